"""Draft models with another vocabulary than the target's: the head sends the target's tokenizer to their drafters."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ggpipe.config.model import ModelConfig
from ggpipe.core.draft_messages import VocabOutline, Vocabularies
from ggpipe.core.drafters import registry
from ggpipe.core.drafters.base import Drafter
from ggpipe.core.drafters.translated import TranslatedModel
from ggpipe.errors import Setting, Wording
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.tokenizer_file import tokenizer_of
from ggpipe.llama.translator import TextTranslator
from ggpipe.llama.vocab import Vocab


def compare(
    vocab: Vocab, model_file: ModelFile, outline: VocabOutline, kind: str, file: str, warnings: list[Wording]
) -> tuple[Vocabularies | None, bytes]:
    """The target's vocabulary and that of a drafter of this kind. If a draft model has other tokens: None, and the
    target's tokenizer for it.

    `file`: of the draft, where messages are to tell several apart; else empty. Raises ModelError for a draft head with
    other tokens.
    """
    found = vocab.compared_with(outline)
    if isinstance(found, Vocabularies):
        return found, b""
    if registry.reads_states(kind):
        return vocab.with_draft(outline, file), b""
    name = f" {file}" if file else ""
    warnings.append(
        Wording(
            Setting("draft.model"),
            f"{name} has another vocabulary than ",
            Setting("model"),
            f" ({found}): its draft tokens are translated by their text",
        )
    )
    return None, tokenizer_of(model_file.paths[0])


def translated(drafter: Drafter, number: int, tokenizer: bytes, target: ModelConfig, draft: ModelConfig) -> Drafter:
    """A draft model's drafter with this id, as a drafter of the target's tokens. `tokenizer`: the target's."""
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(tokenizer)
        file.flush()
        vocab = Vocab(Path(file.name), target)
    return TranslatedModel(drafter, number, TextTranslator(vocab, Vocab(draft.path, draft)))
