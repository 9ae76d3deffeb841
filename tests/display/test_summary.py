"""The numbers of a finished request, on the terminal and in files."""

from __future__ import annotations

import io
import json
import math
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console
from support.screen import Rig, finished_request, speculated_request, speculating_ranks, two_ranks

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.display import files
from ggpipe.display.live.terminal import Terminal
from ggpipe.display.tables import summary
from ggpipe.errors import UsageError
from ggpipe.stats.activity import wasted_s
from ggpipe.stats.records import RequestStats


def test_summary_has_the_numbers() -> None:
    ranks = two_ranks()
    ranks[0].load_s, ranks[1].load_s = 1.5, 3.125
    out = io.StringIO()
    Console(file=out, width=120).print(summary.summary_table(finished_request(), ranks, 99.0, 120))
    rows = [re.split(r" {2,}", row.strip()) for row in out.getvalue().splitlines() if row.strip()]
    assert rows[0] == ["prompt", "100 tokens", "prefill", "50.0 t/s", "TTFT", "2.00 s", "load", "3.12 s"]
    assert rows[1] == ["answer", "5 tokens", "decode", "4.00 t/s", "ITL p50", "250 ms", "ITL p99", "250 ms"]
    assert rows[2] == ["ended", "end of text", "seed", "42"]
    names = ["compute", "busy", "idle", "occupied", "sent/run", "sent", "memory"]
    assert rows[3] == ["rank", "host", "layers", "threads", *names]
    work = ["1.25 s", "1.50 s", "1.50 s", "50 %", "16.4 kB", "98.4 kB"]
    assert rows[4] == ["0", "node-a.example.org", "0-7", "8/16", *work, "4.2 GB"]
    assert rows[5] == ["1", "10.0.0.23", "8-15", "4", *work, "5.2 GB"]


def test_summary_of_speculation() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(summary.summary_table(speculated_request(), speculating_ranks(), 99.0, 120))
    rows = [re.split(r" {2,}", row.strip()) for row in out.getvalue().splitlines() if row.strip()]
    assert rows[2:5] == [
        ["mode", "async", "drafted", "6 tokens", "submitted", "5 tokens", "accepted", "2 tokens"],
        ["per run", "2.00 tokens", "submitted", "2 runs", "acceptance", "40 %", "cancelled", "2 tokens"],
        ["verified", "1 run", "cancelled", "1 run", "ended", "length", "seed", "0"],
    ]
    assert rows[5][4:9] == ["compute", "busy", "idle", "wasted", "occupied"]
    assert rows[6][:3] == ["0", "node-a.example.org", "0-7"]
    assert rows[6][4:9] == ["310 ms", "400 ms", "600 ms", "70 ms", "40 %"]
    assert rows[7][:3] == ["1", "10.0.0.23", "8-15"]
    assert rows[7][4:9] == ["300 ms", "321 ms", "679 ms", "25 ms", "32 %"]
    assert rows[8][:3] == ["draft 0", "node-a.example.org", "0-3"]
    assert rows[8][4:9] == ["60 ms", "70 ms", "930 ms", "20 ms", "7 %"]


def test_summary_says_that_a_draft_paused() -> None:
    request, out = speculated_request(), io.StringIO()
    request.counters.paused_tokens[0] = 3
    Console(file=out, width=120).print(summary.summary_table(request, speculating_ranks(), 99.0, 120))
    assert re.search(r"draft paused +3 tokens", out.getvalue())
    assert summary.request_object(request, speculating_ranks())["drafters"] == [
        {"drafter": "draft", "judged_tokens": 0, "right_tokens": 0, "paused_tokens": 3, "output_tokens": 2}
    ]


def test_no_speculation_numbers_without_speculation() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(summary.summary_table(finished_request(), speculating_ranks(), 99.0, 120))
    for word in ("mode", "draft", "accept", "cancelled", "wasted"):
        assert word not in out.getvalue()


def test_wasted_is_cancelled_runs_and_the_share_of_rejected_rows() -> None:
    stats = speculated_request()
    wasted = wasted_s(stats)
    assert wasted[0, False] == pytest.approx(0.08 / 4 + 0.05)
    assert wasted[1, False] == pytest.approx(0.1 / 4)
    assert wasted[0, True] == pytest.approx(0.02)
    stats.counters.rejected_rows = {1: 7, 2: 4, 3: 2}  # more rows than it had are all of them
    stats.runs[0] = structs.replace(
        stats.runs[0], n_run_rows=2 * stats.runs[0].n_rows, cancelled=True
    )  # half is another's
    assert wasted_s(stats)[1, False] == pytest.approx(0.1 / 2 + 0.1)
    assert wasted_s(finished_request()) == {}


def test_summary_of_nothing() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(summary.summary_table(RequestStats(arrived=5.0), two_ranks(), 5.0, 100))
    Console(file=out, width=100).print(summary.summary_table(RequestStats(), [], 5.0, 100))
    assert "ITL p50   -" in out.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
