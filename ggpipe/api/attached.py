"""The engine of a running `ggpipe serve`: see `attach`."""

from __future__ import annotations

import base64
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import msgspec
import numpy as np

from ggpipe.api.any_engine import AnyEngine, Submit
from ggpipe.api.arguments import REQUEST_ROWS, check_request, named, options_of
from ggpipe.api.feed import Feed
from ggpipe.api.http_client import Address, Call
from ggpipe.api.keywords import RequestOptions
from ggpipe.chat.conversation import ChatPrompt
from ggpipe.config import Pooling, SpeculationConfig
from ggpipe.core.request import Finish, Token, TokenProb
from ggpipe.embeddings import Vector
from ggpipe.errors import GgpipeError, RunError, SettingError
from ggpipe.metrics.stats import RequestStats
from ggpipe.openai.embeddings import MOST_TEXTS
from ggpipe.openai.sampling import BODY_NAMES
from ggpipe.options.grammar import Constraint
from ggpipe.options.sampling import sampling_config
from ggpipe.options.settings import Prompt
from ggpipe.prompt import Conversation
from ggpipe.sampling import SamplingConfig


def attach(address: str, api_key: str | None = None) -> AttachedEngine:
    """The engine of the `ggpipe serve` at an address like `http://127.0.0.1:8080`.

    It asks the server for its model, so it takes as long as an answer does. Raises UsageError for a bad address,
    a wrong key, and where another server is, RunError where none is or where its model is still being loaded.
    """
    return AttachedEngine(Address(address, api_key))


class AttachedEngine(AnyEngine):
    """An engine that a server has, which goes on when this program ends.

    with ggpipe.attach("http://127.0.0.1:8080") as engine:
        for token in engine.generate("Once upon a time", n_predict=100):
            print(token.text, end="", flush=True)

    What is not given is as the server was started. Times of `Answer.stats` are those at which this program sent and
    received, and its lists of ranks and runs are empty.
    """

    def __init__(self, address: Address) -> None:
        """See `attach`."""
        props = Call(address).ask("GET", "/props", _Props)
        self.model = props.model_alias
        """What the server calls its model."""
        self.n_ctx = props.default_generation_settings.n_ctx
        """KV cells, for all requests together."""
        self.n_requests = props.total_slots
        """Requests that are served at a time."""
        self._requests = _Requests(address)
        super().__init__(self._requests.cancel, self.n_requests)

    def load(self) -> Self:
        """It is loaded."""
        return self

    def close(self) -> None:
        """End all requests of this program. The server goes on."""
        self._requests.close()

    def _submit(self, options: RequestOptions) -> Submit:
        try:
            body = _body(options)
        except GgpipeError as e:
            raise named(e) from None
        requests = self._requests

        def submit(prompt: str | Sequence[int] | Conversation, feed: Feed) -> None:
            if isinstance(prompt, Conversation) and prompt.template is not None:
                why = "is a setting of the server, for all requests: give it to `ggpipe serve`"
                raise SettingError(f"`chat_template` {why}")
            requests.begin(prompt, body, feed)

        return submit

    def _embed(self, texts: Sequence[str | Sequence[int]], pooling: Pooling | None, normalize: int) -> list[Vector]:
        if pooling is not None:
            raise SettingError("`pooling` is a setting of the server, for all requests: give it to `ggpipe serve`")
        found: list[Vector] = []
        for at in range(0, len(texts), MOST_TEXTS):
            body = {"input": texts[at : at + MOST_TEXTS], "encoding_format": "base64", "embd_normalize": normalize}
            answer = Call(self._requests.address).ask("POST", "/v1/embeddings", _Embeddings, body)
            found += [np.frombuffer(base64.b64decode(one.embedding), "<f4") for one in answer.data]
        return found


def _body(options: RequestOptions) -> dict[str, Any]:
    """Options as a request's body has them; those that are not given are not in it. Raises SettingError, UsageError."""
    check_request(options)
    rows = {name: REQUEST_ROWS[name] for name, value in options.items() if value is not None}
    for name, row in rows.items():
        if row.record is SpeculationConfig:
            raise SettingError(f"`{name}` is a setting of the server, for all requests: give it to `ggpipe serve`")
    given = options_of(options)
    prompt = replace(given[Prompt], escape=False)
    config = sampling_config(given.having(prompt))
    fields = {row.field for row in rows.values() if row.record is SamplingConfig}
    body = {BODY_NAMES.get(field, field): getattr(config, field) for field in fields}
    if "logit_bias" in body:
        body["logit_bias"] = [(token, bias if bias > -math.inf else False) for token, bias in config.logit_bias]
    if any(row.record is Constraint for row in rows.values()):
        body["grammar"] = config.grammar
    if "n_predict" in rows:
        body["n_predict"] = prompt.n_predict
    return body


