"""A model cut into stages gives the bits of libllama's whole model: any architecture, file and setting."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.pipeline import Pipeline, even_cuts, random_cuts
from support.reference import Fields, Logits, Reference, overrides, run_of
from support.zoo import ZOO, make, split

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import LoadMode, ModelConfig
from ggpipe.core.messages import KvKind, KvOp, LogitsKind, LogitsRequest, Row, RowLogits, Run
from ggpipe.errors import ModelError, RunError, UsageError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.stage import Stage
from scripts.models.quantize import quantize

WHOLE = ("mamba", "mamba2", "rwkv6", "rwkv7", "hrm_text")  # models that cannot be cut
LAYERS = {name: model.n_layer for name, model in ZOO.items() if name not in WHOLE}
CUTS = [
    (name, cuts)
    for i, (name, n) in enumerate(LAYERS.items())
    for cuts in sorted({cuts for k in (2, 3) for cuts in (even_cuts(n, k), random_cuts(n, k, seed=i))})
]
STEPS = (33, 1, 5, 1, 5, 5, 1)  # rows of each run: a prompt, single tokens, drafts
N_CTX = 256


@dataclass(frozen=True)
class Setting:
    """The same thing said to a stage and to libllama."""

    context: Mapping[str, object] = field(default_factory=dict)
    """Fields of ContextConfig."""
    fields: Fields = field(default_factory=dict)
    """Fields of llama_context_params."""
    changes: bool = True
    """The llama model's logits differ from those without the setting."""


