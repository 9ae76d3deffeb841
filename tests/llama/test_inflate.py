"""Inflated models compute what the small ones do, to the bit; and the bundled pair is inflated once."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.commands import HANG_S, ROOT
from support.reference import Reference, run_of
from support.zoo import make

from ggpipe.config.sampling import SamplingConfig
from ggpipe.errors import ModelError, RunError
from ggpipe.llama import bundled
from ggpipe.llama.bundled import BUNDLED_PAIR, ModelPair, inflated_pair
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.inflate import Inflation, Mixture
from ggpipe.llama.inflate_hybrid import HybridInflation
from ggpipe.llama.model_header import ModelHeader

SOURCE = BUNDLED_PAIR.draft
LAYERS = 3  # it has
SIZES = [(1, 1), (4, 1), (1, 3), (4, 2), (16, 1)]


@pytest.fixture(scope="module")
def inflated(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    folder = tmp_path_factory.mktemp("inflated")
    paths = {size: folder / "{}-{}.gguf".format(*size) for size in SIZES}
    for (widen, deepen), path in paths.items():
        Inflation(SOURCE, widen, deepen).write(path)
    return paths


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of inflated models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ggpipe" / "models"


# What is computed


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_same_bits(size: tuple[int, int], inflated: dict[tuple[int, int], Path]) -> None:
    runs = [run_of(1, range(300, 340), 0), run_of(2, (7,), 40), run_of(3, (8, 9, 10), 41)]
    with Reference(SOURCE, 128) as small, Reference(inflated[size], 128) as large:
        for run in runs:
            np.testing.assert_array_equal(large.decode(run), small.decode(run))


def test_the_same_text(inflated: dict[tuple[int, int], Path]) -> None:
    with Reference(SOURCE, 256) as small, Reference(inflated[4, 2], 256) as large:
        prompt = small.tokenize("Once upon a time there was a king who had three sons.")
        assert large.tokenize("Once upon a time there was a king who had three sons.") == prompt
        greedy = SamplingConfig(temp=0, ignore_eos=True)
        text = small.generate(prompt, greedy, 100)
        assert len(set(text)) > 20
        assert large.generate(prompt, greedy, 100) == text


def test_a_mixture_writes_the_same_text(tmp_path: Path) -> None:
    """Equal experts give the dense model's output, whichever the random router chooses."""
    path = tmp_path / "mixture.gguf"
    Inflation(SOURCE, 4, 2, Mixture(8, 2)).write(path)
    with Reference(SOURCE, 256) as small, Reference(path, 256) as mixture:
        prompt = small.tokenize("Once upon a time there was a king who had three sons.")
        greedy = SamplingConfig(temp=0, ignore_eos=True)
        assert mixture.generate(prompt, greedy, 60) == small.generate(prompt, greedy, 60)
    file = ModelFile.open(path)
    assert (file.metadata["llama.expert_count"], file.metadata["llama.expert_used_count"]) == (8, 2)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for layer in range(4):
        router = tensors[f"blk.{layer}.ffn_gate_inp.weight"].data
        assert len(np.unique(router, axis=0)) == 8
        assert tensors[f"blk.{layer}.ffn_norm.weight"].data.any()  # or each token would use the same experts
        for part in ("gate", "up", "down"):
            experts = tensors[f"blk.{layer}.ffn_{part}_exps.weight"].data
            assert (experts == experts[0]).all()
            assert experts.any() == (layer % 2 == 0)


def test_a_hybrid_writes_the_same_text(tmp_path: Path) -> None:
    """Its recurrent layers add nothing, and change their states with every token."""
    path = tmp_path / "hybrid.gguf"
    HybridInflation(SOURCE, 4, 2).write(path)
    with Reference(SOURCE, 256) as small, Reference(path, 256) as hybrid:
        prompt = small.tokenize("Once upon a time there was a king who had three sons.")
        greedy = SamplingConfig(temp=0, ignore_eos=True)
        assert hybrid.generate(prompt, greedy, 60) == small.generate(prompt, greedy, 60)
    file = ModelFile.open(path)
    assert file.architecture == "granitehybrid"
    header = ModelHeader(file)
    assert [header.state_bytes(layer) > 0 for layer in range(2 * LAYERS)] == [False, True] * LAYERS
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert tensors["blk.1.ssm_in.weight"].data.any(axis=1).all()
    assert not tensors["blk.1.ssm_out.weight"].data.any()


