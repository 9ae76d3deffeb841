"""What replies of several APIs have in common: choices, usage, log-probabilities and llama-server's timings."""

from __future__ import annotations

import abc
import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ggpipe.apis.bodies import GenerationBody
from ggpipe.apis.writer import ApiEvent, Output, Writer, WrittenOutput
from ggpipe.core.request import Finish, Token, TokenProb
from ggpipe.stats.records import RequestStats, rate
from ggpipe.text.chat.answer import WholeAnswer, whole_answer
from ggpipe.text.chat.tools.events import AnswerEvent

_LEAST = -9999.0
"""Written for minus infinity, which JSON lacks, as OpenAI does."""
_FINISH = {Finish.END_OF_TEXT: "stop", Finish.STOP_STRING: "stop", Finish.NO_TOKEN: "stop"}


def chat_logprobs(tokens: Sequence[Token], n_best: int | None = None) -> dict[str, Any] | None:
    """Log-probabilities of a message's tokens, each with the `n_best` best (None: all that are known). None if none
    were requested."""
    found = [prob_of(own) | {"top_logprobs": [prob_of(one) for one in best[:n_best]]} for own, best in probs_of(tokens)]
    return {"content": found} if found else None


def text_logprobs(tokens: Sequence[Token], n_best: int | None = None, n_before: int = 0) -> dict[str, Any] | None:
    """Log-probabilities of a completion's tokens. The token itself is always among the best. `n_before`: characters of
    the completion before these tokens."""
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
    """Each token's own log-probability, and those of the best tokens in its place."""
    return ((token.probs[0], token.probs[1:]) for token in tokens if token.probs)


def prob_of(one: TokenProb) -> dict[str, Any]:
    """A token with its log-probability."""
    return {"id": one.id, "token": _text(one), "bytes": list(one.text), "logprob": max(one.logprob, _LEAST)}


def _text(one: TokenProb) -> str:
    return one.text.decode("utf-8", "replace")


def finish_reason(stats: RequestStats, answer: WholeAnswer | None = None) -> str:
    """Why an output ended, in OpenAI's terms. A cancelled one counts as one that reached its maximum length."""
    reason = _FINISH.get(stats.finish, "length") if stats.finish is not None else "length"
    return "tool_calls" if reason == "stop" and answer is not None and answer.calls else reason


def usage(outputs: Sequence[WrittenOutput]) -> dict[str, Any]:
    """Tokens of all outputs together. A prompt with several outputs counts once."""
    prompts = {output.prompt: output.stats for output in reversed(outputs)}
    n_prompt = sum(stats.n_prompt for stats in prompts.values())
    n_generated = sum(output.stats.n_generated for output in outputs)
    n_cached = sum(stats.counters.cached_tokens for stats in prompts.values())
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


def timings(stats: RequestStats) -> dict[str, Any]:
    """llama-server's timings of an output."""
    counters = stats.counters
    n_cached = counters.cached_tokens
    found = _timings(n_cached, stats.n_prompt - n_cached, stats.ttft_s or 0.0, stats.n_generated, stats.decode_s)
    if counters.submitted_tokens:
        found |= {"draft_n": counters.submitted_tokens, "draft_n_accepted": counters.accepted_tokens}
    return found


def progress_timings(prompt_progress: Mapping[str, Any]) -> dict[str, Any]:
    """llama-server's timings of an output whose prompt is being processed, from its `prompt_progress`."""
    n_cached = prompt_progress["cache"]
    n_new = prompt_progress["processed"] - n_cached
    return _timings(n_cached, n_new, prompt_progress["time_ms"] / 1e3 if n_new else 0.0, 0, 0.0)


def _timings(n_cached: int, n_prompt: int, prompt_s: float, n_predicted: int, predicted_s: float) -> dict[str, Any]:
    return {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": 1e3 * prompt_s,
        "prompt_per_token_ms": 1e3 * prompt_s / max(n_prompt, 1),
        "prompt_per_second": rate(n_prompt, prompt_s),
        "predicted_n": n_predicted,
        "predicted_ms": 1e3 * predicted_s,
        "predicted_per_token_ms": 1e3 * predicted_s / max(n_predicted - 1, 1),
        "predicted_per_second": rate(n_predicted - 1, predicted_s),
    }