SETTINGS = {
    "kv-q8_0": Setting({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, {"type_k": 8, "type_v": 8}),
    "kv-q4_0-q5_1": Setting({"cache_type_k": "q4_0", "cache_type_v": "q5_1"}, {"type_k": 2, "type_v": 7}),
    "kv-q4_1-iq4_nl": Setting({"cache_type_k": "q4_1", "cache_type_v": "iq4_nl"}, {"type_k": 3, "type_v": 20}),
    "kv-q5_0-bf16": Setting({"cache_type_k": "q5_0", "cache_type_v": "bf16"}, {"type_k": 6, "type_v": 30}),
    # with flash attention, libllama rounds f32 cells to f16 before it uses them
    "kv-f32": Setting({"cache_type_k": "f32", "cache_type_v": "f32"}, {"type_k": 0, "type_v": 0}, changes=False),
    "fa-off": Setting({"flash_attn": "off"}, {"flash_attn_type": 0}),
    "fa-off-kv-f32": Setting(
        {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"},
        {"flash_attn_type": 0, "type_k": 0, "type_v": 0},
    ),
    "fa-auto": Setting({"flash_attn": "auto"}, {"flash_attn_type": -1}, changes=False),
    "rope-none": Setting(
        {"rope_scaling": "none", "rope_scale": 2.0}, {"rope_scaling_type": 0, "rope_freq_scale": 0.5}, changes=False
    ),
    "rope-linear": Setting(
        {"rope_scaling": "linear", "rope_scale": 4.0}, {"rope_scaling_type": 1, "rope_freq_scale": 0.25}
    ),
    "rope-yarn": Setting(
        {
            "rope_scaling": "yarn",
            "rope_scale": 4.0,
            "yarn_orig_ctx": 128,
            "yarn_ext_factor": 0.5,
            "yarn_attn_factor": 0.9,
            "yarn_beta_fast": 16.0,
            "yarn_beta_slow": 2.0,
        },
        {
            "rope_scaling_type": 2,
            "rope_freq_scale": 0.25,
            "yarn_orig_ctx": 128,
            "yarn_ext_factor": 0.5,
            "yarn_attn_factor": 0.9,
            "yarn_beta_fast": 16.0,
            "yarn_beta_slow": 2.0,
        },
    ),
    "rope-freq-base": Setting({"rope_freq_base": 5e5}, {"rope_freq_base": 5e5}),
    "rope-freq-scale": Setting({"rope_freq_scale": 0.5}, {"rope_freq_scale": 0.5}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stage")


def model_of(folder: Path, name: str, ftype: str | None = None) -> Path:
    """A model of the zoo, made once."""
    path = make(name, folder / f"{name}.gguf")
    if ftype is None:
        return path
    quantized = folder / f"{name}-{ftype}.gguf"
    return quantized if quantized.exists() else quantize(path, quantized, ftype)


def compare(pipeline: Pipeline, reference: Reference, steps: tuple[int, ...] = STEPS) -> Logits:
    """Both decode the same random runs, to the same bits. Returns all logits, (tokens, vocabulary)."""
    rng = np.random.default_rng(1)
    pos, logits = 0, []
    with pipeline, reference:
        for i, n in enumerate(steps):
            run = run_of(i + 1, rng.integers(0, reference.n_vocab, n).tolist(), pos)
            pos += n
            expected = reference.decode(run)
            np.testing.assert_array_equal(pipeline.decode(run), expected, f"run {i + 1} of {n} tokens")
            logits.append(expected)
    return np.concatenate(logits)


def plain(path: Path) -> Logits:
    """libllama's logits for the same runs, without any setting."""
    return compare(Pipeline(path), Reference(path, N_CTX))


@pytest.mark.parametrize(("name", "cuts"), CUTS, ids=str)
def test_cut_equals_libllama(name: str, cuts: tuple[int, ...], folder: Path) -> None:
    path = model_of(folder, name)
    compare(Pipeline(path, cuts), Reference(path, N_CTX))


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek2", "jamba"])
def test_every_cut(name: str, folder: Path) -> None:
    """One stage for each layer, so activations also pass through stages on their way."""
    path = model_of(folder, name)
    compare(Pipeline(path, tuple(range(1, LAYERS[name]))), Reference(path, N_CTX))


@pytest.mark.parametrize("name", WHOLE)
def test_whole_equals_libllama(name: str, folder: Path) -> None:
    path = model_of(folder, name)
    compare(Pipeline(path), Reference(path, N_CTX))


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", WHOLE)
def test_refuses_to_cut(name: str, stages: int, folder: Path) -> None:
    path = model_of(folder, name)
    with pytest.raises(ModelError, match=f"'{name}' models .*cannot be cut.*one rank"):
        Pipeline(path, even_cuts(ZOO[name].n_layer, stages))


@pytest.mark.parametrize("name", WHOLE)
def test_first_stage_refuses_alone(name: str, folder: Path) -> None:
    """The dry run at load sees it on the first rank already, before ranks compare what crosses."""
    path = model_of(folder, name)
    for last in range(1, ZOO[name].n_layer):
        with pytest.raises(ModelError, match=f"'{name}' models"):
            Stage(ModelFile.open(path), (0, last), ModelConfig(path=path), ContextConfig(n_ctx=64), (1, 1))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_long_context(name: str, threads: int, folder: Path) -> None:
    """From 64 rows on, and over 256 cells, flash attention computes in other ways."""
    path = model_of(folder, name)
    reference = Reference(path, 512, threads)
    context = ContextConfig(n_ctx=512, fast_kernels=False)
    compare(Pipeline(path, (1,), context, threads=threads), reference, (200, 70, 1, 5, 64, 1, 1))


@pytest.mark.parametrize("repack", [True, False], ids=["repack", "no-repack"])
@pytest.mark.parametrize("mode", ["mmap", "none", "dio"])
@pytest.mark.parametrize("ftype", [None, "Q4_0", "Q4_K_M"])
@pytest.mark.parametrize("cuts", [(2,), (1, 2)], ids=str)
def test_loading(cuts: tuple[int, ...], ftype: str | None, mode: LoadMode, repack: bool, folder: Path) -> None:
    path = model_of(folder, "llama", ftype)
    config = ModelConfig(path=path, load_mode=mode, repack=repack)
    compare(Pipeline(path, cuts, model=config), Reference(path, N_CTX, model={"use_extra_bufts": repack}))


def test_repacking_changes_bits(folder: Path) -> None:
    """Or the test above says nothing about it."""
    path = model_of(folder, "llama", "Q4_0")
    off = compare(
        Pipeline(path, model=ModelConfig(path=path, repack=False)),
        Reference(path, N_CTX, model={"use_extra_bufts": False}),
    )
    assert (plain(path) != off).any()


@pytest.mark.parametrize("mode", ["mmap", "none"])
@pytest.mark.parametrize("name", ["llama-tied", "qwen2-tied", "gemma2"])
def test_tied_head(name: str, mode: LoadMode, folder: Path) -> None:
    path = model_of(folder, name)
    assert ModelFile.open(path).tied_output
    for cuts in ((), (1,), (1, 2)):
        compare(Pipeline(path, cuts, model=ModelConfig(path=path, load_mode=mode)), Reference(path, N_CTX))


@pytest.mark.parametrize("mode", ["mmap", "none"])
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_split_file(name: str, mode: LoadMode, folder: Path) -> None:
    path = model_of(folder, name)
    first = split(path, folder / f"{name}-part", 3)[0]
    assert len(ModelFile.open(first).paths) == 3
    compare(Pipeline(first, (1, 2), model=ModelConfig(path=first, load_mode=mode)), Reference(path, N_CTX))


@pytest.mark.parametrize("cuts", [(1,), (1, 2)], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, cuts: tuple[int, ...], folder: Path) -> None:
    path = model_of(folder, "llama")
    setting = SETTINGS[name]
    context = ContextConfig(n_ctx=N_CTX, fast_kernels=False, **setting.context)  # type: ignore[arg-type]
    logits = compare(Pipeline(path, cuts, context), Reference(path, N_CTX, context=setting.fields))
    assert (logits != plain(path)).any() == setting.changes


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2)], ids=str)
def test_override_kv(cuts: tuple[int, ...], folder: Path) -> None:
    path = model_of(folder, "llama")
    texts = (
        "llama.rope.freq_base=float:500000",
        "llama.attention.layer_norm_rms_epsilon=float:0.5",
        "llama.context_length=int:1000",
        "tokenizer.ggml.add_bos_token=bool:false",
        "general.name=str:other",
    )
    array = overrides(
        ("llama.rope.freq_base", 500000.0),
        ("llama.attention.layer_norm_rms_epsilon", 0.5),
        ("llama.context_length", 1000),
        ("tokenizer.ggml.add_bos_token", False),
        ("general.name", "other"),
    )
    config = ModelConfig(path=path, override_kv=texts)
    logits = compare(Pipeline(path, cuts, model=config), Reference(path, N_CTX, model={"kv_overrides": array}))
    assert (logits != plain(path)).any()


@pytest.mark.parametrize("text", ["llama.rope.freq_base", "a=b", "a=int:x", "a=bool:1", "=int:1", "a=list:1"])
def test_bad_override_kv(text: str, folder: Path) -> None:
    path = model_of(folder, "llama")
    with pytest.raises(UsageError, match="KEY=TYPE:VALUE"):
        Pipeline(path, model=ModelConfig(path=path, override_kv=(text,)))


def write_lora(path: Path, model: Path, names: tuple[str, ...], rank: int = 4, seed: int = 0) -> Path:
    """An adapter for these tensors of a model. For the embedding, A and B change places."""
    shapes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in gguf.GGUFReader(model).tensors}
    writer = gguf.GGUFWriter(path, str(ModelFile.open(model).architecture))
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    rng = np.random.default_rng(seed)
    for name in names:
        n_in, n_out = shapes[name]
        a, b = ((n_out, rank), (n_in, rank)) if name.startswith("token_embd") else ((rank, n_in), (n_out, rank))
        writer.add_tensor(f"{name}.lora_a", 0.1 * rng.standard_normal(a, np.float32))
        writer.add_tensor(f"{name}.lora_b", 0.1 * rng.standard_normal(b, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LORAS = {
    "attention": ("blk.0.attn_q.weight", "blk.1.attn_v.weight"),
    "last-layer": ("blk.2.ffn_down.weight",),
    "ends": ("token_embd.weight", "output.weight"),
}


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2)], ids=str)
@pytest.mark.parametrize("ftype", [None, "Q4_0"])
@pytest.mark.parametrize("tensors", LORAS)
def test_lora(tensors: str, ftype: str | None, cuts: tuple[int, ...], folder: Path) -> None:
    path = model_of(folder, "llama", ftype)
    loras = (
        (write_lora(folder / f"{tensors}.gguf", path, LORAS[tensors]), 0.7),
        (write_lora(folder / "second.gguf", path, LORAS["attention"], seed=1), 0.3),
    )
    config = ModelConfig(path=path, loras=loras)
    logits = compare(Pipeline(path, cuts, model=config), Reference(path, N_CTX, loras=loras))
    assert (logits != plain(path)).any()