@pytest.mark.parametrize("experts", [(8, 3), (2, 2), (8, 0), (16, 8)], ids=str)
def test_mixtures_that_cannot_be_made(experts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"n_used must|use at most 4"):
        Inflation(SOURCE, 4, 1, Mixture(*experts))


def test_a_weight_matters(inflated: dict[tuple[int, int], Path], tmp_path: Path) -> None:
    """The comparisons would see a single new weight that is not zero."""
    path = tmp_path / "spoilt.gguf"
    path.write_bytes(inflated[4, 1].read_bytes())
    matrix = next(t for t in gguf.GGUFReader(path, "r+").tensors if t.name == "blk.0.ffn_down.weight")
    assert not matrix.data[-1].any()
    matrix.data[-1] = matrix.data[0]
    run = run_of(1, range(300, 310), 0)
    with Reference(SOURCE, 64) as small, Reference(path, 64) as spoilt:
        assert not np.array_equal(small.decode(run), spoilt.decode(run))


# What is written


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_headers(size: tuple[int, int], inflated: dict[tuple[int, int], Path]) -> None:
    widen, deepen = size
    old, new = ModelFile.open(SOURCE), ModelFile.open(inflated[size])
    grown = {
        "llama.block_count": deepen,
        "llama.embedding_length": widen,
        "llama.feed_forward_length": widen,
        "llama.attention.layer_norm_rms_epsilon": 1 / widen,
    }
    head_widths = {"llama.attention.key_length": 64, "llama.attention.value_length": 64}
    assert new.metadata.keys() == old.metadata.keys() | head_widths.keys()
    assert head_widths.items() <= new.metadata.items()
    for key, value in old.metadata.items():
        if key in grown:
            assert isinstance(value, int | float)
            assert new.metadata[key] == value * grown[key]
        elif key != "general.name":
            assert new.metadata[key] == value
    assert new.array_lengths == old.array_lengths
    kinds = {name: tensor.type for name, tensor in new.tensors.items()}
    assert len(kinds) == 3 + 9 * LAYERS * deepen
    assert kinds["token_embd.weight"] == "q8_0"
    assert new.tensors["output.weight"].size == old.tensors["output.weight"].size * widen
    for part, grows in (("ffn_up", widen**2), ("attn_q", widen), ("attn_output", widen)):
        last = f"blk.{LAYERS * deepen - 1}.{part}.weight"
        assert new.tensors[last].size == old.tensors[f"blk.{LAYERS - 1}.{part}.weight"].size * grows


def test_tokens_are_taken_over(inflated: dict[tuple[int, int], Path]) -> None:
    old, new = (gguf.GGUFReader(path).fields for path in (SOURCE, inflated[4, 2]))
    arrays = [key for key, field in old.items() if field.types[0] == gguf.GGUFValueType.ARRAY]
    assert "tokenizer.ggml.merges" in arrays
    for key in arrays:
        assert new[key].contents() == old[key].contents()
        assert new[key].types == old[key].types


def test_zeros_are_holes(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    with probe.open("wb") as file:
        file.truncate(1 << 22)
    if probe.stat().st_blocks:
        pytest.skip("a file system without holes")
    path = tmp_path / "model.gguf"
    Inflation(SOURCE, 16, 1).write(path)
    assert path.stat().st_blocks * 512 < path.stat().st_size / 4


def test_progress(tmp_path: Path) -> None:
    inflation, done = Inflation(SOURCE, 4, 2), list[int]()
    inflation.write(tmp_path / "model.gguf", done.append)
    assert len(done) == 3 + 9 * LAYERS * 2
    assert sum(done) == inflation.n_bytes == ModelFile.open(tmp_path / "model.gguf").n_bytes


@pytest.mark.parametrize(("name", "why"), [("qwen3moe", "'qwen3moe'"), ("llama-tied", r"no tensor output\.weight")])
def test_other_models_are_refused(name: str, why: str, tmp_path: Path) -> None:
    path = make(name, tmp_path / f"{name}.gguf")
    with pytest.raises(ModelError, match=why):
        Inflation(path, 4)


@pytest.mark.parametrize(
    ("n_layer", "why"),
    [(1, r"a plain Llama model has no tensor blk\.1\.attn_k"), (LAYERS + 1, r"no tensor blk\.3\.attn_norm")],
)
def test_tensors_that_are_not_known(n_layer: int, why: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(SOURCE.read_bytes())
    gguf.GGUFReader(path, "r+").fields["llama.block_count"].parts[-1][0] = n_layer
    with pytest.raises(ModelError, match=why):
        Inflation(path, 4)


def test_files_that_are_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelError, match="No such file"):
        Inflation(path)
    whole = SOURCE.read_bytes()
    for content, why in ((b"x" * 100, "not a GGUF"), (whole[:1000], "damaged"), (whole[:500_000], "truncated")):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=why):
            Inflation(path)


