"""`/v1/completions` and `/v1/chat/completions`: their responses and chunks, in which each output is a choice."""

from __future__ import annotations

import abc
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ggpipe.apis.answers import Written, chat_logprobs, finish_reason, text_logprobs, timings, usage
from ggpipe.core.request import Token
from ggpipe.text.chat.answer import WholeAnswer
from ggpipe.text.chat.tools.events import Arguments, CallBegun, Event, Reasoning, Text


class Choices(abc.ABC):
    """The objects of one request."""

    prefix = ""
    whole_object = ""
    chunk_object = ""
    empty: ClassVar[Mapping[str, Any]]
    """What a chunk without text has."""
    first: ClassVar[Mapping[str, Any] | None] = None
    """What the first chunk of each output has; None: it has no such chunk."""

    def __init__(self, model: str, n_best: int | None, identity: str = "", **further: Any) -> None:
        """`n_best`: as `n_best_probs` of bodies. `identity`: id of the response; empty: a random one. `further`: fields
        of the response and of all chunks."""
        identity = identity or self.prefix + secrets.token_hex(12)
        self._common = {"id": identity, "created": int(time.time()), "model": model, **further}
        self.n_best = n_best

    def whole(self, outputs: Sequence[Written], splits: bool) -> dict[str, Any]:
        """The response, once all outputs have ended. `splits`: reasoning is separated from the answer."""
        choices = []
        for index, output in enumerate(outputs):
            answer = output.answer(splits)
            choice = self.choice(index, self._whole(answer), finish_reason(output.stats, answer))
            choices.append({**choice, "logprobs": self.logprobs(index, output.tokens)})
        figures = {"usage": usage(outputs), "timings": timings(outputs[0].stats)}
        return {"choices": choices, **self._common, "object": self.whole_object, **figures}

    def chunk(self, choices: list[dict[str, Any]], **further: Any) -> dict[str, Any]:
        """The next part of a stream."""
        return {"choices": choices, **self._common, "object": self.chunk_object, **further}

    @staticmethod
    def choice(index: int, content: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        """An output, or a part of it. `reason`: why it ended."""
        return {"index": index, **content, "finish_reason": reason}

    @abc.abstractmethod
    def part(self, one: Event) -> dict[str, Any] | None:
        """What a chunk has of this part of an output; None: there is no chunk for it."""

    @abc.abstractmethod
    def logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Log-probabilities of an output's next tokens; None if none were requested."""

    @abc.abstractmethod
    def _whole(self, answer: WholeAnswer) -> dict[str, Any]:
        """What a response has of a whole output."""


class ChatChoices(Choices):
    """Of `/v1/chat/completions`."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    empty: ClassVar[Mapping[str, Any]] = {"delta": {}}
    first: ClassVar[Mapping[str, Any] | None] = {"delta": {"role": "assistant", "content": None}}

    def part(self, one: Event) -> dict[str, Any] | None:
        match one:
            case Text(text):
                return {"delta": {"content": text}}
            case Reasoning(text):
                return {"delta": {"reasoning_content": text}}
            case CallBegun(call, identity, name):
                function = {"name": name, "arguments": ""}
                return _call_delta({"index": call, "id": identity, "type": "function", "function": function})
            case Arguments(call, text):
                return _call_delta({"index": call, "function": {"arguments": text}})
        return None

    def logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        return chat_logprobs(tokens, self.n_best)

    def _whole(self, answer: WholeAnswer) -> dict[str, Any]:
        return {"message": answer.message}


class CompletionChoices(Choices):
    """Of `/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"
    empty: ClassVar[Mapping[str, Any]] = {"text": ""}

    def __init__(self, model: str, n_best: int | None, identity: str = "", **further: Any) -> None:
        super().__init__(model, n_best, identity, **further)
        self._n_chars: dict[int, int] = {}
        """Characters of each output's tokens whose log-probabilities were returned."""

    def part(self, one: Event) -> dict[str, Any] | None:
        return {"text": one.text} if isinstance(one, Text) else None

    def logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        found = text_logprobs(tokens, self.n_best, self._n_chars.get(index, 0))
        if found is not None:
            self._n_chars[index] = found["text_offset"][-1] + len(found["tokens"][-1])
        return found

    def _whole(self, answer: WholeAnswer) -> dict[str, Any]:
        return {"text": answer.text}


def _call_delta(call: dict[str, Any]) -> dict[str, Any]:
    return {"delta": {"tool_calls": [call]}}
