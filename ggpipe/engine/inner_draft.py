"""A draft model in the head's process: a draft rank like any other, which is a thread."""

from __future__ import annotations

import threading
from dataclasses import replace

from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import FIRST_DRAFT
from ggpipe.engine import wiring
from ggpipe.engine.control_channel import ControlChannel
from ggpipe.engine.worker import Worker
from ggpipe.errors import RunError
from ggpipe.transport.base import HEAD, Transport
from ggpipe.transport.local import JoinedTransport


class InnerDraft:
    """Runs until the head sends Quit to its rank."""

    def __init__(self, outer: Transport, config: EngineConfig) -> None:
        """`outer`: the head's transport. The draft model is the first one of `config` that has no ranks."""
        index = next(i for i, draft in enumerate(config.drafts) if draft.layer_split is None)
        single, batch = wiring.threads_of(config, outer, FIRST_DRAFT + index)
        draft = replace(config.drafts[index], layer_split=LayerSplit((1.0,)), threads=single, threads_batch=batch)
        self.config = replace(config, drafts=(*config.drafts[:index], draft, *config.drafts[index + 1 :]))
        """The head's config, with the draft rank."""
        self.transport = JoinedTransport(outer)
        """The head's transport, with the draft rank."""
        pipeline = replace(config.pipeline, threads=(single,), threads_batch=(batch,))
        self._worker = Worker(self.transport.inner, replace(self.config, pipeline=pipeline), process_rank=HEAD)
        self._thread = threading.Thread(target=self._run, name="draft", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._worker.serve()
        except Exception as e:  # a bug, but the head must not wait for ever
            error = RunError(f"internal error: {type(e).__name__}: {e}")
            ControlChannel[object](self.transport.inner).fail(error)

    def join(self) -> None:
        """To be called after Quit was sent: wait until its memory is free."""
        self._thread.join()
