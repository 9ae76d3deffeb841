"""The engine of a Python program: see `Engine`."""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, Unpack

from ggpipe.api.answer import Answer
from ggpipe.api.arguments import ROWS, check_request, named, options_of
from ggpipe.api.batch import Batch
from ggpipe.api.engine_thread import EngineThread, Prompt
from ggpipe.api.feed import Feed
from ggpipe.api.keywords import EngineOptions, RequestOptions
from ggpipe.api.panel import Panel
from ggpipe.config import SpeculationConfig
from ggpipe.display.live.notebook import in_notebook
from ggpipe.errors import GgpipeError, LaunchError, UsageError
from ggpipe.launch import environment
from ggpipe.metrics.stats import RankStats
from ggpipe.options import settings
from ggpipe.options.chat import Chat
from ggpipe.options.engine_config import engine_config, speculation_config, warnings_of
from ggpipe.options.grammar import Constraint
from ggpipe.options.sampling import SamplingOf, sampling_config
from ggpipe.sampling import SamplingConfig

_NOT_FOR_RANKS = (SamplingConfig, Constraint, settings.Prompt)


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
            raise named(e) from None
        self.warnings: list[str] = warnings_of(given)
        """Settings that are not used as they were given."""
        self._n_at_a_time = 2 * config.n_requests
        of_ranks = {name: value for name, value in self._keywords.items() if ROWS[name].record not in _NOT_FOR_RANKS}
        self._thread = EngineThread(config, options_of(of_ranks))
        thread = self._thread
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
        await asyncio.to_thread(self.close)  # which waits for the ranks

    # Requests

    def generate(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Answer:
        """Continue a text, or tokens. The request begins at once; see `Answer` for what comes of it.

        Raises SettingError for options that cannot be. A bad prompt is the answer's error.
        """
        _check_prompt(prompt)
        return self._submit(prompt, prompt, options)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Answer a conversation, whose messages and tools are as in OpenAI's API.

        `chat_template`: in the Jinja language, or "chatml", instead of the model's own. `chat_template_kwargs`: further
        names for it. Raises as `generate`; what the template refuses is the answer's error.
        """
        try:
            chat = Chat(single_turn=True, template=chat_template, template_kwargs=dict(chat_template_kwargs or {}))
            conversation = chat.of_messages(messages, tools)
        except GgpipeError as e:
            raise named(e) from None
        return self._submit(messages, conversation, options)

    def batch(self, prompts: Iterable[str | Sequence[int]], **options: Unpack[RequestOptions]) -> Batch:
        """Continue many texts, several at a time: `for answer in engine.batch(prompts)` yields whole answers, in the
        order of the prompts. One whose prompt is bad has an `error`.

        A loop that is left early cancels the others. Raises as `generate`.
        """
        texts, request, thread = list(prompts), self._request(options), self._thread
        for text in texts:
            _check_prompt(text)
        panel = self._panel

        def submit(text: str | Sequence[int], feed: Feed) -> None:
            thread.submit(feed, text, *request)
            if panel is not None:
                panel.request(feed)

        return Batch(texts, self._n_at_a_time, submit, thread.cancel)

    def _submit(self, prompt: object, text: Prompt, options: RequestOptions) -> Answer:
        request, feed, thread = self._request(options), Feed(), self._thread
        thread.submit(feed, text, *request)
        if self._panel is not None:
            self._panel.request(feed)
        return Answer(feed, lambda: thread.cancel(feed), prompt)

    def _request(self, options: RequestOptions) -> tuple[SamplingOf, int, SpeculationConfig]:
        try:
            check_request(options)
            given = options_of({**self._keywords, **options})
            prompt = replace(given[settings.Prompt], escape=False)
            sampling = functools.partial(sampling_config, given.having(prompt))
            sampling(SamplingConfig())
            return sampling, prompt.n_predict, speculation_config(given)
        except GgpipeError as e:
            raise named(e) from None


def _check_prompt(prompt: object) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, Sequence) or not all(isinstance(token, int) for token in prompt):
        raise UsageError(f"a prompt must be a text or a sequence of tokens, got {prompt!r}")
