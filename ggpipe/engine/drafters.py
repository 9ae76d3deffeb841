"""An engine's drafters: how the head reaches them by their ids, and what drives one that is a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import DrafterMessage, MicroBatch
from ggpipe.core.drafters import registry
from ggpipe.core.drafters.base import Drafter, DraftEvent, ForgetStates, TextDrafter, ToHead
from ggpipe.core.events import CancelRuns, RunDone, RunEnded, SubmitRun, Tick
from ggpipe.core.layout import Layout
from ggpipe.core.messages import RunRecord, RunResult
from ggpipe.engine.pipeline import Pipeline
from ggpipe.errors import Setting, SettingError, Wording
from ggpipe.transport import draft_codec
from ggpipe.transport.base import Kind, Transport


class Drafters:
    """Belongs to the main thread."""

    def __init__(
        self, transport: Transport, models: Sequence[str], started: Mapping[int, Layout], takes_back: bool
    ) -> None:
        """`models`: the kinds of the draft models' drafters. `started`: those that draft, by their ids. `takes_back`:
        the target can take draft tokens back."""
        self._transport = transport
        self._models_kinds = tuple(models)
        self._labels = registry.labels(models)
        self._models = dict(started)
        self.takes_back = takes_back
        """The target can take draft tokens back."""
        self.in_head: Mapping[int, TextDrafter] = {
            drafter: registry.WITHOUT_MODEL[kind](drafter)
            for drafter, kind in enumerate(registry.kinds(models))
            if kind in registry.WITHOUT_MODEL
        }
        """Drafters without a model, which the scheduler asks itself."""

    @property
    def labels(self) -> tuple[str, ...]:
        """What people call each of them, by its id."""
        return self._labels

    @property
    def has_model(self) -> bool:
        """There is a draft model, and the target can take its tokens back."""
        return bool(self._models) and self.takes_back

    def chosen(self, speculation: SpeculationConfig, forces: bool = False) -> tuple[int, ...]:
        """The ids of those that draft for a request. `forces`: it has a grammar that knows what it forces."""
        if not self.takes_back:
            return ()
        names = speculation.drafters
        if names is None and not self._models_kinds:
            names = (registry.GRAMMAR,)
        named = registry.chosen(names, self._models_kinds)
        if not forces:
            named = tuple(drafter for drafter in named if self._labels[drafter] != registry.GRAMMAR)
        return tuple(drafter for drafter in named if drafter in self.in_head or drafter in self._models)

    def have_models(self, speculation: SpeculationConfig) -> bool:
        """Whether any of those has a model."""
        return speculation.mode != "iterative" and not self._models.keys().isdisjoint(self.chosen(speculation))

    def check(self, speculation: SpeculationConfig) -> None:
        """Raises SettingError where a request names a kind of draft model that there is none of."""
        own = self._models_kinds
        for name in speculation.drafters or ():
            if own and name in registry.WITH_MODEL and name not in own:
                what, has = registry.model_of(name), registry.model_of(own[0])
                if registry.MTP in (name, own[0]):
                    raise SettingError(
                        "spec_type",
                        f"{name} is not loaded, but {', '.join(dict.fromkeys(own))} is",
                        f"name {own[0]}, or load {what} as well",
                    )
                raise SettingError(
                    "spec_type",
                    Wording(f"{name} needs {what}, and ", Setting("draft.model"), f" names {has}"),
                    f"name {own[0]} there, or another file",
                )

    def n_ranks(self, drafter: int) -> int:
        """Ranks that hold layers of this drafter's model."""
        return 0 if drafter in self.in_head else len(self._models[drafter].stage_ranks)

    def send(self, drafter: int, message: DrafterMessage) -> None:
        """Send a message to a draft model's drafter."""
        self._transport.send(self._models[drafter].head, Kind.TO_DRAFTER, draft_codec.drafter_message(message))


class DraftHead:
    """On the first draft rank, or inside the head's process. Where the draft model has a single stage, that stage's
    thread passes results on itself, so that the next run needs no other thread."""

    def __init__(
        self,
        pipeline: Pipeline,
        drafter: Drafter,
        send: Callable[[MicroBatch, Sequence[RunRecord]], None],
        forget: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`send` brings draft tokens to the head, with the runs that ended since the last ones. `forget`: as
        `TargetStates.forget`."""
        self._pipeline = pipeline
        self._drafter = drafter
        self._send = send
        self._forget = forget
        self._records: list[RunRecord] = []
        self._lock = threading.Lock()

    def ended(self, result: RunResult) -> None:
        """A run came back."""
        self.handle(RunEnded(result))

    def handle(self, event: DraftEvent) -> None:
        """Give the state machine an event, and perform its actions."""
        with self._lock:
            for action in self._drafter.handle(event, time.monotonic()):
                match action:
                    case SubmitRun(run):
                        self._pipeline.submit(run)
                    case CancelRuns() as cancelled:
                        self._pipeline.cancel(cancelled)
                    case RunDone(records):
                        self._records += records
                    case ToHead(micro_batch):
                        self._send(micro_batch, self._records)
                        self._records = []
                    case ForgetStates(before):
                        self._forget(before)

    def wait_s(self) -> float | None:
        """Seconds until `tick` is due; None when it is not."""
        with self._lock:
            wake_at = self._drafter.wake_at
        return None if wake_at is None else max(wake_at - time.monotonic(), 0.0)

    def tick(self) -> None:
        """To be called when `wait_s` has passed; does nothing too early."""
        if self.wait_s() == 0:
            self.handle(Tick())
