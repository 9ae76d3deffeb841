"""Pauses of a stage's long run, in which short runs are decoded in a second context of its model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ggpipe.config.context import ContextConfig
from ggpipe.core.overtaking import CONTINUES, MOST_ROWS
from ggpipe.llama.layers import Loras
from ggpipe.llama.libllama import lib, native
from ggpipe.llama.params import LlamaBatch, context_params


class Pauses:
    """The second context has the KV cells of the first one: see `native/pauses.cpp`. Its own are never touched, so they
    take no memory. All methods but `want` belong to the thread that decodes."""

    def __init__(self, native_stage: native.Stage, context: int, own_memory: int, batch: LlamaBatch) -> None:
        """See `open_pauses`."""
        self._native = native_stage
        self._native.continues = CONTINUES
        self._own_memory = own_memory
        self.context = context
        self.batch = batch
        self.spent_s = 0.0
        """In all pauses so far."""

    @property
    def n_rows(self) -> int:
        """Rows of a run that is decoded in a pause, at most."""
        return self.batch.n_rows

    def at(self, call: Callable[[], None]) -> None:
        """Call this where a run pauses. It must not raise."""
        self._native.at_pause = call

    def want(self) -> None:
        """Have the run that is computed pause soon, if it may. Thread-safe."""
        self._native.want_pause()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """In what `at` calls: runs can be decoded in the second context."""
        start_s = time.perf_counter()
        self._native.pause()
        try:
            yield
        finally:
            self._native.resume()
            self.spent_s += time.perf_counter() - start_s

    def close(self) -> None:
        """Free the second context. The first one must still be there."""
        self._native.at_pause = None
        native.replace_memory(self.context, lib.llama_get_memory(self.context), self._own_memory)
        lib.llama_free(self.context)


def open_pauses(
    native_stage: native.Stage,
    model: Any,
    first: Any,
    config: ContextConfig,
    loras: Loras,
    threads: tuple[int, int],
    batch: LlamaBatch,
) -> Pauses | None:
    """Make a second context of a model, with the cells of its `first` one. None: libllama does not let it have them.

    `config`, `loras`, `batch`: those of the first one.
    """
    native_stage.touch_cells = False  # those of the first one have their memory
    params = context_params(replace(config, n_ubatch=min(MOST_ROWS, config.n_ubatch)), *threads)
    native_stage.pause()  # a group keeps graphs of each context
    context = lib.llama_init_from_model(model, params)
    native_stage.resume()
    if not context:
        return None
    own, shared = lib.llama_get_memory(context), lib.llama_get_memory(first)
    if not native.replace_memory(context, own, shared):
        lib.llama_free(context)
        return None
    loras.apply(context)
    return Pauses(native_stage, context, own, batch.resized(params.n_ubatch))
