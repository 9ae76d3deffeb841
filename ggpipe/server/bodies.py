"""Bodies of requests: what OpenAI's API and llama-server's have in them, and how it becomes settings.

Fields that are not known are ignored. A field may be null where it may be left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec

from ggpipe.checks import MAX_TOKENS
from ggpipe.errors import UsageError
from ggpipe.grammar.gbnf import check
from ggpipe.grammar.json_schema import grammar_of
from ggpipe.sampling import SamplingConfig, samplers_by_letter, samplers_by_name
from ggpipe.server.errors import ApiError

MOST_CHOICES, MOST_STOPS, MOST_PROBS = 64, 64, 20
_MOST_NESTING = 64
_AS_THEY_ARE = (
    "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p", "xtc_probability",
    "xtc_threshold", "repeat_last_n", "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier",
    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta",
    "adaptive_target", "adaptive_decay", "min_keep", "seed", "ignore_eos",
)  # fmt: skip
"""Fields of bodies that are fields of `SamplingConfig`."""


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class SamplingBody(msgspec.Struct, kw_only=True):
    """How tokens are drawn, and where the text ends. None: as the server was started."""

    temperature: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    adaptive_target: float | None = None
    adaptive_decay: float | None = None
    min_keep: int | None = None
    samplers: list[str] | str | None = None
    """Names, or letters."""
    seed: int | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | list[tuple[TokenId, float | bool]] | None = None
    """By token; false: never."""
    stop: str | list[str] | None = None

    def sampling(self, usual: SamplingConfig) -> SamplingConfig:
        """With what the server was started with where the body says nothing. Raises SettingError, ApiError."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _AS_THEY_ARE}
        fields["temp"] = self.temperature
        if isinstance(self.samplers, str):
            fields["samplers"] = samplers_by_letter(self.samplers)
        elif self.samplers is not None:
            fields["samplers"] = samplers_by_name(self.samplers)
        if self.dry_sequence_breakers is not None:
            fields["dry_sequence_breakers"] = tuple(self.dry_sequence_breakers)
        if self.logit_bias is not None:
            fields["logit_bias"] = _biases(self.logit_bias)
        if self.stop is not None:
            fields["stop"] = _stops(self.stop)
        return replace(usual, **{name: value for name, value in fields.items() if value is not None})


class StreamOptions(msgspec.Struct, kw_only=True):
    """Of a stream."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """What the text must be."""

    type: str
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None


class GenerationBody(SamplingBody, kw_only=True):
    """What all requests for a text have."""

    model: str | None = None
    """Any name: there is one model."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_predict: int | None = None
    cache_prompt: bool | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    @property
    def n_choices(self) -> int:
        """Texts for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        """A stream ends with the number of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def most_tokens(self, usual: int) -> int:
        """Tokens to generate at most; -1: no bound."""
        for name in ("max_completion_tokens", "max_tokens", "n_predict"):
            value: int | None = getattr(self, name)
            if value is not None:
                if value < -1:
                    raise ApiError(400, f"`{name}` must be -1 (no bound) or a number of tokens, got {value}", name)
                return min(value, MAX_TOKENS)
        return usual

    def check(self) -> None:
        """Raises ApiError for what no request can have."""
        if not 1 <= self.n_choices <= MOST_CHOICES:
            raise ApiError(400, f"`n` must be a number from 1 to {MOST_CHOICES}, got {self.n}", "n")
        self.schema()

    def schema(self) -> Any:
        """The JSON schema that the text is held to; None: there is none. Raises ApiError."""
        own, form = self.json_schema, self.response_format
        if form is None or form.type == "text":
            return own
        if form.type == "json_object":
            return form.schema if form.schema is not None else own if own is not None else {}
        if form.type == "json_schema":
            schema = (form.json_schema or {}).get("schema", form.schema)
            if isinstance(schema, dict):
                return schema
            raise ApiError(400, "`response_format.json_schema.schema` must be an object", "response_format.json_schema")
        raise ApiError(
            400, f"`response_format.type` must be text, json_object or json_schema, got {form.type}",
            "response_format.type",
        )  # fmt: skip

    def sampling(self, usual: SamplingConfig) -> SamplingConfig:
        """As without a grammar; with the one that the text is held to."""
        drawn, schema, grammar = super().sampling(usual), self.schema(), self.grammar
        if grammar and schema is not None:
            raise ApiError(400, "`grammar` and a JSON schema contradict each other: give one of them", "grammar")
        try:
            if schema is not None:
                grammar = grammar_of(json.dumps(schema))
            elif grammar:
                check(grammar)
        except UsageError as e:
            param = (
                "grammar" if schema is None else "json_schema" if self.response_format is None else "response_format"
            )
            raise ApiError(400, str(e), param) from e
        return replace(drawn, n_probs=self.most_probs, grammar=drawn.grammar if grammar is None else grammar)

    @property
    def most_probs(self) -> int:
        """Most probable tokens that come with each token, as `SamplingConfig.n_probs`."""
        return 0