class ChoiceWriter(Writer):
    """A reply of OpenAI's API in which each output is a choice, with llama-server's further fields."""

    ends_with_done = True
    names_stop_string = False
    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    empty: ClassVar[dict[str, Any]]
    """Content of a chunk without text."""
    first: ClassVar[dict[str, Any] | None] = None
    """Content of the first chunk of each output; None: no such chunk."""

    def __init__(
        self, body: GenerationBody, model: str, splits: bool = False, identity: str = "", **further: Any
    ) -> None:
        """`identity`: id of the response; empty: a random one. `further`: fields of the response and of all chunks."""
        super().__init__(splits)
        identity = identity or self.prefix + secrets.token_hex(12)
        self._common = {"id": identity, "created": int(time.time()), "model": model, **further}
        self._body = body
        self.by_token = bool(body.return_origins)
        self.native: Writer | None = None
        """Writes the first output as llama-server's `/completion` does, for `__verbose`; None: without that."""
        self._answers: dict[int, WholeAnswer] = {}
        """Per output."""
        self._tokens: dict[int, list[Token]] = {}
        """Tokens of each output that no chunk had yet."""

    def begin(self, output: Output) -> Iterator[ApiEvent]:
        self._answers[output.index], self._tokens[output.index] = WholeAnswer(), []
        if self.first is not None:
            yield self._chunk([_choice(output.index, self.first)])

    def progress(self, output: Output, prompt_progress: dict[str, Any]) -> Iterator[ApiEvent]:
        further = {"timings": progress_timings(prompt_progress)} if self._body.timings_per_token else {}
        yield self._chunk([_choice(output.index, self.empty)], prompt_progress=prompt_progress, **further)

    def add(self, output: Output, parts: Sequence[AnswerEvent], tokens: Sequence[Token]) -> Iterator[ApiEvent]:
        index, new = output.index, self._tokens[output.index]
        new += tokens
        self._answers[index].add(parts)
        for one in parts:
            if (content := self._part(one)) is None:
                continue
            choice = {**_choice(index, content), "logprobs": self._logprobs(index, new)}
            if self.by_token and new:
                choice["origin"] = "drafted" if new[-1].drafted else "own"
                choice["drafters"] = new[-1].drafters
            yield self._chunk([choice], **{"timings": timings(output.stats)} if self._body.timings_per_token else {})
            new.clear()

    def end(self, output: Output, stop_string: str = "") -> Iterator[ApiEvent]:
        index = output.index
        last = _choice(index, self.empty, finish_reason(output.stats, self._answers[index]))
        last["logprobs"] = self._logprobs(index, self._tokens[index])
        yield self._chunk([last], timings=timings(output.stats), **self._verbose([output]))

    def finish(self, outputs: Sequence[Output]) -> Iterator[ApiEvent]:
        if self._body.includes_usage:
            yield self._chunk([], usage=usage(outputs), timings=timings(outputs[0].stats))

    def whole(self, outputs: Sequence[WrittenOutput], stop_strings: Sequence[str] = ()) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            answer = whole_answer(output.marks, output.key, output.tokens, output.rest, self.splits)
            choice = _choice(index, self._content(answer), finish_reason(output.stats, answer))
            choices.append({**choice, "logprobs": self._logprobs(index, output.tokens)})
        figures = {"usage": usage(outputs), "timings": timings(outputs[0].stats)}
        return {
            "choices": choices, **self._common, "object": self.whole_object, **figures, **self._verbose(outputs),
        }  # fmt: skip

    def _verbose(self, outputs: Sequence[Any]) -> dict[str, Any]:
        return {} if self.native is None else {"__verbose": self.native.whole(outputs[:1], ("",))}

    def _chunk(self, choices: list[dict[str, Any]], **further: Any) -> ApiEvent:
        return {"choices": choices, **self._common, "object": self.chunk_object, **further}

    @abc.abstractmethod
    def _part(self, one: AnswerEvent) -> Mapping[str, Any] | None:
        """A chunk's content for this part of an output; None: no chunk."""

    @abc.abstractmethod
    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Log-probabilities of an output's next tokens; None if none were requested."""

    @abc.abstractmethod
    def _content(self, answer: WholeAnswer) -> dict[str, Any]:
        """A choice's content for a whole output."""


def _choice(index: int, content: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
    """An output, or a part of it. `reason`: why it ended."""
    return {"index": index, **content, "finish_reason": reason}
