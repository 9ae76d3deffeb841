"""The engine of a Python program: see `Engine`."""

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
    """A model over one or several ranks, which are started here and serve requests until the engine is closed.

    with ggpipe.Engine("model.gguf", draft="draft.gguf", layer_split="0.5,0.5/1.0") as engine:
        for token in engine.generate("Once upon a time", n_predict=100):
            print(token.text, end="", flush=True)

    `async with` and `async for` do the same on an event loop. All methods may be called from several threads at a time.
    Messages go to the logger `ggpipe`. The ranks are processes of their own: they end when the engine is closed or
    dropped, and with this process in any case. This process gets no signal handlers.
    """

    def __init__(self, model: str | os.PathLike[str], *, live: bool = True, **options: Unpack[EngineOptions]) -> None:
        """Begin to start the ranks and to load; `with` waits until that is done, `load` too.

        `live`: a notebook shows how far loading is, and how busy the ranks are while they write.
        Options are those of `ggpipe generate`, see `EngineOptions`; those of requests are the defaults of all requests.
        Raises SettingError or UsageError for options that cannot be; LaunchError under mpirun or srun.
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
        """Settings that are not used as they were given."""
        of_ranks = RankSetup(config=config, verbose=given[settings.LogSettings].verbose)
        self._thread = thread = EngineThread(of_ranks, given[settings.RankSettings])
        self._n_at_a_time = 2 * config.n_requests
        """Requests that a batch has submitted at a time."""
        self._panel = Panel(lambda: thread.ranks) if live and in_notebook() else None
        if self._panel is not None:
            self._panel.loading(thread.loaded)
        self._finalizer = weakref.finalize(self, self._thread.close)

    # The ranks

    @property
    def ranks(self) -> Sequence[RankStats]:
        """All ranks in order: what each holds and did; nothing before the first has loaded."""
        return self._thread.ranks

    def load(self) -> Self:
        """Wait until everything is loaded. Raises what that failed with."""
        try:
            self._thread.loaded.wait(None)
        except BaseException:  # Ctrl-C
            self.close()
            raise
        return self._loaded()

    async def load_async(self) -> Self:
        """As `load`, for an event loop."""
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
        """End all requests and all ranks, and wait until they have left. A second call does nothing."""
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
        await asyncio.to_thread(self.close)  # which may wait

    # Requests

    def generate(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Answer:
        """Continue a text, or tokens. The request begins at once; see `Answer` for what comes of it.

        Raises SettingError for options that cannot be. A bad prompt is the answer's error.
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
        """Answer a conversation, whose messages, tools and `tool_choice` are as in OpenAI's API.

        `chat_template`: in the Jinja language, or "chatml", instead of the model's own. `chat_template_kwargs`: further
        names for it. Raises as `generate`; what the template refuses is the answer's error.
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
        """Continue many texts, several at a time: `for answer in engine.batch(prompts)` yields whole answers, in the
        order of the prompts. One whose prompt is bad has an `error`.

        A loop that is left early cancels the others. Raises as `generate`.
        """
        texts, submit = _checked(prompts), self._submit(options)
        return Batch(texts, self._n_at_a_time, submit, self._cancel)

    def embed(
        self, texts: Iterable[str | Sequence[int]], *, pooling: Pooling | None = None, normalize: int = 2
    ) -> list[Vector]:
        """The embedding of each text, several at a time: float32 arrays of the model's width, with the pooling `none`
        one row a token.

        `pooling`: how they are made of the hidden states of a text's tokens; None: as the model's file says.
        `normalize`: 2 gives them the length 1, -1 leaves them, others are as of `ggpipe serve --embd-normalize`.

        Raises SettingError where the model's file does not say how, UsageError for a bad text.
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
        """As `embed`, for an event loop. It goes on where the task is cancelled."""
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
        """How a prompt becomes a request, with the sampling settings that the model's file recommends."""
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
    """A list of them. Raises UsageError."""
    if isinstance(prompts, str):  # each of its letters would be a prompt
        raise UsageError(f"prompts must be a list of texts, got one text: write [{prompts[:40]!r}]")
    found = list(prompts)
    for prompt in found:
        _check_prompt(prompt)
    return found


def _check_prompt(prompt: object) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, Sequence) or not all(isinstance(token, int) for token in prompt):
        raise UsageError(f"a prompt must be a text or a sequence of tokens, got {prompt!r}")
