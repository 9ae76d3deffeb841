"""llama-server's own endpoints: the bodies, and the objects of the reply to `/completion`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from ggpipe.apis.bodies import BodyPrompt, GenerationBody, TokenId
from ggpipe.apis.completions import PromptField, prompts_of
from ggpipe.apis.replies import WrittenOutput, prob_of, probs_of, timings
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.request import Finish, Token, TokenProb
from ggpipe.core.request_spec import RequestSpec

_MISSING = object()
_STOP_TYPES = {
    Finish.END_OF_TEXT: "eos", Finish.STOP_STRING: "word", Finish.NO_TOKEN: "eos", Finish.STOPPED: "none",
}  # fmt: skip
_NOT_SHOWN = ("temp", "logit_bias", "grammar", "stop")


class NativeBody(GenerationBody, kw_only=True):
    """`/completion`."""

    prompt: PromptField
    response_fields: list[str] | None = None
    """Those that the answer has; none: all."""

    @property
    def prompts(self) -> Sequence[BodyPrompt]:
        return prompts_of(self.prompt)


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`/tokenize`."""

    content: str
    add_special: bool = False
    with_pieces: bool = False


class SlotBody(msgspec.Struct, kw_only=True):
    """Of `/slots/{id_slot}`."""

    filename: str = ""


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`/detokenize`."""

    tokens: list[TokenId]


class Output(WrittenOutput, Protocol):
    """An output, or what has come of it."""

    @property
    def index(self) -> int:
        """Its number, in one request."""

    @property
    def spec(self) -> RequestSpec:
        """What the engine is asked for."""


class NativeObjects:
    """The objects of a reply to `/completion`."""

    def __init__(self, model: str, post_sampling_probs: bool, fields: Sequence[str] = ()) -> None:
        """`post_sampling_probs`: probabilities are those of the draw. `fields`: those of replies and of the last events
        of streams; none: all."""
        self._model = model
        self._post_sampling_probs = post_sampling_probs
        self._fields = fields

    def part(self, output: Output, slot: int, text: str, tokens: Sequence[Token], stop: bool = False) -> dict[str, Any]:
        """The next part of an output: its text and tokens. `slot`: the output's, -1: none. `stop`: it is the last."""
        found = {
            "index": output.index,
            "content": text,
            "tokens": [token.id for token in tokens],
            "stop": stop,
            "id_slot": slot,
            "tokens_predicted": output.stats.n_generated,
            "tokens_evaluated": output.stats.n_prompt,
        }
        post = self._post_sampling_probs
        best_name = "top_probs" if post else "top_logprobs"
        probs = [
            _native_prob(own, post) | {best_name: [_native_prob(one, post) for one in best]}
            for own, best in probs_of(tokens)
        ]
        return found | {"completion_probabilities": probs} if probs else found

    def last(self, output: Output, slot: int, text: str, tokens: Sequence[Token], stop_string: str) -> dict[str, Any]:
        """The last part, or a whole output, and how it ended. `stop_string`: the one that ended it, else empty."""
        stats = output.stats
        kind = _STOP_TYPES.get(stats.finish, "limit") if stats.finish is not None else "limit"
        ending = {
            "model": self._model,
            "stop_type": kind,
            "stopping_word": stop_string,
            "has_new_line": any("\n" in token.text for token in output.tokens),
            "truncated": stats.finish is Finish.CONTEXT_FULL,
            "generation_settings": _all_settings(output),
            "tokens_cached": stats.counters.cached_tokens,
            "timings": timings(stats),
        }
        return _chosen({**self.part(output, slot, text, tokens, stop=True), **ending}, self._fields)


def settings(sampling: SamplingConfig, n_predict: int) -> dict[str, Any]:
    """How a text is drawn, without what may say something of the text."""
    shown = {name: value for name, value in vars(sampling).items() if name not in _NOT_SHOWN}
    return {**shown, "temperature": sampling.temp, "n_predict": n_predict, "max_tokens": n_predict}


def _all_settings(output: Output) -> dict[str, Any]:
    """All settings of a text, also those that say something of it: its own client gets them."""
    drawn = output.spec.sampling
    return {
        **settings(drawn, output.spec.n_predict),
        "seed": output.stats.seed,
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
