"""Requests and responses of OpenAI's API: /v1/completions and /v1/chat/completions, as far as ggpipe has them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ggpipe.chat.conversation import Conversation
from ggpipe.chat.reasoning import ReasoningFormat, ReasoningParser
from ggpipe.core.request import Finish, Token, TokenProb
from ggpipe.errors import UsageError
from ggpipe.grammar import gbnf
from ggpipe.grammar.json_schema import grammar_of
from ggpipe.metrics.stats import RequestStats
from ggpipe.sampling import SamplingConfig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_IGNORED = frozenset(
    {"metadata", "model", "parallel_tool_calls", "service_tier", "store", "stream", "stream_options", "user"}
)
"""Fields that change nothing here."""
_ONLY = {"n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "tool_choice": ("auto", "none")}
"""Fields that may have these values only."""
_LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A prompt, and what it changes in the settings of all."""

    prompt: str | tuple[int, ...] | Conversation
    n_predict: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingConfig."""

    def drawn(self, sampling: SamplingConfig) -> SamplingConfig:
        """The settings of this one. Raises SettingError."""
        return replace(sampling, **self.sampling)

    @property
    def key(self) -> str:
        """Those of prompts that begin alike begin alike."""
        match self.prompt:
            case str() as text:
                return text
            case Conversation(messages=messages, tools=tools):
                return json.dumps([tools, messages])
            case tokens:
                return " ".join(map(str, tokens))


def ask_of(method: object, url: object, body: object) -> Ask:
    """What a request asks for. Raises UsageError that names the field."""
    if method != "POST":
        raise UsageError(f"method must be POST, got {method!r}")
    if url not in (COMPLETIONS, CHAT):
        raise UsageError(f"url must be {COMPLETIONS} or {CHAT}, got {url!r}")
    if not isinstance(body, dict):
        raise UsageError("body must be an object")
    given = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
    prompt = _conversation(given) if url == CHAT else _prompt(given)
    for name, values in _ONLY.items():
        if name in given and given.pop(name) not in values:
            raise UsageError(f"body.{name} must be {' or '.join(map(json.dumps, values))} here")
    sampling: dict[str, Any] = {}
    if (n_probs := _n_probs(given)) is not None:
        sampling["n_probs"] = n_probs
    if (grammar := _grammar(given)) is not None:
        sampling["grammar"] = grammar
    n_predict = None
    for name in _LENGTHS:
        if name in given:
            n_predict = _number(name, given.pop(name), int)
            if n_predict < -1:
                raise UsageError(f"body.{name} must be a number of tokens, got {n_predict}")
    sampling |= dict(_sampled(name, given[name]) for name in given)
    ask = Ask(prompt=prompt, n_predict=n_predict, sampling=sampling)
    ask.drawn(SamplingConfig())
    return ask


def _prompt(given: dict[str, Any]) -> str | tuple[int, ...]:
    prompt = given.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and token >= 0 for token in prompt):
        return tuple(prompt)
    raise UsageError("body.prompt must be a text or a list of tokens")


def _conversation(given: dict[str, Any]) -> Conversation:
    messages, tools = given.pop("messages", None), given.pop("tools", [])
    further = given.pop("chat_template_kwargs", {})
    for name, value in (("messages", messages), ("tools", tools)):
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise UsageError(f"body.{name} must be a list of objects")
    if not messages:
        raise UsageError("body.messages must have a message")
    if not isinstance(further, dict):
        raise UsageError("body.chat_template_kwargs must be an object")
    return Conversation(messages=tuple(messages), tools=tuple(tools), further=further)


def _n_probs(given: dict[str, Any]) -> int | None:
    """`logprobs` is a number for texts; for conversations it is true, and `top_logprobs` the number."""
    wanted, n_best = given.pop("logprobs", None), given.pop("top_logprobs", None)
    if wanted is None or wanted is False:
        if n_best:
            raise UsageError("body.top_logprobs needs body.logprobs: set it to true")
        return None
    n_probs: int = _number("logprobs", 1 if wanted is True else wanted, int)
    return max(_number("top_logprobs", n_best, int), 1) if n_best is not None else n_probs


def _grammar(given: dict[str, Any]) -> str | None:
    """What the text is held to, as a grammar."""
    found, schemas = given.pop("grammar", None), []
    if "json_schema" in given:
        schemas.append(given.pop("json_schema"))
    match given.pop("response_format", None):
        case None | {"type": "text"}:
            pass
        case {"type": "json_object"}:
            schemas.append({})
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            schemas.append(schema)
        case _:
            raise UsageError("body.response_format must have the type text, json_object or json_schema")
    if len(schemas) + (found is not None) > 1:
        raise UsageError("body must have one of grammar, json_schema and response_format")
    if schemas:
        return grammar_of(json.dumps(schemas[0]))
    if found is not None and not isinstance(found, str):
        raise UsageError("body.grammar must be a text")
    if found:
        gbnf.check(found)
    return found


_FIELDS = {
    name: hint
    for name, hint in typing.get_type_hints(SamplingConfig).items()
    if hint in (int, float, bool) and name in {field.name for field in dataclasses.fields(SamplingConfig)}
}


def _sampled(name: str, value: Any) -> tuple[str, Any]:
    """A field of SamplingConfig."""
    if name == "temperature":
        return "temp", _number(name, value, float)
    if name == "stop":
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UsageError("body.stop must be a text or a list of texts")
        return "stop", tuple(text for text in texts if text)
    if name == "logit_bias":
        try:
            return "logit_bias", tuple((int(token), float(bias)) for token, bias in value.items())
        except (AttributeError, TypeError, ValueError):
            raise UsageError("body.logit_bias must be an object of tokens and biases") from None
    if name not in _FIELDS:
        raise UsageError(f"body.{name} is not known here")
    if _FIELDS[name] is bool:
        if not isinstance(value, bool):
            raise UsageError(f"body.{name} must be true or false, got {json.dumps(value)}")
        return name, value
    return name, _number(name, value, _FIELDS[name])


def _number(name: str, value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and value != int(value)):
        raise UsageError(f"body.{name} must be a {'whole ' * (kind is int)}number, got {json.dumps(value)}")
    return kind(value)


# Responses


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A request that was served."""

    stats: RequestStats
    prompt: Sequence[int]
    tokens: Sequence[Token]
    rest: str
    """Text of a character whose last bytes never came."""
    marks: ReasoningFormat | None
    """How reasoning is marked in the answer to a conversation; None: it is a text."""