class CompletionBody(GenerationBody, kw_only=True):
    """`/v1/completions`."""

    prompt: str | list[TokenId | str | list[TokenId]]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def most_probs(self) -> int:
        return _probs("logprobs", self.logprobs or 0)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each is answered by itself. Raises ApiError."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [one for one in self.prompt if isinstance(one, int)]
        texts = [one for one in self.prompt if not isinstance(one, int)]
        if (tokens and texts) or len(texts) > MOST_CHOICES:
            most = f"at most {MOST_CHOICES} of these"
            raise ApiError(400, f"`prompt` must be a text, a list of tokens, or {most}", "prompt")
        return [*texts] if texts else [tokens]


class ChatBody(GenerationBody, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_format: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def most_probs(self) -> int:
        if not self.logprobs:
            return 0
        return max(_probs("top_logprobs", self.top_logprobs or 0), 1)

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as templates take them: contents are texts. Raises ApiError."""
        if not self.messages:
            raise ApiError(400, "`messages` is empty: give a message or more", "messages")
        return [_message(message, f"messages[{i}]") for i, message in enumerate(self.messages)]


class NativeBody(GenerationBody, kw_only=True):
    """`/completion`."""

    prompt: str | list[TokenId]
    n_probs: int | None = None
    post_sampling_probs: bool | None = None

    @property
    def most_probs(self) -> int:
        return self.n_probs or 0

    def sampling(self, usual: SamplingConfig) -> SamplingConfig:
        return replace(super().sampling(usual), post_sampling_probs=bool(self.post_sampling_probs))


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`/tokenize`."""

    content: str
    add_special: bool = False
    with_pieces: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`/detokenize`."""

    tokens: list[TokenId]


B = TypeVar("B", bound=msgspec.Struct)


def decode(kind: type[B], data: bytes) -> B:
    """A body. Raises ApiError that names the field which is wrong."""
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as e:
        what, _, path = str(e).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
        if missing is not None:
            param = f"{param}.{missing[1]}" if param else missing[1]
            raise ApiError(400, f"`{param}` is missing", param) from None
        raise ApiError(400, f"`{param}`: {_lower(what)}" if param else _lower(what), param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as e:
        raise ApiError(400, f"the body is no JSON that can be read: {_lower(str(e))}") from None
    for name in ("messages", "tools", "chat_template_kwargs", "json_schema"):
        if _is_deep(getattr(body, name, None)):
            raise ApiError(400, f"`{name}` is nested more than {_MOST_NESTING} times", name)
    form = getattr(body, "response_format", None)
    if form is not None and _is_deep([form.json_schema, form.schema]):
        raise ApiError(400, f"`response_format` is nested more than {_MOST_NESTING} times", "response_format")
    return body


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MOST_NESTING):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, Mapping) else one)
        ]
        if not level:
            return False
    return True


def _message(message: dict[str, Any], at: str) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ApiError(400, f"`{at}.role` must be a text, as user or system", f"{at}.role")
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise ApiError(400, f"`{at}.content` must be a text or a list of parts", f"{at}.content")
    if content is None and role != "assistant":
        raise ApiError(400, f"`{at}.content` is missing", f"{at}.content")
    return {**message, "role": "system" if role == "developer" else role, "content": content or ""}


def _probs(name: str, value: int) -> int:
    if not 0 <= value <= MOST_PROBS:
        raise ApiError(400, f"`{name}` must be a number from 0 to {MOST_PROBS}, got {value}", name)
    return value


def _part(part: Any, at: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") in ("text", "input_text") else None
    if not isinstance(text, str):
        raise ApiError(400, f"`{at}` must be a text: the model reads nothing else", at)
    return text


def _stops(stop: str | list[str]) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > MOST_STOPS:
        raise ApiError(400, f"`stop` must have at most {MOST_STOPS} texts, got {len(texts)}", "stop")
    return tuple(filter(None, texts))


def _biases(biases: dict[str, float] | list[tuple[int, float | bool]]) -> tuple[tuple[int, float], ...]:
    found: list[tuple[int, float]] = []
    for token, bias in biases.items() if isinstance(biases, dict) else biases:
        if isinstance(token, str) and not (token.isdecimal() and token.isascii() and len(token) < 10):
            raise ApiError(400, f"`logit_bias` must have numbers of tokens, got {token!r}", "logit_bias")
        found.append((int(token), float("-inf") if bias is False else float(bias)))
    return tuple(found)
