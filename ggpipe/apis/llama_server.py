"""llama-server's own endpoints: the bodies, and the reply to `/completion`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ggpipe.apis.bodies import BodyPrompt, GenerationBody, TokenId
from ggpipe.apis.completions import PromptField, prompts_of
from ggpipe.apis.replies import prob_of, probs_of, progress_timings, timings
from ggpipe.apis.writer import ApiEvent, Output, Writer
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.request import Finish, Token, TokenProb
from ggpipe.text.chat.tools.events import AnswerEvent

_MISSING = object()
_STOP_TYPES = {
    Finish.END_OF_TEXT: "eos", Finish.STOP_STRING: "word", Finish.NO_TOKEN: "eos", Finish.STOPPED: "none",
}  # fmt: skip
_NOT_SHOWN = ("temp", "logit_bias", "grammar", "stop")


class NativeBody(GenerationBody, kw_only=True):
    """Body of `/completion`."""

    prompt: PromptField
    response_fields: list[str] | None = None
    """Fields of the reply; empty: all."""

    @property
    def prompts(self) -> Sequence[BodyPrompt]:
        return prompts_of(self.prompt)


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of `/tokenize`."""

    content: str
    add_special: bool = False
    with_pieces: bool = False


class SlotBody(msgspec.Struct, kw_only=True):
    """Body of `/slots/{id_slot}`."""

    filename: str = ""


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of `/detokenize`."""

    tokens: list[TokenId]


class NativeWriter(Writer):
    """The reply to `/completion`."""

    def __init__(
        self,
        body: GenerationBody,
        model: str,
        slot_of: Callable[[str], int],
        fields: Sequence[str] = (),
        end_tokens: Sequence[int] = (),
    ) -> None:
        """`slot_of`: the slot of the output with this key; -1: none. `fields`: fields of the last part or whole reply;
        empty: all. `end_tokens`: of the model, see `ModelInfo`."""
        super().__init__(splits=False)
        self.prompts: Mapping[int, str] = {}
        """The text of each of the request's prompts."""
        self._body = body
        self._fields = fields
        self._model = model
        self._slot_of = slot_of
        self._end_tokens = end_tokens

    @property
    def shows_prompts(self) -> bool:
        """Whether `prompts` will be written."""
        return not self._fields or "prompt" in self._fields

    def progress(self, output: Output, prompt_progress: dict[str, Any]) -> Iterator[ApiEvent]:
        further = {"timings": progress_timings(prompt_progress)} if self._body.timings_per_token else {}
        yield {**self._part(output, "", []), "prompt_progress": prompt_progress, **further}

    def add(self, output: Output, parts: Sequence[AnswerEvent], tokens: Sequence[Token]) -> Iterator[ApiEvent]:
        for token in tokens:  # also those without text
            part = self._part(output, token.text, [token])
            yield {**part, "timings": timings(output.stats)} if self._body.timings_per_token else part

    def end(self, output: Output, stop_string: str = "") -> Iterator[ApiEvent]:
        yield self._last(output, output.rest, [], stop_string)

    def whole(self, outputs: Sequence[Output], stop_strings: Sequence[str]) -> dict[str, Any] | list[dict[str, Any]]:
        found = [
            self._last(output, "".join(token.text for token in output.tokens) + output.rest, output.tokens, stop_string)
            for output, stop_string in zip(outputs, stop_strings, strict=True)
        ]
        return found if len(found) > 1 else found[0]

    def _part(self, output: Output, text: str, tokens: Sequence[Token], stop: bool = False) -> dict[str, Any]:
        """The next part of an output. `stop`: it is the last."""
        found = {
            "index": output.index,
            "content": text,
            "tokens": [token.id for token in tokens],
            "stop": stop,
            "id_slot": self._slot_of(output.key),
            "tokens_predicted": output.stats.n_generated,
            "tokens_evaluated": output.stats.n_prompt,
        }
        post = bool(self._body.post_sampling_probs)
        best_name = "top_probs" if post else "top_logprobs"
        probs = [
            _native_prob(own, post) | {best_name: [_native_prob(one, post) for one in best]}
            for own, best in probs_of(tokens)
        ]
        return found | {"completion_probabilities": probs} if probs else found

    def _last(self, output: Output, text: str, tokens: Sequence[Token], stop_string: str) -> dict[str, Any]:
        """The last part, or a whole output, and how it ended."""
        stats = output.stats
        ending = {
            "model": self._model,
            "prompt": self.prompts.get(output.prompt, ""),
            "stop_type": _STOP_TYPES.get(stats.finish, "limit") if stats.finish is not None else "limit",
            "stopping_word": stop_string,
            "has_new_line": any("\n" in token.text for token in output.tokens),
            "truncated": stats.finish is Finish.CONTEXT_FULL,
            "generation_settings": _all_settings(output, self._end_tokens),
            "tokens_cached": stats.counters.cached_tokens,
            "timings": timings(stats),
        }
        return _chosen({**self._part(output, text, tokens, stop=True), **ending}, self._fields)


def settings(sampling: SamplingConfig, n_predict: int) -> dict[str, Any]:
    """Settings that may be shown to every client, since they reveal nothing about the prompt or the output."""
    shown = {name: value for name, value in vars(sampling).items() if name not in _NOT_SHOWN}
    return {**shown, "temperature": sampling.temp, "n_predict": n_predict, "max_tokens": n_predict}


def _all_settings(output: Output, end_tokens: Sequence[int]) -> dict[str, Any]:
    """All settings of an output, for the client that requested it. As in llama-server, `ignore_eos` is a bias against
    `end_tokens`, and the bias of a token that is ruled out is null."""
    drawn = output.spec.sampling
    ruled_out = {token: -math.inf for token in end_tokens} if drawn.ignore_eos else {}
    return {
        **settings(drawn, output.spec.n_predict),
        "seed": output.stats.seed,
        "stop": drawn.stop,
        "logit_bias": [
            {"token": token, "bias": bias if math.isfinite(bias) else None}
            for token, bias in ({**dict(drawn.logit_bias), **ruled_out}).items()
        ],
        "grammar": drawn.grammar,
        "lora": [],
    }


def _chosen(answer: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The fields of an answer with these paths, such as `timings/prompt_n`. Empty: all fields."""
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
