"""What the request bodies of all APIs have in common, and the settings that they become.

Unknown fields are ignored. Optional fields may be null.
"""

from __future__ import annotations

import abc
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_type_hints

import msgspec

from ggpipe.config.checks import MAX_TOKENS
from ggpipe.config.samplers import samplers_by_letter, samplers_by_name
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prompt import Conversation, as_prompt
from ggpipe.core.request_spec import RequestSpec
from ggpipe.errors import BodyError

MOST_STOPS = 64
MOST_BIASED_STRINGS = 256
_RANDOM_SEED = 2**32 - 1  # llama-server's value for a random seed
_SAME = {
    name: kind
    for name, kind in get_type_hints(SamplingConfig).items()
    if kind in (bool, int, float, str) and name not in ("grammar", "json_schema", "reasoning_budget")
}
"""Fields that bodies share with `SamplingConfig`, and their types."""
BODY_NAMES = {"temp": "temperature", "reasoning_budget": "reasoning_budget_tokens"}
"""Names that settings have in bodies, if they differ from the names in the library's messages."""
MOST_CHOICES = 64
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
ChoiceCount = Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)]
TokenLimit = Annotated[int, msgspec.Meta(ge=-1)]
"""-1: no limit."""
ProbCount = Annotated[int, msgspec.Meta(ge=0, le=1000)]


if TYPE_CHECKING:

    class _SameFields(msgspec.Struct, kw_only=True):
        """The fields that our code reads by name, for mypy."""

        top_p: float | None = None
        seed: int | None = None
        post_sampling_probs: bool | None = None

else:
    _SameFields = msgspec.defstruct(
        "_SameFields", [(name, kind | None, None) for name, kind in _SAME.items()], kw_only=True
    )


