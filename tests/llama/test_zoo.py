"""Every model of the zoo loads by path in libllama, decodes, and listens to more than its last token."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray
from support.zoo import ZOO, make, pair_script, split

from ggpipe.llama.libllama import start
from scripts.models.quantize import quantize

TOKENS = (5, 17, 3, 90, 44, 8, 121, 60)


def logits(path: Path, tokens: Sequence[int] = TOKENS) -> NDArray[np.float32]:
    """Logits of every token, (tokens, vocabulary), decoded in one batch on one thread."""
    start()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
    assert model is not None
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = 64
    params.n_threads = params.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, params)
    assert context is not None
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i] = token
        batch.pos[i] = i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = True
    assert llama_cpp.llama_decode(context, batch) == 0
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rows = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (len(tokens), n_vocab)).copy()
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return rows


def tensor_types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("name", ZOO)
def test_decodes(name: str, tmp_path: Path) -> None:
    path = make(name, tmp_path / "model.gguf")
    rows = logits(path)
    assert np.isfinite(rows).all()
    assert rows.std() > 0.5
    other = logits(path, (TOKENS[0] + 1, *TOKENS[1:]))
    assert np.abs(other[-1] - rows[-1]).max() > 0.01 * rows.std(), "the first token leaves no trace in the last"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["mistral", "jamba", "llama-tied"])
def test_bytes_follow_from_arguments(name: str, tmp_path: Path) -> None:
    first, again, other = (make(name, tmp_path / f"{i}.gguf", seed=seed) for i, seed in enumerate((3, 3, 4)))
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_layer_count(tmp_path: Path) -> None:
    path = make("jamba", tmp_path / "jamba.gguf", n_layer=6)
    assert gguf.GGUFReader(path).fields["jamba.block_count"].contents() == 6
    assert np.isfinite(logits(path)).all()
    with pytest.raises(ValueError, match="32 layers"):
        make("baichuan-7b", tmp_path / "baichuan.gguf", n_layer=3)


def test_tied_heads_are_missing(tmp_path: Path) -> None:
    tied = tensor_types(make("llama-tied", tmp_path / "tied.gguf"))
    assert "output.weight" not in tied
    assert tied["token_embd.weight"] == "Q8_0"
    assert "output.weight" in tensor_types(make("llama", tmp_path / "llama.gguf"))


@pytest.mark.parametrize(("ftype", "tensor_type"), [("F16", "F16"), ("Q4_0", "Q4_0"), ("Q4_K_M", "Q4_K")])
def test_quantize(ftype: str, tensor_type: str, tmp_path: Path) -> None:
    path = quantize(make("llama", tmp_path / "f32.gguf"), tmp_path / "quantized.gguf", ftype)
    assert tensor_types(path)["blk.1.ffn_up.weight"] == tensor_type
    assert np.isfinite(logits(path)).all()
    assert path.read_bytes() == make("llama", tmp_path / "again.gguf", weight_type=ftype).read_bytes()


@pytest.mark.parametrize("n", [2, 3])
def test_split(n: int, tmp_path: Path) -> None:
    path = make("llama-tied", tmp_path / "whole.gguf")
    parts = split(path, tmp_path / "part", n)
    assert parts[0].name == f"part-00001-of-{n:05d}.gguf"
    np.testing.assert_array_equal(logits(parts[0]), logits(path))
    names = [name for part in parts for name in tensor_types(part)]
    assert names == list(tensor_types(path))


def test_spm_spells_any_text(tmp_path: Path) -> None:
    path = make("llama-tied", tmp_path / "model.gguf")
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    assert model is not None
    vocab = llama_cpp.llama_model_get_vocab(model)
    text = "Hello t7,\n\u00e9\U0001f40d!".encode()
    ids = (llama_cpp.llama_token * 64)()
    n_ids = llama_cpp.llama_tokenize(vocab, text, len(text), ids, 64, True, False)
    assert ids[0] == llama_cpp.llama_vocab_bos(vocab)
    out = ctypes.create_string_buffer(64)
    n_bytes = llama_cpp.llama_detokenize(vocab, ids, n_ids, out, 64, True, False)
    assert out.raw[:n_bytes].strip() == text
    llama_cpp.llama_model_free(model)


def test_one_libggml(tmp_path: Path) -> None:
    make("llama-tied", tmp_path / "model.gguf")
    pair_script().make_pair(tmp_path / "target.gguf", tmp_path / "draft.gguf", _small(), weight_type="q8_0")
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    for library in ("libggml-base", "libggml-cpu", "libllama"):
        assert len([path for path in mapped if library in path]) == 1


def _small(**sizes: int) -> object:
    defaults = {"n_layer": 3, "width": 256, "n_head": 4, "n_head_kv": 2, "n_ff": 512, "n_vocab": 512}
    return pair_script().Shape(**(defaults | sizes))


@pytest.mark.parametrize("weight_type", ["f32", "f16", "q4_0", "q4_k"])
def test_pair_agrees_as_told(weight_type: str, tmp_path: Path) -> None:
    agreement = []
    for s in (0.0, 0.3, 3.0):
        paths = tmp_path / f"target{s}.gguf", tmp_path / f"draft{s}.gguf"
        pair_script().make_pair(*paths, _small(), weight_type=weight_type, s=s)
        target, draft = (logits(path, range(60)).argmax(1) for path in paths)
        agreement.append((target == draft).mean())
        assert tensor_types(paths[0])["blk.2.ffn_up.weight"] == weight_type.upper()
    assert agreement[0] == 1
    assert agreement[0] > agreement[1] > agreement[2]


@pytest.mark.parametrize("argument", ["--n-vocab=100", "--n-head=3", "--n-ff=100", "--n-layer-draft=99", "--n-head=0"])
def test_pair_command_refuses_in_one_line(argument: str, tmp_path: Path) -> None:
    script = Path(pair_script().__file__)
    files = [str(tmp_path / "target.gguf"), str(tmp_path / "draft.gguf")]
    run = subprocess.run([sys.executable, script, *files, argument], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir())
