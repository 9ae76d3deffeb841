"""The target's vocabulary, read once for a file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.commands import TARGET

from ggpipe.config.model import ModelConfig
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.guided_grammar import GuidanceVocab
from ggpipe.llama.vocab import Vocab


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    vocab = Vocab(ModelFile.open(TARGET), ModelConfig(path=TARGET))
    yield vocab
    vocab.close()


@pytest.fixture(scope="module")
def guidance(vocab: Vocab) -> Iterator[GuidanceVocab]:
    guidance = GuidanceVocab(vocab)
    yield guidance
    guidance.close()
