"""The engine of a Python program: see `Engine`."""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self, Unpack

import numpy as np

from ggpipe.api.any_engine import AnyEngine, Submit
from ggpipe.api.arguments import ROWS, check_request, named, options_of
from ggpipe.api.batch import Batch, Prompt
from ggpipe.api.engine_thread import EngineThread
from ggpipe.api.feed import Feed
from ggpipe.api.keywords import EngineOptions, RequestOptions
from ggpipe.api.panel import Panel
from ggpipe.checks import check_range
from ggpipe.config import MOST_NORM, Pooling
from ggpipe.display.live.notebook import in_notebook
from ggpipe.embeddings import Vector, chosen, normalized
from ggpipe.errors import GgpipeError, LaunchError
from ggpipe.launch import environment
from ggpipe.metrics.stats import RankStats
from ggpipe.options import settings
from ggpipe.options.engine_config import engine_config, speculation_config, warnings_of
from ggpipe.options.grammar import Constraint
from ggpipe.options.sampling import sampling_config
from ggpipe.prompt import Conversation, as_prompt
from ggpipe.prompt import Prompt as ReadablePrompt
from ggpipe.request import RequestSpec
from ggpipe.sampling import SamplingConfig

_NOT_FOR_RANKS = (SamplingConfig, Constraint, settings.Prompt)


class Engine(AnyEngine):
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
        of_ranks = {name: value for name, value in self._keywords.items() if ROWS[name].record not in _NOT_FOR_RANKS}
        self._thread = thread = EngineThread(config, options_of(of_ranks))
        super().__init__(thread.cancel, 2 * config.n_requests)
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

    # Requests

    def _submit(self, options: RequestOptions) -> Submit:
        request, thread, panel = self._request(options), self._thread, self._panel

        def submit(text: Prompt | Conversation, feed: Feed) -> None:
            prompt = as_prompt(text)
            thread.submit(feed, lambda usual: request(usual, prompt))
            if panel is not None:
                panel.request(feed)

        return submit

    def _embed(self, texts: Sequence[str | Sequence[int]], pooling: Pooling | None, normalize: int) -> list[Vector]:
        check_range("normalize", normalize, -1, MOST_NORM)
        own = chosen(pooling, self._thread.ask(lambda engine: engine.model.pooling).result())
        thread = self._thread

        def submit(text: Prompt, feed: Feed) -> None:
            spec = RequestSpec(prompt=as_prompt(text), pooling=own)
            thread.submit(feed, lambda _: spec)

        batch = Batch(texts, self._n_at_a_time, submit, self._cancel)
        found = [np.array([np.frombuffer(row, np.float32) for row in one.wait().embedding]) for one in batch]
        return found if own == "none" else [normalized(rows[0], normalize) for rows in found]

    def _request(self, options: RequestOptions) -> Callable[[SamplingConfig, ReadablePrompt], RequestSpec]:
        """How a prompt becomes a request, with the sampling settings that the model's file recommends."""
        try:
            check_request(options)
            given = options_of({**self._keywords, **options})
            prompt = replace(given[settings.Prompt], escape=False)
            sampling = functools.partial(sampling_config, given.having(prompt))
            sampling(SamplingConfig())
            speculation = speculation_config(given)
        except GgpipeError as e:
            raise named(e) from None
        return lambda usual, own: RequestSpec(
            prompt=own, sampling=sampling(usual), n_predict=prompt.n_predict, speculation=speculation
        )