class _Requests:
    """Those that have not ended, each with a thread that reads its answer."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._calls: dict[Feed, Call] = {}
        self._is_closed = False

    def begin(self, prompt: str | Sequence[int] | Conversation, body: Mapping[str, Any], feed: Feed) -> None:
        """Have a prompt continued; what comes of it goes to the feed."""
        call = Call(self.address)
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._calls[feed] = call
        if is_closed:
            feed.end(error=_closed())
            return
        thread = threading.Thread(target=self._run, args=(call, prompt, body, feed), name="ggpipe answer", daemon=True)
        thread.start()

    def cancel(self, feed: Feed) -> None:
        """End a request soon."""
        with self._lock:
            call = self._calls.get(feed)
        if call is not None:
            call.abort()

    def close(self) -> None:
        """End all."""
        with self._lock:
            self._is_closed = True
            calls = list(self._calls.values())
        for call in calls:
            call.abort()

    def _run(self, call: Call, prompt: str | Sequence[int] | Conversation, body: Mapping[str, Any], feed: Feed) -> None:
        rest, error = "", None
        feed.stats.arrived = time.monotonic()
        try:
            rest = self._read(call, _with_prompt(body, call, prompt, feed), feed)
        except GgpipeError as e:
            error = e
        except Exception as e:
            error = RunError(f"the request broke: {e!r}")
        feed.stats.ended = time.monotonic()
        if error is not None and call.is_aborted:
            feed.stats.finish = Finish.STOPPED
            error = _closed() if self._is_closed else None
        with self._lock:
            del self._calls[feed]
        feed.end(rest, error)
        if not self._is_closed:
            feed.on_end()

    def _read(self, call: Call, body: Mapping[str, Any], feed: Feed) -> str:
        """Text behind the last token. Raises UsageError, RunError."""
        stats = feed.stats
        for event in call.events("/completion", _Event, {**body, "stream": True}):
            stats.n_prompt = event.tokens_evaluated
            if event.stop:
                event.ends(stats)
                return event.content
            for token in event.tokens:
                probs = [found for one in event.completion_probabilities for found in one.with_best()]
                stats.token_times.append(time.monotonic())
                feed.add(Token(id=token, text=event.content, probs=tuple(probs)))
        raise RunError(f"the connection to {self.address} was lost: it ended in the middle of the text")


def _with_prompt(
    body: Mapping[str, Any], call: Call, prompt: str | Sequence[int] | Conversation, feed: Feed
) -> dict[str, Any]:
    """What `/completion` takes."""
    if isinstance(prompt, str):
        return {**body, "prompt": prompt}
    if not isinstance(prompt, Conversation):
        return {**body, "prompt": list(prompt)}
    names = {
        "messages": prompt.messages, "tools": prompt.tools, "chat_template_kwargs": prompt.further,
        "tool_choice": prompt.choice.to_openai(), "parallel_tool_calls": prompt.choice.parallel,
    }  # fmt: skip
    chat = call.ask("POST", "/apply-template", ChatPrompt, names)
    feed.marks = chat.answer
    found = {**body, "prompt": chat.tokens}
    grammar = chat.grammar_beside(body.get("grammar", ""))
    return {**found, "grammar": grammar} if grammar else found


def _closed() -> RunError:
    return RunError("the engine is closed")


# What the server sends, as far as it is used


class _Settings(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    model_alias: str
    total_slots: int
    default_generation_settings: _Settings


class _Embedding(msgspec.Struct):
    embedding: str


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]


class _Prob(msgspec.Struct):
    id: int
    bytes: list[int]
    logprob: float | None = None
    prob: float | None = None
    """In place of `logprob`, with `post_sampling_probs`."""
    top_logprobs: list[_Prob] = []
    top_probs: list[_Prob] = []

    def with_best(self) -> list[TokenProb]:
        """The token's own, then those of the most probable tokens."""
        return [one.found() for one in (self, *self.top_logprobs, *self.top_probs)]

    def found(self) -> TokenProb:
        """This one."""
        logprob = self.logprob
        if logprob is None:
            logprob = math.log(self.prob) if self.prob else -math.inf
        return TokenProb(id=self.id, text=bytes(self.bytes), logprob=logprob)


class _Timings(msgspec.Struct):
    cache_n: int
    draft_n: int = 0
    draft_n_accepted: int = 0


class _Drawn(msgspec.Struct):
    seed: int


class _Event(msgspec.Struct):
    """A token, or the end of the text."""

    content: str
    tokens: list[int]
    stop: bool
    tokens_evaluated: int
    completion_probabilities: list[_Prob] = []
    stop_type: str = "none"
    truncated: bool = False
    timings: _Timings | None = None
    generation_settings: _Drawn | None = None

    def ends(self, stats: RequestStats) -> None:
        """Fills in what the last event says."""
        ends = {"eos": Finish.END_OF_TEXT, "word": Finish.STOP_STRING, "limit": Finish.LENGTH}
        stats.finish = Finish.CONTEXT_FULL if self.truncated else ends.get(self.stop_type, Finish.STOPPED)
        if self.timings is not None:
            stats.counters.cached_tokens = self.timings.cache_n
            stats.counters.submitted_tokens = self.timings.draft_n
            stats.counters.accepted_tokens = self.timings.draft_n_accepted
        if self.generation_settings is not None:
            stats.seed = self.generation_settings.seed
