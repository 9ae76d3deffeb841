"""The bench: turns, statistics, files; real runs inside one process and under mpirun."""

from __future__ import annotations

import collections
import csv
import io
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import TARGET
from support.pipeline import local_session
from support.requests import asked
from support.screen import speculated_request, speculating_ranks

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.request import Finish
from ggpipe.display.tables import bench as tables
from ggpipe.engine.session import Session
from ggpipe.errors import UsageError
from ggpipe.profiling import bench
from ggpipe.stats.records import RankStats, RequestStats, quartiles
from ggpipe.stats.summary import BenchRun, summarise

DRAFT = TARGET.with_name("tales-draft.gguf")
MODES: tuple[bench.BenchMode, ...] = ("iterative", "speculative", "async", "single")
CONFIG = EngineConfig(
    ModelConfig(path=TARGET),
    ContextConfig(n_ctx=256),
    PipelineConfig(LayerSplit((0.5, 0.5)), threads=(1,)),
    (DraftConfig(model=ModelConfig(path=DRAFT), context=ContextConfig(n_ctx=256), layer_split=LayerSplit((1.0,))),),
)
WORK = bench.BenchWork(
    prompts={"a": (5, 6, 7, 8), "b": tuple(range(20, 50))},
    modes=MODES,
    rounds=2,
    n_predict=6,
    sampling=SamplingConfig(seed=3, ignore_eos=True),
    speculation=SpeculationConfig(n_draft=3),
)


# Who has a turn when


def test_modes_take_turns_in_another_order_each_time() -> None:
    order = bench.turns(["a", "b"], MODES, 4)
    assert [turn for turn in order if turn.round == 0] == [bench.BenchTurn(mode, 0, "a") for mode in MODES]
    rest = order[len(MODES) :]
    assert collections.Counter(rest) == {
        bench.BenchTurn(mode, i, prompt): 1 for mode in MODES for i in range(1, 5) for prompt in ("a", "b")
    }
    groups = [rest[at : at + 4] for at in range(0, len(rest), 4)]
    assert all(len({(turn.round, turn.prompt) for turn in group}) == 1 for group in groups), "side by side"
    firsts = collections.Counter((group[0].mode) for group in groups)
    assert firsts == dict.fromkeys(MODES, 2)


def test_layouts_take_turns_in_each_mode() -> None:
    layouts = ("1.0", "1.0*2", "0.5,0.5")
    order = bench.turns(["a"], ("iterative", "async"), 2, layouts)
    cases = replace(WORK, modes=("iterative", "async"), layouts=layouts).cases
    assert cases == [f"{layout} {mode}" for mode in ("iterative", "async") for layout in layouts]
    assert [turn.case for turn in order] == [*cases, *cases, *cases[1:], cases[0]]
    assert [turn.round for turn in order] == [0] * 6 + [1] * 6 + [2] * 6


def test_a_context_without_room() -> None:
    bench.check_room("a", (1, 2, 3), 5, 8)
    with pytest.raises(UsageError, match=r"a has 3 tokens, `n_predict` is 6, .* room for 8: raise `n_ctx` to 9$"):
        bench.check_room("a", (1, 2, 3), 6, 8)


# Inside one process


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with local_session(CONFIG, 3) as session:
        yield session


def test_a_bench_inside_one_process(session: Session) -> None:
    seen: list[bench.BenchTurn] = []
    with bench.open_single(CONFIG) as single:
        runs = list(bench.measure({"": session}, Session.load(single), WORK, seen.append))
    assert seen == bench.turns(["a", "b"], MODES, 2)
    assert [(run.mode, run.round, run.prompt) for run in runs] == [(t.mode, t.round, t.prompt) for t in seen if t.round]
    assert all(run.stats.n_generated == len(run.tokens) == 6 for run in runs)
    for run in runs:
        assert run.stats.speculation.mode == ("iterative" if run.mode == "single" else run.mode)
        assert len(run.ranks) == (1 if run.mode == "single" else 3)
        assert run.stats.seed == 3
    assert {run.ranks[0].layers for run in runs if run.mode == "single"} == {(0, 8)}
    assert {s.mode: s.pooled.n_requests for s in summarise(runs, MODES)} == dict.fromkeys(MODES, 4)


