"""What was said in a conversation so far, as messages of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ggpipe.errors import UsageError

ChatMessage = dict[str, Any]
_ROLES = ("system", "developer", "user", "assistant", "tool")


class Transcript:
    """A conversation that grows and can be taken back."""

    def __init__(self, system: str | None = None) -> None:
        self.messages: list[ChatMessage] = []
        self.system = system

    @property
    def system(self) -> str | None:
        """The instructions to the model, which come first."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        if self.system is not None:
            del self.messages[0]
        if text is not None:
            self.messages.insert(0, {"role": "system", "content": text})

    @property
    def n_questions(self) -> int:
        """Messages of the user."""
        return sum(message["role"] == "user" for message in self.messages)

    @property
    def question(self) -> str | None:
        """The user's last message; None where there is none."""
        place = self._last_question()
        return None if place is None else text_of(self.messages[place])

    def ask(self, text: str) -> None:
        """The user says this."""
        self.messages.append({"role": "user", "content": text})

    def answered(self, text: str, reasoning: str = "") -> None:
        """The model says this."""
        message = {"role": "assistant", "content": text}
        self.messages.append(message | ({"reasoning_content": reasoning} if reasoning else {}))

    def take_back_answer(self) -> None:
        """Remove what follows the user's last message."""
        if (place := self._last_question()) is not None:
            del self.messages[place + 1 :]

    def take_back_question(self) -> None:
        """Remove the user's last message, and what follows it."""
        if (place := self._last_question()) is not None:
            del self.messages[place:]

    def clear(self) -> None:
        """Remove all but the instructions."""
        system, self.messages = self.system, []
        self.system = system

    def to_json(self) -> str:
        """All messages as a file."""
        text = json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False)
        if any("\ud800" <= character <= "\udfff" for character in text):  # halves of characters, which UTF-8 has not
            text = json.dumps({"messages": self.messages}, indent=2)
        return f"{text}\n"

    def load_json(self, text: str) -> None:
        """Take the messages of a file instead: a list of messages, or an object that has it under `messages`.

        Raises UsageError with what is wrong in it; then nothing is changed.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise UsageError(f"it is not JSON: {e}") from e
        found = value.get("messages") if isinstance(value, dict) else value
        if not isinstance(found, list):
            raise UsageError('it has no list of messages, as in {"messages": [{"role": "user", "content": "..."}]}')
        self.messages = [_checked(number, message) for number, message in enumerate(found, start=1)]

    def _last_question(self) -> int | None:
        places = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        return places[-1] if places else None


def text_of(message: ChatMessage) -> str:
    """A message's text, which may be in parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or ())


def _checked(number: int, message: object) -> ChatMessage:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise UsageError(f"message {number} must be an object whose role is one of {', '.join(_ROLES)}")
    content = message.get("content")
    if not (isinstance(content, str) or _is_parts(content) or (content is None and message.get("tool_calls"))):
        raise UsageError(f"message {number} must have a text as its content")
    return message


def _is_parts(content: object) -> bool:
    return isinstance(content, Sequence) and all(isinstance(part, dict) for part in content)
