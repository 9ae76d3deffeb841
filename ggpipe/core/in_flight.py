"""Runs in flight: what each one carries, which of its rows are still of use, which runs nobody needs any more.

The target's scheduler and the draft model keep one `InFlight` each. It also holds what all requests of a pipeline
share: the sequence ids, and the KV operations that wait for the next run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ggpipe.core.events import Cancel, Submit
from ggpipe.core.messages import KvOp, Row, Run, RunRecord, RunResult, Want
from ggpipe.core.tree import Node, SequenceIds

Owner = TypeVar("Owner")
"""What a run belongs to: the state of a request."""


@dataclass(slots=True, eq=False, kw_only=True)
class RunInFlight(Generic[Owner]):
    """A run in the pipeline."""

    run: Run
    owner: Owner | None
    """Whose rows it carries; None: it only carries operations."""
    nodes: Sequence[Node]
    """The nodes of its last rows; rows in front of them are text."""
    n_draft_tokens: int
    n_live: int
    """Rows that are not rejected."""
    submitted_at: float
    cancelled: bool = False

    @property
    def n_text(self) -> int:
        """Rows in front of the nodes."""
        return len(self.run.rows) - len(self.nodes)


class InFlight(Generic[Owner]):
    """See the module's text. `Owner` must be hashable by identity."""

    def __init__(self, n_seq: int, n_requests: int) -> None:
        self.ids = SequenceIds(n_seq, n_requests)
        self.ops: list[KvOp] = []
        """Operations that go in front of the next run, whichever request it belongs to."""
        self.next_run = 1
        """The id that the next run gets."""
        self.n_computed = 0
        """Runs that are or will be computed; cancelled ones and bare operations only pass through."""
        self._runs: dict[int, RunInFlight[Owner]] = {}
        self._of: dict[Owner, dict[int, RunInFlight[Owner]]] = {}

    def of(self, owner: Owner) -> Collection[RunInFlight[Owner]]:
        """An owner's runs, the oldest first."""
        return self._of.get(owner, {}).values()

    def submit(
        self,
        owner: Owner,
        rows: Sequence[Row],
        wants: tuple[Want, ...],
        nodes: Sequence[Node],
        n_draft_tokens: int,
        now: float,
    ) -> Submit:
        """Put rows into the pipeline; `nodes`: those of the last rows."""
        run = self._enter(owner, tuple(rows), wants, nodes, n_draft_tokens, now)
        self._of.setdefault(owner, {})[run.id] = self._runs[run.id]
        self.n_computed += 1
        return Submit(run)

    def submit_ops(self, now: float) -> Submit:
        """Put the waiting operations into the pipeline by themselves."""
        return Submit(self._enter(None, (), (), (), 0, now))

    def _enter(
        self,
        owner: Owner | None,
        rows: tuple[Row, ...],
        wants: tuple[Want, ...],
        nodes: Sequence[Node],
        n_draft_tokens: int,
        now: float,
    ) -> Run:
        run = Run(id=self.next_run, rows=rows, ops=tuple(self.ops), wants=wants)
        self.next_run += 1
        self.ops.clear()
        self._runs[run.id] = RunInFlight(
            run=run, owner=owner, nodes=nodes, n_draft_tokens=n_draft_tokens, n_live=len(rows), submitted_at=now
        )
        return run

    def end(self, result: RunResult) -> RunInFlight[Owner]:
        """A run came back: its nodes get their answers. Raises ValueError when it is not in flight."""
        ended = self._runs.pop(result.run, None)
        if ended is None:
            raise ValueError(f"run {result.run} is not in flight")
        if ended.owner is not None:
            own = self._of[ended.owner]
            del own[result.run]
            if not own:
                del self._of[ended.owner]
            self.n_computed -= not ended.cancelled
        for row in result.rows:
            ended.nodes[row.row - ended.n_text].answer = row
        return ended

    def drop(self, owner: Owner, dead: Iterable[Node]) -> tuple[int, ...]:
        """Count rows out whose nodes died. Returns the runs that nobody needs any more: none of their rows lives, and
        no row of a run that goes on, dead or alive, has its parent in them (it could not be computed without)."""
        any_empty = False
        for node in dead:
            if (run := self._runs.get(node.run)) is not None:
                run.n_live -= 1
                any_empty = any_empty or run.n_live == 0
        return self._unneeded(owner) if any_empty else ()

    def _unneeded(self, owner: Owner) -> tuple[int, ...]:
        unneeded: list[int] = []
        needed: set[int] = set()
        for run in reversed(self._of.get(owner, {}).values()):
            if run.n_live or run.run.id in needed:
                needed.update(node.parent.run for node in run.nodes if node.parent is not None)
            elif not run.cancelled:
                unneeded.append(run.run.id)
        return tuple(unneeded[::-1])

    def cancel(self, runs: Sequence[int]) -> list[RunInFlight[Owner]]:
        """Mark these runs as cancelled; returns them. None may be cancelled already."""
        cancelled = [self._runs[run] for run in runs]
        for run in cancelled:
            assert not run.cancelled
            run.cancelled = True
            self.n_computed -= 1
        return cancelled

    def validate(self, trees: Collection[tuple[Owner, frozenset[int]]]) -> None:
        """Check what must hold between events; `trees`: each open request with the ids of its tree.

        Raises AssertionError.
        """
        taken = [seq for _, ids in trees for seq in ids]
        assert len(taken) == len(set(taken)), "two trees have one id"
        assert not self.ids.free.intersection(taken), "an id is free and taken"
        computed = 0
        for number, run in self._runs.items():
            assert run.run.id == number < self.next_run
            assert (run.owner is None) == (not run.run.rows)
            computed += run.owner is not None and not run.cancelled
            if run.owner is not None:
                assert number in self._of[run.owner]
                assert run.n_live == len(run.run.rows) - sum(node.dead for node in run.nodes) or run.cancelled
            assert all(node.run == number for node in run.nodes)
        assert computed == self.n_computed
        assert sum(map(len, self._of.values())) == sum(run.owner is not None for run in self._runs.values())


def record_of(ended: RunInFlight[Owner], result: RunResult) -> RunRecord:
    """What statistics keep of a run with rows that came back."""
    return RunRecord(
        id=result.run,
        request=ended.run.rows[0].request,
        n_rows=len(ended.run.rows),
        n_draft_tokens=ended.n_draft_tokens,
        cancelled=result.cancelled,
        spans=result.spans,
    )


def cancel_action(cancelled: Sequence[RunInFlight[Owner]]) -> Cancel:
    """The action that stops these runs."""
    return Cancel(tuple(run.run.id for run in cancelled))
