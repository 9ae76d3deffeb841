"""Bodies of requests for texts: what OpenAI's API and llama-server's have in them, and how it becomes settings.

Fields that are not known are ignored. A field may be null where it may be left out.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ggpipe.apis.sampling import SamplingBody, TokenId
from ggpipe.config.checks import MAX_TOKENS
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prompt import Conversation
from ggpipe.errors import BodyError, UsageError
from ggpipe.text.chat.tools.choice import tool_choice
from ggpipe.text.grammar.gbnf import check
from ggpipe.text.grammar.json_schema import grammar_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MOST_CHOICES = 64
MOST_PROBS = 1000
_REASONING_FORMATS = ("auto", "none", "deepseek", "deepseek-legacy")


@dataclass(frozen=True)
class Mixed:
    """A text to continue: texts and tokens."""

    parts: tuple[int | str, ...]


BodyPrompt = str | Sequence[int] | Mixed | Conversation
"""A text to continue, as such or as tokens, or a conversation to answer."""


class PromptObject(msgspec.Struct, kw_only=True):
    """llama-server's form of a prompt that may have more than text."""

    prompt_string: str
    multimodal_data: list[str] | None = None


PromptField = str | PromptObject | list[TokenId | str | list[TokenId | str] | PromptObject]
"""One prompt, or several where a list has no token in itself."""


def prompts_of(given: PromptField) -> Sequence[BodyPrompt]:
    """The prompts of a body. Raises BodyError."""
    if not isinstance(given, list):
        return [_prompt(given, "prompt")]
    if not given or any(isinstance(part, int) for part in given):
        parts = [part for part in given if isinstance(part, int | str)]
        if len(parts) == len(given):
            return [_prompt(parts, "prompt")]
    elif len(given) <= MOST_CHOICES:
        return [_prompt(one, f"prompt[{i}]") for i, one in enumerate(given) if not isinstance(one, int)]
    raise BodyError(
        f"`prompt` must be a text, a list of tokens and texts, or at most {MOST_CHOICES} of these", "prompt"
    )  # fmt: skip


def _prompt(one: str | PromptObject | list[int | str], at: str) -> BodyPrompt:
    match one:
        case PromptObject(prompt_string=text, multimodal_data=data):
            if data:
                raise BodyError(f"`{at}.multimodal_data` is not supported: the model reads nothing but text", at)
            return text
        case list() as parts:
            tokens = [part for part in parts if isinstance(part, int)]
            return tokens if len(tokens) == len(parts) else Mixed(tuple(parts))
    return one


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


class CompletionBody(GenerationBody, kw_only=True):
    """`/v1/completions`."""

    prompt: PromptField
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> Sequence[BodyPrompt]:
        return prompts_of(self.prompt)

    def check(self) -> None:
        """Raises BodyError for what no request can have, and for what is not done here."""
        super().check()
        for name, wanted in (
            ("echo", self.echo), ("suffix", self.suffix), ("best_of", self.best_of not in (None, self.n_choices)),
        ):  # fmt: skip
            if wanted:
                raise BodyError(f"`{name}` is not supported: leave it out", name)


class ChatBody(GenerationBody, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    """Older clients' form of `tools`; answered as these are."""
    function_call: Any = None
    """Older clients' form of `tool_choice`."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """How much the model is to think. Templates that do not know it ignore it."""

    @property
    def prompts(self) -> Sequence[Conversation]:
        if not self.messages:
            raise BodyError("`messages` is empty: give a message or more", "messages")
        messages = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(self.messages))
        further = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort == "none":
            further.setdefault("enable_thinking", False)
        elif self.reasoning_effort:
            further.setdefault("reasoning_effort", self.reasoning_effort)
        functions = [{"type": "function", "function": function} for function in self.functions or ()]
        wanted = self.tool_choice if self.function_call is None else self.function_call
        if isinstance(wanted, dict) and "name" in wanted:
            wanted = {"type": "function", "function": wanted}
        tools, choice = tool_choice(self.tools or functions, wanted, self.parallel_tool_calls)
        return [Conversation(messages=messages, tools=tools, choice=choice, further=further)]


def _message(message: dict[str, Any], at: str) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise BodyError(f"`{at}.role` must be a text, as user or system", f"{at}.role")
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise BodyError(f"`{at}.content` must be a text or a list of parts", f"{at}.content")
    if content is None and role != "assistant":
        raise BodyError(f"`{at}.content` is missing", f"{at}.content")
    return {**message, "role": "system" if role == "developer" else role, "content": content or ""}


def _part(part: Any, at: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") in ("text", "input_text") else None
    if not isinstance(text, str):
        raise BodyError(f"`{at}` must be a text: the model reads nothing else", at)
    return text
