"""Prompt caches of stages: what is restored gives the same bits, and a bad file gives one line and nothing else."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.architectures import write
from support.pipeline import Pipeline, even_cuts
from support.reference import Logits, run_of
from support.zoo import ZOO, make

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.messages import KvKind, KvOp, LogitsKind, LogitsRequest, Restored, Row, Run
from ggpipe.errors import SettingError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.prompt_cache import PromptCache

CONTEXT = ContextConfig(n_ctx=512, n_ubatch=64, n_seq=3, exact=True)
TOKENS = tuple(np.random.default_rng(0).integers(3, 120, 400).tolist())
N = 300


@contextmanager
def stages(path: Path, cuts: Sequence[int] = (), context: ContextConfig = CONTEXT) -> Iterator[Pipeline]:
    with Pipeline(path, cuts, context, n_prefixes=1, saves_states=True) as pipeline:
        yield pipeline


def files(folder: Path, path: Path, pipeline: Pipeline, context: ContextConfig = CONTEXT) -> list[PromptCache]:
    caches = [PromptCache(folder / "cache", rank) for rank in range(len(pipeline.stages))]
    for cache, stage in zip(caches, pipeline.stages, strict=True):
        cache.describe(stage, ModelFile.open(path), ModelConfig(path=path), context)
    return caches


def compute(pipeline: Pipeline, tokens: Sequence[int], at: int = 0) -> None:
    for i in range(0, len(tokens), 64):
        pipeline.decode(run_of(1 + i, tokens[i : i + 64], at + i))


def save(pipeline: Pipeline, caches: Sequence[PromptCache], tokens: tuple[int, ...] = TOKENS[:N]) -> list[str]:
    return [cache.save(stage, 0, tokens) for cache, stage in zip(caches, pipeline.stages, strict=True)]


def restore(pipeline: Pipeline, caches: Sequence[PromptCache]) -> list[Restored]:
    return [cache.restore(stage) for cache, stage in zip(caches, pipeline.stages, strict=True)]


def go_on(pipeline: Pipeline, tokens: Sequence[int], at: int, ops: tuple[KvOp, ...] = ()) -> Logits:
    first = pipeline.decode(run_of(1000, tokens[:40], at, ops=ops))
    return np.concatenate([first, pipeline.decode(run_of(1001, tokens[40:50], at + 40))])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "deepseek2", "mamba", "rwkv7", "jamba", "deepseek4"])
def test_rows_behind_a_restored_prefix_have_the_same_bits(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.gguf"
    (make if name in ZOO else write)(name, path)
    cuts = even_cuts(ModelFile.open(path).n_layer, 1 if name in ("mamba", "rwkv7") else 2)
    with stages(path, cuts) as pipeline:
        caches = files(tmp_path, path, pipeline)
        compute(pipeline, TOKENS[:N])
        assert not any(save(pipeline, caches))
        expected = go_on(pipeline, TOKENS[N:], N)
    with stages(path, cuts) as pipeline:
        assert restore(pipeline, files(tmp_path, path, pipeline)) == [Restored(TOKENS[:N])] * len(pipeline.stages)
        assert (go_on(pipeline, TOKENS[N:], N) == expected).all()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("n", [5, 131])
def test_a_part_of_what_is_restored_can_be_continued(name: str, n: int, tmp_path: Path) -> None:
    """Also where sliding windows hide that part from the end."""
    path, other = make(name, tmp_path / f"{name}.gguf"), TOKENS[::-1]
    with stages(path) as pipeline:
        compute(pipeline, TOKENS[:n])
        expected = go_on(pipeline, other, n)
    with stages(path) as pipeline:
        compute(pipeline, TOKENS[:N])
        save(pipeline, files(tmp_path, path, pipeline))
    with stages(path) as pipeline:
        restore(pipeline, files(tmp_path, path, pipeline))
        assert (go_on(pipeline, other, n, (KvOp(KvKind.RM, 0, p0=n),)) == expected).all()


def test_cells_in_another_order_are_restored_in_the_order_of_positions(tmp_path: Path) -> None:
    path = make("llama", tmp_path / "llama.gguf")

    def row(token: int, pos: int, seq: int) -> Row:
        return Row(token=token, pos=pos, seqs=(seq,), request=0, logits_request=0)

    wants = (LogitsRequest(LogitsKind.FULL),)
    with stages(path) as pipeline:
        caches = files(tmp_path, path, pipeline)
        pipeline.decode(run_of(1, TOKENS[200:220], 0, seqs=(1,)))
        pipeline.decode(run_of(2, TOKENS[:20], 0))
        for i in range(20, 40):  # each takes one of the cells in front, the last one first
            op = KvOp(KvKind.RM, 1, p0=39 - i)
            pipeline.decode(Run(id=i, rows=(row(TOKENS[i], i, 0),), ops=(op,), logits_requests=wants))
        assert not any(save(pipeline, caches, TOKENS[:40]))
        expected = go_on(pipeline, TOKENS[40:], 40)
    with stages(path) as pipeline:
        assert restore(pipeline, files(tmp_path, path, pipeline)) == [Restored(TOKENS[:40])]
        assert (go_on(pipeline, TOKENS[40:], 40) == expected).all()


def test_each_file_has_the_layers_of_its_stage_only(tmp_path: Path) -> None:
    path = make("llama", tmp_path / "llama.gguf", n_layer=8)
    sizes = []
    for cuts in ((), (2,)):
        with stages(path, cuts) as pipeline:
            caches = files(tmp_path, path, pipeline)
            compute(pipeline, TOKENS[:N])
            save(pipeline, caches)
            sizes.append([cache.path.stat().st_size for cache in caches])
    (whole,), (quarter, rest) = sizes
    n_bytes = N * 256 * 2 * 2  # of a layer
    assert 8 * n_bytes < whole < 8.5 * n_bytes
    assert 2 * n_bytes < quarter < 2.6 * n_bytes
    assert 6 * n_bytes < rest < 6.6 * n_bytes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A model, and the bytes of its prompt cache."""
    folder = tmp_path_factory.mktemp("saved")
    path = make("qwen2", folder / "model.gguf")
    with stages(path) as pipeline:
        caches = files(folder, path, pipeline)
        compute(pipeline, TOKENS[:N])
        save(pipeline, caches)
    return path, caches[0].path.read_bytes()


