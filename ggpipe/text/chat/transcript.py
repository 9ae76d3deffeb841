"""The messages of a conversation, in the format of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ggpipe.errors import UsageError

ChatMessage = dict[str, Any]
_ROLES = ("system", "developer", "user", "assistant", "tool")


class Transcript:
    """A conversation whose last messages can be removed again."""

    def __init__(self, system: str | None = None) -> None:
        self.messages: list[ChatMessage] = []
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message, which comes first; None if there is none."""
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
        """Number of the user's messages."""
        return sum(message["role"] == "user" for message in self.messages)

    @property
    def question(self) -> str | None:
        """The text of the user's last message; None if there is none."""
        place = self._last_question()
        return None if place is None else text_of(self.messages[place])

    def ask(self, text: str) -> None:
        """Append a message of the user."""
        self.messages.append({"role": "user", "content": text})

    def answered(self, text: str, reasoning: str = "") -> None:
        """Append the model's answer."""
        message = {"role": "assistant", "content": text}
        self.messages.append(message | ({"reasoning_content": reasoning} if reasoning else {}))

    def take_back_answer(self) -> None:
        """Remove everything after the user's last message."""
        if (place := self._last_question()) is not None:
            del self.messages[place + 1 :]

    def take_back_question(self) -> None:
        """Remove the user's last message and everything after it."""
        if (place := self._last_question()) is not None:
            del self.messages[place:]

    def clear(self) -> None:
        """Remove everything but the system message."""
        system, self.messages = self.system, []
        self.system = system

    def to_json(self) -> str:
        """All messages as the content of a file."""
        text = json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False)
        if any("\ud800" <= character <= "\udfff" for character in text):  # UTF-8 cannot encode lone surrogates
            text = json.dumps({"messages": self.messages}, indent=2)
        return f"{text}\n"

    def load_json(self, text: str) -> None:
        """Replace the messages with those of a file: a list, or an object with a list named `messages`.

        Raises UsageError, and changes nothing, if the file is invalid.
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
    """The text of a message, whose content may be in parts."""
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
