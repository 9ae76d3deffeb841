"""What is said to a model, before its template makes a text of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ggpipe.chat.reasoning import ReasoningFormat

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For models whose file has no template."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, the last of which is to be answered. All values are JSON's."""

    messages: tuple[dict[str, Any], ...]
    """As in OpenAI's API: `role`, `content`, and what else the template knows."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the model may call, as in OpenAI's API."""
    template: str | None = None
    """In the Jinja language; None: the model's own, or ChatML where it has none."""
    further: Mapping[str, Any] = field(default_factory=dict)
    """Further names for the template, such as `enable_thinking`."""


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as a model reads it."""

    tokens: tuple[int, ...]
    """Up to where the model's answer begins."""
    reasoning: ReasoningFormat
    """How the model marks reasoning in its answer."""
    text: str = ""
    """What the template wrote."""
