"""Runs in flight: the rows of each run, which of them are still useful, and which runs are not needed any more.

The target's scheduler and the draft model keep one `InFlight` each. It also holds what all requests of a pipeline
share: the sequence ids, and the KV operations that wait for the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ggpipe.core.dropped_rows import DeadRow
from ggpipe.core.events import CancelRuns, SubmitRun
from ggpipe.core.messages import KvOp, LogitsRequest, Restore, Row, RowLogits, Run, RunRecord, RunResult, Save
from ggpipe.core.overtaking import divided
from ggpipe.core.sequence_ids import SequenceIds
from ggpipe.core.tree import Node

Owner = TypeVar("Owner")
"""What a run belongs to: the state of a request."""


@dataclass(slots=True, eq=False, kw_only=True)
class RunPart(Generic[Owner]):
    """One owner's rows of a run: tokens of its prompt first, then tokens that are decoded again, then nodes."""

    owner: Owner
    request: int
    rows: Sequence[Row]
    nodes: Sequence[Node]
    """Nodes of the last rows. Rows before them are accepted tokens."""
    n_draft_tokens: int
    n_again: int = 0
    """Rows right before the nodes whose tokens were decoded before."""
    run: int = -1
    first_row: int = 0
    """Number of its first row in the run."""
    n_live: int = 0
    """Number of rows that are not rejected, of an owner that has not ended."""
    prompt_logits: list[RowLogits] = field(default_factory=list)
    """What came back of rows that are text."""
    after: int = -1
    """The run with the accepted tokens before these rows, if it was in flight when this one was submitted."""
    n_text_rows: int = field(init=False)
    """Rows before the nodes."""
    n_prompt_rows: int = field(init=False)
    """Rows of the prompt that are no nodes."""

    def __post_init__(self) -> None:
        self.n_text_rows = len(self.rows) - len(self.nodes)
        self.n_prompt_rows = self.n_text_rows - self.n_again


@dataclass(slots=True, eq=False, kw_only=True)
class RunInFlight(Generic[Owner]):
    """A run in the pipeline. One without parts only carries operations."""

    run: Run
    parts: Sequence[RunPart[Owner]]
    submitted_at: float
    cancelled: bool = False
    needs: frozenset[int] = frozenset()
    """The runs on which it depends: those with the row before each of its rows."""
    saved: frozenset[int] = frozenset()
    """Runs without which what is to be saved is not computed."""

    @property
    def lives(self) -> bool:
        """Whether any row is still needed."""
        return any([part.n_live for part in self.parts])

    @property
    def n_prompt_rows(self) -> int:
        """Rows of prompts that are no nodes."""
        return sum([part.n_prompt_rows for part in self.parts])