def test_a_file_that_is_cut_off_or_damaged_anywhere_restores_nothing(saved: tuple[Path, bytes], tmp_path: Path) -> None:
    path, data = saved
    rng = np.random.default_rng(1)
    with stages(path) as pipeline:
        (cache,) = files(tmp_path, path, pipeline)
        starts = [0, 1, 16, 20, 24, 30, 1500, len(data) - 1]
        for n in [*starts, *rng.integers(0, len(data), 10).tolist()]:
            cache.path.write_bytes(data[:n])
            check_unusable(cache, pipeline)
        for at in [*starts, *rng.integers(0, len(data), 20).tolist()]:
            damaged = bytearray(data)
            damaged[at] ^= 1 << int(rng.integers(8))
            cache.path.write_bytes(damaged)
            check_unusable(cache, pipeline)
        cache.path.write_bytes(data)
        assert restore(pipeline, [cache]) == [Restored(TOKENS[:N])]


def check_unusable(cache: PromptCache, pipeline: Pipeline) -> None:
    (restored,) = restore(pipeline, [cache])
    assert restored.tokens == ()
    assert restored.problem.startswith(f"prompt cache {cache.path}: ")
    assert restored.problem.endswith("; the prompt is computed anew")
    assert "\n" not in restored.problem


@pytest.mark.parametrize(
    ("context", "what"),
    [
        (replace(CONTEXT, cache_type_k="q8_0"), "KV types f16 and f16, not q8_0 and f16"),
        (replace(CONTEXT, exact=False), "exact numerics on, not off"),
        (replace(CONTEXT, rope_freq_base=5e5), "RoPE settings"),
        (replace(CONTEXT, flash_attn="off", exact=False), "flash attention on, not off"),
    ],
)
def test_other_settings_restore_nothing(
    context: ContextConfig, what: str, saved: tuple[Path, bytes], tmp_path: Path
) -> None:
    path, data = saved
    with stages(path, context=context) as pipeline:
        (cache,) = files(tmp_path, path, pipeline, context)
        cache.path.write_bytes(data)
        (restored,) = restore(pipeline, [cache])
    assert "it was written with" in restored.problem
    assert what in restored.problem


def test_another_model_split_or_context(saved: tuple[Path, bytes], tmp_path: Path) -> None:
    path, data = saved
    other = make("qwen2", tmp_path / "other.gguf", seed=2)
    (tmp_path / "cache").write_bytes(data)
    with stages(other) as pipeline:
        (restored,) = restore(pipeline, files(tmp_path, other, pipeline))
        assert "a model file of" in restored.problem
    with stages(path, (1,)) as pipeline:
        first, second = restore(pipeline, files(tmp_path, path, pipeline))
        assert "layers 1-3 of 3, not 1-1 of 3" in first.problem
        assert second == Restored()
    small = replace(CONTEXT, n_ctx=256)
    with stages(path, context=small) as pipeline:
        assert restore(pipeline, files(tmp_path, path, pipeline, small)) == [Restored(TOKENS[:128])]


def test_a_full_disk_leaves_the_file_as_it_was(saved: tuple[Path, bytes], tmp_path: Path) -> None:
    path, data = saved
    with stages(path) as pipeline:
        caches = files(tmp_path, path, pipeline)
        caches[0].path.write_bytes(data)
        compute(pipeline, TOKENS[:N])
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
        try:
            (problem,) = save(pipeline, caches)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert problem == f"cannot write the prompt cache {caches[0].path}: File too large"
    assert caches[0].path.read_bytes() == data
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"], "something unfinished is left"


def test_paths_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match=r"`prompt_cache` .*: there is no directory"):
        PromptCache(tmp_path / "none" / "cache", 0)
    with pytest.raises(SettingError, match="no regular file"):
        PromptCache(tmp_path, 0)
    (tmp_path / "notes").write_text("not a cache")
    with pytest.raises(SettingError, match=r"notes: it is no prompt cache of ggpipe, .*; name another file"):
        PromptCache(tmp_path / "notes", 0)
    PromptCache(tmp_path / "notes", 0, read_only=True)
    (tmp_path / "empty").touch()
    PromptCache(tmp_path / "empty", 0)
    monkeypatch.setattr(os, "access", lambda _path, mode: mode == os.R_OK)
    with pytest.raises(SettingError, match="permission denied"):
        PromptCache(tmp_path / "cache", 0)
    assert PromptCache(tmp_path / "cache", 2, read_only=True).path == tmp_path / "cache.rank2"
