"""Runs that pause between two of their layers for others: all have the bits that they have one after the other."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from support.architectures import write
from support.groups import Parts
from support.zoo import ZOO, make

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.messages import KvKind, KvOp, LogitsKind, LogitsRequest, Row, Run
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.stage import Outcome, Stage

HYBRID = ("qwen3next", "qwen35moe", "kimi-linear", "nemotron_h_moe", "granitehybrid", "falcon-h1", "jamba", "lfm2")
FULL = (LogitsRequest(LogitsKind.FULL),)
NAMES = ("llama", "gemma3", "qwen3moe", "deepseek2", "gpt-oss", "cohere2", *HYBRID)
N_CHUNKS, CHUNK = 3, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def rows_of(tokens: Sequence[int], seq: int, start: int) -> tuple[Row, ...]:
    last = len(tokens) - 1
    return tuple(
        Row(token=token, pos=start + i, seqs=(seq,), request=seq, logits_request=0 if i == last else -1)
        for i, token in enumerate(tokens)
    )


def prompt_runs(hidden: bool = False) -> list[Run]:
    """`hidden`: the hidden states of all rows are wanted, instead of the last row's logits."""
    tokens = np.random.default_rng(1).integers(1, 90, N_CHUNKS * CHUNK).tolist()
    starts = range(0, N_CHUNKS * CHUNK, CHUNK)
    runs = [
        Run(id=10 + i, rows=rows_of(tokens[at : at + CHUNK], 1, at), logits_requests=FULL, pauses=True)
        for i, at in enumerate(starts)
    ]
    if not hidden:
        return runs
    wanted = (LogitsRequest(LogitsKind.HIDDEN),)
    rows = [tuple(structs.replace(row, logits_request=0) for row in run.rows) for run in runs]
    return [structs.replace(run, rows=own, logits_requests=wanted) for run, own in zip(runs, rows, strict=True)]


def short_runs() -> list[Run]:
    """Tokens of another sequence, with branches that are rejected."""
    tokens = np.random.default_rng(2).integers(1, 90, 40).tolist()
    runs = []
    for i in range(12):
        ops = (KvOp(KvKind.RM, 2), KvOp(KvKind.CP, 0, 2)) if i else ()
        rows = (*rows_of(tokens[i : i + 1], 0, i), *(rows_of(tokens[-1:], 2, i) if i else ()))
        runs.append(Run(id=100 + i, rows=rows, ops=ops, logits_requests=FULL))
    return runs


def runs_with_states() -> list[Run]:
    """As `short_runs` for models with recurrent states: of one sequence, whose state is kept before each run. Each
    third run is taken back."""
    tokens = np.random.default_rng(3).integers(1, 90, 12).tolist()
    runs, pos = [], 0
    for i, token in enumerate(tokens):
        ops: tuple[KvOp, ...] = ()
        if i % 3 == 2:
            pos -= 1
            ops = (KvOp(KvKind.CP, 2, 0, 0, 0), KvOp(KvKind.RM, 0, p0=pos))
        ops += (KvOp(KvKind.RM, 2), KvOp(KvKind.CP, 0, 2, 0, 0)) if i else ()
        runs.append(Run(id=100 + i, rows=rows_of((token,), 0, pos), ops=ops, logits_requests=FULL))
        pos += 1
    return runs


@contextlib.contextmanager
def two_stages(path: Path, context: ContextConfig, inputs: Sequence[int] = ()) -> Iterator[list[Stage]]:
    file, model = ModelFile.open(path), ModelConfig(path=path)
    middle = file.n_layer // 2
    with contextlib.ExitStack() as stack:
        stages = []
        for layers in ((0, middle), (middle, file.n_layer)):
            stages.append(Stage(file, layers, model, context, (1, 1), wanted_inputs=inputs, pauses=True))
            stages[-1]._native.continues = 0  # it may pause at each place
            stack.callback(stages[-1].close)
        yield stages


