"""A rank's own part while a cluster is profiled: it measures what the first rank asks for."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ggpipe.config import EngineConfig
from ggpipe.engine import machine
from ggpipe.engine.model_file import ModelFile
from ggpipe.errors import ModelError, RunError
from ggpipe.runtime import measuring, startup
from ggpipe.runtime.line import HEAD, Line
from ggpipe.runtime.measuring import Samples, TimedStage
from ggpipe.sim.profile import ModelFacts, Point

_N_CTX = measuring.LONG_CELLS + 2 * measuring.CHUNK_ROWS
_MEMORY_S = 0.5
_MEMORY, _HALF, _SHORT, _LONG = 0.05, 0.2, 0.4, 0.35  # shares of the target's budget alone
_DRAFT_SHORT, _DRAFT_LONG = 0.6, 0.4  # shares of the draft's


class ProfiledRank:
    """Belongs to the main thread."""

    def __init__(self, line: Line, config: EngineConfig) -> None:
        self.config = config
        self._line = line
        self._timed: TimedStage | None = None
        self.draft: ModelFacts | None = None
        """Of the config's draft, after `hello`."""

    def hello(self) -> dict[str, Any]:
        """What this rank says of itself; under "of_draft" the same of its draft, if there is one. Raises ModelError for
        a model that cannot be read."""
        self._file = ModelFile.open(self.config.model.path)
        self.model = ModelFacts.of(self._file)
        transport = self._line.transport
        of_draft = None
        if self.config.draft is not None:
            self._draft_file = ModelFile.open(self.config.draft.model.path)
            self.draft = ModelFacts.of(self._draft_file)
            of_draft = startup.hello(transport, self._draft_file, True)
        return {
            **startup.hello(transport, self._file, False),
            "of_draft": of_draft,
            "cores": machine.cores(),
            "threads": startup.threads_of(self.config, transport, False),
            "memory_bytes": machine.available_bytes(),
            "cache_bytes": machine.cache_bytes(),
        }

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what the order says."""
        match order["kind"]:
            case "draft":
                return self._draft_alone(order["budget_s"])
            case "alone":
                return self._alone((order["layers"][0], order["layers"][1]), order["budget_s"])
            case "together":
                return self._together(order["budget_s"])
            case "link":
                self.close()
                latency_s, bytes_per_s = self._line.measure(order["peer"], order["budget_s"])
                return {"latency_s": latency_s, "bytes_per_s": bytes_per_s}
        raise RunError(f"the first rank asks for {order['kind']!r}: use one ggpipe everywhere")

    def close(self) -> None:
        """Free the stage."""
        if self._timed is not None:
            self._timed.close()
            self._timed = None

    def _draft_alone(self, budget_s: float) -> dict[str, Any]:
        """All of the draft, with the target's threads: times are scaled to others later, as the target's are."""
        draft, facts = self.config.draft, self.draft
        assert draft is not None
        assert facts is not None
        if self._draft_file.n_bytes > machine.available_bytes():
            return {"points": None}
        config = replace(self.config, model=draft.model, context=draft.context)
        timed = self._load((0, facts.n_layer), config, self._draft_file, facts)
        points, _ = self._short_and_long(timed, budget_s * _DRAFT_SHORT, budget_s * _DRAFT_LONG)
        self.close()
        return {"points": as_told(points)}

    def _alone(self, layers: tuple[int, int], budget_s: float) -> dict[str, Any]:
        single, _ = startup.threads_of(self.config, self._line.transport, False)
        speed = measuring.memory_speed(single, min(budget_s * _MEMORY, _MEMORY_S))
        half, half_s = self._half(layers, budget_s * _HALF)
        timed = self._load_target(layers)
        points, short = self._short_and_long(timed, budget_s * _SHORT, budget_s * _LONG)
        fixed_s = 0.0
        if half is not None:
            few, all_bytes = self.model.weight_bytes(half["layers"]), self.model.weight_bytes(layers)
            fixed_s = measuring.where_nothing_is((few, half_s), (all_bytes, short.fastest_s))
        return {
            "layers": layers,
            "points": as_told(points),
            "half": half,
            "memory_bytes_per_s": speed,
            "run_s": statistics.median(short.rest_s),
            "change_s": max(statistics.median(short.change_s), 0.0) if short.change_s else 0.0,
            "fixed_s": fixed_s,
        }

    @staticmethod
    def _short_and_long(timed: TimedStage, short_s: float, long_s: float) -> tuple[list[Point], Samples]:
        """All points of a stage, and the samples of short contexts."""
        short = measuring.measure_short(timed, short_s)
        points = short.points(measuring.cells_before(timed.stage.n_ctx))
        return points + measuring.measure_long(timed, short, long_s), short

    def _half(self, layers: tuple[int, int], budget_s: float) -> tuple[dict[str, Any] | None, float]:
        """The first half of the layers, and its fastest run of one row; None where there is none."""
        (a, b), n = layers, self.model.n_layer
        if b - a == 1:
            return None, 0.0
        some = (a, a + (b - a) // 2)
        try:
            timed = self._load_target(some)
        except ModelError:
            if layers != (0, n):
                raise
            return None, 0.0  # a model that cannot be cut; what else there is shows when all is loaded
        samples = measuring.measure_short(timed, budget_s, (1, 8))
        points = samples.points(measuring.cells_before(timed.stage.n_ctx))
        return {"layers": some, "points": as_told(points)}, samples.fastest_s

    def _together(self, budget_s: float) -> dict[str, Any]:
        assert self._timed is not None
        line = self._line
        leads = line.transport.rank == HEAD

        def ready() -> None:
            if not leads:
                line.tell(HEAD, "ready")

        def enough() -> bool:
            if not leads:
                return line.has_told("enough") > 0
            if line.has_told("ready") < line.transport.size - 1:
                return False
            line.tell_all("enough")
            return True

        points = measuring.measure_together(self._timed, budget_s, ready, enough)
        line.forget("ready" if leads else "enough")
        self.close()
        return {"points": as_told(points)}

    def _load_target(self, layers: tuple[int, int]) -> TimedStage:
        try:
            return self._load(layers, self.config, self._file, self.model)
        except ModelError as e:
            n = self.model.n_layer
            if "cannot be cut" not in str(e) or layers == (0, n):
                raise
            raise ModelError(
                f"'{self.model.architecture}' models cannot be cut: profile all layers, with --layers 0-{n - 1}"
            ) from e

    def _load(
        self, layers: tuple[int, int], config: EngineConfig, model_file: ModelFile, facts: ModelFacts
    ) -> TimedStage:
        """These layers of a model, as the config's target, instead of what was loaded before."""
        self.close()
        transport, context = self._line.transport, config.context
        trained = model_file.metadata.get(f"{model_file.architecture}.context_length", _N_CTX)
        limits = [n for n in (_N_CTX, context.n_ctx, trained) if isinstance(n, int) and n > 0]
        config = replace(config, context=replace(context, n_ctx=min(limits)))
        load = startup.stage_loader(config, transport, model_file, layers, False)
        self._timed = TimedStage(
            transport.rank, load, facts.n_vocab, self._line.inbox, self._line.notice, startup.look_s(config)
        )
        return self._timed


def as_told(points: Iterable[Point]) -> list[tuple[int, int, float]]:
    """Points as they travel."""
    return [(p.rows, p.n_past, p.seconds) for p in points]