def test_bad_lora(folder: Path) -> None:
    path, other = model_of(folder, "llama"), model_of(folder, "qwen2")
    lora = write_lora(folder / "qwen2-lora.gguf", other, ("blk.0.attn_q.weight",))
    missing = folder / "missing.gguf"
    for file, why in ((lora, "model arch and LoRA arch mismatch"), (missing, "no such file"), (path, "general.type")):
        with pytest.raises(ModelError, match=f"`loras` {file}: .*{why}"):
            Pipeline(path, (1,), model=ModelConfig(path=path, loras=((file, 1.0),)))


def test_top_is_what_full_rows_say(folder: Path) -> None:
    path = model_of(folder, "llama")
    banned = (7, 3, 380)
    wants = tuple(
        LogitsRequest(kind, n, ban)
        for kind, n, ban in (
            (LogitsKind.FULL, 1, ()),
            (LogitsKind.FULL, 1, banned),
            (LogitsKind.TOP, 1, ()),
            (LogitsKind.TOP, 40, banned),
            (LogitsKind.TOP, 383, ()),
            (LogitsKind.TOP, 384, banned),
            (LogitsKind.TOP, 500, ()),
        )
    )
    with Pipeline(path, (1,)) as pipeline:
        rows: list[RowLogits] = []
        for i in range(len(wants)):
            run = Run(
                id=i + 1,
                rows=(Row(token=11, pos=0, seqs=(0,), request=0, logits_request=i),),
                ops=(KvOp(KvKind.RM, 0),),
                logits_requests=wants,
            )
            rows += pipeline.outcome(run).rows
    full = np.asarray(rows[0].logits)
    for row, want in zip(rows, wants, strict=True):
        expected = full.copy()
        expected[list(want.banned)] = -np.inf
        if want.kind is LogitsKind.FULL:
            np.testing.assert_array_equal(row.logits, expected)
            continue
        n = min(want.n, len(full) - len(want.banned))
        order = np.lexsort((np.arange(len(full)), -expected))[:n]
        assert row.ids == tuple(order)
        np.testing.assert_array_equal(row.logits, full[order])
        if n > 1:  # the best one alone does not need it
            assert row.log_sum_exp == pytest.approx(np.logaddexp.reduce(expected.astype(np.float64)), rel=1e-6)


