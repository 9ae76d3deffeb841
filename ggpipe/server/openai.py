"""OpenAI's API: chats and completions, whole and as streams, with llama-server's further fields."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import ggpipe
from ggpipe.chat.conversation import Conversation
from ggpipe.chat.reasoning import Piece
from ggpipe.core.request import Finish, Token, TokenProb
from ggpipe.metrics.stats import RequestStats
from ggpipe.sampling import SamplingConfig
from ggpipe.server.backend import Generation
from ggpipe.server.json import rate
from ggpipe.server.stream import DONE, event, follow

BUILD = f"ggpipe {ggpipe.__version__}"
"""Which server it is."""
_LEAST = -9999.0
"""JSON has no minus infinity; OpenAI writes this."""
_FINISH = {Finish.END_OF_TEXT: "stop", Finish.STOP_STRING: "stop", Finish.NO_TOKEN: "stop"}

_STOP_TYPES = {
    Finish.END_OF_TEXT: "eos", Finish.STOP_STRING: "word", Finish.NO_TOKEN: "eos", Finish.STOPPED: "none",
}  # fmt: skip


class Reply(Protocol):
    """The objects of one answer."""

    def stream(self, generations: Sequence[Generation], includes_usage: bool) -> AsyncGenerator[bytes, None]:
        """Events, as texts come. Raises ApiError."""

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer, once all texts have ended."""


class _OpenAIReply(abc.ABC):
    """As OpenAI has them: a choice for each text."""

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, model: str, splits: bool) -> None:
        """`splits`: reasoning is told apart."""
        self._common = {
            "id": self.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": BUILD,
        }
        self.splits = splits

    async def stream(self, generations: Sequence[Generation], includes_usage: bool) -> AsyncGenerator[bytes, None]:
        """Events, as texts come. Raises ApiError."""
        begun: set[int] = set()
        tokens: dict[int, list[Token]] = {generation.index: [] for generation in generations}
        async for news in follow(generations, self.splits):
            index = news.generation.index
            if index not in begun:
                begun.add(index)
                for choice in self.first(index):
                    yield event(self._chunk([choice]))
            tokens[index] += news.tokens
            for piece in news.pieces:
                yield event(self._chunk([{**self.delta(index, piece), "logprobs": self.logprobs(tokens[index])}]))
                tokens[index] = []
            if news.is_end:
                stats = news.generation.stats
                last = {**self.last(index, finish_reason(stats)), "logprobs": self.logprobs(tokens[index])}
                yield event(self._chunk([last], timings=timings(stats)))
        if includes_usage:
            yield event(self._chunk([], usage=usage(generations)))
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]], **further: Any) -> dict[str, Any]:
        return {"choices": choices, **self._common, "object": self.chunk_object, **further}

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer, once all texts have ended."""
        pieces: dict[int, list[Piece]] = {generation.index: [] for generation in generations}
        async for news in follow(generations, self.splits):
            pieces[news.generation.index] += news.pieces
        choices = [
            {
                **self.choice(generation.index, pieces[generation.index], finish_reason(generation.stats)),
                "logprobs": self.logprobs(generation.feed.tokens),
            }
            for generation in generations
        ]
        own = {"choices": choices, **self._common, "object": self.whole_object, "usage": usage(generations)}
        return {**own, "timings": timings(generations[0].stats)}

    # What the kinds of answers do in their own ways

    @abc.abstractmethod
    def logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Log-probabilities of these tokens; None where none were asked for."""

    def first(self, index: int) -> Iterable[dict[str, Any]]:
        """What a stream's text begins with."""
        return ()

    @abc.abstractmethod
    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        """The next part of a text."""

    @abc.abstractmethod
    def last(self, index: int, reason: str) -> dict[str, Any]:
        """The end of a text."""

    @abc.abstractmethod
    def choice(self, index: int, pieces: Sequence[Piece], reason: str) -> dict[str, Any]:
        """A whole text."""


