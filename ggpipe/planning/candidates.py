"""Arrangements with splits that fit into memory, and their estimated speed; or a message about what does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ggpipe.cluster.memory import USABLE, Memory, memory_by_rank, process_memory, stage_memory, with_streaming
from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config.speculation import Mode
from ggpipe.core.drafters import registry
from ggpipe.core.drafters.eagle import HORIZON
from ggpipe.core.layout import Layout, part_shares
from ggpipe.errors import MemoryNeededError, Setting, SettingError, UsageError
from ggpipe.planning.evaluate import Candidate, drafts_of, placed
from ggpipe.planning.groups import grouped
from ggpipe.planning.placements import Arrangement, FurtherDraft, arrangements
from ggpipe.planning.splits import good_splits
from ggpipe.planning.stage_tables import N_PAST, ROWS, StageRank, StageRanks, StageTables
from ggpipe.sim.groups import group_cost
from ggpipe.sim.stage_costs import stage_cost

_SMALL_DRAFT = 4  # draft tokens for each of the target's runs, about
_DRAFT_PARTS = 4
_ROUNDED = 1 + 1e-9  # ranks that stream use exactly the memory that there is


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a plan must comply with."""

    n_ctx: int
    n_ubatch: int
    n_ranks: int | None = None
    """Number of ranks; None: the best number."""
    in_order: bool = False
    """The ranks already exist and keep their order; the last one may be for the draft."""
    threads: int | None = None
    """Threads of each rank; None: its share of the machine's cores."""
    draft_threads: int | None = None
    """Threads of the draft; None: chosen by the planner."""
    must_draft: bool = False
    """Consider only plans with a draft."""
    groups: bool = True
    """Groups may compute a stage, if the model supports them."""
    halves: bool = False
    """Groups on several machines may send sums as 16-bit floats, if that pays."""
    streams: bool = True
    """Weights that do not fit into memory may be streamed from disks whose speed is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A candidate's speed by formula, from the times of its stages."""

    candidate: Candidate
    slowest_s: tuple[float, ...]
    """Time of the slowest stage, for each number of rows in `ROWS`."""
    all_s: tuple[float, ...]
    """Time of all stages and of the messages between them, for each number of rows in `ROWS`."""
    draft_s: float
    """Time of the draft for one token; 0: there is no draft."""

    def token_s(self, mode: Mode, agreement: float, users: int = 1) -> float:
        """Estimated seconds per token, of all users together.

        Each run has rows of several users. A round takes as long as all runs in the slowest stage, or as one run in all
        stages. Draft tokens only fill the pipeline.
        """
        token_s = self._token_s(mode, agreement)
        if users == 1:
            return token_s
        slowest_s = min(slowest_s / n for n, slowest_s in zip(ROWS, self.slowest_s, strict=True) if n <= users)
        if mode != "iterative" and self.candidate.arrangement.drafts:
            return max(token_s / users, slowest_s)
        both = zip(ROWS, self.slowest_s, self.all_s, strict=True)
        return min(max(-(-users // n) * slowest_s, all_s) / users for n, slowest_s, all_s in both if n <= users)

    def _token_s(self, mode: Mode, agreement: float) -> float:
        """Estimated seconds per token of one user, with the best number of draft tokens in a run.

        If each draft token is accepted with probability a, then a / (1 - a) are accepted before the first rejection, in
        a / (1 - a^n) runs of n. After that, a run passes through all stages, and the draft starts again.
        """
        if mode == "iterative" or not self.candidate.arrangement.drafts:
            return self.all_s[0]
        a = min(agreement, 0.99)
        both = zip(ROWS, self.slowest_s, self.all_s, strict=True)
        if mode == "async":
            chains_s = [a / (1 - a**n) * max(slowest_s, n * self.draft_s) for n, slowest_s, _ in both]
            return (1 - a) * (self.all_s[0] + self.draft_s + min(chains_s))
        return min((all_s + (n - 1) * self.draft_s) * (1 - a) / (1 - a**n) for n, _, all_s in both)


class CandidateSearch:
    """Finds candidates for one cluster and its models."""

    def __init__(
        self,
        spec: ClusterSpec,
        target: ModelShape,
        draft: ModelShape | None,
        constraints: Constraints,
        further: Sequence[FurtherDraft] = (),
    ) -> None:
        self._spec = spec
        self._target = target
        self._draft = draft
        self._further = further
        self._constraints = constraints
        self._tables = StageTables(spec, target, constraints.n_ctx, constraints.n_ubatch)

    def all(self) -> list[Estimate]:
        """The estimates of all candidates. Raises UsageError if none fits into memory."""
        constraints = self._constraints
        speeds = [self._tables.speed(node, spec.cores) for node, spec in enumerate(self._spec.nodes)]
        possible = arrangements(
            self._spec,
            self._draft is not None,
            speeds.__getitem__,
            n_ranks=constraints.n_ranks,
            in_order=constraints.in_order,
            threads=constraints.threads,
            draft_threads=constraints.draft_threads,
            draft_parts=self._draft_parts(),
            further=self._further,
        )
        possible = [arrangement for arrangement in possible if arrangement.drafts or not constraints.must_draft]
        if constraints.groups and self._target.max_parts > 1:
            max_parts = self._target.max_parts
            possible += [own for arrangement in possible for own in grouped(arrangement, max_parts, self._tables.speed)]
        possible = self._fed(possible)
        found = [estimate for arrangement in possible for estimate in self._of(arrangement)]
        if not found:
            raise self._missing()
        return found

    def _fed(self, possible: Sequence[Arrangement]) -> list[Arrangement]:
        """Those that the draft model can feed. With more stages than a draft head's horizon has tokens, and one, some
        would wait for the others.

        Raises SettingError where the user wants it for more ranks.
        """
        if self._draft is None or not self._draft.taps:
            return list(possible)
        most = (self._draft.horizon or HORIZON) + 1
        fed = [
            own.shortened(most)
            if own.drafts and len(own.stages) > most and not own.group_sizes and not self._constraints.n_ranks
            else own
            for own in possible
        ]
        fed = [own for own in fed if not own.drafts or len(own.stages) <= most]
        if not fed:
            what = registry.model_of(self._draft.drafter)
            raise SettingError("n_ranks", f"{self._constraints.n_ranks}: {what} feeds {most} stages at most")
        return list(dict.fromkeys(fed))

    def estimate(self, candidate: Candidate) -> Estimate | None:
        """The estimate of a candidate; None if it does not fit into memory."""
        needs = self.memory(candidate)
        if not self._fits(needs):
            return None
        arrangement, end, n_ranks = candidate.arrangement, 0, 0
        stages: list[list[float]] = []
        for i, (stage, count) in enumerate(zip(_stages(arrangement), candidate.counts, strict=True)):
            if not count:
                n_ranks += len(stage) * (arrangement.in_order and i == 0)
                continue
            missing = [memory.streamed for _, memory in needs[n_ranks : n_ranks + len(stage)]]
            if any(missing):
                stages.append(self._tables.run_s(stage, (end, end + count), ROWS, missing))
            else:
                one_s = float(self._tables.seconds(stage)[end, end + count])
                stages.append([one_s * factor for factor in self._tables.row_factors(stage)])
            end, n_ranks = end + count, n_ranks + len(stage)
        by_rows = list(zip(*stages, strict=True))
        return Estimate(
            candidate=candidate,
            slowest_s=tuple(map(max, by_rows)),
            all_s=tuple(map(sum, by_rows)),
            draft_s=self._draft_s(arrangement),
        )

    def fits(self, candidate: Candidate) -> bool:
        """Whether every machine has enough memory for its ranks."""
        return self._fits(self.memory(candidate))

    def _fits(self, needs: Sequence[tuple[int, Memory]]) -> bool:
        needed = [0.0] * len(self._spec.nodes)
        for node, memory in needs:
            needed[node] += memory.total
        return all(need <= self._usable(node) * _ROUNDED for node, need in enumerate(needed))

    def memory(self, candidate: Candidate) -> list[tuple[int, Memory]]:
        """The node of each rank, and the memory that the rank needs. Ranks of nodes without enough stream weights."""
        drafts = drafts_of(candidate, self._draft, self._further)
        placement = placed(self._spec, candidate, drafts)[1]
        layout, constraints = placement.layout or Layout(()), self._constraints
        sizes, tensor_split = (constraints.n_ctx, constraints.n_ubatch), placement.tensor_split
        on = [(draft, placement.draft_layout(number)) for number, draft in enumerate(drafts)]
        needs = memory_by_rank(self._target, layout, on, *sizes, tensor_split)
        needs = with_streaming(self._target, layout, needs, placement.node_of, self._streaming, tensor_split)
        return list(zip(placement.node_of, needs.values(), strict=True))

    def streamed_bytes(self, candidate: Candidate) -> tuple[float, ...]:
        """See `VirtualPlacement`."""
        found = tuple(memory.streamed for _, memory in self.memory(candidate))
        return found if any(found) else ()

    @property
    def _streaming(self) -> dict[int, float]:
        """Usable memory of the nodes whose ranks may stream weights."""
        nodes = enumerate(self._spec.nodes) if self._constraints.streams else ()
        return {number: self._usable(number) for number, node in nodes if node.disk_bytes_per_s}

    def _of(self, arrangement: Arrangement) -> Iterator[Estimate]:
        rooms = [self._usable(node) for node in range(len(self._spec.nodes))]
        for place in arrangement.draft:
            rooms[place.node] -= self._draft_memory(len(arrangement.draft))
        for place, further in zip(arrangement.further, self._further, strict=False):
            rooms[place.node] -= self._memory_of_rank(further.shape)
        inside = self._draft_memory(0) if arrangement.inside else 0.0
        on = [place.node for place in arrangement.target]
        if min(rooms) < 0:
            return
        places, streaming = [], self._streaming
        for i, stage in enumerate(_stages(arrangement)):
            fits = np.full((self._target.n_layer + 1,) * 2, True)
            rooms_of_parts = [rooms[part.node] / on.count(part.node) for part in stage]
            for part, room in zip(stage, rooms_of_parts, strict=True):
                memory = self._tables.memory(part.share)
                if inside and part is stage[0] and (i == 0 or arrangement.skips[0]):
                    memory = memory.copy()
                    memory[0] += inside
                fits &= memory <= room
            seconds = np.where(fits, self._tables.seconds(stage), np.inf)
            if streaming and not fits[0, -1]:
                if inside and (i == 0 or arrangement.skips[0]):
                    rooms_of_parts[0] -= inside
                seconds = np.minimum(seconds, self._tables.streamed_seconds(stage, tuple(rooms_of_parts)))
            places.append(seconds)
        for counts in good_splits(places, arrangement.skips):
            estimate = self.estimate(Candidate(arrangement, counts))
            if estimate is not None:
                yield estimate

    def _usable(self, node: int) -> float:
        return self._spec.nodes[node].memory_bytes * USABLE

    def _draft_parts(self) -> int:
        """Maximum number of ranks in the draft's group. Groups do not pay for a draft that is small compared with a
        machine's part of the target."""
        draft, constraints = self._draft, self._constraints
        if draft is None or draft.taps or not constraints.groups or constraints.in_order:
            return 1
        is_small = _SMALL_DRAFT * len(self._spec.nodes) * draft.weight_bytes < self._target.weight_bytes
        return 1 if is_small else min(draft.max_parts, _DRAFT_PARTS)

    def _draft_memory(self, n_ranks: int) -> float:
        """Bytes that one of the draft's ranks needs; with 0 ranks, bytes that the head needs for the draft."""
        assert self._draft is not None
        part = self._draft.part(1 / max(n_ranks, 1))
        if n_ranks:
            return self._memory_of_rank(part)
        return stage_memory(part, (0, part.n_layer), self._constraints.n_ctx, self._constraints.n_ubatch).total

    def _memory_of_rank(self, part: ModelShape) -> float:
        """Bytes that a rank needs for all layers of a draft model, or of its part of one."""
        memory = stage_memory(part, (0, part.n_layer), self._constraints.n_ctx, self._constraints.n_ubatch)
        return (memory + process_memory(part, True)).total

    def _draft_s(self, arrangement: Arrangement) -> float:
        if self._draft is None or not arrangement.drafts:
            return 0.0
        on = [place.node for place in arrangement.draft or arrangement.target[:1]]
        part, layers = self._draft.part(1 / len(on)), (0, self._draft.n_layer)
        cost = stage_cost(self._spec.nodes[on[0]], part, layers, arrangement.draft_threads, is_draft=True)
        own_s = self._spec.overheads.run_s + cost.seconds(1, N_PAST)
        if len(on) == 1:
            return own_s
        return own_s + group_cost(self._spec, self._draft, layers, on, arrangement.draft_threads).seconds(1, 1)

    def _missing(self) -> UsageError:
        """The error about what remains after filling one machine after another."""
        target, constraints = self._target, self._constraints
        whole = stage_memory(target, (0, target.n_layer), constraints.n_ctx, constraints.n_ubatch)
        what = f"weights of {_gb(whole.weights)}, a KV cache of {_gb(whole.kv)}"
        draft_bytes = 0.0
        if self._draft is not None:
            draft_bytes = self._draft_memory(0)
            what += f", a draft of {_gb(draft_bytes)}"
        nodes, start, left = range(len(self._spec.nodes)), 0, 0.0
        order = sorted(nodes, key=lambda node: -self._usable(node))
        for node in order:
            ends = np.flatnonzero(self._tables.memory(1.0)[start] <= self._usable(node))
            start = int(ends[-1]) if len(ends) else start
            if start == target.n_layer:
                break
        if start < target.n_layer:
            rest = stage_memory(target, (start, target.n_layer), constraints.n_ctx, constraints.n_ubatch)
            left = rest.weights + rest.kv
        elif constraints.must_draft:
            left = draft_bytes
        if left == 0:
            return UsageError(
                f"{target.name}'s {target.n_layer} layers cannot be divided among {constraints.n_ranks or len(nodes)} "
                f"ranks so that they fit into their machines' memory: {what}; use fewer ranks, lower ",
                Setting("n_ctx"),
                " or ",
                Setting("n_ubatch"),
                ", or name a split",
            )
        where = ", ".join(f"{self._spec.nodes[node].name} {_gb(self._usable(node))}" for node in nodes)
        streams = whole.kv + draft_bytes < sum(map(self._usable, nodes))
        anyway = ", or start the ranks anyway: weights that do not fit are then read from the file for each token"
        if not self._streaming:
            anyway += " (to plan that, give disk_gb_per_s in the cluster file, or profile the machines again)"
        return (MemoryNeededError if streams else UsageError)(
            f"{target.name} does not fit: it needs {what} and compute buffers, and the machines have {where}; "
            f"{_gb(left)} are missing: add memory or machines, lower ",
            Setting("n_ctx"),
            " or ",
            Setting("n_ubatch"),
            ", or use a smaller model",
            anyway if streams and self._constraints.streams else "",
        )


def _stages(arrangement: Arrangement) -> list[StageRanks]:
    found = []
    for ranks in arrangement.stages:
        shares = part_shares(len(ranks), arrangement.tensor_split)
        both = zip(ranks, shares, strict=True)
        found.append(tuple(StageRank(arrangement.target[i].node, arrangement.threads[i], share) for i, share in both))
    return found


def _gb(n_bytes: float) -> str:
    if n_bytes < 1e8:
        return f"{n_bytes / 1e6:.3g} MB"
    return f"{n_bytes / 1e9:.3g} GB" if n_bytes < 1e12 else f"{n_bytes / 1e12:.3g} TB"


def ranked(
    estimates: Sequence[Estimate], mode: Mode, agreement: float, n: int, n_each: int = 4, users: int = 1
) -> list[Estimate]:
    """The `n` best estimates for a mode, with at most `n_each` of each arrangement."""
    taken: dict[Arrangement, int] = {}
    best: list[Estimate] = []
    for estimate in sorted(estimates, key=lambda e: (e.token_s(mode, agreement, users), len(e.candidate.counts))):
        arrangement = estimate.candidate.arrangement
        if taken.get(arrangement, 0) < n_each:
            taken[arrangement] = taken.get(arrangement, 0) + 1
            best.append(estimate)
    return best[:n]
