"""OpenAI's objects about texts that were written, with llama-server's further fields."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.request import Finish, Token, TokenProb
from ggpipe.stats.records import RequestStats, rate
from ggpipe.text.chat.answer import WholeAnswer

_LEAST = -9999.0
"""JSON has no minus infinity; OpenAI writes this."""
_FINISH = {Finish.END_OF_TEXT: "stop", Finish.STOP_STRING: "stop", Finish.NO_TOKEN: "stop"}


class WrittenOutput(Protocol):
    """A text that was written."""

    @property
    def prompt(self) -> int:
        """Its prompt's number, in one request."""

    @property
    def stats(self) -> RequestStats:
        """Its figures."""


def chat_logprobs(tokens: Sequence[Token], n_best: int | None = None) -> dict[str, Any] | None:
    """Log-probabilities of a message's tokens, with the `n_best` best at each place (None: all that there are); None
    where none were asked for."""
    found = [prob_of(own) | {"top_logprobs": [prob_of(one) for one in best[:n_best]]} for own, best in probs_of(tokens)]
    return {"content": found} if found else None


def text_logprobs(tokens: Sequence[Token], n_best: int | None = None, n_before: int = 0) -> dict[str, Any] | None:
    """Those of a text's tokens. The token itself is always among the best. `n_before`: characters of the text in front
    of these tokens."""
    probs = list(probs_of(tokens))
    if not probs:
        return None
    texts = [_text(own) for own, _ in probs]
    return {
        "tokens": texts,
        "token_logprobs": [max(own.logprob, _LEAST) for own, _ in probs],
        "top_logprobs": [
            {_text(one): max(one.logprob, _LEAST) for one in (*best[:n_best], own)} for own, best in probs
        ],
        "text_offset": list(itertools.accumulate(map(len, texts), initial=n_before))[:-1],
    }


def probs_of(tokens: Sequence[Token]) -> Iterator[tuple[TokenProb, Sequence[TokenProb]]]:
    """Each token's own log-probability, and those of the best ones."""
    return ((token.probs[0], token.probs[1:]) for token in tokens if token.probs)


def prob_of(one: TokenProb) -> dict[str, Any]:
    return {"id": one.id, "token": _text(one), "bytes": list(one.text), "logprob": max(one.logprob, _LEAST)}


def _text(one: TokenProb) -> str:
    return one.text.decode("utf-8", "replace")


def finish_reason(stats: RequestStats, answer: WholeAnswer | None = None) -> str:
    """Why a text ended, as OpenAI says it; one that was cut off is like one that was too long."""
    reason = _FINISH.get(stats.finish, "length") if stats.finish is not None else "length"
    return "tool_calls" if reason == "stop" and answer is not None and answer.calls else reason


def usage(texts: Sequence[WrittenOutput]) -> dict[str, Any]:
    """Tokens of all texts together; a prompt that several of them answer counts once."""
    prompts = {text.prompt: text.stats for text in reversed(texts)}
    n_prompt = sum(stats.n_prompt for stats in prompts.values())
    n_generated = sum(text.stats.n_generated for text in texts)
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