class Computed:
    """Both kinds of runs through two stages, the short ones in pauses of the others or behind each of them."""

    def __init__(self, stages: Sequence[Stage], pauses: bool, hidden: bool) -> None:
        beside_all = short_runs() if stages[0].rolls_back else runs_with_states()
        self.n_pauses = 0
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        """By stage and run."""
        each = -(-len(beside_all) // N_CHUNKS)
        short = iter(beside_all)
        for run in prompt_runs(hidden):
            beside = list(itertools.islice(short, each))
            for number, stage in enumerate(stages):
                left = list(beside)
                if pauses:
                    assert stage.pauses is not None
                    stage.pauses.at(self._at_pause(stages, number, left))
                    stage.pauses.want()
                self.decode(stages, number, run)
                for later in left:
                    self.decode(stages, number, later)

    def _at_pause(self, stages: Sequence[Stage], number: int, left: list[Run]) -> Callable[[], None]:
        def at_pause() -> None:
            stage = stages[number]
            assert stage.pauses is not None
            self.n_pauses += 1
            with stage.paused():
                if left:
                    self.decode(stages, number, left.pop(0))
            stage.pauses.want()

        return at_pause

    def decode(self, stages: Sequence[Stage], number: int, run: Run) -> None:
        incoming = self.outcomes[number - 1, run.id].outgoing if number else None
        self.outcomes[number, run.id] = stages[number].decode(run, incoming)


def check(path: Path, context: ContextConfig, hidden: bool = False, inputs: Sequence[int] = ()) -> None:
    with two_stages(path, context, inputs) as stages:
        ours = Computed(stages, True, hidden)
    with two_stages(path, context, inputs) as stages:
        theirs = Computed(stages, False, hidden)
    check_same(ours, theirs)


def check_same(ours: Computed, theirs: Computed) -> None:
    """With pauses and without."""
    assert ours.n_pauses > 2 * N_CHUNKS, "no pauses between layers"
    assert theirs.n_pauses == 0
    for of, outcome in theirs.outcomes.items():
        own = ours.outcomes[of]
        assert own.outgoing == outcome.outgoing
        for states, others in zip(own.layer_inputs, outcome.layer_inputs, strict=True):
            np.testing.assert_array_equal(states, others)
        for one, other in zip(own.rows, outcome.rows, strict=True):
            np.testing.assert_array_equal(one.logits, other.logits)
        assert (own.paused_s > 0) == (of[1] < 100)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_pauses_change_no_bit(name: str, exact: bool, folder: Path) -> None:
    path = make(name, folder / f"{name}.gguf") if name in ZOO else write(name, folder / f"{name}.gguf", n_layer=4)
    check(path, ContextConfig(n_ctx=256, n_seq=3, exact=exact))


def test_deepseek4(folder: Path) -> None:
    """With `exact`, it serves one request at a time."""
    path = write("deepseek4", folder / "deepseek4.gguf", n_layer=4)
    check(path, ContextConfig(n_ctx=256, n_seq=3))


def test_graphs_that_name_no_place_do_not_pause(folder: Path) -> None:
    with two_stages(
        write("qwen4exp", folder / "qwen4exp.gguf", n_layer=4), ContextConfig(n_ctx=256, n_seq=3)
    ) as stages:
        assert all(stage.pauses is None for stage in stages)
    with two_stages(make("llama", folder / "llama.gguf"), ContextConfig(n_ctx=256, n_seq=3)) as stages:
        assert all(stage.pauses is not None for stage in stages)


def test_hidden_states_are_those_of_the_run_that_paused(folder: Path) -> None:
    check(make("llama", folder / "llama.gguf"), ContextConfig(n_ctx=256, n_seq=3), hidden=True)


def test_layers_inputs_are_those_of_their_run(folder: Path) -> None:
    path, context = make("llama", folder / "llama.gguf"), ContextConfig(n_ctx=256, n_seq=3)
    inputs = (0, 1, ModelFile.open(path).n_layer - 1)
    with two_stages(path, context, inputs) as stages:
        assert {layer for stage in stages for layer in stage.tapped} == set(inputs)
    check(path, context, inputs=inputs)


@pytest.mark.parametrize("shares", [(1, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3moe", "deepseek2", "qwen35moe", "jamba"])
def test_parts_of_a_group_pause_at_the_same_places(name: str, shares: tuple[float, ...], folder: Path) -> None:
    path = folder / f"{name}-group.gguf"
    path = make(name, path, n_ff=512) if name in ZOO else write(name, path, n_layer=4)
    file, context = ModelFile.open(path), ContextConfig(n_ctx=256, n_seq=3)
    found = []
    for pauses in (True, False):
        parts = Parts(file, (0, file.n_layer), ModelConfig(path=path), context, shares, pauses=True)
        for stage in parts.stages:
            stage._native.continues = 0
        found.append(parts.each(lambda part: Computed([parts.stages[part]], pauses, False)))  # noqa: B023
        parts.close()
    for ours, theirs in zip(*found, strict=True):
        check_same(ours, theirs)


def test_a_run_can_be_cancelled_in_its_pause(folder: Path) -> None:
    path = make("llama", folder / "llama.gguf")
    with two_stages(path, ContextConfig(n_ctx=256, n_seq=3, exact=True)) as (stage, _):
        assert stage.pauses is not None
        first, second = short_runs()[:2]
        found: list[Outcome] = []

        def at_pause() -> None:
            with stage.paused():
                found.append(stage.decode(first, None))
            stage.cancel(10)

        stage.pauses.at(at_pause)
        stage.pauses.want()
        prompt = stage.decode(prompt_runs()[0], None)
        assert prompt.cancelled
        assert prompt.outgoing == b""
        after = stage.decode(second, None)
        stage.forget_all()
        assert [outcome.outgoing for outcome in (*found, after)] == [
            stage.decode(run, None).outgoing for run in (first, second)
        ]
