"""Draft heads without token embeddings or an output layer: they draft as llama.cpp does with the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from support import dflash, head_sessions
from support.commands import TARGET
from support.eagle3 import PlainHead, reduced
from support.tale import N_TOKENS
from support.zoo import make, split, without

from ggpipe.config.model import LoadMode
from ggpipe.engine import handshake
from ggpipe.errors import ModelError
from ggpipe.llama.bundled import BUNDLED_HEAD
from ggpipe.llama.completed import as_one_file, lacking
from ggpipe.llama.draft_heads import open_draft
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_shape import shape_of
from ggpipe.transport.loading_messages import Hello
from scripts.models.quantize import quantize

pytestmark = pytest.mark.usefixtures("eager_drafts")

EMBEDDINGS, OUTPUT = "^token_embd", "^output.weight"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without(BUNDLED_HEAD, tmp_path_factory.mktemp("heads") / "bare.gguf", f"{EMBEDDINGS}|{OUTPUT}")


@pytest.mark.parametrize("place", head_sessions.PLACES)
def test_the_text_stays_libllamas(bare: Path, place: str) -> None:
    judged, right = head_sessions.check_text(bare, "eagle3", place)
    assert judged > 30
    assert right > 0.3 * judged, "with other embeddings it would hardly ever be right"


@pytest.mark.parametrize("drop", [EMBEDDINGS, OUTPUT, f"{EMBEDDINGS}|{OUTPUT}"], ids=["embeddings", "output", "both"])
def test_drafts_are_llama_cpps(drop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = without(BUNDLED_HEAD, tmp_path / "head.gguf", drop)
    drafts_of = PlainHead(TARGET, head).drafts
    assert head_sessions.check_drafts(head, "eagle3", drafts_of, monkeypatch, fast_kernels=False) > N_TOKENS / 4


@pytest.mark.parametrize("load_mode", ["none", "dio"])
def test_weights_that_are_read(load_mode: LoadMode, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts_of = PlainHead(TARGET, bare).drafts
    head_sessions.check_drafts(bare, "eagle3", drafts_of, monkeypatch, fast_kernels=False, load_mode=load_mode)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_target_with_one_matrix_for_both(parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output layer is its embedding, here of a type that ggml repacks."""
    target = quantize(without(TARGET, tmp_path / "tied.gguf", OUTPUT), tmp_path / "target.gguf", "Q4_0")
    target = split(target, tmp_path / "part", parts)[0] if parts > 1 else target
    head = without(BUNDLED_HEAD, tmp_path / "head.gguf", f"{EMBEDDINGS}|{OUTPUT}")
    drafts_of = PlainHead(target, head).drafts
    head_sessions.check_drafts(head, "eagle3", drafts_of, monkeypatch, fast_kernels=False, target=target)


def test_a_head_of_few_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts some of the tokens only, with an output layer of its own, as most EAGLE-3 heads do."""
    head = reduced(BUNDLED_HEAD, tmp_path / "head.gguf", range(200, 900), drop=("token_embd.weight",))
    drafts_of = PlainHead(TARGET, head).drafts
    assert head_sessions.check_drafts(head, "eagle3", drafts_of, monkeypatch, fast_kernels=False) > 0
    bare = reduced(BUNDLED_HEAD, tmp_path / "bare.gguf", range(200, 900), drop=("output.weight",))
    message = "no output layer of its own, and that of the model has 2,048 rows instead of 700: take a head with its"
    head_sessions.check_refused(message, heads=(bare,))


@pytest.mark.parametrize("drop", [("token_embd.weight",), ("token_embd.weight", "output.weight"), ("output.weight",)])
def test_dflash(drop: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an output layer of its own, its own embeddings serve."""
    path = dflash.write(tmp_path / "head.gguf", TARGET, drop=drop)
    assert len(lacking(ModelFile.open(path))) == (0 if drop == ("output.weight",) else len(drop))
    head_sessions.check_drafts(path, "dflash", dflash.PlainDFlash(TARGET, path).drafts, monkeypatch, fast_kernels=False)


def test_dflash_of_few_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dflash.write(tmp_path / "head.gguf", TARGET, drafts=range(300, 700), drop=("token_embd.weight",))
    head_sessions.check_drafts(path, "dflash", dflash.PlainDFlash(TARGET, path).drafts, monkeypatch, fast_kernels=False)


def test_one_file(tmp_path: Path) -> None:
    """libllama gets a file with all weights, and holes where it reads none."""
    first, *_ = split(without(BUNDLED_HEAD, tmp_path / "bare.gguf", f"{EMBEDDINGS}|{OUTPUT}"), tmp_path / "head", 3)
    target = without(TARGET, tmp_path / "tied.gguf", OUTPUT)
    file = open_draft(first, target)
    assert file.borrowed == {"token_embd.weight": "token_embd.weight", "output.weight": "token_embd.weight"}
    assert file.n_bytes > ModelFile.open(first).n_bytes + ModelFile.open(target).tensors["token_embd.weight"].size
    sources = {tensor.name: tensor.data for tensor in gguf.GGUFReader(BUNDLED_HEAD).tensors}
    embeddings = next(t.data for t in gguf.GGUFReader(TARGET).tensors if t.name == "token_embd.weight")
    sources |= {"token_embd.weight": embeddings, "output.weight": embeddings}
    with as_one_file(file, lambda name: name != "fc.weight") as path:
        whole = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
        assert whole.keys() == {tensor.name for tensor in gguf.GGUFReader(BUNDLED_HEAD).tensors}
        for name, data in whole.items():
            assert np.array_equal(data, sources[name] * (name != "fc.weight")), name
    with as_one_file(ModelFile.open(BUNDLED_HEAD), lambda _: True) as path:
        assert path == BUNDLED_HEAD


def test_what_does_not_fit_is_said_in_one_line(bare: Path, tmp_path: Path) -> None:
    draft = TARGET.with_name("tales-draft.gguf")
    wrong = "no token embeddings of its own, and those of the model have 192 numbers per token instead of 256"
    head_sessions.check_refused(wrong, heads=(bare,), target=draft)
    words = make("llama", tmp_path / "words.gguf")
    head_sessions.check_refused("does not fit `model`", heads=(bare,), target=words)
    with pytest.raises(ModelError, match=r"bare.gguf takes its token embeddings and output layer from `model`: cannot"):
        open_draft(bare, tmp_path / "none.gguf")


def test_another_target_on_the_heads_rank(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hello = handshake.hello

    def other(*arguments: Any) -> Hello:
        own = hello(*arguments)
        return msgspec.structs.replace(own, target_fingerprint="other") if own.target_fingerprint else own

    monkeypatch.setattr(handshake, "hello", other)
    head_sessions.check_refused("has another model than rank 0 .* as `model`: copy it there again", heads=(bare,))


def test_memory_counts_what_is_taken(bare: Path) -> None:
    """The rank of a head pays for the target's weights that it reads."""
    whole, taken = shape_of(ModelFile.open(BUNDLED_HEAD)), shape_of(open_draft(bare, TARGET))
    assert (taken.input_bytes, taken.output_bytes) == (whole.input_bytes, whole.output_bytes)
    assert taken.taps == whole.taps