class ChatReply(_OpenAIReply):
    """Of `/v1/chat/completions`."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> Iterable[dict[str, Any]]:
        return [_delta(index, {"role": "assistant", "content": None})]

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        return _delta(index, {"reasoning_content" if piece.is_reasoning else "content": piece.text})

    def last(self, index: int, reason: str) -> dict[str, Any]:
        return {**_delta(index, {}), "finish_reason": reason}

    def choice(self, index: int, pieces: Sequence[Piece], reason: str) -> dict[str, Any]:
        reasoning = "".join(piece.text for piece in pieces if piece.is_reasoning)
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces if not piece.is_reasoning)}
        if reasoning:
            message["reasoning_content"] = reasoning
        return {"index": index, "message": message, "finish_reason": reason}

    def logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        found = [_prob(own) | {"top_logprobs": [_prob(one) for one in best]} for own, best in _probs(tokens)]
        return {"content": found} if found else None


class CompletionReply(_OpenAIReply):
    """Of `/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        return {"index": index, "text": piece.text, "finish_reason": None}

    def last(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "finish_reason": reason}

    def choice(self, index: int, pieces: Sequence[Piece], reason: str) -> dict[str, Any]:
        return {"index": index, "text": "".join(p.text for p in pieces), "finish_reason": reason}

    def logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        probs = list(_probs(tokens))
        if not probs:
            return None
        texts = [_text(own) for own, _ in probs]
        return {
            "tokens": texts,
            "token_logprobs": [max(own.logprob, _LEAST) for own, _ in probs],
            "top_logprobs": [{_text(one): max(one.logprob, _LEAST) for one in best} for _, best in probs],
            "text_offset": list(itertools.accumulate(map(len, texts), initial=0))[:-1],
        }


class NativeReply:
    """Of llama-server's `/completion`."""

    def __init__(self, model: str, post_sampling_probs: bool) -> None:
        """`post_sampling_probs`: probabilities are those of the draw."""
        self._model = model
        self._post_sampling_probs = post_sampling_probs

    async def stream(self, generations: Sequence[Generation], includes_usage: bool) -> AsyncGenerator[bytes, None]:
        """An event for each token, whether it has text or not, and one for the end."""
        async for news in follow(generations, splits=False):
            for token in news.tokens:
                yield event(self._part(news.generation, token.text, [token], stop=False))
            if news.is_end:
                rest = news.generation.feed.rest
                yield event({**self._part(news.generation, rest, [], stop=True), **self._end(news.generation)})

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The text and how it ended."""
        (own,) = generations
        text = "".join(token.text for token in own.feed.tokens) + own.feed.rest
        return {**self._part(own, text, own.feed.tokens, stop=True), **self._end(own)}

    def _part(self, generation: Generation, text: str, tokens: Sequence[Token], stop: bool) -> dict[str, Any]:
        found = {
            "index": generation.index,
            "content": text,
            "tokens": [token.id for token in tokens],
            "stop": stop,
            "id_slot": -1,
            "tokens_predicted": generation.stats.n_generated,
            "tokens_evaluated": generation.stats.n_prompt,
        }
        post = self._post_sampling_probs
        best_name = "top_probs" if post else "top_logprobs"
        probs = [
            _native_prob(own, post) | {best_name: [_native_prob(one, post) for one in best]}
            for own, best in _probs(tokens)
        ]
        return found | {"completion_probabilities": probs} if probs else found

    def _end(self, generation: Generation) -> dict[str, Any]:
        stats = generation.stats
        kind = _STOP_TYPES.get(stats.finish, "limit") if stats.finish is not None else "limit"
        return {
            "model": self._model,
            "stop_type": kind,
            "truncated": stats.finish is Finish.CONTEXT_FULL,
            "generation_settings": {"seed": stats.seed},
            "tokens_cached": stats.counters.cached_tokens,
            "timings": timings(stats),
        }


def _probs(tokens: Sequence[Token]) -> Iterator[tuple[TokenProb, Sequence[TokenProb]]]:
    """Each token's own log-probability, and those of the best ones."""
    return ((token.probs[0], token.probs[1:]) for token in tokens if token.probs)


def _prob(one: TokenProb) -> dict[str, Any]:
    return {"id": one.id, "token": _text(one), "bytes": list(one.text), "logprob": max(one.logprob, _LEAST)}


def _native_prob(one: TokenProb, post_sampling: bool) -> dict[str, Any]:
    found = _prob(one)
    if post_sampling:
        found["prob"] = math.exp(found.pop("logprob"))
    return found


def _text(one: TokenProb) -> str:
    return one.text.decode("utf-8", "replace")


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None}


def finish_reason(stats: RequestStats) -> str:
    """Why a text ended, as OpenAI says it; one that was cut off is like one that was too long."""
    return _FINISH.get(stats.finish, "length") if stats.finish is not None else "length"


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens of all texts together; a prompt that several of them answer counts once."""
    prompts = {generation.prompt: generation.stats for generation in reversed(generations)}
    n_prompt = sum(stats.n_prompt for stats in prompts.values())
    n_generated = sum(generation.stats.n_generated for generation in generations)
    n_cached = sum(stats.counters.cached_tokens for stats in prompts.values())
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


def timings(stats: RequestStats) -> dict[str, Any]:
    """A text's figures, as llama-server has them."""
    counters = stats.counters
    n_prompt, prompt_s = stats.n_prompt - counters.cached_tokens, stats.ttft_s or 0.0
    n_predicted, predicted_s = stats.n_generated, stats.decode_s
    found = {
        "cache_n": counters.cached_tokens,
        "prompt_n": n_prompt,
        "prompt_ms": 1e3 * prompt_s,
        "prompt_per_token_ms": 1e3 * prompt_s / max(n_prompt, 1),
        "prompt_per_second": rate(n_prompt, prompt_s),
        "predicted_n": n_predicted,
        "predicted_ms": 1e3 * predicted_s,
        "predicted_per_token_ms": 1e3 * predicted_s / max(n_predicted - 1, 1),
        "predicted_per_second": rate(n_predicted - 1, predicted_s),
    }
    if counters.submitted_tokens:
        found |= {"draft_n": counters.submitted_tokens, "draft_n_accepted": counters.accepted_tokens}
    return found


def draws(sampling: SamplingConfig, n: int) -> list[SamplingConfig]:
    """For several texts of a prompt: each has a seed of its own."""
    if sampling.seed < 0:
        return [sampling] * n
    return [dataclasses.replace(sampling, seed=(sampling.seed + i) % (2**32 - 1)) for i in range(n)]


def with_names(conversation: Conversation, names: dict[str, Any] | None) -> Conversation:
    """With further names for the template."""
    if not names:
        return conversation
    return dataclasses.replace(conversation, further={**conversation.further, **names})
