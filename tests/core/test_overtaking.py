"""Which runs overtake a run that pauses, and which runs a stage is through with."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.examples import n_examples

from ggpipe.core.messages import KvKind, KvOp, Row, Run, Save
from ggpipe.core.overtaking import RunsDone, SharedStates, divided, overtakes

N_EXAMPLES = n_examples(100, 1000)


def run(*seqs: int, n_rows: int = 1, ops: Sequence[KvOp] = (), pauses: bool = False, save: Save | None = None) -> Run:
    rows = tuple(Row(token=1, pos=i, seqs=seqs, request=1) for i in range(n_rows if seqs else 0))
    return Run(id=1, rows=rows, ops=tuple(ops), pauses=pauses, save=save)


PAUSED = run(1, n_rows=50, pauses=True)


def test_a_short_run_of_others_overtakes() -> None:
    assert overtakes(PAUSED, [run(2)], 8) == 0
    assert overtakes(PAUSED, [run(2, n_rows=8)], 8) == 0
    assert overtakes(PAUSED, [], 8) is None


def test_a_long_run_does_not() -> None:
    assert overtakes(PAUSED, [run(2, n_rows=9)], 8) is None
    assert overtakes(PAUSED, [run(2, pauses=True)], 8) is None


def test_a_run_of_the_same_sequence_does_not() -> None:
    assert overtakes(PAUSED, [run(2, 1)], 8) is None
    assert overtakes(PAUSED, [run(2, ops=[KvOp(KvKind.RM, 1)])], 8) is None
    assert overtakes(PAUSED, [run(2, ops=[KvOp(KvKind.CP, 1, 2)])], 8) is None
    assert overtakes(PAUSED, [run(2, ops=[KvOp(KvKind.CP, 2, 1)])], 8) is None
    assert overtakes(run(1, n_rows=9, ops=[KvOp(KvKind.CP, 2, 1)], pauses=True), [run(2)], 8) is None


def test_a_run_that_waits_for_others_is_overtaken_itself() -> None:
    waiting = [run(3, pauses=True), run(3), run(1, 4), run(4), run(2)]
    assert overtakes(PAUSED, waiting, 8) == 4


def test_what_is_saved_has_its_place() -> None:
    saves = run(save=Save(request=1, seq=2, tokens=(1,)))
    assert overtakes(PAUSED, [saves, run(2)], 8) is None
    assert overtakes(PAUSED, [saves, run(3)], 8) == 1


OPS = st.lists(
    st.builds(
        lambda seq, dst: KvOp(KvKind.RM if dst < 0 else KvKind.CP, seq, dst), st.integers(0, 8), st.integers(-1, 8)
    )
)


@given(OPS, st.sets(st.integers(0, 8), max_size=3))
def test_divided_operations_have_nothing_in_common(ops: list[KvOp], seqs: set[int]) -> None:
    own, foreign = divided(ops, seqs)
    assert sorted(own + foreign, key=ops.index) == sorted(ops, key=ops.index)
    touched = [{seq for op in part for seq in (op.seq, op.dst)} - {-1} for part in (own, foreign)]
    assert not touched[1] & (touched[0] | seqs)
    for part in (own, foreign):
        places = [next(i for i, op in enumerate(ops) if op is one) for one in part]
        assert places == sorted(places)


@given(st.permutations(range(1, 20)))
def test_what_a_stage_is_through_with(order: list[int]) -> None:
    done = RunsDone()
    for n, one in enumerate(order):
        assert {number for number in range(1, 25) if number in done} == set(order[:n])
        done.add(one)
    assert not done._later


def test_runs_of_one_sequence_overtake_where_sequences_have_states() -> None:
    two = run(2)
    two = structs.replace(two, rows=(*two.rows, *run(3).rows))
    assert overtakes(PAUSED, [two], 8) == 0
    assert overtakes(PAUSED, [two], 8, frozenset()) is None
    assert overtakes(PAUSED, [two, run(3), run(4)], 8, frozenset()) == 2
    assert overtakes(PAUSED, [run(2), run(3, ops=[KvOp(KvKind.RM, 5)]), run(4)], 8, frozenset((2, 5))) == 2


def test_copies_share_a_state_until_one_continues() -> None:
    states = SharedStates()
    assert not states.begin(run(1))
    assert states.begin(run(1, ops=[KvOp(KvKind.CP, 1, 5, 0, 0), KvOp(KvKind.CP, 5, 6)])) == {5, 6}
    assert not states.begin(run(1))
    assert states.begin(run(5)) == {6}
    assert states.begin(run(2, ops=[KvOp(KvKind.CP, 6, 2, 0, 0), KvOp(KvKind.RM, 6, p0=3)])) == {6}
    assert not states.begin(run(5, ops=[KvOp(KvKind.CP, 5, 6), KvOp(KvKind.RM, 6)]))
    assert not states.begin(structs.replace(run(5, ops=[KvOp(KvKind.CP, 5, 7)]), cancelled=True))
    assert states.begin(run(7)) == {5}