def body_of(identity: str, model: str, answered: Answered) -> dict[str, Any]:
    """A response, with latencies as llama.cpp's server has them (`timings`)."""
    stats = answered.stats
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": _finish_reason(stats.finish)}
    has_probs = any(token.probs for token in answered.tokens)
    if answered.marks is None:
        kind, choice["text"] = "text_completion", "".join(t.text for t in answered.tokens) + answered.rest
        choice["logprobs"] = _text_logprobs(answered.tokens) if has_probs else None
    else:
        kind, choice["message"] = "chat.completion", _message(answered, answered.marks)
        choice["logprobs"] = {"content": [_logprob(token) for token in answered.tokens]} if has_probs else None
    return {
        "id": identity,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": stats.n_prompt,
            "completion_tokens": stats.n_generated,
            "total_tokens": stats.n_prompt + stats.n_generated,
            "prompt_tokens_details": {"cached_tokens": stats.counters.cached_tokens},
        },
        "timings": _timings(stats),
    }


def _message(answered: Answered, marks: ReasoningFormat) -> dict[str, Any]:
    parser = ReasoningParser(marks)
    pieces = [piece for token in answered.tokens for piece in parser.feed(marks.text_of(token.id, token.text))]
    pieces += [*parser.feed(answered.rest), *parser.finish()]
    content, reasoning = ("".join(p.text for p in pieces if p.is_reasoning is wanted) for wanted in (False, True))
    message = {"role": "assistant", "content": content}
    return {**message, "reasoning_content": reasoning} if reasoning else message


def _text_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    lengths = [len(token.text) for token in tokens]
    return {
        "tokens": [_shown(token.probs[0]) for token in tokens],
        "token_logprobs": [token.probs[0].logprob for token in tokens],
        "top_logprobs": [{_shown(prob): prob.logprob for prob in token.probs[1:]} for token in tokens],
        "text_offset": list(itertools.accumulate(lengths[:-1], initial=0)),
    }


def _logprob(token: Token) -> dict[str, Any]:
    own, *best = ({"token": _shown(p), "logprob": p.logprob, "bytes": list(p.text)} for p in token.probs)
    return {**own, "top_logprobs": best}


def _shown(prob: TokenProb) -> str:
    return prob.text.decode("utf-8", "replace")


def _finish_reason(finish: Finish | None) -> str:
    return "length" if finish in (Finish.LENGTH, Finish.CONTEXT_FULL) else "stop"


def _timings(stats: RequestStats) -> dict[str, float | int | None]:
    prefill_s, decode_s = stats.ttft_s or 0.0, stats.decode_s
    return {
        "prompt_ms": round(prefill_s * 1000, 3),
        "prompt_per_second": stats.prefill_tps,
        "predicted_ms": round(decode_s * 1000, 3),
        "predicted_per_second": stats.decode_tps,
        "draft_n": stats.counters.submitted_tokens,
        "draft_n_accepted": stats.counters.accepted_tokens,
    }
