"""llama-server's own answers, of `/completion`."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from ggpipe.api.feed import Feed
from ggpipe.apis.bodies import GenerationBody
from ggpipe.apis.replies import prob_of, probs_of, timings
from ggpipe.core.request import Finish, Token, TokenProb
from ggpipe.server.backend import Generation
from ggpipe.server.errors import ApiError
from ggpipe.server.replies.stream import event, follow
from ggpipe.server.slots import settings

_MISSING = object()
_STOP_TYPES = {
    Finish.END_OF_TEXT: "eos", Finish.STOP_STRING: "word", Finish.NO_TOKEN: "eos", Finish.STOPPED: "none",
}  # fmt: skip


class NativeReply:
    """Of llama-server's `/completion`."""

    def __init__(
        self,
        model: str,
        post_sampling_probs: bool,
        slot_of: Callable[[Feed], int],
        stop_string: Callable[[Generation], Awaitable[str]],
        fields: Sequence[str] = (),
    ) -> None:
        """`post_sampling_probs`: probabilities are those of the draw. `slot_of`: the slot of a text. `stop_string`: the
        one that ended a text; empty: none has. `fields`: those of answers and of streams' ends; none: all."""
        self._fields = fields
        self._model = model
        self._post_sampling_probs = post_sampling_probs
        self._slot_of = slot_of
        self._stop_string = stop_string

    async def stream(self, generations: Sequence[Generation], body: GenerationBody) -> AsyncGenerator[bytes, None]:
        """An event for each token, whether it has text or not, and one for the end."""
        async for news in follow(generations, False, bool(body.return_progress)):
            own = news.generation
            if news.progress is not None:
                yield event({**self._part(own, "", [], stop=False), "prompt_progress": news.progress})
            for token in news.tokens:
                part = self._part(own, token.text, [token], stop=False)
                yield event({**part, "timings": timings(own.stats)} if body.timings_per_token else part)
            if news.is_end:
                last = {**self._part(own, own.feed.rest, [], stop=True), **await self._end(own)}
                yield event(_chosen(last, self._fields))

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream which failed."""
        return event(error.body)

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any] | list[dict[str, Any]]:
        """The text and how it ended; of several texts a list of these."""
        found = []
        for own in generations:
            text = "".join(token.text for token in own.feed.tokens) + own.feed.rest
            answer = {**self._part(own, text, own.feed.tokens, stop=True), **await self._end(own)}
            found.append(_chosen(answer, self._fields))
        return found if len(found) > 1 else found[0]

    def _part(self, generation: Generation, text: str, tokens: Sequence[Token], stop: bool) -> dict[str, Any]:
        found = {
            "index": generation.index,
            "content": text,
            "tokens": [token.id for token in tokens],
            "stop": stop,
            "id_slot": self._slot_of(generation.feed),
            "tokens_predicted": generation.stats.n_generated,
            "tokens_evaluated": generation.stats.n_prompt,
        }
        post = self._post_sampling_probs
        best_name = "top_probs" if post else "top_logprobs"
        probs = [
            _native_prob(own, post) | {best_name: [_native_prob(one, post) for one in best]}
            for own, best in probs_of(tokens)
        ]
        return found | {"completion_probabilities": probs} if probs else found

    async def _end(self, generation: Generation) -> dict[str, Any]:
        stats = generation.stats
        kind = _STOP_TYPES.get(stats.finish, "limit") if stats.finish is not None else "limit"
        return {
            "model": self._model,
            "stop_type": kind,
            "stopping_word": await self._stop_string(generation),
            "has_new_line": any("\n" in token.text for token in generation.feed.tokens),
            "truncated": stats.finish is Finish.CONTEXT_FULL,
            "generation_settings": _settings(generation),
            "tokens_cached": stats.counters.cached_tokens,
            "timings": timings(stats),
        }


def _settings(generation: Generation) -> dict[str, Any]:
    """All settings of a text, also those that say something of it: its own client gets them."""
    drawn = generation.spec.sampling
    return {
        **settings(drawn, generation.spec.n_predict),
        "seed": generation.stats.seed,
        "stop": drawn.stop,
        "logit_bias": [
            {"token": token, "bias": bias if math.isfinite(bias) else False} for token, bias in drawn.logit_bias
        ],
        "grammar": drawn.grammar,
        "lora": [],
    }


def _chosen(answer: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """These fields of an answer; `timings/prompt_n` is one inside of another. No fields: all."""
    if not fields:
        return answer
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            found[path] = value
    return found


def _native_prob(one: TokenProb, post_sampling: bool) -> dict[str, Any]:
    found = prob_of(one)
    if post_sampling:
        found["prob"] = math.exp(found.pop("logprob"))
    return found
