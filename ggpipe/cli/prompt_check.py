"""Whether a prompt fits the context that the user chose, before ranks start and load the model."""

from __future__ import annotations

import contextlib

from ggpipe.config.engine import EngineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prompt import Conversation
from ggpipe.core.request import check_prompt
from ggpipe.core.request_spec import RequestSpec
from ggpipe.errors import ModelError

_CELLS = 256
"""libllama rounds a context up to a multiple of this."""
_MOST_ADDED = 64
"""Tokens that a model adds to a prompt, such as BOS. No other token has less than a byte of the prompt."""
_MOST_BY_TEMPLATE = 4096
"""The same with a chat template. Longer ones exist; the ranks check every prompt again."""


def check_fits(spec: RequestSpec, config: EngineConfig) -> None:
    """Raises PromptTooLong if the prompt leaves no room in the context of the user's choice.

    Loads the vocabulary, unless the prompt is so short that it fits in any case. Without the model's file on this
    machine, nothing is checked.
    """
    prompt = spec.prompt
    if isinstance(prompt, Conversation):
        n_most = sum(len(str(message)) for message in prompt.messages) + _MOST_BY_TEMPLATE
    else:
        parts = (prompt,) if isinstance(prompt, bytes) else prompt
        n_most = sum(len(part) if isinstance(part, bytes) else 1 for part in parts) + _MOST_ADDED
    n_ctx = -(-config.context.n_ctx // _CELLS) * _CELLS
    if not n_ctx or n_most < n_ctx:
        return
    with contextlib.suppress(ModelError):
        from ggpipe.engine.prompt_reader import PromptReader  # which load libllama
        from ggpipe.llama.gguf import ModelFile
        from ggpipe.llama.vocab import Vocab

        with (
            contextlib.closing(Vocab(ModelFile.open(config.model.path), config.model)) as vocab,
            contextlib.closing(PromptReader(vocab)) as reader,
        ):
            check_prompt(reader.read(prompt, SamplingConfig()).tokens, n_ctx)