class InFlight(Generic[Owner]):
    """See the module's text. `Owner` must be hashable by identity."""

    def __init__(self, n_seq: int, n_reserved: int) -> None:
        """See `SequenceIds`."""
        self.ids = SequenceIds(n_seq, n_reserved)
        self.ops: list[KvOp] = []
        """Operations to apply before the next run, whichever request it belongs to."""
        self.next_run = 1
        """The id that the next run gets."""
        self.n_computed = 0
        """Runs that are or will be computed; cancelled ones and bare operations only pass through."""
        self.n_pausing = 0
        """Those of them that pause."""
        self._runs: dict[int, RunInFlight[Owner]] = {}
        self._of: dict[Owner, dict[int, RunPart[Owner]]] = {}
        self._latest_text: dict[Owner, int] = {}
        """By owner: the latest run with rows that are no nodes."""

    @property
    def has_prompt_rows(self) -> bool:
        """A run with rows of prompts that are no nodes is or will be computed."""
        return any(run.n_prompt_rows and not run.cancelled for run in self._runs.values())

    def of(self, owner: Owner) -> Collection[RunPart[Owner]]:
        """An owner's parts of runs in flight, the oldest first."""
        return self._of.get(owner, {}).values()

    def computed(self, owner: Owner, n: int) -> int:
        """How many tokens from the first of an owner's text on have cells for certain; `n` are submitted."""
        for part in self.of(owner):
            text_rows = (row.pos for row in part.rows[: part.n_text_rows])
            n = min([n, *text_rows, *(node.pos for node in part.nodes if not node.dead)])
        return n

    def is_computed(self, run: int) -> bool:
        """Whether a run is in flight and not cancelled."""
        return run in self._runs and not self._runs[run].cancelled

    def pauses(self, run: int) -> bool:
        """Whether a run is in flight that pauses for others."""
        return run in self._runs and self._runs[run].run.pauses

    def submit(
        self,
        parts: Sequence[RunPart[Owner]],
        logits_requests: tuple[LogitsRequest, ...],
        now: float,
        kept_from: int | None = None,
        pauses: bool = False,
    ) -> SubmitRun:
        """Put a run of these parts, one per owner, into the pipeline. `kept_from`, `pauses`: see `Run`; None: this
        run."""
        n_rows = 0
        for part in parts:
            own_parts = self._of.setdefault(part.owner, {})
            part.run, part.first_row, part.n_live = self.next_run, n_rows, len(part.rows)
            n_rows += part.n_live
            before = self._latest_text.get(part.owner, -1)
            part.after = before if before in own_parts else -1
            own_parts[part.run] = part
            if part.n_prompt_rows:
                self._latest_text[part.owner] = part.run
        self.n_computed += 1
        self.n_pausing += pauses
        run = self._enter(parts, logits_requests, now, kept_from=kept_from, pauses=pauses)
        return SubmitRun(run)

    def submit_ops(self, now: float) -> SubmitRun:
        """Put the waiting operations into the pipeline, in a run without rows."""
        return SubmitRun(self._enter((), (), now))

    def submit_foreign_ops(self, seqs: set[int], now: float) -> Sequence[SubmitRun]:
        """Put waiting operations that have nothing to do with these sequences into the pipeline. A run that pauses is
        to follow: others would wait for it if it had operations on their sequences."""
        own, self.ops[:] = divided(self.ops, seqs)
        submitted = (self.submit_ops(now),) if self.ops else ()
        self.ops[:] = own
        return submitted

    def submit_save(self, owner: Owner, save: Save | Restore, now: float) -> SubmitRun:
        """Save or restore a sequence of an owner, after the waiting operations. It is cancelled with its runs."""
        run = self._enter((), (), now, save)
        if owner in self._of:
            self._runs[run.id].saved = frozenset(part.run for part in self.of(owner) if part.n_prompt_rows)
        return SubmitRun(run)

    def _enter(
        self,
        parts: Sequence[RunPart[Owner]],
        logits_requests: tuple[LogitsRequest, ...],
        now: float,
        save: Save | Restore | None = None,
        kept_from: int | None = 0,
        pauses: bool = False,
    ) -> Run:
        rows = tuple(row for part in parts for row in part.rows)
        kept_from = self.next_run if kept_from is None else kept_from
        run = Run(
            id=self.next_run,
            rows=rows,
            ops=tuple(self.ops),
            logits_requests=logits_requests,
            save=save,
            kept_from=kept_from,
            pauses=pauses,
        )
        self.next_run += 1
        self.ops.clear()
        needs = {node.parent.run for part in parts for node in part.nodes if node.parent is not None}
        needs.update(part.after for part in parts)
        self._runs[run.id] = RunInFlight(run=run, parts=parts, submitted_at=now, needs=frozenset(needs))
        return run

    def end(self, result: RunResult) -> RunInFlight[Owner]:
        """A run came back: its nodes get their logits. Raises ValueError when it is not in flight."""
        ended = self._runs.pop(result.run, None)
        if ended is None:
            raise ValueError(f"run {result.run} is not in flight")
        for part in ended.parts:
            own_parts = self._of[part.owner]
            del own_parts[result.run]
            if not own_parts:
                del self._of[part.owner]
                self._latest_text.pop(part.owner, None)
        if ended.parts and not ended.cancelled:
            self._leaves(ended)
        if not result.rows:
            return ended
        takers = [(part, node) for part in ended.parts for node in (*[None] * part.n_text_rows, *part.nodes)]
        for row in result.rows:
            part, node = takers[row.row]
            if node is None:
                part.prompt_logits.append(row)
            else:
                node.logits = row
        return ended

    def drop(self, owner: Owner, dead: Iterable[Node]) -> tuple[int, ...]:
        """Discount rows whose nodes are dead. Returns the runs that are not needed any more: those without a live row
        on which no remaining run depends, not even by a dead row."""
        own_parts, any_empty = self._of.get(owner, {}), False
        for node in dead:
            if (part := own_parts.get(node.run)) is not None:
                part.n_live -= 1
                any_empty = any_empty or part.n_live == 0
        return self._unneeded() if any_empty else ()

    def dead_rows(self, owner: Owner, dead: Collection[Node]) -> tuple[DeadRow, ...]:
        """The rows of these nodes in runs that are or will be computed."""
        own_parts, nodes = self._of.get(owner, {}), set(dead)
        runs = {node.run for node in dead if node.run in own_parts and not self._runs[node.run].cancelled}
        parts = [own_parts[run] for run in sorted(runs)]
        return tuple(
            (part.run, part.first_row + row)
            for part in parts
            for row, node in enumerate(part.nodes, part.n_text_rows)
            if node in nodes
        )

    def leave(self, owner: Owner) -> tuple[int, ...]:
        """Discount all rows of an owner that has ended. Returns the runs that are not needed any more."""
        for part in self.of(owner):
            part.n_live = 0
        return self._unneeded() if owner in self._of else ()

    def _unneeded(self) -> tuple[int, ...]:
        unneeded: list[int] = []
        needed: set[int] = set()
        for number, run in reversed(self._runs.items()):
            if run.lives or number in needed:
                needed |= run.needs
            elif run.parts and not run.cancelled:
                unneeded.append(number)
        return tuple(unneeded[::-1])

    def cancel(
        self, runs: Sequence[int], may_cancel: Callable[[Owner], bool] = lambda _: True
    ) -> list[RunInFlight[Owner]]:
        """Mark these runs as cancelled, but for those with an owner for whom none may be; returns those that are, and
        what was to save their cells.

        None may be cancelled already.
        """
        cancelled = [self._runs[run] for run in runs if all(may_cancel(part.owner) for part in self._runs[run].parts)]
        ids = {run.run.id for run in cancelled}
        cancelled += [run for run in self._runs.values() if not run.saved.isdisjoint(ids) and not run.cancelled]
        for run in cancelled:
            assert not run.cancelled
            run.cancelled = True
            if run.parts:
                self._leaves(run)
        return cancelled

    def _leaves(self, run: RunInFlight[Owner]) -> None:
        self.n_computed -= 1
        self.n_pausing -= run.run.pauses

    def validate(self, trees: Collection[tuple[Owner, frozenset[int]]]) -> None:
        """Check what must hold between events; `trees`: each owner that has not ended, with the ids of its tree.

        Raises AssertionError.
        """
        taken = [seq for _, ids in trees for seq in ids]
        assert len(taken) == len(set(taken)), "two trees have one id"
        assert not self.ids.free.intersection(taken), "an id is free and taken"
        owners = {owner for owner, _ in trees}
        computed = 0
        for number, run in self._runs.items():
            assert run.run.id == number < self.next_run
            assert bool(run.parts) == bool(run.run.rows)
            assert [row for part in run.parts for row in part.rows] == list(run.run.rows)
            assert all(run.run.rows[part.first_row] is part.rows[0] for part in run.parts)
            assert len({id(part.owner) for part in run.parts}) == len(run.parts), "two parts for one owner"
            computed += bool(run.parts) and not run.cancelled
            for part in run.parts:
                assert self._of[part.owner][number] is part
                n_live = len(part.rows) - sum(node.dead for node in part.nodes) if part.owner in owners else 0
                assert part.n_live == n_live or run.cancelled
                assert all(node.run == number for node in part.nodes)
        assert computed == self.n_computed
        assert self.n_pausing == sum(run.run.pauses and not run.cancelled for run in self._runs.values())
        assert sum(map(len, self._of.values())) == sum(len(run.parts) for run in self._runs.values())


def records_of(ended: RunInFlight[Owner], result: RunResult) -> tuple[RunRecord, ...]:
    """What statistics keep of a run with rows that came back: a record for each request."""
    return tuple(
        RunRecord(
            id=result.run,
            request=part.request,
            n_rows=len(part.rows),
            n_run_rows=len(ended.run.rows),
            n_draft_tokens=part.n_draft_tokens,
            cancelled=result.cancelled,
            spans=result.spans,
        )
        for part in ended.parts
    )


def cancel_action(cancelled: Sequence[RunInFlight[Owner]], dead_rows: tuple[DeadRow, ...] = ()) -> CancelRuns:
    """The action that stops these runs, and drops these rows of others."""
    return CancelRuns(tuple(run.run.id for run in cancelled), dead_rows)
