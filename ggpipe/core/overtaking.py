"""Which runs overtake others in a stage.

A run with `Run.pauses` has many tokens of prompts. Between two of its layers, a stage computes short runs that came
later, and those that wait behind them. So requests that decode hardly notice others' prompts. Runs whose sequences have
nothing in common give the same results in either order. All others keep the order in which they came to the stage, and
so that in which they went into the pipeline: a sequence's cells are there when they are read, and an operation that
frees an id comes before the rows that use it again.

Recurrent states restrict this further. Each sequence has one, in a place that libllama chooses. A run of several
sequences moves states, also those of a run that pauses, so only runs of one sequence overtake. And a copy of a state is
the original until one of the two continues (`SharedStates`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ggpipe.core.messages import KvKind, KvOp, Run

CONTINUES = 0.7
"""Times a pause: so long a run continues at least before the next one. With 0, prompts hardly advance where a stage has
many layers, which take much less time than others' runs; with 1, requests on groups end 4 to 5 % later (simulated,
prompts of 1,000 tokens that arrive at random)."""
MOST_ROWS = 64
"""Of a run that overtakes. Stages have buffers for that many besides those of long runs."""


def pays(is_only_stage: bool, sparsity: float) -> bool:
    """Whether a stage's long runs should pause at all. Not those of a dense model on its only stage: others' tokens
    take next to no time within such a run. `sparsity`: see `RowWork`."""
    return not is_only_stage or sparsity > 1


def overtakes(
    paused: Run, waiting: Iterable[Run], most_rows: float, sharing: Collection[int] | None = None
) -> int | None:
    """Which of the runs that wait, in their order, is to be computed while a run pauses: the first one that is short,
    of at most `most_rows` rows, and has no sequence in common with those before it. None: there is none.

    `sharing`: where sequences have recurrent states, those that the paused run reads as well; None: they have none.
    """
    before = _touched(paused).union(sharing or ())
    for i, run in enumerate(waiting):
        own = _touched(run)
        is_short = not run.pauses and run.save is None and len(run.rows) <= most_rows
        if sharing is not None and len({row.seqs for row in run.rows}) > 1:
            is_short = False
        if is_short and before.isdisjoint(own):
            return i
        before |= own
    return None


def _touched(run: Run) -> set[int]:
    """Sequences that its operations and rows read or change."""
    touched = {seq for row in run.rows for seq in row.seqs}
    for op in run.ops:
        touched.update((op.seq, op.dst))
    if run.save is not None:
        touched.add(run.save.seq)
    touched.discard(-1)
    return touched


class SharedStates:
    """Which sequences of a stage share a recurrent state.

    A run reads its sequences' former states layer by layer. Until it ends, no sequence that shares one may be removed
    or continue: another state would take its place.
    """

    def __init__(self) -> None:
        """Of a stage without sequences."""
        self._state_of: dict[int, int] = {}
        self._n_states = 0

    def begin(self, run: Run) -> frozenset[int]:
        """A run begins: after its operations, each of its sequences gets a state of its own. Returns the others that
        share one of the former."""
        for op in run.ops:
            if op.kind is KvKind.RM and (op.p0 > 0 or op.p1 >= 0):
                continue  # a state is removed as a whole
            dst = op.seq if op.kind is KvKind.RM else op.dst
            self._state_of.pop(dst, None)
            if op.kind is KvKind.CP and op.seq in self._state_of:
                self._state_of[dst] = self._state_of[op.seq]
        own = set() if run.cancelled else {seq for row in run.rows for seq in row.seqs}
        former = {self._state_of[seq] for seq in own if seq in self._state_of}
        sharing = frozenset(seq for seq, state in self._state_of.items() if state in former and seq not in own)
        for seq in own:
            self._n_states += 1
            self._state_of[seq] = self._n_states
        return sharing


def divided(ops: Sequence[KvOp], seqs: set[int]) -> tuple[list[KvOp], list[KvOp]]:
    """Operations that touch these sequences, or what others of them touch; and all others. Both keep their order."""
    reached, n_before = set(seqs), -1
    while n_before < len(reached):
        n_before = len(reached)
        for op in ops:
            if not reached.isdisjoint((op.seq, op.dst)):
                reached.update((op.seq, op.dst))
        reached.discard(-1)
    own = [op for op in ops if op.seq in reached]
    return own, [op for op in ops if op.seq not in reached]


class RunsDone:
    """Ids of the runs that a stage is through with: nearly all from 1 up to the latest one."""

    def __init__(self) -> None:
        """Of a stage that has not begun."""
        self._all_before = 1
        self._later: set[int] = set()

    def add(self, run: int) -> None:
        """A stage is through with it."""
        self._later.add(run)
        while self._all_before in self._later:
            self._later.discard(self._all_before)
            self._all_before += 1

    def __contains__(self, run: int) -> bool:
        """Whether a stage is through with it."""
        return run < self._all_before or run in self._later
