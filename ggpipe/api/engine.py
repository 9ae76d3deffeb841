"""`ggpipe.Engine`."""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np

from ggpipe.api.answer import Answer
from ggpipe.api.arguments import NAMES, check_request, options_of
from ggpipe.api.batch import Batch, TextOrTokens
from ggpipe.api.engine_thread import EngineThread
from ggpipe.api.feed import Feed
from ggpipe.api.keywords import EngineOptions, RequestOptions
from ggpipe.api.panel import Panel
from ggpipe.config.checks import check_range
from ggpipe.config.embeddings import MOST_NORM, Pooling
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prompt import Conversation, RequestPrompt, as_prompt
from ggpipe.core.request_spec import RequestSpec
from ggpipe.display.live.notebook import in_notebook
from ggpipe.errors import GgpipeError, LaunchError, UsageError
from ggpipe.launch import environment
from ggpipe.launch.rank_setup import RankSetup
from ggpipe.options import settings
from ggpipe.options.chat import ChatSettings
from ggpipe.options.engine_config import engine_config, speculation_config, warnings_of
from ggpipe.options.sampling import sampling_config
from ggpipe.stats.records import RankStats
from ggpipe.text.embeddings import Vector, chosen, normalized


class Engine:
    """A model on one or several ranks, which this class starts. They serve requests until the engine is closed.

    with ggpipe.Engine("model.gguf", draft="draft.gguf", layer_split="0.5,0.5/1.0") as engine:
        for token in engine.generate("Once upon a time", n_predict=100):
            print(token.text, end="", flush=True)

    `async with` and `async for` do the same on an event loop. All methods may be called from several threads at once.
    Messages go to the logger `ggpipe`. The ranks are separate processes. They end when the engine is closed or dropped,
    and in any case with this process. No signal handlers are installed.
    """

    def __init__(self, model: str | os.PathLike[str], *, live: bool = True, **options: Unpack[EngineOptions]) -> None:
        """Start the ranks and begin to load. `with` and `load` wait until loading is complete.

        `live`: in a notebook, show the progress of loading, and how busy the ranks are during requests.
        Options are those of `ggpipe generate`, see `EngineOptions`. Options of requests become defaults for all
        requests. Raises SettingError or UsageError for invalid options, LaunchError under mpirun or srun.
        """
        if environment.is_rank():
            raise LaunchError("this program was started by mpirun or srun, but ggpipe.Engine starts its ranks itself")
        self._keywords: dict[str, Any] = {"model": model, **options}
        try:
            given = options_of(self._keywords)
            config = engine_config(given)
            self._request(RequestOptions())
        except GgpipeError as e:
            raise e.renamed(NAMES) from None
        self.warnings: list[str] = [str(warning.renamed(NAMES)) for warning in warnings_of(given)]
        """Notes about settings that have no effect."""
        of_ranks = RankSetup(config=config, verbose=given[settings.LogSettings].verbose)
        self._thread = thread = EngineThread(of_ranks, given[settings.RankSettings])
        self._n_at_a_time = 2 * config.n_requests
        """How many requests of a batch are submitted at a time."""
        self._panel = Panel(lambda: thread.ranks) if live and in_notebook() else None
        if self._panel is not None:
            self._panel.loading(thread.loaded)
        self._finalizer = weakref.finalize(self, self._thread.close)

    # The ranks

    @property
    def ranks(self) -> Sequence[RankStats]:
        """All ranks in order, with what each holds and has done; empty before the first has loaded."""
        return self._thread.ranks

    def load(self) -> Self:
        """Wait until everything is loaded. Raises the error if loading failed."""
        try:
            self._thread.loaded.wait(None)
        except BaseException:  # Ctrl-C
            self.close()
            raise
        return self._loaded()

    async def load_async(self) -> Self:
        """Same as `load`, for an event loop."""
        try:
            await self._thread.loaded.wait_async(None)
        except BaseException:  # the task is cancelled
            await asyncio.to_thread(self.close)
            raise
        return self._loaded()

    def _loaded(self) -> Self:
        if (error := self._thread.loaded.error) is not None:
            self.close()
            raise error
        return self

    def close(self) -> None:
        """End all requests and ranks, and wait for them. A second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self.load()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await self.load_async()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)  # it may block

    # Requests

    def generate(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Answer:
        """Continue a string, or tokens. The request begins at once.

        Raises SettingError for invalid options. A bad prompt becomes the answer's error.
        """
        _check_prompt(prompt)
        return self._answer(prompt, prompt, options)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Answer a conversation. `messages`, `tools` and `tool_choice` are as in OpenAI's API.

        `chat_template`: a Jinja template, or "chatml", instead of the model's own. `chat_template_kwargs`: further
        variables of the template. Raises the same errors as `generate`. A conversation that the template refuses
        becomes the answer's error.
        """
        try:
            chat = ChatSettings(
                single_turn=True, template=chat_template, template_kwargs=dict(chat_template_kwargs or {})
            )
            conversation = chat.of_messages(messages, tools, tool_choice, parallel_tool_calls)
        except GgpipeError as e:
            raise e.renamed(NAMES) from None
        return self._answer(messages, conversation, options)

    def batch(self, prompts: Iterable[str | Sequence[int]], **options: Unpack[RequestOptions]) -> Batch:
        """Continue many prompts, several at a time. `for answer in engine.batch(prompts)` yields complete answers in
        the order of the prompts. An answer to a bad prompt has an `error`.

        Leaving the loop early cancels the rest. Raises the same errors as `generate`.
        """
        texts, submit = _checked(prompts), self._submit(options)
        return Batch(texts, self._n_at_a_time, submit, self._cancel)

    def embed(
        self, texts: Iterable[str | Sequence[int]], *, pooling: Pooling | None = None, normalize: int = 2
    ) -> list[Vector]:
        """The embedding of each prompt: float32 arrays of shape (n_embd,), or (n_tokens, n_embd) without pooling.

        `pooling`: how hidden states are combined; None: the model's own pooling. `normalize`: 2: to length 1, -1: not
        at all; see `ggpipe serve --embd-normalize` for others.

        Raises SettingError if the model has no pooling for embeddings, UsageError for a bad prompt.
        """
        prompts = _checked(texts)
        check_range("normalize", normalize, -1, MOST_NORM)
        own = chosen(pooling, self._thread.ask(lambda engine: engine.model.pooling).result())
        thread = self._thread

        def submit(text: TextOrTokens, feed: Feed) -> None:
            spec = RequestSpec(prompt=as_prompt(text), pooling=own)
            thread.submit(feed, lambda _: spec)

        micro_batch = Batch(prompts, self._n_at_a_time, submit, self._cancel)
        found = [np.array([np.frombuffer(row, np.float32) for row in one.wait().embedding]) for one in micro_batch]
        return found if own == "none" else [normalized(rows[0], normalize) for rows in found]

    async def embed_async(
        self, texts: Iterable[str | Sequence[int]], *, pooling: Pooling | None = None, normalize: int = 2
    ) -> list[Vector]:
        """Same as `embed`, for an event loop. Cancelling the task does not stop it."""
        return await asyncio.to_thread(self.embed, texts, pooling=pooling, normalize=normalize)

    def _answer(self, prompt: object, text: TextOrTokens | Conversation, options: RequestOptions) -> Answer:
        feed = Feed()
        self._submit(options)(text, feed)
        return Answer(feed, lambda: self._cancel(feed), prompt)

    def _cancel(self, feed: Feed) -> None:
        self._thread.cancel(feed)

    def _submit(self, options: RequestOptions) -> Callable[[TextOrTokens | Conversation, Feed], None]:
        request, thread, panel = self._request(options), self._thread, self._panel

        def submit(text: TextOrTokens | Conversation, feed: Feed) -> None:
            prompt = as_prompt(text)
            thread.submit(feed, lambda usual: request(usual, prompt))
            if panel is not None:
                panel.request(feed)

        return submit

    def _request(self, options: RequestOptions) -> Callable[[SamplingConfig, RequestPrompt], RequestSpec]:
        """A function that makes a request of a prompt and the sampling settings that the model recommends."""
        try:
            check_request(options)
            given = options_of({**self._keywords, **options})
            prompt = replace(given[settings.PromptSettings], escape=False)
            sampling = functools.partial(sampling_config, given.having(prompt))
            sampling(SamplingConfig())
            speculation = speculation_config(given)
        except GgpipeError as e:
            raise e.renamed(NAMES) from None
        return lambda usual, own: RequestSpec(
            prompt=own, sampling=sampling(usual), n_predict=prompt.n_predict, speculation=speculation
        )


def _checked(prompts: Iterable[TextOrTokens]) -> list[TextOrTokens]:
    """The prompts as a list. Raises UsageError."""
    if isinstance(prompts, str):  # each of its characters would be a prompt
        raise UsageError(f"prompts must be a list of strings, got one string: write [{prompts[:40]!r}]")
    found = list(prompts)
    for prompt in found:
        _check_prompt(prompt)
    return found


def _check_prompt(prompt: object) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, Sequence) or not all(isinstance(token, int) for token in prompt):
        raise UsageError(f"a prompt must be a string or a sequence of tokens, got {prompt!r}")
