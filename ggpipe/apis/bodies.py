"""What bodies of requests have in common in OpenAI's API, Anthropic's and llama-server's, and the settings they become.

Unknown fields are ignored. A field that may be omitted may also be null.
"""

from __future__ import annotations

import abc
import itertools
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec

from ggpipe.config.checks import MAX_TOKENS
from ggpipe.config.samplers import samplers_by_letter, samplers_by_name
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prompt import Conversation, RequestPrompt, as_prompt
from ggpipe.core.request_spec import RequestSpec
from ggpipe.errors import BodyError, UsageError
from ggpipe.text.grammar.gbnf import check
from ggpipe.text.grammar.json_schema import grammar_of

MOST_STOPS = 64
_RANDOM_SEED = 2**32 - 1  # llama-server's number for a random one
_SAME = {
    name: kind
    for name, kind in get_type_hints(SamplingConfig).items()
    if kind in (bool, int, float, str) and name not in ("grammar", "reasoning_budget")
}
"""Fields of bodies that are fields of `SamplingConfig`, and their types."""
BODY_NAMES = {"temp": "temperature", "reasoning_budget": "reasoning_budget_tokens"}
"""What bodies call a setting, where it has another name than in the library's messages."""
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
MOST_CHOICES = 64
MOST_PROBS = 1000
_REASONING_FORMATS = ("auto", "none", "deepseek", "deepseek-legacy")


if TYPE_CHECKING:

    class _SameFields(msgspec.Struct, kw_only=True):
        """Those that are read by name; mypy knows no others."""

        top_p: float | None = None
        seed: int | None = None
        post_sampling_probs: bool | None = None

else:
    _SameFields = msgspec.defstruct(
        "_SameFields", [(name, kind | None, None) for name, kind in _SAME.items()], kw_only=True
    )


class SamplingBody(_SameFields, kw_only=True):
    """How tokens are drawn, and where the text ends: the fields of `SamplingConfig`, and those that bodies have in
    another form. None: as usual."""

    temperature: float | None = None
    """`temp`, as OpenAI calls it."""
    dry_sequence_breakers: list[str] | None = None
    samplers: list[str] | str | None = None
    """Names, or letters."""
    logit_bias: dict[str, float] | list[tuple[TokenId, float | bool]] | None = None
    """By token; false: never."""
    stop: str | list[str] | None = None
    reasoning_budget_tokens: int | None = None
    """Of conversations; -1: as the server says."""
    thinking_budget_tokens: int | None = None
    """The same by llama-server's older name."""

    def sampling(self, usual: SamplingConfig) -> SamplingConfig:
        """`usual`: for what the body does not say. Raises SettingError, BodyError."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        if self.temperature is not None:
            fields["temp"] = self.temperature
        for budget in (self.thinking_budget_tokens, self.reasoning_budget_tokens):
            if budget is not None and budget != -1:
                fields["reasoning_budget"] = budget
        if isinstance(self.samplers, str):
            fields["samplers"] = samplers_by_letter(self.samplers)
        elif self.samplers is not None:
            fields["samplers"] = samplers_by_name(self.samplers)
        if self.dry_sequence_breakers is not None:
            fields["dry_sequence_breakers"] = tuple(self.dry_sequence_breakers)
        if self.seed is not None:
            fields["seed"] = _seed(self.seed)
        if self.logit_bias is not None:
            fields["logit_bias"] = _biases(self.logit_bias)
        if self.stop is not None:
            fields["stop"] = _stops(self.stop)
        return replace(usual, **{name: value for name, value in fields.items() if value is not None})


def _seed(seed: int) -> int:
    """In 32 bits: OpenAI's have 64. One that has more stays, and is refused."""
    if seed in (-1, _RANDOM_SEED):
        return -1
    return min(seed % 2**32, _RANDOM_SEED - 1) if -(2**63) <= seed < 2**63 else seed


def _stops(stop: str | list[str]) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > MOST_STOPS:
        raise BodyError(f"`stop` must have at most {MOST_STOPS} texts, got {len(texts)}", "stop")
    return tuple(filter(None, texts))


def _biases(biases: dict[str, float] | list[tuple[int, float | bool]]) -> tuple[tuple[int, float], ...]:
    found: list[tuple[int, float]] = []
    for token, bias in biases.items() if isinstance(biases, dict) else biases:
        if isinstance(token, str) and not (token.isdecimal() and token.isascii() and len(token) < 10):
            raise BodyError(f"`logit_bias` must have numbers of tokens, got {token!r}", "logit_bias")
        found.append((int(token), float("-inf") if bias is False else float(bias)))
    return tuple(found)


@dataclass(frozen=True)
class Mixed:
    """A text to continue: texts and tokens."""

    parts: tuple[int | str, ...]