class SamplingBody(_SameFields, kw_only=True):
    """How tokens are sampled, and where the output ends: the fields of `SamplingConfig`, some of them in other forms.
    None: the server's default."""

    temperature: float | None = None
    """OpenAI's name for `temp`."""
    dry_sequence_breakers: list[str] | None = None
    samplers: list[str] | str | None = None
    """A list of names, or a string of letters."""
    logit_bias: dict[str, float | bool] | list[tuple[TokenId | str, float | bool]] | None = None
    """Bias per token; false: the token is never sampled. A string that is no token id stands for all of its tokens."""
    stop: str | list[str] | None = None
    reasoning_budget_tokens: int | None = None
    """Maximum reasoning tokens in conversations; -1: the server's default."""
    thinking_budget_tokens: int | None = None
    """llama-server's older name for `reasoning_budget_tokens`."""

    @property
    def biased_strings(self) -> list[str]:
        """The strings in `logit_bias` that are no token ids. Raises BodyError if they are too many."""
        given = self.logit_bias or ()
        found = [one for one in (given if isinstance(given, dict) else dict(given)) if not _is_token_id(one)]
        if len(found) > MOST_BIASED_STRINGS:
            raise BodyError(
                f"`logit_bias` must have at most {MOST_BIASED_STRINGS} strings, got {len(found)}", "logit_bias"
            )
        return cast("list[str]", found)

    def tokenize_biases(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Replace the strings in `logit_bias` by their tokens."""
        given = self.logit_bias or ()
        self.logit_bias = [
            (token, bias)
            for one, bias in (given.items() if isinstance(given, dict) else given)
            for token in (tokens[str(one)] if one in tokens else (one,))
        ]

    def sampling(self, usual: SamplingConfig) -> SamplingConfig:
        """The body's settings. `usual`: for settings that the body omits. Raises SettingError, BodyError."""
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
    """An OpenAI seed of 64 bits, reduced to 32. A larger number is returned as it is, and refused later."""
    if seed in (-1, _RANDOM_SEED):
        return -1
    return min(seed % 2**32, _RANDOM_SEED - 1) if -(2**63) <= seed < 2**63 else seed


def _stops(stop: str | list[str]) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > MOST_STOPS:
        raise BodyError(f"`stop` must have at most {MOST_STOPS} strings, got {len(texts)}", "stop")
    return tuple(filter(None, texts))


def _is_token_id(token: int | str) -> bool:
    return isinstance(token, int) or (token.isdecimal() and token.isascii() and len(token) < 10)


def _biases(biases: dict[str, float | bool] | list[tuple[int | str, float | bool]]) -> tuple[tuple[int, float], ...]:
    found: list[tuple[int, float]] = []
    for token, bias in biases.items() if isinstance(biases, dict) else biases:
        if not _is_token_id(token):
            raise BodyError(f"`logit_bias` must have token ids as keys, got {token!r}", "logit_bias")
        found.append((int(token), float("-inf") if bias is False else float(bias)))
    return tuple(found)


BodyPrompt = str | Sequence[int | str] | Conversation
"""A string to continue, a sequence of tokens and strings to continue, or a conversation to answer."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A format that the output must have. The schema is in `schema`, or in an object in `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None
    name: str | None = None
    """Only returned, as are the fields below."""
    description: str | None = None
    strict: bool | None = None


class GenerationBody(SamplingBody, kw_only=True):
    """The fields of all requests that generate text."""

    model: str | None = None
    """Ignored: the server has one model."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    """Stream how much of the prompt has been processed."""
    timings_per_token: bool | None = None
    """Add timings to every event of the stream, instead of only the last one."""
    verbose: bool | None = None
    """Add llama-server's own reply, with the prompt's text, to replies of OpenAI's API as `__verbose`."""
    sse_ping_interval: int | None = None
    """Seconds between pings in this stream; 0, -1: no pings. None: the server's default."""
    n: ChoiceCount | None = None
    n_cmpl: ChoiceCount | None = None
    """llama-server's name for `n`."""
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    n_predict: TokenLimit | None = None
    t_max_predict_ms: int | None = None
    """Milliseconds after the first token until the output ends with its next new line; None, 0 or less: no limit."""
    cache_prompt: bool | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    logprobs: bool | ProbCount | None = None
    """For completions, how many log-probabilities to return; for conversations true, with the number in
    `top_logprobs`."""
    top_logprobs: ProbCount | None = None
    return_origins: bool | None = None
    """Stream one event per token that says whether a drafter had proposed the token."""
    reasoning_format: Literal["auto", "none", "deepseek", "deepseek-legacy"] | None = None
    """For conversations; none: reasoning is a part of the content. None: the server's default."""
    id_slot: int | None = None
    """Slot to use if it is free; None, -1: any."""

    @property
    def n_choices(self) -> int:
        """Outputs per prompt."""
        return self.n or self.n_cmpl or 1

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def most_tokens(self, usual: int) -> int:
        """Tokens to generate at most; -1: no limit. `usual`: the value if the body has none."""
        for limit in (self.max_completion_tokens, self.max_tokens, self.n_predict):
            if limit is not None:
                return min(limit, MAX_TOKENS)
        return usual

    @property
    @abc.abstractmethod
    def prompts(self) -> Sequence[BodyPrompt]:
        """The prompts, each of which gets its own output. Raises BodyError."""

    def requests(
        self, usual: RequestSpec, sampling: SamplingConfig, completed: Callable[[Conversation], Conversation]
    ) -> list[RequestSpec]:
        """`n_choices` requests per prompt, in the order of the prompts. `usual`: for settings that the body omits.
        `completed`: `Chat.completed`. Raises BodyError, UsageError."""
        usual = msgspec.structs.replace(
            usual,
            n_predict=self.most_tokens(usual.n_predict),
            t_max_predict_ms=self.t_max_predict_ms or 0,
            cache_prompt=self.cache_prompt is not False,
        )
        prompts = [
            completed(prompt) if isinstance(prompt, Conversation) else as_prompt(prompt) for prompt in self.prompts
        ]
        return [
            msgspec.structs.replace(usual, prompt=prompt, sampling=drawn)
            for prompt, drawn in itertools.product(prompts, _with_seeds(sampling, self.n_choices))
        ]

    def _format(self) -> tuple[str, ResponseFormat | None]:
        """The name of the field that holds the output's format, and the format."""
        return "response_format", self.response_format

    @property
    def schema_field(self) -> str:
        """The field that a JSON schema comes in."""
        field, form = self._format()
        return field if form is not None else "json_schema"

    def sampling(self, usual: SamplingConfig) -> SamplingConfig:
        """The body's settings, with its grammar or JSON schema, which the engine checks."""
        drawn, grammar = super().sampling(usual), self.grammar
        field, form = self._format()
        schema = self.json_schema
        if form is not None and form.type != "text":
            schema = (form.json_schema or {}).get("schema", form.schema)
            if form.type == "json_object":
                schema = form.schema or self.json_schema or {}
            elif not isinstance(schema, dict):
                raise BodyError(f"`{field}` has no schema: give an object", field)
        if grammar and schema is not None:
            raise BodyError("`grammar` and a JSON schema cannot be combined: give one of them", "grammar")
        if grammar or schema is not None:
            drawn = replace(drawn, grammar=grammar or "", json_schema="" if schema is None else json.dumps(schema))
        return replace(drawn, n_probs=drawn.n_probs if (n_probs := self.most_probs()) is None else n_probs)

    def most_probs(self) -> int | None:
        """Most probable tokens to record for each token; None: as `n_probs` says. Raises BodyError."""
        if self.logprobs is None or self.logprobs is False:
            if self.top_logprobs:
                raise BodyError("`top_logprobs` needs `logprobs`: set it to true", "top_logprobs")
            return None
        return max(int(self.logprobs) if self.top_logprobs is None else self.top_logprobs, 1)

    @property
    def n_best_probs(self) -> int | None:
        """How many of the most probable tokens are returned for each token; None: all of `n_probs`."""
        if self.logprobs is None or self.logprobs is False:
            return None
        if self.top_logprobs is not None:
            return self.top_logprobs
        return 0 if self.logprobs is True else self.logprobs


def _with_seeds(sampling: SamplingConfig, n: int) -> list[SamplingConfig]:
    """Settings for several outputs of one prompt, each with its own seed."""
    if sampling.seed < 0:
        return [sampling] * n
    return [replace(sampling, seed=(sampling.seed + i) % (2**32 - 1)) for i in range(n)]


def text_of(content: Any, at: str, kinds: Collection[str], parts: str = "parts", separator: str = "\n") -> str:
    """A string, or the strings of a list of parts, joined by `separator`. `kinds`: allowed types of parts; empty: all.
    `parts`: the API's name for parts. Raises BodyError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BodyError(f"`{at}` must be a string or a list of {parts}", at)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if not isinstance(text, str) or (kinds and kind not in kinds):
            raise BodyError(f"`{at}[{i}]` must be text: the model reads nothing else", f"{at}[{i}]")
        texts.append(text)
    return separator.join(texts)