def test_a_stop_ends_it(session: Session) -> None:
    def stop(turn: bench.BenchTurn) -> None:
        if (turn.round, turn.prompt, turn.mode) == (2, "a", "async"):
            session.stop()

    work = replace(WORK, modes=("iterative", "async"))
    runs = list(bench.measure({"": session}, None, work, stop))
    assert [(run.round, run.prompt) for run in runs] == [(1, "a"), (1, "a"), (1, "b"), (1, "b")]
    assert list(session.stream(asked((5, 6), WORK.sampling, 2))), "it still serves"


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_what_stops_the_process_stops_its_single_session(session: Session, number: signal.Signals) -> None:
    received: list[int] = []
    before = signal.signal(number, lambda n, _: received.append(n))
    try:
        with bench.open_single(CONFIG) as single:
            alone = Session.load(single)
            work = replace(WORK, modes=("single",))
            turns = bench.measure(
                {"": session}, alone, work, lambda t: os.kill(os.getpid(), number) if t.round == 2 else None
            )
            assert [run.round for run in turns] == [1, 1]
        assert received == [number]
        os.kill(os.getpid(), number)
        assert received == [number, number], "the handler is back"
    finally:
        signal.signal(number, before)


def test_when_one_process_is_left_out(session: Session) -> None:
    assert bench.why_not_single(CONFIG, session) is None
    why = bench.why_not_single(CONFIG, session, free_bytes=10**6)
    assert why is not None
    assert why.endswith("and this machine has 0.0 GB left")
    with local_session(replace(CONFIG, pipeline=PipelineConfig(threads=(1,)), drafts=()), 1) as alone:
        assert bench.why_not_single(CONFIG, alone) == "one rank already holds the whole model"


# Statistics


def measured(
    mode: str, number: int, step_s: float, tokens: tuple[int, ...] = (1, 2, 3), prompt: str = "a", **counters: Any
) -> BenchRun:
    """Three tokens: the first after a second, the others `step_s` apart; two stages that were busy half of the time."""
    stats = RequestStats(n_prompt=10, arrived=5.0, ended=6.0 + 2 * step_s, finish=Finish.LENGTH)
    stats.token_times = [6.0, 6.0 + step_s, 6.0 + 2 * step_s]
    stats.speculation = SpeculationConfig(mode="iterative" if mode == "single" else mode)  # type: ignore[arg-type]
    busy_s = (1.0 + 2 * step_s) / 2
    stats.ranks = [RankStats(rank=i, layers=(i, i + 1), compute_s=busy_s / 2, busy_s=busy_s) for i in (0, 1)]
    stats.ranks.append(RankStats(rank=2, model=1, layers=(0, 1), busy_s=busy_s))
    for name, value in counters.items():
        setattr(stats.counters, name, value)
    return BenchRun(mode=mode, round=number, prompt=prompt, tokens=tokens, stats=stats, ranks=stats.ranks)


def test_quartiles() -> None:
    assert quartiles([]) is None
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)


def test_ratios_are_of_the_same_round() -> None:
    """The machine gets slower and slower; async is twice as fast throughout."""
    runs = [measured(mode, i, 0.1 * i / gain) for i in (1, 2, 3, 4) for mode, gain in (("iterative", 1), ("async", 2))]
    iterative, fast = summarise(runs, ["iterative", "async", "single"])
    assert fast.gain == pytest.approx((2, 2, 2))
    assert iterative.gain == pytest.approx((1, 1, 1))
    assert iterative.tokens_per_s == pytest.approx((3.125, 25 / 6, 6.25))
    assert iterative.itl_s is not None
    assert iterative.itl_s.middle == pytest.approx(0.25)
    assert iterative.ttft_s == (1.0, 1.0, 1.0)
    assert iterative.pooled.itl_p50_s == pytest.approx(0.2)
    assert iterative.pooled.itl_p99_s == pytest.approx(0.4)
    assert iterative.pooled.occupancy == pytest.approx(0.5), "the draft does not count"


def test_shares_are_of_all_runs_together() -> None:
    one = measured("async", 1, 0.1, submitted_tokens=10, accepted_tokens=9, speculative_runs=4, cancelled_runs=1)
    other = measured("async", 2, 0.1, submitted_tokens=30, accepted_tokens=1, speculative_runs=4, cancelled_runs=3)
    (summary,) = summarise([one, other], ["async"])
    assert (summary.pooled.acceptance, summary.pooled.cancelled, summary.pooled.wasted) == (0.25, 0.5, 0.0)
    (summary,) = summarise([measured("iterative", 1, 0.1)], ["iterative"])
    assert (summary.pooled.acceptance, summary.pooled.cancelled, summary.pooled.wasted) == (None, None, None)


def test_wasted_is_what_stages_decoded_for_nothing() -> None:
    stats = speculated_request()
    for rank in stats.ranks:
        rank.layers = (0, 8)
    run = BenchRun(mode="async", round=1, prompt="a", tokens=(), stats=stats, ranks=speculating_ranks())
    (summary,) = summarise([run], ["async"])
    assert summary.pooled.wasted == pytest.approx((0.07 + 0.025) / (0.31 + 0.3))


