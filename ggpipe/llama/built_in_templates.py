"""The chat templates that are built into libllama, which are not in Jinja."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ggpipe.errors import UsageError
from ggpipe.llama.libllama import lib


def apply(name: str, messages: Sequence[tuple[str, str]], asks: bool) -> str:
    """Render a conversation. `messages`: roles and contents. `asks`: what prompts the model to answer comes last.

    Raises UsageError if libllama does not know the name, or does not take the conversation.
    """
    array = (lib.llama_chat_message * len(messages))(
        *(lib.llama_chat_message(role.encode(), content.encode()) for role, content in messages)
    )
    n_bytes = lib.llama_chat_apply_template(name.encode(), array, len(array), asks, None, 0)
    if n_bytes < 0:
        raise UsageError(f"the chat template {name} does not take this conversation")
    text = ctypes.create_string_buffer(n_bytes + 1)
    lib.llama_chat_apply_template(name.encode(), array, len(array), asks, text, n_bytes)
    return text.value.decode("utf-8", "replace")