def test_refuses_what_cannot_run(folder: Path) -> None:
    path = model_of(folder, "llama")
    with Pipeline(path, (1,), ContextConfig(n_ctx=256, n_ubatch=16)) as pipeline:
        first, last = pipeline.stages
        with pytest.raises(RunError, match="20 rows is longer than `n_ubatch` 16"):
            first.decode(run_of(1, range(20), 0), None)
        with pytest.raises(RunError, match="out of step"):
            last.decode(run_of(2, range(3), 0), b"")
        with pytest.raises(RunError, match="cannot decode run 3"):
            first.decode(run_of(3, [384], 0), None)  # no such token


def test_refuses_more_sequences_than_the_models_own_context_has_tokens(folder: Path) -> None:
    path = model_of(folder, "llama")
    model = ModelConfig(path=path, override_kv=("llama.context_length=int:64",))
    with pytest.raises(UsageError, match=r"`n_seq` 65 needs .* own has 64: set `n_ctx`"):
        Pipeline(path, (1,), ContextConfig(n_seq=65), model)


def test_refuses_a_context_that_cannot_be(folder: Path) -> None:
    path = model_of(folder, "deepseek2")  # its keys have 80 elements, q8_0's blocks 32
    with pytest.raises(UsageError, match=r"cannot make a context of 256 tokens: .*80"):
        Pipeline(path, (1,), ContextConfig(n_ctx=256, cache_type_k="q8_0", cache_type_v="q8_0"))