def test_texts_are_compared_with_the_same_rounds() -> None:
    runs = [measured(mode, i, 0.1, (i, 2, 3)) for i in (1, 2) for mode in ("iterative", "async", "single")]
    text = rendered(runs, ["iterative", "async", "single"])
    assert text.endswith("Medians [quartiles] of 2 rounds, 1 prompt, 3 tokens each. All outputs are the same.")
    runs[-1] = measured("single", 2, 0.1, (9, 9))
    text = rendered(runs, ["iterative", "async", "single"])
    assert "1 of 4 outputs differ from iterative's" in text
    assert "texts" not in rendered(runs[:1], ["iterative"])


def rendered(runs: list[BenchRun], modes: list[str]) -> str:
    out = io.StringIO()
    tables.print_bench(None, out.write, runs, modes)
    assert all(line == line.rstrip() and len(line) <= 120 for line in out.getvalue().splitlines())
    assert out.getvalue().isascii()
    return out.getvalue().strip()


def test_the_table() -> None:
    runs = [measured(mode, i, step) for i in (1, 2) for mode, step in (("iterative", 0.1), ("async", 0.05))]
    runs += [measured(mode, i, 0.2, prompt="b") for i in (1, 2) for mode in ("iterative", "async")]
    lines = rendered(runs, ["iterative", "async"]).splitlines()
    titles = ["mode", "t/s", "x", "iterative", "TTFT", "ITL", "p50", "ITL", "p99", "occupied"]
    assert lines[0].split() == titles, "nothing of what no run has"
    assert lines[1].split()[:5] == ["iterative", "7.50", "[5.00-10.0]", "-", "1.00"]
    assert lines[2].split()[:5] == ["async", "12.5", "[5.00-20.0]", "1.50", "[1.00-2.00]"]
    assert [line.split() for line in lines[4:7]] == [
        ["t/s", "after", "tokens", "iterative", "async"], ["a", "10", "10.0", "20.0", "(2.00x)"],
        ["b", "10", "5.00", "5.00", "(1.00x)"],
    ]  # fmt: skip


def test_without_iterative_the_first_mode_is_the_base() -> None:
    runs = [measured("speculative", 1, 0.1), measured("async", 1, 0.05)]
    assert "x speculative" in rendered(runs, ["speculative", "async"])


# Files


def test_csv_has_pipeinfers_columns_first(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("old\n")
    tables.begin_bench_csv(path)
    for run in (measured("async", 1, 0.1, prompt="a, b"), measured("single", 2, 0.5)):
        tables.append_bench_csv(path, run)
    rows = list(csv.reader(path.open()))
    assert rows[0] == ["prefill_tokens_per_s", "decode_tokens_per_s", "itl_s", "ttft_s", "mode", "round", "prompt"]
    assert [float(cell) for cell in rows[1][:4]] == pytest.approx([10.0, 10.0, 0.1, 1.0])
    assert rows[1][4:] == ["async", "1", "a, b"]
    assert rows[2][4:] == ["single", "2", "a"]


def test_json_has_every_run(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    runs = [measured("iterative", 1, 0.1), measured("single", 1, 0.05)]
    tables.write_bench_json(path, runs, ["iterative", "single"], {"model": "m.gguf"})
    read = json.loads(path.read_text())
    assert read["model"] == "m.gguf"
    assert [(run["mode"], run["round"], run["prompt"], run["n_prompt_tokens"]) for run in read["runs"]] == [
        ("iterative", 1, "a", 10), ("single", 1, "a", 10)
    ]  # fmt: skip
    assert read["runs"][0]["token_times_s"] == pytest.approx([1.0, 1.1, 1.2])
    assert [summary["mode"] for summary in read["summary"]] == ["iterative", "single"]
    assert read["summary"][1]["gain"] == pytest.approx({"low": 2.0, "middle": 2.0, "high": 2.0})


@pytest.mark.parametrize(("modes", "names"), [
    (["iterative"], ["itl", "occupancy", "speed", "ttft"]),
    (["iterative", "async"], ["acceptance", "itl", "occupancy", "speed", "ttft"]),
])  # fmt: skip
def test_plots_are_drawn(modes: list[str], names: list[str], tmp_path: Path) -> None:
    runs = [measured(mode, i, 0.1, prompt=prompt) for mode in modes for i in (1, 2) for prompt in ("a", "b")]
    if "async" in modes:
        stats, ranks = speculated_request(), speculating_ranks()
        runs.append(BenchRun(mode="async", round=3, prompt="a", tokens=(), stats=stats, ranks=ranks))
    written = tables.write_plots(tmp_path, "png", runs, modes)
    assert sorted(tmp_path.iterdir()) == sorted(written) == [tmp_path / f"{name}.png" for name in names]
