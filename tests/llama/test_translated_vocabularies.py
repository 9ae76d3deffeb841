"""Draft models with the vocabulary of one family for targets of another, without the models: only their tokenizers."""

from __future__ import annotations

import functools
import inspect
import itertools

import pytest
from support import llama_cpp_source
from support.commands import ROOT
from support.translation import FakeDraftModel, KnownTree

from ggpipe.config.model import ModelConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import Accepted, BeginDrafting
from ggpipe.core.drafters import translated
from ggpipe.core.drafters.base import ToHead
from ggpipe.core.drafters.translated import TranslatedModel
from ggpipe.llama.translator import TextTranslator
from ggpipe.llama.vocab import Vocab

FAMILIES = ("qwen2", "llama-bpe", "llama-spm", "deepseek-llm")
N_AHEAD = 10
"""Tokens that the draft model is ahead of those that it was told."""
TEXTS = {
    "english": (ROOT / "README.md").read_text()[:1500],
    "code": inspect.getsource(translated)[4000:5500],
    "chinese": "很久很久以前有一个国王。他有三个女儿。最小的女儿非常美丽。王宫附近有一片黑暗的大森林。"
    "森林里的一棵老椴树下有一口井。",
    "others": "Ein König hatte eine Tochter, über alle Maßen schön. Жил-был царь; 昔々ある所に 🙂👍🏽 naïve café",
}


@functools.cache
def opened(family: str) -> Vocab:
    path = llama_cpp_source.source() / "models" / f"ggml-vocab-{family}.gguf"
    return Vocab(path, ModelConfig(path=path))


@pytest.mark.parametrize(("target", "draft"), itertools.permutations(FAMILIES, 2))
@pytest.mark.parametrize("text", TEXTS)
def test_a_draft_model_that_is_right(target: str, draft: str, text: str) -> None:
    """All tokens are in the tree before the target writes them, and the draft model reads the text to its end."""
    vocab = opened(target)
    translator = TextTranslator(vocab, opened(draft))
    tokens = vocab.inner_tokens(TEXTS[text])
    whole = b"".join(map(translator.target_text, tokens))
    assert whole == TEXTS[text].encode()
    model, head = FakeDraftModel(), KnownTree()
    drafter = TranslatedModel(model, 0, translator)

    def handle(event: BeginDrafting | Accepted) -> None:
        for action in drafter.handle(event, 0.0):
            if isinstance(action, ToHead):
                head.take(action.micro_batch)
        drafter.validate()

    begin = BeginDrafting(
        request=1, prompt=vocab.inner_tokens("\n"), n_left=len(tokens), look_ahead=N_AHEAD, ends=frozenset(),
        banned=(), speculation=SpeculationConfig(),
    )  # fmt: skip
    handle(begin)
    for token in tokens:
        path: list[int] = []
        read = b"".join(map(translator.draft_text, model.told))
        for one in translator.draft_tokens(whole[len(read) :])[:N_AHEAD]:
            model.draft(path, one, 0.9)
            path.append(one)
        handle(Accepted(1, head.epoch, (), N_AHEAD))
        assert head.accept(token), vocab.piece(token)
        handle(Accepted(1, head.epoch, (token,), N_AHEAD))
    assert b"".join(map(translator.draft_text, model.told)) == whole