BodyPrompt = str | Sequence[int] | Mixed | Conversation
"""A text to continue, as such or as tokens, or a conversation to answer."""


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
    return_progress: bool | None = None
    """A stream says how far the prompt is computed."""
    timings_per_token: bool | None = None
    """A stream has figures with each part, not at its end alone."""
    sse_ping_interval: int | None = None
    """Seconds between pings in this stream; 0, -1: none. None: as the server was started."""
    n: int | None = None
    n_cmpl: int | None = None
    """llama-server's name for `n`."""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_predict: int | None = None
    cache_prompt: bool | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    logprobs: bool | int | None = None
    """A number for texts; for conversations it is true, and `top_logprobs` the number."""
    top_logprobs: int | None = None
    return_origins: bool | None = None
    """A stream has a part for each token, which says whether a drafter had named it."""
    reasoning_format: str | None = None
    """Of conversations: with none, what the model thinks is a part of its text. None: as the server was started."""
    id_slot: int | None = None
    """The slot of a text, where it is free; None, -1: any."""

    @property
    def n_choices(self) -> int:
        """Texts for each prompt."""
        return next((n for n in (self.n, self.n_cmpl) if n is not None), 1)

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
                    raise BodyError(f"`{name}` must be -1 (no bound) or a number of tokens, got {value}", name)
                return min(value, MAX_TOKENS)
        return usual

    @property
    @abc.abstractmethod
    def prompts(self) -> Sequence[BodyPrompt]:
        """Each is answered by itself. Raises BodyError."""

    def requests(
        self, usual: RequestSpec, sampling: SamplingConfig, completed: Callable[[Conversation], Conversation]
    ) -> list[RequestSpec]:
        """`n_choices` requests per prompt, in the order of the prompts. `usual`: for what the body does not say.
        `completed`: as `Chat.completed`. Raises BodyError, UsageError."""
        usual = msgspec.structs.replace(
            usual, n_predict=self.most_tokens(usual.n_predict), cache_prompt=self.cache_prompt is not False
        )
        prompts: list[RequestPrompt] = []
        for prompt in self.prompts:
            match prompt:
                case Conversation():
                    prompts.append(completed(prompt))
                case Mixed(parts):
                    prompts.append(as_prompt(parts))
                case _:
                    prompts.append(as_prompt(prompt))
        return [
            msgspec.structs.replace(usual, prompt=prompt, sampling=drawn)
            for prompt, drawn in itertools.product(prompts, draws(sampling, self.n_choices))
        ]

    def check(self) -> None:
        """Raises BodyError for what no request can have."""
        if not 1 <= self.n_choices <= MOST_CHOICES:
            raise BodyError(f"`n` must be a number from 1 to {MOST_CHOICES}, got {self.n_choices}", "n")
        if self.reasoning_format not in (None, *_REASONING_FORMATS):
            formats = " or ".join((", ".join(_REASONING_FORMATS[:-1]), _REASONING_FORMATS[-1]))
            raise BodyError(f"`reasoning_format` must be {formats}, got {self.reasoning_format}", "reasoning_format")
        self.schema()

    @property
    def schema_field(self) -> str:
        """What has the JSON schema."""
        return "json_schema" if self.response_format is None else "response_format"

    def schema(self) -> Any:
        """The JSON schema that the text is held to; None: there is none. Raises BodyError."""
        own, form = self.json_schema, self.response_format
        if form is None or form.type == "text":
            return own
        if form.type == "json_object":
            return form.schema if form.schema is not None else own if own is not None else {}
        if form.type == "json_schema":
            schema = (form.json_schema or {}).get("schema", form.schema)
            if isinstance(schema, dict):
                return schema
            raise BodyError("`response_format.json_schema.schema` must be an object", "response_format.json_schema")
        raise BodyError(
            f"`response_format.type` must be text, json_object or json_schema, got {form.type}", "response_format.type"
        )

    def sampling(self, usual: SamplingConfig) -> SamplingConfig:
        """As without a grammar; with the one that the text is held to."""
        drawn, schema, grammar = super().sampling(usual), self.schema(), self.grammar
        if grammar and schema is not None:
            raise BodyError("`grammar` and a JSON schema contradict each other: give one of them", "grammar")
        try:
            if schema is not None:
                grammar = grammar_of(json.dumps(schema))
            elif grammar:
                check(grammar)
        except UsageError as e:
            raise BodyError(str(e), "grammar" if schema is None else self.schema_field) from e
        return replace(
            drawn,
            n_probs=drawn.n_probs if (n_probs := self.most_probs()) is None else n_probs,
            grammar=drawn.grammar if grammar is None else grammar,
        )

    def most_probs(self) -> int | None:
        """Most probable tokens that come with each token; None: as `n_probs` says. Raises BodyError."""
        if self.logprobs is None or self.logprobs is False:
            if self.top_logprobs:
                raise BodyError("`top_logprobs` needs `logprobs`: set it to true", "top_logprobs")
            return None
        return max(self.number_of_probs("logprobs" if self.top_logprobs is None else "top_logprobs"), 1)

    @property
    def n_best_probs(self) -> int | None:
        """Of the most probable tokens, how many are answered; None: all of `n_probs`."""
        if self.logprobs is None or self.logprobs is False:
            return None
        if self.top_logprobs is not None:
            return self.top_logprobs
        return 0 if self.logprobs is True else self.logprobs

    def number_of_probs(self, name: str) -> int:
        """The value of `logprobs` or `top_logprobs`. Raises BodyError."""
        value = int(getattr(self, name))
        if not 0 <= value <= MOST_PROBS:
            raise BodyError(f"`{name}` must be a number from 0 to {MOST_PROBS}, got {value}", name)
        return value


def draws(sampling: SamplingConfig, n: int) -> list[SamplingConfig]:
    """For several texts of a prompt: each has a seed of its own."""
    if sampling.seed < 0:
        return [sampling] * n
    return [replace(sampling, seed=(sampling.seed + i) % (2**32 - 1)) for i in range(n)]


def text_of(content: Any, at: str, kinds: Collection[str], parts: str = "parts") -> str:
    """A text, or the texts of a list of parts, joined by newlines. `kinds`: types that parts may have; none: any.
    `parts`: what the API calls them. Raises BodyError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BodyError(f"`{at}` must be a text or a list of {parts}", at)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if not isinstance(text, str) or (kinds and kind not in kinds):
            raise BodyError(f"`{at}[{i}]` must be a text: the model reads nothing else", f"{at}[{i}]")
        texts.append(text)
    return "\n".join(texts)
