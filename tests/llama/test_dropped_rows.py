"""Stages that drop dead rows of runs on their way, each from another run on: live rows keep their logits."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from support.pipeline import HEADROOM, Pipeline, even_cuts
from support.reference import Logits
from support.zoo import ZOO, make

from ggpipe.config.context import ContextConfig
from ggpipe.core.messages import KvKind, KvOp, LogitsKind, LogitsRequest, Row, RowLogits, Run
from ggpipe.llama.row_filter import RowFilter

N_STAGES = 3
TOLERANCE = 5e-3  # of logits' range: sums differ with the number of rows
FULL = (LogitsRequest(LogitsKind.FULL),)
CONTEXT = ContextConfig(n_ctx=256, n_seq=5)
NAMES = ("llama", "gemma3", "qwen3moe", "deepseek2", "gpt-oss")


@dataclass
class Text:
    """A text in a pipeline, and the branches of its draft tokens. A round is two runs, and all but one branch dies."""

    pipeline: Pipeline
    rng: np.random.Generator
    seq: int = 0
    n_past: int = 0
    n_runs: int = 0
    ops: list[KvOp] = field(default_factory=list)
    n_dropped: list[int] = field(default_factory=lambda: [0] * N_STAGES)
    """By stage, of all runs."""

    def row(self, pos: int, *seqs: int) -> Row:
        token = int(self.rng.integers(1, 100))
        return Row(token=token, pos=pos, seqs=seqs, request=1, logits_request=0)

    def decode(self, rows: Sequence[Row], dead: frozenset[int] = frozenset(), drops_from: int = N_STAGES) -> Logits:
        """The logits of the live rows. Stages from `drops_from` on know which are dead."""
        self.n_runs += 1
        run, incoming = Run(id=self.n_runs, rows=tuple(rows), ops=tuple(self.ops), logits_requests=FULL), None
        self.ops.clear()
        for i, (stage, group) in enumerate(zip(self.pipeline.stages, self.pipeline.groups, strict=True)):
            outcome = (group or stage).decode(run, incoming, HEADROOM, dead if i >= drops_from else frozenset())
            assert run.dropped <= outcome.dropped <= dead
            self.n_dropped[i] += len(outcome.dropped)
            run, incoming = structs.replace(run, dropped=outcome.dropped), outcome.outgoing[HEADROOM:]
        live = {row.row: row.logits for row in outcome.rows if row.row not in dead}
        assert list(live) == [number for number in range(len(rows)) if number not in dead]
        return np.array(list(live.values()))

    def round(self, alive: int, drops_from: tuple[int, int]) -> list[Logits]:
        """A root with three branches, then their next tokens. That number of them stays alive."""
        seqs = [self.seq, *[seq for seq in range(4) if seq != self.seq][:2]]
        root, (first, *others) = self.n_past, seqs
        self.ops += [KvOp(KvKind.CP, first, other, 0, root) for other in others]
        branches = [[self.row(root + 1 + depth, seq) for depth in range(3)] for seq in seqs]
        both = []
        for depths, first_stage in zip(((0, 1), (2,)), drops_from, strict=True):
            rows = [self.row(root, *seqs)] if 0 in depths else []
            rows += [branch[depth] for branch in branches for depth in depths]
            dead = frozenset(n for n, row in enumerate(rows) if row.pos > root and row.seqs != (seqs[alive],))
            both.append(self.decode(rows, dead, first_stage))
        self.ops += [KvOp(KvKind.RM, seq) for seq in seqs if seq != seqs[alive]]
        self.seq, self.n_past = seqs[alive], root + 4
        return both


def assert_close(ours: Logits, theirs: Logits) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * float(np.ptp(theirs)))


def text_of(pipeline: Pipeline) -> Text:
    text = Text(pipeline, np.random.default_rng(5))
    text.decode([text.row(pos, 0) for pos in range(9)])
    text.n_past = 9
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dropped")


# A stage that knows of dead rows in a run knows of them in later ones.
ORDERS = [(a, b) for a, b in itertools.product(range(N_STAGES + 1), repeat=2) if b <= a]


@pytest.mark.parametrize(("name", "grouped"), [*((name, False) for name in NAMES), ("llama", True), ("qwen3moe", True)])
def test_live_rows_keep_their_logits(name: str, grouped: bool, folder: Path) -> None:
    path = make(name, folder / f"{name}.gguf")
    cuts = even_cuts(ZOO[name].n_layer, N_STAGES)
    shares = ((1.0,), (0.5, 0.5), (0.5, 0.5)) if grouped else ()
    with (
        Pipeline(path, cuts, CONTEXT, shares=shares) as dropping,
        Pipeline(path, cuts, CONTEXT, shares=shares) as whole,
    ):
        texts = text_of(dropping), text_of(whole)
        for i, drops_from in enumerate(ORDERS):
            found, expected = texts[0].round(i % 3, drops_from), texts[1].round(i % 3, (N_STAGES, N_STAGES))
            for ours, theirs in zip(found, expected, strict=True):
                assert_close(ours, theirs)
        assert all(texts[0].n_dropped)
        assert not any(texts[1].n_dropped)


def test_exact_stages_drop_nothing(folder: Path) -> None:
    path = make("llama", folder / "exact.gguf")
    with Pipeline(path, even_cuts(3, N_STAGES), replace(CONTEXT, exact=True)) as pipeline:
        text = text_of(pipeline)
        text.round(1, (0, 0))
        assert not any(text.n_dropped)


def test_a_run_whose_rows_are_all_dead_is_cancelled(folder: Path) -> None:
    path = make("llama", folder / "all.gguf")
    with Pipeline(path, (), CONTEXT) as pipeline:
        text = text_of(pipeline)
        run = Run(id=9, rows=(text.row(9, 0), text.row(10, 0)), logits_requests=FULL)
        outcome = pipeline.stages[0].decode(run, None, HEADROOM, frozenset({0, 1}))
        assert (outcome.cancelled, outcome.rows, len(outcome.outgoing)) == (True, (), HEADROOM)
        assert len(text.decode([text.row(9, 0)])) == 1  # its cells are free


def test_kept_rows_keep_their_numbers(folder: Path) -> None:
    path = make("llama", folder / "kept.gguf")
    with Pipeline(path, (), CONTEXT) as pipeline:
        text, stage = text_of(pipeline), pipeline.stages[0]
        want = (LogitsRequest(LogitsKind.TOP, 3, keeps=True),)
        rows = (text.row(9, 0, 1), text.row(10, 0), text.row(10, 1), text.row(11, 1))
        run = Run(id=9, rows=rows, ops=(KvOp(KvKind.CP, 0, 1, 0, 9),), logits_requests=want)
        outcome = stage.decode(run, None, 0, frozenset({1}))
        kept = stage.kept(run)
        assert [row.row for row in outcome.rows] == [0, 2, 3] == list(kept)
        for row in outcome.rows:
            whole: RowLogits = kept[row.row]
            assert whole.row == row.row
            assert row.ids is not None
            assert int(np.argmax(whole.logits)) == row.ids[0]


def test_input_of_another_form_is_left_as_it_is(folder: Path) -> None:
    """Its rows cannot be told apart: from then on the stage drops none."""
    path = make("llama", folder / "form.gguf")
    with Pipeline(path, even_cuts(3, N_STAGES), CONTEXT) as pipeline:
        text, first = text_of(pipeline), pipeline.stages[0]
        run = Run(id=9, rows=(text.row(9, 0), text.row(10, 0)), logits_requests=FULL)
        sent = first.decode(run, None)
        filter_ = RowFilter({"l_out-0": 12}, None)
        assert filter_.dropped(run, {1}) == {1}
        assert filter_.incoming(memoryview(sent.outgoing), run, {1}) is None
        assert filter_.dropped(run, {1}) == frozenset()


def test_every_rank_of_a_group_fills_up_with_the_same_rows() -> None:
    """Of 20 rows 9 live: a group computes 12, dead ones among them that hang on something that is there."""
    seqs = [0] * 9 + [1] * 6 + [2] * 5
    places = [*range(5, 14), *range(9, 15), *range(6, 11)]
    rows = tuple(Row(token=1, pos=pos, seqs=(seq,), request=1) for pos, seq in zip(places, seqs, strict=True))
    run, dead = Run(id=1, rows=rows), frozenset(range(9, 20))
    tips = {0: 4, 1: 7, 2: 5}  # what branch 1 hangs on is missing
    assert RowFilter({}, tips.__getitem__).dropped(run, dead) == dead - {15, 16, 17}
    assert RowFilter({}, None).dropped(run, dead) == dead


def test_a_group_computes_some_dead_rows(folder: Path) -> None:
    path = make("llama", folder / "filled.gguf")
    found = []
    for dead in (frozenset(range(9, 20)), frozenset[int]()):
        with Pipeline(path, (), CONTEXT, shares=((0.5, 0.5),)) as pipeline:
            text, (group,) = text_of(pipeline), pipeline.groups
            assert group is not None
            rows = [text.row(9 + i, seq) for seq, n in enumerate((9, 6, 5)) for i in range(n)]
            ops = tuple(KvOp(KvKind.CP, 0, seq, 0, 9) for seq in (1, 2))
            run = Run(id=9, rows=tuple(rows), ops=ops, logits_requests=FULL)
            outcome = group.decode(run, None, 0, dead)
            assert outcome.dropped == (dead - {9, 10, 11})
            found.append(np.array([row.logits for row in outcome.rows[:9]]))
            text.ops += [KvOp(KvKind.RM, 1), KvOp(KvKind.RM, 2)]
            found.append(text.decode([text.row(18, 0)]))
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        assert_close(ours, theirs)
