"""OpenAI's API: chats and completions, whole and as streams, with llama-server's further fields."""

from __future__ import annotations

import abc
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Protocol

from ggpipe._version import __version__
from ggpipe.apis.answers import chat_logprobs, finish_reason, text_logprobs, timings, usage
from ggpipe.apis.bodies import GenerationBody
from ggpipe.core.request import Token
from ggpipe.server.backend import Generation
from ggpipe.server.errors import ApiError
from ggpipe.server.replies.stream import DONE, event, follow
from ggpipe.text.chat.answer import WholeAnswer
from ggpipe.text.chat.tools.events import AnswerEvent, Arguments, CallBegun, Reasoning, Text

BUILD = f"ggpipe {__version__}"
"""Which server it is."""


class Reply(Protocol):
    """The objects of one answer."""

    def stream(self, generations: Sequence[Generation], body: GenerationBody) -> AsyncGenerator[bytes, None]:
        """Events, as texts come. `body` says what is in them beside the texts. Raises ApiError."""

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream which failed."""

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any] | list[dict[str, Any]]:
        """The answer, once all texts have ended."""


class _OpenAIReply(abc.ABC):
    """As OpenAI has them: a choice for each text."""

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, model: str, splits: bool, n_best: int | None) -> None:
        """`splits`: reasoning is told apart. `n_best`: as `n_best_probs` of bodies."""
        self._common = {
            "id": self.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": BUILD,
        }
        self.splits = splits
        self.n_best = n_best

    async def stream(self, generations: Sequence[Generation], body: GenerationBody) -> AsyncGenerator[bytes, None]:
        """Events, as texts come. Raises ApiError."""
        begun: set[int] = set()
        tokens: dict[int, list[Token]] = {generation.index: [] for generation in generations}
        answers = {generation.index: WholeAnswer() for generation in generations}
        names_origins = bool(body.return_origins)
        async for news in follow(generations, self.splits, bool(body.return_progress), by_token=names_origins):
            index = news.generation.index
            if index not in begun:
                begun.add(index)
                for choice in self.first(index):
                    yield event(self._chunk([choice]))
            if news.progress is not None:
                yield event(self._chunk([self.empty(index)], prompt_progress=vars(news.progress)))
                continue
            tokens[index] += news.tokens
            answers[index].add(news.events)
            for one in news.events:
                delta = self.delta(index, one)
                if delta is not None:
                    choice = {**delta, "logprobs": self.logprobs(index, tokens[index])}
                    if names_origins and tokens[index]:
                        choice["origin"] = "drafted" if tokens[index][-1].drafted else "own"
                    figures = {"timings": timings(news.generation.stats)} if body.timings_per_token else {}
                    yield event(self._chunk([choice], **figures))
                    tokens[index] = []
            if news.is_end:
                stats = news.generation.stats
                reason = finish_reason(stats, answers[index])
                last = {**self.last(index, reason), "logprobs": self.logprobs(index, tokens[index])}
                yield event(self._chunk([last], timings=timings(stats)))
        if body.includes_usage:
            yield event(self._chunk([], usage=usage(generations), timings=timings(generations[0].stats)))
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream which failed."""
        return event(error.body)

    def _chunk(self, choices: list[dict[str, Any]], **further: Any) -> dict[str, Any]:
        return {"choices": choices, **self._common, "object": self.chunk_object, **further}

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer, once all texts have ended."""
        answers = {generation.index: WholeAnswer() for generation in generations}
        async for news in follow(generations, self.splits):
            answers[news.generation.index].add(news.events)
        choices = []
        for generation in generations:
            answer = answers[generation.index]
            choice = self.choice(generation.index, answer, finish_reason(generation.stats, answer))
            choices.append({**choice, "logprobs": self.logprobs(generation.index, generation.feed.tokens)})
        own = {"choices": choices, **self._common, "object": self.whole_object, "usage": usage(generations)}
        return {**own, "timings": timings(generations[0].stats)}

    # What the kinds of answers do in their own ways

    @abc.abstractmethod
    def logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Log-probabilities of a text's next tokens; None where none were asked for."""

    def first(self, index: int) -> Iterable[dict[str, Any]]:
        """What a stream's text begins with."""
        return ()

    @abc.abstractmethod
    def delta(self, index: int, one: AnswerEvent) -> dict[str, Any] | None:
        """The next part of a text; None: nothing is sent of it."""

    @abc.abstractmethod
    def empty(self, index: int) -> dict[str, Any]:
        """No part of a text."""

    @abc.abstractmethod
    def last(self, index: int, reason: str) -> dict[str, Any]:
        """The end of a text."""

    @abc.abstractmethod
    def choice(self, index: int, answer: WholeAnswer, reason: str) -> dict[str, Any]:
        """A whole text."""


class ChatReply(_OpenAIReply):
    """Of `/v1/chat/completions`."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> Iterable[dict[str, Any]]:
        return [_delta(index, {"role": "assistant", "content": None})]

    def delta(self, index: int, one: AnswerEvent) -> dict[str, Any] | None:
        match one:
            case Text(text):
                return _delta(index, {"content": text})
            case Reasoning(text):
                return _delta(index, {"reasoning_content": text})
            case CallBegun(call, identity, name):
                function = {"name": name, "arguments": ""}
                begun = {"index": call, "id": identity, "type": "function", "function": function}
                return _delta(index, {"tool_calls": [begun]})
            case Arguments(call, text):
                return _delta(index, {"tool_calls": [{"index": call, "function": {"arguments": text}}]})
        return None

    def empty(self, index: int) -> dict[str, Any]:
        return _delta(index, {})

    def last(self, index: int, reason: str) -> dict[str, Any]:
        return {**_delta(index, {}), "finish_reason": reason}

    def choice(self, index: int, answer: WholeAnswer, reason: str) -> dict[str, Any]:
        return {"index": index, "message": answer.message, "finish_reason": reason}

    def logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        return chat_logprobs(tokens, self.n_best)


class CompletionReply(_OpenAIReply):
    """Of `/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, model: str, n_best: int | None) -> None:
        super().__init__(model, splits=False, n_best=n_best)
        self._n_chars: dict[int, int] = {}
        """Characters of each text's tokens whose log-probabilities were answered."""

    def delta(self, index: int, one: AnswerEvent) -> dict[str, Any] | None:
        return {"index": index, "text": one.text, "finish_reason": None} if isinstance(one, Text) else None

    def empty(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "", "finish_reason": None}

    def last(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "finish_reason": reason}

    def choice(self, index: int, answer: WholeAnswer, reason: str) -> dict[str, Any]:
        return {"index": index, "text": answer.text, "finish_reason": reason}

    def logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        found = text_logprobs(tokens, self.n_best, self._n_chars.get(index, 0))
        if found is not None:
            self._n_chars[index] = found["text_offset"][-1] + len(found["tokens"][-1])
        return found


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None}