@pytest.mark.parametrize(("stats", "share"), [(finished_request(), "50 %"), (speculated_request(), "40 %")])
def test_summary_fits(width: int, stats: RequestStats, share: str) -> None:
    out = io.StringIO()
    table = summary.summary_table(stats, speculating_ranks(), 99.0, width)
    Console(file=out, width=width).print(table)
    assert "…" not in out.getvalue()
    assert share in out.getvalue()
    assert all(len(row) <= width for row in out.getvalue().splitlines())


def test_summary_without_a_terminal_is_plain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    summary.print_summary(None, finished_request(), two_ranks(), 99.0)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.isascii()
    assert "\x1b" not in err
    assert "decode    4.00 t/s" in err
    assert all(row == row.rstrip() and len(row) <= 100 for row in err.splitlines())


def test_summary_on_the_terminal() -> None:
    rig = Rig(100, 30)
    summary.print_summary(Terminal(console=rig.console, stdout_shared=True), finished_request(), two_ranks(), 99.0)
    assert "\x1b[" in rig.screen.raw
    assert "node-a.example.org" in rig.screen.text


def test_csv_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    summary.append_csv(path, finished_request())
    summary.append_csv(path, RequestStats())
    first, second = ([float(x) for x in line.split(",")] for line in path.read_text().splitlines())
    assert first == [50.0, 4.0, 0.25, 2.0]
    assert len(second) == 4
    assert all(math.isnan(x) for x in second)


def test_json_has_everything(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    ranks = two_ranks()
    ranks[1].load_s = 3.0
    extra = {"model": Path("m.gguf"), "seed": "ours wins"}
    files.write_json(path, summary.request_object(finished_request(), ranks, extra))
    read = json.loads(path.read_text())
    assert read["model"] == "m.gguf"
    assert (read["seed"], read["finish"], read["n_prompt_tokens"], read["n_generated_tokens"]) == (
        42,
        "end of text",
        100,
        5,
    )
    assert read["token_times_s"] == [2.0, 2.25, 2.5, 2.75, 3.0]
    assert (read["ttft_s"], read["itl_p50_s"], read["itl_mean_s"], read["decode_s"]) == (2.0, 0.25, 0.25, 1.0)
    assert (read["prefill_tokens_per_s"], read["decode_tokens_per_s"], read["load_s"]) == (50.0, 4.0, 3.0)
    assert read["elapsed_s"] == 3.0
    assert read["ranks"][1] == {
        "rank": 1,
        "draft": False,
        "model": 0,
        "host": "10.0.0.23",
        "layers": [8, 16],
        "threads": [4, 4],
        "load_bytes": 5 * 10**9,
        "load_s": 3.0,
        "resident_bytes": 52 * 10**8,
        "runs": 6,
        "compute_s": 1.25,
        "busy_s": 1.5,
        "idle_s": 1.5,
        "wasted_s": 0.0,
        "sent_bytes": 98400,
    }
    files.write_json(path, summary.request_object(RequestStats(), [], None))
    assert json.loads(path.read_text())["ttft_s"] is None


def test_json_has_everything_of_speculation(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    stats = speculated_request()
    stats.counters.by_lead = {2: [1, 0], 1: [4, 2]}
    files.write_json(path, summary.request_object(stats, speculating_ranks()))
    read = json.loads(path.read_text())
    assert read["mode"] == "async"
    assert [tuple(entry.values()) for entry in read["by_lead"]] == [(1, 4, 2), (2, 1, 0)]
    assert read["speculation"] == asdict(SpeculationConfig(n_draft=3))
    assert read["drafted"] == [False, True, True, False]
    tokens = [read[f"{what}_tokens"] for what in ("drafted", "submitted", "accepted", "cancelled")]
    runs = [read[f"{what}_runs"] for what in ("speculative", "verified", "cancelled")]
    assert (tokens, runs) == ([6, 5, 2, 2], [2, 1, 1])
    assert (read["acceptance"], read["accepted_tokens_per_run"]) == (0.4, 2.0)
    assert [(r["rank"], r["draft"]) for r in read["ranks"]] == [(0, False), (1, False), (0, True)]
    assert [r["wasted_s"] for r in read["ranks"]] == pytest.approx([0.07, 0.025, 0.02])
    assert [r["idle_s"] for r in read["ranks"]] == pytest.approx([0.6, 0.679, 0.93])
    files.write_json(path, summary.request_object(finished_request(), speculating_ranks()))
    read = json.loads(path.read_text())
    assert (read["mode"], read["drafted_tokens"], read["acceptance"]) == ("iterative", 0, None)


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    files.check_writable(tmp_path / "new.csv")
    files.check_writable(Path(os.devnull))
    missing = tmp_path / "no" / "such.csv"
    for path in (missing, tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match="cannot write to"):
            files.check_writable(path)
    assert not (tmp_path / "new.csv").exists()
    with pytest.raises(UsageError, match="No such file"):
        summary.append_csv(missing, finished_request())
    with pytest.raises(UsageError, match="No such file"):
        files.write_json(missing, {})
