"""KV cells of a pipeline: sequence operations, trees in one run, rollback, and runs that are stopped halfway."""

import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.pipeline import HEADROOM, Pipeline
from support.reference import Logits, Reference, run_of
from support.runs import TREE, rows_of
from support.zoo import make, pair_script

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.messages import KvKind, KvOp, LogitsKind, LogitsRequest, Run
from ggpipe.errors import RunError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.stage import Stage

N_SEQ = 4
CONTEXT = ContextConfig(n_ctx=256, n_seq=N_SEQ, fast_kernels=False)
FIELDS = {"n_seq_max": N_SEQ, "kv_unified": True}
FULL = (LogitsRequest(LogitsKind.FULL),)
RM, CP = KvKind.RM, KvKind.CP


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.mark.parametrize("cuts", [(1,), (1, 2)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3moe", "deepseek2", "gpt-oss", "falcon", "bloom"])
def test_trees(name: str, cuts: tuple[int, ...], folder: Path) -> None:
    path = make(name, folder / f"{name}.gguf")
    with Pipeline(path, cuts, CONTEXT) as pipeline, Reference(path, 256, context=FIELDS) as reference:
        for run in TREE:
            if run.rows:
                np.testing.assert_array_equal(pipeline.decode(run), reference.decode(run), f"run {run.id}")
            else:
                assert not pipeline.outcome(run).rows
                assert all(reference.apply(op) for op in run.ops)


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(seed: int, folder: Path) -> None:
    """Sequences grow, fork, are cut back and die, in any order."""
    path = make("llama", folder / "llama.gguf")
    rng = np.random.default_rng(seed)
    length = [0] * N_SEQ
    with Pipeline(path, (2,), CONTEXT) as pipeline, Reference(path, 256, context=FIELDS) as reference:
        for i in range(40):
            ops = []
            for _ in range(rng.integers(0, 3)):
                seq, other = map(int, rng.permutation(N_SEQ)[:2])
                kind = rng.choice(["cut", "clear", "fork"], p=[0.4, 0.25, 0.35])
                keep = int(rng.integers(0, length[seq] + 1))
                if kind == "cut":
                    ops.append(KvOp(RM, seq, p0=keep))
                    length[seq] = keep
                elif kind == "clear":
                    ops.append(KvOp(RM, seq))
                    length[seq] = 0
                else:
                    ops += [KvOp(RM, other), KvOp(CP, seq, other, 0, keep)]
                    length[other] = keep
            rows = []
            for seq in rng.permutation(N_SEQ)[: rng.integers(1, N_SEQ)].tolist():
                if length[seq] > 40:
                    ops.append(KvOp(RM, seq))
                    length[seq] = 0
                for _ in range(rng.integers(1, 5)):
                    rows.append((int(rng.integers(3, 384)), length[seq], (seq,)))
                    length[seq] += 1
            run = Run(id=i + 1, rows=rows_of(*rows), ops=tuple(ops), logits_requests=FULL)
            np.testing.assert_array_equal(pipeline.decode(run), reference.decode(run), f"run {run}")


@pytest.mark.parametrize("n_rejected", [1, 25, 250])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt-oss", "baichuan-13b"])
def test_rollback_leaves_no_trace(name: str, n_rejected: int, folder: Path) -> None:
    """The gemmas and gpt-oss have sliding windows of 32 tokens: what has left the window comes back into it."""
    path = make(name, folder / f"{name}.gguf")
    context = ContextConfig(n_ctx=512, n_ubatch=70)
    prompt, then = range(3, 73), range(30, 35)
    with Pipeline(path, (1,), context) as pipeline:
        pipeline.decode(run_of(1, prompt, 0))
        for at in range(0, n_rejected, 50):
            pipeline.decode(run_of(2 + at, range(40, 40 + min(50, n_rejected - at)), 70 + at))
        back = (KvOp(RM, 0, p0=70),)
        after = [pipeline.decode(run_of(1000, then, 70, ops=back)), pipeline.decode(run_of(1001, [9], 75))]
    with Pipeline(path, (1,), context) as pipeline:
        pipeline.decode(run_of(1, prompt, 0))
        never = [pipeline.decode(run_of(1000, then, 70)), pipeline.decode(run_of(1001, [9], 75))]
    np.testing.assert_array_equal(np.concatenate(after), np.concatenate(never))


@pytest.mark.parametrize("cuts", [(), (1,)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt-oss"])
def test_rollback_behind_another_sequence(name: str, cuts: tuple[int, ...], folder: Path) -> None:
    """A window of 32 tokens hides the cells that the rollback needs again, while another prompt looks for free ones."""
    path = make(name, folder / f"{name}.gguf")
    context = ContextConfig(n_ctx=512, n_seq=3, exact=True)
    with Pipeline(path, cuts, context) as pipeline:
        pipeline.decode(run_of(1, range(30, 70), 0, (1,)))
        pipeline.decode(run_of(2, range(3, 103), 0))
        pipeline.decode(run_of(3, range(50, 70), 100))
        pipeline.decode(run_of(4, [*range(3, 123), 5, 6, 7, 8], 0, (2,), ops=(KvOp(RM, 1),)))
        after = pipeline.decode(run_of(5, range(20, 25), 100, ops=(KvOp(RM, 0, p0=100),)))
        copied = pipeline.decode(run_of(6, range(20, 25), 60, (1,), ops=(KvOp(CP, 0, 1, 0, 60),)))
    with Pipeline(path, cuts, context) as pipeline:
        pipeline.decode(run_of(1, range(3, 103), 0))
        np.testing.assert_array_equal(after, pipeline.decode(run_of(2, range(20, 25), 100)))
        again = pipeline.decode(run_of(3, range(20, 25), 60, ops=(KvOp(RM, 0, p0=60),)))
        np.testing.assert_array_equal(copied, again)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "rwkv7", "jamba"])
def test_recurrent_models_forget_whole_sequences_only(name: str, folder: Path) -> None:
    path = make(name, folder / f"{name}.gguf")
    with Pipeline(path) as pipeline:
        first = pipeline.decode(run_of(1, range(3, 23), 0))
        with pytest.raises(RunError, match=f"'{name}' models cannot forget part of a sequence"):
            pipeline.decode(run_of(2, [1], 10, ops=(KvOp(RM, 0, p0=10),)))
        again = pipeline.decode(run_of(3, range(3, 23), 0, ops=(KvOp(RM, 0),)))
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize(
    ("name", "n_ctx", "n_prefixes", "partial"),
    [
        ("llama", 512, 16, True),
        ("llama", 12, 9, True),
        ("gemma3", 512, 16, True),
        ("gemma3", 30, 12, True),
        ("mamba", 512, 4, False),
        ("jamba", 512, 4, False),
    ],
)
def test_ids_for_prefixes(name: str, n_ctx: int, n_prefixes: int, partial: bool, folder: Path) -> None:
    """As many as there is room for; each takes a pin where windows slide, and the memory of a state if there is one."""
    path = make(name, folder / f"{name}.gguf")
    file, context = ModelFile.open(path), ContextConfig(n_ctx=n_ctx, n_seq=3)
    stage = Stage(file, (0, file.n_layer), ModelConfig(path=path), context, (1, 1), n_prefixes=16)
    assert (stage.n_prefixes, stage.partial_prefixes) == (n_prefixes, partial)
    last = (2 + n_prefixes,)
    assert len(stage.decode(run_of(1, range(3), 0, last), None).rows) == 3
    stage.close()


def test_full_context_is_an_error(folder: Path) -> None:
    path = make("llama", folder / "llama.gguf")
    with Pipeline(path, (1,), ContextConfig(n_ctx=256)) as pipeline:
        pipeline.decode(run_of(1, [5] * 250, 0))
        with pytest.raises(RunError, match="no free KV cells for 7 tokens; raise `n_ctx`"):
            pipeline.decode(run_of(2, [5] * 7, 250))


# Aborted runs

N_ROWS = 256
TOKENS = tuple(3 + i % 90 for i in range(N_ROWS))
BRANCHES = (  # 56 tokens of both sequences, then 100 of each
    *run_of(0, TOKENS[:56], 32, (0, 1)).rows,
    *run_of(0, TOKENS[:100], 88, (0,)).rows,
    *run_of(0, TOKENS[50:150], 88, (1,)).rows,
)
FORK = (KvOp(CP, 0, 1, 0, 32),)


@pytest.fixture(scope="module")
def slow_model(folder: Path) -> Path:
    """100 million parameters: a run of 256 tokens takes most of a second."""
    shape = pair_script().Shape(n_layer=8, width=1024, n_head=16, n_head_kv=4, n_ff=2816, n_vocab=1024)
    pair_script().make_pair(folder / "slow.gguf", folder / "slow-draft.gguf", shape)
    return folder / "slow.gguf"


def stage_of(path: Path, first: int, last: int) -> Stage:
    return Stage(ModelFile.open(path), (first, last), ModelConfig(path=path), ContextConfig(n_ctx=512, n_seq=2), (1, 1))


class Canceller(threading.Thread):
    """Cancels a run of a stage again and again from its start until it ends, as no one sees when it has begun."""

    def __init__(self, stage: Stage, run: int, after_s: float) -> None:
        super().__init__()
        self._stage, self._run, self._after_s = stage, run, after_s
        self._ended = threading.Event()

    def run(self) -> None:
        wait = self._after_s
        while not self._ended.wait(wait):
            self._stage.cancel(self._run)
            wait = 0.001

    def __enter__(self) -> "Canceller":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def full(stage: Stage, run: Run, incoming: object = None) -> Logits:
    return np.array([row.logits for row in stage.decode(run, incoming).rows])  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", ["one sequence", "two sequences"])
def test_abort_leaves_no_trace(rows: str, slow_model: Path) -> None:
    """Aborted early, and in the middle; the rows' cells are given back for all their sequence ids."""
    prompt, after = run_of(1, range(3, 35), 0), run_of(100, range(200, 205), 32)
    later = run_of(101, range(210, 215), 32, (1,), FORK)
    stopped = (
        run_of(2, TOKENS, 32) if rows == "one sequence" else Run(id=2, rows=BRANCHES, ops=FORK, logits_requests=FULL)
    )
    with Pipeline(slow_model, (), ContextConfig(n_ctx=512, n_seq=2)) as never:
        never.decode(prompt)
        expected = [never.decode(after), never.decode(later)]
    stage = stage_of(slow_model, 0, 8)
    stage.decode(prompt, None)
    start = time.perf_counter()
    assert not stage.decode(stopped, None).cancelled
    took_s = time.perf_counter() - start
    ids = itertools.count(3)
    back: tuple[KvOp, ...] = (KvOp(RM, 0, p0=32), KvOp(RM, 1))
    for after_s in (0.0, took_s / 4):
        while True:
            again = Run(id=next(ids), rows=stopped.rows, ops=(*back, *stopped.ops), logits_requests=FULL)
            with Canceller(stage, again.id, after_s):
                outcome = stage.decode(again, None, HEADROOM)
            if outcome.cancelled:
                break
            after_s, back = after_s / 2, (KvOp(RM, 0, p0=32), KvOp(RM, 1))  # faster than the first time
        assert not outcome.rows
        assert len(outcome.outgoing) == HEADROOM
        back = ()
    # nothing is rolled back here: the stage did that itself
    np.testing.assert_array_equal(full(stage, after), expected[0])
    np.testing.assert_array_equal(full(stage, later), expected[1])
    stage.close()


def test_cancel_of_another_run_does_nothing(slow_model: Path) -> None:
    prompt = run_of(5, TOKENS, 0)
    stage, other = stage_of(slow_model, 0, 8), stage_of(slow_model, 0, 8)
    expected = full(other, prompt)
    stage.cancel(5)  # too early: a rank keeps such a cancel itself
    with Canceller(stage, 4, 0.0), Canceller(stage, 6, 0.0), Canceller(other, 5, 0.0):
        np.testing.assert_array_equal(full(stage, prompt), expected)
    following = run_of(6, range(5), N_ROWS)
    stage.cancel(5)  # too late
    np.testing.assert_array_equal(full(stage, following), full(other, following))
    stage.close()
    other.close()


@pytest.mark.parametrize("aborted", [0, 1])
def test_abort_in_a_pipeline(aborted: int, slow_model: Path) -> None:
    """The stages before have computed the run, those after see its marker; the head rolls back everywhere."""
    prompt = run_of(1, range(3, 35), 0)
    stopped = run_of(2, TOKENS, 32)
    after = run_of(3, range(200, 205), 32, ops=(KvOp(RM, 0, p0=32),))
    with Pipeline(slow_model, (4,), ContextConfig(n_ctx=512, n_seq=2)) as never:
        never.decode(prompt)
        expected = never.decode(run_of(3, range(200, 205), 32))
    with Pipeline(slow_model, (4,), ContextConfig(n_ctx=512, n_seq=2)) as pipeline:
        pipeline.decode(prompt)
        with Canceller(pipeline.stages[aborted], 2, 0.0):
            incoming = None
            if aborted == 1:
                outcome = pipeline.stages[0].decode(stopped, None, HEADROOM)
                incoming = outcome.outgoing[HEADROOM:]
            assert pipeline.stages[aborted].decode(stopped, incoming).cancelled
        if aborted == 0:
            marker = Run(
                id=2, rows=stopped.rows, ops=stopped.ops, logits_requests=stopped.logits_requests, cancelled=True
            )
            outcome = pipeline.stages[1].decode(marker, None, HEADROOM)
            assert outcome.cancelled
            assert not outcome.rows
        np.testing.assert_array_equal(pipeline.decode(after), expected)