@pytest.mark.parametrize(("widen", "deepen"), [(0, 1), (2, 1), (8, 1), (9, 1), (-4, 1), (4, 0)])
def test_sizes_that_cannot_be(widen: int, deepen: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        Inflation(SOURCE, widen, deepen)


# The bundled pair


def test_the_pair_is_made_once(cache: Path) -> None:
    done: list[tuple[int, int]] = []
    pair = inflated_pair(lambda *progress: done.append(progress))
    assert done == sorted(done)
    assert done[-1][0] == done[-1][1] == sum(ModelFile.open(path).n_bytes for path in (pair.target, pair.draft))
    assert set(cache.iterdir()) == {pair.target, pair.draft}
    made = pair.target.stat().st_mtime_ns, pair.draft.stat().st_mtime_ns
    assert inflated_pair(lambda *_: pytest.fail("made again")) == pair
    assert (pair.target.stat().st_mtime_ns, pair.draft.stat().st_mtime_ns) == made
    assert ModelFile.open(pair.target).n_layer == 40
    assert 430e6 < pair.target.stat().st_size < 445e6
    pair.draft.unlink()
    assert inflated_pair() == pair
    assert pair.draft.exists()


def test_files_of_other_models_and_versions_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = inflated_pair()
    monkeypatch.setattr(bundled, "_FORMAT", 0)
    new = inflated_pair()
    assert set(cache.iterdir()) == {new.target, new.draft}
    assert old.target not in (new.target, new.draft)
    other = ModelPair(BUNDLED_PAIR.draft, BUNDLED_PAIR.draft)
    monkeypatch.setattr(bundled, "BUNDLED_PAIR", other)
    assert set(cache.iterdir()).isdisjoint({inflated_pair().target})


def test_an_interrupted_write_leaves_nothing(cache: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inflated_pair(interrupt)
    assert list(cache.iterdir()) == []


def child(script: str) -> subprocess.Popen[str]:
    """A process that inflates, with the environment's cache."""
    lines = f"from ggpipe.llama.bundled import inflated_pair\n{textwrap.dedent(script)}"
    return subprocess.Popen([sys.executable, "-c", lines], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_a_killed_process_does_no_harm(cache: Path) -> None:
    process = child("""
        import os, signal
        inflated_pair(lambda done, total: done > total / 2 and os.kill(os.getpid(), signal.SIGKILL))
    """)
    assert process.wait(HANG_S) == -9
    (half,) = cache.iterdir()
    assert half.suffix == ".unfinished"
    pair = inflated_pair()
    assert set(cache.iterdir()) == {pair.target, pair.draft, half}


def test_many_at_once(cache: Path) -> None:
    processes = [child("print(inflated_pair().target)") for _ in range(4)]
    outputs = {process.communicate(timeout=HANG_S)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    pair = inflated_pair(lambda *_: pytest.fail("made again"))
    assert outputs == {str(pair.target)}
    assert set(cache.iterdir()) == {pair.target, pair.draft}
    assert ModelFile.open(pair.target).n_layer == 40


def said(process: subprocess.Popen[str]) -> Sequence[str]:
    return process.communicate(timeout=HANG_S)[0].splitlines()


def test_a_disk_without_room(cache: Path) -> None:
    process = child("""
        import resource
        from ggpipe.errors import RunError
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000_000, 100_000_000))
        try:
            inflated_pair()
        except RunError as e:
            print(e)
    """)
    (line,) = said(process)
    assert line.startswith(f"cannot write the inflated models to {cache}: File too large; make room")
    assert list(cache.iterdir()) == []


def test_a_folder_that_cannot_be(cache: Path) -> None:
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.write_text("a file where the cache's folder would be")
    with pytest.raises(RunError, match=r"cannot write the inflated models to .*; make room .* XDG_CACHE_HOME"):
        inflated_pair()
