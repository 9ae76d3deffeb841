"""A rank while a cluster is profiled: it carries out the head's orders to measure."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import replace

from ggpipe.cluster.profile import MeasuredLayers, ModelFacts, Point
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import FIRST_DRAFT, TARGET
from ggpipe.engine import handshake, wiring
from ggpipe.engine.control_channel import ControlChannel
from ggpipe.engine.stage_thread import Notice
from ggpipe.errors import IndivisibleModelError, ModelError, MpiError, RunError, Setting
from ggpipe.llama import machine
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group import Membership, most_parts
from ggpipe.llama.model_shape import facts_of
from ggpipe.profiling import stage_timing
from ggpipe.profiling.disk import disk_speed
from ggpipe.profiling.guest import Guest
from ggpipe.profiling.links import LinkTimer
from ggpipe.profiling.memory import memory_speed
from ggpipe.profiling.overheads import measure_overheads, measure_stops
from ggpipe.profiling.stage_timing import Samples, TimedStage
from ggpipe.profiling.sums import measure_decodes, measure_sums
from ggpipe.transport.base import HEAD
from ggpipe.transport.loading_messages import ControlMessage
from ggpipe.transport.profile_messages import (
    AloneMeasured,
    DecodesMeasured,
    DraftMeasured,
    EndProfile,
    MeasureAlone,
    MeasureDecodes,
    MeasureDraft,
    MeasureLink,
    MeasureSums,
    MeasureTogether,
    MeasureTurn,
    ProfileHello,
    ReadyToStop,
    StopTogether,
    SumsMeasured,
    TogetherMeasured,
    TurnMeasured,
)

_N_CTX = stage_timing.LONG_CELLS + 2 * stage_timing.CHUNK_ROWS
_MEMORY_S, _DISK_S = 0.5, 0.5
# shares of the target's budget alone
_MEMORY, _DISK, _STOPS, _OWN = 0.05, 0.03, 0.05, 0.05
_HALF, _SHORT, _LONG = 0.2, 0.4, 0.22
TURN_S = 0.2
"""Duration of a turn. By its end, the waiting ranks poll rarely."""
_ROWS_IN_TURN = 3
_GUEST_S = 3e-3  # of work, if there is no draft
_DRAFT_SHORT, _DRAFT_LONG = 0.6, 0.4  # shares of the draft's budget


class ProfiledRank:
    """A rank that measures. It has at most one stage loaded at a time. Used by the main thread only."""

    def __init__(self, channel: ControlChannel[Notice], links: LinkTimer, config: EngineConfig) -> None:
        """Raises ModelError for a model that cannot be read."""
        self.config = config
        self._channel = channel
        self._links = links
        self._file = ModelFile.open(config.model.path)
        self._drafts = [draft for draft in config.drafts if not draft.is_mtp]
        self._draft_files = [ModelFile.open(draft.model.path) for draft in self._drafts]
        self.model = facts_of(self._file)
        self.drafts = tuple(map(facts_of, self._draft_files))
        self._guest: Guest | None = None
        """Exists on the first rank of each machine, once its speed alone has been measured."""
        self._guest_s = _GUEST_S
        self._timed: TimedStage | None = None
        """The stage that is currently loaded."""

    @property
    def may_group(self) -> bool:
        """Whether ranks can compute the target's layers as a group."""
        context = self.config.context
        if context.exact or context.flash_attn == "off" or self.config.model.loras:
            return False
        return most_parts(self._file) > 1

    def serve(self) -> None:
        """Carry out the head's orders until everything is measured."""
        self._channel.send(HEAD, self.hello())
        while not isinstance(order := self._channel.receive().message, EndProfile):
            self._channel.send(HEAD, self.answer(order))

    def hello(self) -> ProfileHello:
        """Facts about this rank's machine and models."""
        transport = self._channel.transport
        return ProfileHello(
            target=handshake.hello(transport, self.config, self._file, TARGET),
            drafts=tuple(
                handshake.hello(transport, self.config, file, FIRST_DRAFT + number)
                for number, file in enumerate(self._draft_files)
            ),
            cores=wiring.machine_cores(transport),
            threads=wiring.threads_of(self.config, transport, TARGET),
            memory_bytes=machine.available_bytes(),
            cache_bytes=machine.cache_bytes(),
        )

    def answer(self, order: ControlMessage) -> ControlMessage:
        """Carry out an order. Raises RunError for a message that is not an order to measure."""
        match order:
            case MeasureDraft(number, budget_s):
                return DraftMeasured(self._draft_alone(number, budget_s))
            case MeasureAlone(layers, budget_s):
                return self._alone(layers, budget_s)
            case MeasureTogether(budget_s):
                return self._together_with_guest(budget_s)
            case MeasureTurn():
                return self._turn()
            case MeasureLink(peer, budget_s):
                self.close()
                return self._links.measure(peer, budget_s, self._channel.wait)
            case MeasureSums(ranks, budget_s):
                self.close()
                with contextlib.suppress(MpiError):  # raised on both ranks: this MPI does not support groups
                    return measure_sums(self._channel.transport, ranks, self.model.n_embd, budget_s)
                return SumsMeasured((), ())
            case MeasureDecodes(ranks, layers, budget_s):
                return self._decodes(ranks, layers, budget_s)
        raise RunError(f"the head sent {type(order).__name__} to a rank that measures: use one ggpipe everywhere")

    def _decodes(self, ranks: tuple[int, int], layers: tuple[int, int], budget_s: float) -> DecodesMeasured:
        """Measure sums inside decodes of a group. A model that cannot be divided gives the same error on both ranks."""
        group = wiring.membership(self.config, self._channel.transport, ranks)
        assert group is not None
        with contextlib.suppress(ModelError):
            timed = self._load(layers, self.config, self._file, self.model, group)
            return measure_decodes(timed, group, budget_s)  # the next order closes the stage: both ranks are done then
        return DecodesMeasured(())

    def close(self) -> None:
        """Free the stage."""
        if self._timed is not None:
            self._timed.close()
            self._timed = None

    def _turn(self) -> TurnMeasured:
        """Time the first row of a turn, and the last ones."""
        assert self._timed is not None
        start, took_s = time.monotonic(), [self._timed.run(1).compute_s]
        while time.monotonic() < start + TURN_S:
            self._timed.run(1)
        took_s += [self._timed.run(1).compute_s for _ in range(_ROWS_IN_TURN)]
        return TurnMeasured(took_s[0], statistics.fmean(took_s[1:]))

    def _together_with_guest(self, budget_s: float) -> TogetherMeasured:
        if self._guest is None:
            return TogetherMeasured(self._together(budget_s), None)
        with self._guest:
            points = self._together(budget_s)
        return TogetherMeasured(points, self._guest.share)

    def _draft_alone(self, number: int, budget_s: float) -> MeasuredLayers | None:
        """Measure a whole draft with the target's threads; None if it does not fit into memory. Times for other
        numbers of threads are scaled later, like the target's."""
        draft, draft_file, facts = self._drafts[number], self._draft_files[number], self.drafts[number]
        if draft_file.n_bytes > machine.available_bytes():
            return None
        layers = (0, facts.n_layer)
        config = replace(self.config, model=draft.model, context=draft.context)
        timed = self._load(layers, config, draft_file, facts)
        points, short = self._short_and_long(timed, budget_s * _DRAFT_SHORT, budget_s * _DRAFT_LONG)
        self.close()
        if number == 0:
            self._guest_s = short.fastest_s
        return MeasuredLayers(layers, facts.weight_bytes(layers), points, short.more_for_change_s)

    def _alone(self, layers: tuple[int, int], budget_s: float) -> AloneMeasured:
        single, _ = wiring.threads_of(self.config, self._channel.transport, TARGET)
        speed = memory_speed(single, min(budget_s * _MEMORY, _MEMORY_S))
        disk_bytes_per_s = disk_speed(self._file.paths, min(budget_s * _DISK, _DISK_S))
        transport = self._channel.transport
        if transport.hosts.index(transport.host) == transport.rank:
            self._guest = Guest(self._guest_s, speed / single)
        cold_s, abort_s = self._stops(layers, budget_s * _STOPS)
        half, half_s = self._half(layers, budget_s * _HALF)
        timed = self._load_target(layers)
        overheads = measure_overheads(timed, self._channel.inbox.pump, budget_s * _OWN)
        points, short = self._short_and_long(timed, budget_s * _SHORT, budget_s * _LONG)
        fixed_s = 0.0
        if half is not None:
            weight_bytes = self.model.weight_bytes(layers)
            fixed_s = stage_timing.intercept_s((half.weight_bytes, half_s), (weight_bytes, short.fastest_s))
        return AloneMeasured(
            alone=points,
            half=half,
            memory_bytes_per_s=speed,
            disk_bytes_per_s=disk_bytes_per_s,
            overheads=replace(overheads, cold_s=cold_s, abort_s=abort_s),
            change_s=short.more_for_change_s,
            fixed_s=fixed_s,
        )

    @staticmethod
    def _short_and_long(timed: TimedStage, short_s: float, long_s: float) -> tuple[tuple[Point, ...], Samples]:
        """All points of a stage, and the samples in a short context. `short_s`, `long_s`: budgets in seconds."""
        short = stage_timing.measure_short(timed, short_s)
        points = short.points(stage_timing.cells_before(timed.stage.n_ctx))
        return (*points, *stage_timing.measure_long(timed, short, long_s)), short

    def _stops(self, layers: tuple[int, int], budget_s: float) -> tuple[float, float]:
        """Measure (`Overheads.cold_s`, `Overheads.abort_s`) with the first layer, or all if they cannot be divided."""
        try:
            timed = self._load_target((layers[0], layers[0] + 1))
        except IndivisibleModelError:
            timed = self._load_target(layers)
        return measure_stops(timed, budget_s)

    def _half(self, layers: tuple[int, int], budget_s: float) -> tuple[MeasuredLayers | None, float]:
        """Measure the first half of the layers. Returns None if there is only one, and its fastest run of one row."""
        a, b = layers
        if b - a == 1:
            return None, 0.0
        some = (a, a + (b - a) // 2)
        try:
            timed = self._load_target(some)
        except IndivisibleModelError:
            if layers != (0, self.model.n_layer):
                raise
            return None, 0.0
        samples = stage_timing.measure_short(timed, budget_s, (1, 8))
        points = samples.points(stage_timing.cells_before(timed.stage.n_ctx))
        return MeasuredLayers(some, self.model.weight_bytes(some), tuple(points)), samples.fastest_s

    def _together(self, budget_s: float) -> tuple[Point, ...]:
        """Measure runs of few rows until all ranks are ready to stop. The head counts them, and then stops all."""
        assert self._timed is not None
        channel = self._channel
        leads = channel.transport.rank == HEAD
        n_ready = 0

        def ready() -> None:
            if not leads:
                channel.send(HEAD, ReadyToStop())

        def enough() -> bool:
            nonlocal n_ready
            if not leads:
                return len(channel.take(StopTogether)) > 0
            n_ready += len(channel.take(ReadyToStop))
            if n_ready < channel.transport.size - 1:
                return False
            channel.send_to_all(StopTogether())
            return True

        points = stage_timing.measure_together(self._timed, budget_s, ready, enough)
        self.close()
        return tuple(points)

    def _load_target(self, layers: tuple[int, int]) -> TimedStage:
        try:
            return self._load(layers, self.config, self._file, self.model)
        except IndivisibleModelError as e:
            n = self.model.n_layer
            if layers == (0, n):
                raise
            raise IndivisibleModelError(
                f"'{self.model.architecture}' models cannot be divided: profile all layers, with ",
                Setting("layers"),
                f" 0-{n - 1}",
            ) from e

    def _load(
        self,
        layers: tuple[int, int],
        config: EngineConfig,
        model_file: ModelFile,
        facts: ModelFacts,
        group: Membership | None = None,
    ) -> TimedStage:
        """Load these layers of a model as the target of `config`, in place of the stage that was loaded before."""
        self.close()
        context = config.context
        trained = model_file.metadata.get(f"{model_file.architecture}.context_length", _N_CTX)
        limits = [n for n in (_N_CTX, context.n_ctx, trained) if isinstance(n, int) and n > 0]
        config = replace(config, context=replace(context, n_ctx=min(limits)))
        load = wiring.stage_loader(config, self._channel.transport, model_file, layers, TARGET, group=group)
        self._timed = TimedStage(self._channel, load, facts.n_vocab, wiring.poll_s(config), group)
        return self._timed
