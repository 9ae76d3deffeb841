"""Bodies of requests for texts: what OpenAI's API and llama-server's have in them, and how it becomes settings.

Fields that are not known are ignored. A field may be null where it may be left out.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ggpipe.chat.conversation import Conversation
from ggpipe.chat.tools.choice import tool_choice
from ggpipe.checks import MAX_TOKENS
from ggpipe.errors import BodyError, UsageError
from ggpipe.grammar.gbnf import check
from ggpipe.grammar.json_schema import grammar_of
from ggpipe.openai.sampling import SamplingBody, TokenId
from ggpipe.sampling import SamplingConfig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MOST_CHOICES = 64
MOST_PROBS = 1000
Prompt = str | Sequence[int] | Conversation
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
    def prompts(self) -> Sequence[Prompt]:
        """Each is answered by itself. Raises BodyError."""

    def check(self) -> None:
        """Raises BodyError for what no request can have."""
        if not 1 <= self.n_choices <= MOST_CHOICES:
            raise BodyError(f"`n` must be a number from 1 to {MOST_CHOICES}, got {self.n_choices}", "n")
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
        n_probs = self.number_of_probs("logprobs" if self.top_logprobs is None else "top_logprobs")
        return max(n_probs, 1) if self.logprobs is True else n_probs

    def number_of_probs(self, name: str) -> int:
        """The value of `logprobs` or `top_logprobs`. Raises BodyError."""
        value = int(getattr(self, name))
        if not 0 <= value <= MOST_PROBS:
            raise BodyError(f"`{name}` must be a number from 0 to {MOST_PROBS}, got {value}", name)
        return value


class CompletionBody(GenerationBody, kw_only=True):
    """`/v1/completions`."""

    prompt: str | list[TokenId | str | list[TokenId]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> Sequence[Prompt]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [one for one in self.prompt if isinstance(one, int)]
        texts = [one for one in self.prompt if not isinstance(one, int)]
        if (tokens and texts) or len(texts) > MOST_CHOICES:
            most = f"at most {MOST_CHOICES} of these"
            raise BodyError(f"`prompt` must be a text, a list of tokens, or {most}", "prompt")
        return [*texts] if texts else [tokens]

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
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_format: str | None = None
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
        tools, choice = tool_choice(self.tools or (), self.tool_choice, self.parallel_tool_calls)
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
