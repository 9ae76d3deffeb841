"""`ggpipe simulate`: its output, its files and its errors."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from support.commands import TARGET, ggpipe
from support.virtual import measured
from test_layering import HEAVY, loaded_by

from ggpipe.cli import run
from ggpipe.cluster.profile import write
from ggpipe.cluster.recording import BUNDLED
from ggpipe.cluster.toml import CLUSTERS

DRAFT, HEAD = (TARGET.with_name(f"tales-{name}.gguf") for name in ("draft", "eagle3"))
SHORT = ("-n", "12", "--prompt-tokens", "8")
MODES = ["iterative", "speculative", "async"]


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> object:
    """Run it; its stdout."""

    def simulated(*arguments: object) -> str:
        code = run(["simulate", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return out

    return simulated


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> object:
    """Run what cannot be; its one line."""

    def refused(*arguments: object) -> str:
        code = run(["simulate", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("ggpipe: error: ")
        return err

    return refused


def rows_of(out: str) -> dict[str, list[str]]:
    """The table's rows by their first cells."""
    lines = [re.split(r" {2,}", line.strip()) for line in out.split("\n\n", 1)[1].splitlines()]
    return {name: cells for name, *cells in lines[1:]}


def test_a_group_has_a_line_for_each_part(simulate) -> None:  # type: ignore[no-untyped-def]
    split = ("nodes4-100g", *SHORT, "--mode", "iterative", "--mpi-layer-split", "0.5*2,0.5*2")
    modes, ranks = simulate(*split, "-ts", "3,1", "--tensor-wire", "f16").split("ranks in iterative\n")
    assert "x iterative" in modes
    found = [line.split()[:3] for line in ranks.splitlines()]
    assert found[0] == ["rank", "host", "layers"]
    assert [line[0] for line in found[1:]] == ["0", "1", "2", "3"]
    assert "ranks in" not in simulate("nodes4-100g", *SHORT, "--mode", "iterative")
    speeds = [line.split()[1] for line in simulate(*split[:-2], "--sweep", "group=1,2,4").split("\n\n")[1].splitlines()]
    assert sorted(speeds[1:], key=float) == speeds[1:]


def test_modes_side_by_side(simulate) -> None:  # type: ignore[no-untyped-def]
    out = simulate("nodes4-gigabit", *SHORT, "-s", 3)
    head, table = out.split("\n\n", 1)
    assert head.splitlines() == [
        "4 nodes of 16 cores and one for the draft, Gigabit Ethernet",
        "target 70B Q4_K_M (80 layers) on 4 ranks; draft 1B Q4_K_M (16 layers) on 1 rank",
        "prompt of 8 tokens, output of 12, agreement 70 %, calibrated",
    ]
    assert table.splitlines()[0].split() == MODES
    rows = rows_of(out)
    assert list(rows) == [
        "t/s", "x iterative", "TTFT", "ITL mean", "ITL p99", "accepted", "per run", "cancelled runs", "occupied",
        "wasted", "draft occupied", "sent/token",
    ]  # fmt: skip
    assert all(len(cells) == 3 for cells in rows.values())
    speeds = [float(cell) for cell in rows["t/s"]]
    assert speeds[0] < speeds[2]
    assert rows["x iterative"][0] == "1.00"
    assert float(rows["x iterative"][2]) == pytest.approx(speeds[2] / speeds[0], abs=0.02)
    assert rows["accepted"][0] == rows["wasted"][0] == "-"
    assert out == simulate("nodes4-gigabit", *SHORT, "-s", 3), "the same seed, the same table"
    assert out != simulate("nodes4-gigabit", *SHORT, "-s", 4)
    assert not any(line.endswith(" ") for line in out.splitlines())


def test_users(simulate, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    files = [tmp_path / name for name in ("all.csv", "all.json", "each.csv")]
    out = simulate(
        "nodes4-gigabit", *SHORT, "--users", 3, "--csv", files[0], "--json", files[1], "--requests-csv", files[2]
    )
    assert out.splitlines()[3] == "3 users, 6 requests, 3 at a time"
    rows = rows_of(out)
    assert list(rows) == [
        "total t/s", "x iterative", "t/s each", "requests/s", "TTFT p50", "TTFT p90", "TTFT p99", "ITL p50", "ITL p90",
        "ITL p99", "queued p50", "queued p90", "queued p99", "accepted", "occupied", "wasted", "draft occupied",
        "sent/token",
    ]  # fmt: skip
    lines = list(csv.DictReader(files[0].open()))
    assert [line["mode"] for line in lines] == MODES
    assert float(lines[0]["total_tokens_per_s"]) == pytest.approx(float(rows["total t/s"][0]), rel=0.01)
    assert float(lines[0]["ttft_p50_s"]) <= float(lines[0]["ttft_p90_s"]) <= float(lines[0]["ttft_p99_s"])
    each = list(csv.DictReader(files[2].open()))
    assert [(line["mode"], line["request"]) for line in each] == [(mode, f"{i}") for mode in MODES for i in range(1, 7)]
    assert {line["n_generated_tokens"] for line in each} == {"12"}
    content = json.loads(files[1].read_text())
    assert content["traffic"]["users"] == 3
    requests = content["results"][0]["requests"]
    assert [request["request"] for request in requests] == [1, 2, 3, 4, 5, 6]
    assert all(request["queue_s"] <= request["ttft_s"] for request in requests)


def test_requests_at_a_rate_and_from_a_file(simulate, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    once = ("nodes4-gigabit", *SHORT, "--mode", "iterative")
    assert "0.5 requests per second, 5 requests, 4 at a time" in simulate(*once, "--rate", 0.5, "--requests", 5)
    assert "\n5 requests, 2 at a time" in simulate(*once, "--requests", 5, "--concurrent", 2)
    path = tmp_path / "arrivals.csv"
    path.write_text("0,8,12\n1.5,20,4\n")
    assert "\n2 requests, 2 at a time" in simulate(*once, "--arrivals", path)
    out = simulate(*once, "--sweep", "users=1,2")
    assert "total t/s" in out


def test_one_mode(simulate) -> None:  # type: ignore[no-untyped-def]
    rows = rows_of(simulate("nodes4-gigabit", *SHORT, "--mode", "async"))
    assert len(rows["t/s"]) == 1
    assert float(rows["x iterative"][0]) > 1
    plain = rows_of(simulate("nodes4-gigabit", *SHORT, "--mode", "iterative"))
    assert plain["x iterative"] == ["1.00"]
    assert "accepted" not in plain


def test_flags_reach_the_simulation(simulate) -> None:  # type: ignore[no-untyped-def]
    usual = rows_of(simulate("nodes4-gigabit", *SHORT))
    right = rows_of(simulate("nodes4-gigabit", *SHORT, "--acceptance", 1))
    assert float(right["t/s"][2]) > float(usual["t/s"][2])
    assert rows_of(simulate("nodes4-gigabit", *SHORT, "--draft", 1))["t/s"][1] != usual["t/s"][1]
    uncancelled = rows_of(simulate("nodes4-gigabit", *SHORT, "--no-cancel"))  # but for those at the output's end
    assert int(uncancelled["cancelled runs"][2]) < min(int(usual["cancelled runs"][2]), 5)
    assert float(rows_of(simulate("nodes4-gigabit", *SHORT, "-t", 1))["t/s"][0]) < float(usual["t/s"][0])
    assert rows_of(simulate("nodes4-gigabit", *SHORT, "-td", 1))["draft occupied"] != usual["draft occupied"]
    assert rows_of(simulate("nodes4-gigabit", *SHORT, "-ub", 1))["TTFT"] != usual["TTFT"]
    stretched = rows_of(simulate("nodes4-gigabit", *SHORT, "--confidence", "overconfident", "-pa", 0.7))
    assert stretched["t/s"] != rows_of(simulate("nodes4-gigabit", *SHORT, "-pa", 0.7))["t/s"]
    split = simulate("nodes4-gigabit", *SHORT, "--mpi-layer-split", "0.7,0.1,0.1,0.1/1.0")
    assert rows_of(split)["t/s"] != usual["t/s"]
    assert "inside the head" in simulate("nodes4-gigabit", *SHORT, "--mpi-layer-split", "0.25,0.25,0.25,0.25")


def test_several_drafters(simulate, refuse) -> None:  # type: ignore[no-untyped-def]
    name, mode = "nodes4-gigabit", ("--mode", "async")
    out = simulate(name, *SHORT, *mode, "--drafters", "draft:0.6,draft,eagle3:0.8,ngram:0.25", "--overlap", 0.3)
    assert (
        "draft 1B Q4_K_M (16 layers) on 1 rank; draft 1B Q4_K_M (16 layers) on 1 rank; head EAGLE-3 (1 layer) on 1"
        in (out.replace("\n", " "))
    )
    assert "agreement 60 % and 70 % and 80 %, calibrated, overlap 30 %, 25 % repeated" in out
    split = simulate(name, *SHORT, *mode, "--drafters", "draft,eagle3", "--mpi-layer-split", "0.4,0.3,0.3/1.0/1.0")
    assert "on 3 ranks" in split
    assert "head MTP (1 layer) on 1 rank" in simulate(name, *SHORT, *mode, "--drafters", "mtp:0.8").replace("\n", " ")
    alone = simulate(name, *SHORT, *mode, "--drafters", "ngram:1")
    assert "draft" not in alone.splitlines()[1]
    for words, line in {
        ("--drafters", "draft:2"): "a share is a number between 0 and 1",
        ("--drafters", "a"): "write drafters, separated by commas",
        ("--drafters", "ngram,ngram"): "one ngram drafter at most",
        ("--spec-type", "draft-mtp"): "mtp is not simulated this way: use --drafters mtp",
        ("--drafters", "draft", "--spec-type", "ngram"): "--drafters both name drafters: omit one of them",
        ("--drafters", "draft", "--overlap", 2): "must be a share between 0 and 1, got 2",
        ("--drafters", "draft,draft", "--recording", BUNDLED): "has the candidates of one draft model",
        ("--drafters", "draft:0.5", "--recording", BUNDLED): "those of a recording are fixed",
        ("--drafters", "eagle3,dflash"): "there is one drafter at most of eagle3, dflash",
    }.items():
        assert line in refuse(name, *words)


def test_shapes_from_models_and_a_recording(simulate) -> None:  # type: ignore[no-untyped-def]
    models = ("-m", TARGET, "-md", DRAFT)
    out = simulate("two-cores", *models, "--recording", BUNDLED, "-n", 16)
    assert "3 recorded prompts, outputs of 16 + 16 + 16 tokens, agreement 69 %, second choice 26 %" in out
    assert "outputs of 256 + " in simulate("two-cores", *models, "--recording", BUNDLED, "--mode", "iterative")


def test_a_profile_as_the_cluster(simulate, refuse, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write(tmp_path / "measured.json", measured())
    assert "does not describe a target model: name one with -m" in refuse(tmp_path / "measured.json")
    out = simulate(tmp_path / "measured.json", "-m", TARGET, "-md", DRAFT, *SHORT)
    assert out.startswith("measured\ntarget tales-target (8 layers) on 2 ranks; draft tales-draft (3 layers) inside")


def test_without_a_draft(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = (CLUSTERS / "nodes4-gigabit.toml").read_text()
    own = tmp_path / "own.toml"
    own.write_text(text.partition("[draft]")[0] + "[network]" + text.partition("[network]")[2])
    assert run(["simulate", str(own), *SHORT]) == 0
    out, err = capsys.readouterr()
    assert out.split("\n\n", 1)[1].splitlines()[0].split() == ["iterative"]
    assert err == "ggpipe: simulating only iterative, without a draft model: name one with -md/--model-draft\n"
    assert run(["simulate", str(own), "--mode", "async"]) == 2
    assert "--mode async needs a draft model: name one with -md" in capsys.readouterr().err
    assert run(["simulate", str(own), "--spec-type", "draft-eagle3"]) == 2
    assert "--spec-type" in (err := capsys.readouterr().err)
    assert "eagle3 needs an EAGLE-3 head: name one with -md/--model-draft, or use --drafters eagle3" in err
    assert run(["simulate", str(own), "--sweep", "draft=1..2"]) == 2
    assert "draft=… makes no difference without draft tokens" in capsys.readouterr().err


def test_sweep(simulate, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    written = tmp_path / "sweep.csv"
    out = simulate("nodes4-gigabit", *SHORT, "--sweep", "draft=1..4", "--csv", written)
    header, *rows = out.split("\n\n", 1)[1].splitlines()
    assert header.split()[:6] == ["draft", "iterative", "t/s", "speculative", "t/s", "async"]
    assert [row.split()[0] for row in rows] == ["1", "2", "3", "4"]
    speeds = [float(row.split()[3]) for row in rows]
    assert [row.endswith("best") for row in rows].index(True) == speeds.index(max(speeds))
    assert sum(row.endswith("best") for row in rows) == 1
    lines = list(csv.DictReader(written.open()))
    assert [(line["draft"], line["mode"]) for line in lines] == [(str(n), mode) for n in range(1, 5) for mode in MODES]
    written_speeds = [float(line["tokens_per_s"]) for line in lines if line["mode"] == "async"]
    assert written_speeds == pytest.approx(speeds, abs=0.0051)  # rounded twice
    assert {line["acceptance"] for line in lines if line["mode"] == "iterative"} == {""}


def test_two_sweeps_in_one_mode(simulate, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    written = tmp_path / "sweep.json"
    sweeps = ("--sweep", "pa=0.1,0.5", "--sweep", "acceptance=0.3,0.9")
    out = simulate("nodes4-gigabit", *SHORT, *sweeps, "--mode", "async", "--json", written)
    assert "agreement" not in out, "that is swept"
    header, *rows = out.split("\n\n", 1)[1].splitlines()
    assert header.split()[:3] == ["pa", "acceptance", "t/s"]
    assert [row.split()[:2] for row in rows] == [["0.1", "0.3"], ["0.1", "0.9"], ["0.5", "0.3"], ["0.5", "0.9"]]
    found = json.loads(written.read_text())
    assert found["target"] == "70B Q4_K_M"
    assert [(*line["values"].values(), line["mode"]) for line in found["results"]] == [
        (pa, a, "async") for pa in (0.1, 0.5) for a in (0.3, 0.9)
    ]
    assert found["results"][1]["tokens_per_s"] > found["results"][0]["tokens_per_s"]


def test_files_of_one_simulation(simulate, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    paths = [tmp_path / name for name in ("a.csv", "a.json", "a.svg", "trace.json")]
    flags = [word for pair in zip(("--csv", "--json", "--plot", "--trace"), paths, strict=True) for word in pair]
    simulate("nodes4-gigabit", *SHORT, *flags)
    assert [line["mode"] for line in csv.DictReader(paths[0].open())] == MODES
    found = json.loads(paths[1].read_text())
    assert [result["mode"] for result in found["results"]] == MODES
    assert [len(result["requests"][0]["token_times_s"]) for result in found["results"]] == [12] * 3
    assert (found["cluster"], found["tokens"]["agreement"]) == (
        "4 nodes of 16 cores and one for the draft, Gigabit Ethernet", 0.7,
    )  # fmt: skip
    assert "<svg" in paths[2].read_text()
    trace = json.loads(paths[3].read_text())
    assert trace["otherData"]["mode"] == "async"
    assert {event["pid"] for event in trace["traceEvents"]} == set(range(5))


@pytest.mark.parametrize("sweeps", [("draft=1..3",), ("draft=1..2", "pa=0.1,0.3")])
def test_plots_of_sweeps(simulate, sweeps: tuple[str, ...], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    flags = [word for sweep in sweeps for word in ("--sweep", sweep)]
    simulate("nodes4-gigabit", *SHORT, *flags, "--plot", tmp_path / "sweep.svg")
    assert "<svg" in (tmp_path / "sweep.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "cluster file nothing does not exist; clusters that come with ggpipe are"),
        (("office", "--mode", "fast"), "--mode must be iterative, speculative or async, got fast"),
        (("office", "-m", "nothing.gguf"), "cannot open model file nothing.gguf"),
        (("office", "-n", "0"), "-n/--predict must be -1 (the default) or a number of tokens, 1 or more"),
        (("office", "-n", "-2"), "-n/--predict must be -1 (the default) or a number of tokens, 1 or more"),
        (("office", "--prompt-tokens", "0"), "--prompt-tokens must be 1 or more, got 0"),
        (("c" * 300,), "File name too long"),
        (("office", "--acceptance", "2"), "--acceptance must be a share between 0 and 1, got 2"),
        (("office", "--second-choice", "-1"), "--second-choice must be a share between 0 and 1, got -1"),
        (("office", "--confidence", "some"), "--confidence must be calibrated, overconfident, underconfident or n"),
        (("office", "--recording", "nothing.json"), "cannot read the recording nothing.json"),
        (("office", "--recording", BUNDLED, "--acceptance", "0.5"), "omit --recording or --acceptance"),
        (("office", "--recording", BUNDLED, "--second-choice", "0.5"), "omit --recording or --second-choice"),
        (("office", "--recording", BUNDLED, "--sweep", "acceptance=0..1"), "a recording has its own acceptance"),
        (("office", "-c", "100"), "a context of 100 tokens cannot hold 384"),
        (("office", "-c", "-1"), "-c/--ctx-size must be 0 (the model's own) or"),
        (("office", "-ub", "0"), "-ub/--ubatch-size must be a number of tokens"),
        (("office", "-t", "1,2"), "-t/--threads has 2 values for 6 ranks: give one value, or one per rank"),
        (("office", "-t", "x"), "-t/--threads x: give one number"),
        (("office", "-t", "0"), "-t/--threads must be -1"),
        (("office", "-td", "0"), "-td/--threads-draft must be -1"),
        (("office", "-pa", "2"), "-pa/--p-accept must be a probability from 0 to 1"),
        (("office", "--mpi-layer-split", "0.5,0.5"), "names 2 ranks, and the cluster has 6"),
        (("office", "--mpi-layer-split", "x"), "--mpi-layer-split x: give one share"),
        (("nodes4-100g", "--mpi-layer-split", "0.5*2,0.5*4"), "names 6 ranks, and the cluster has 5"),
        (("nodes4-100g", "-ts", "3,1"), "-ts/--tensor-split has 2 values, but no group has 2 ranks"),
        (("nodes4-100g", "--sweep", "group=3"), "group must divide the target's 4 ranks"),
        (("office", "--mpi-layer-split", "0.9,0.025,0.025,0.025,0.001/1.0"), "would get no layer"),
        (("nodes4-gigabit", "-c", "1000000"), "node1 has 64 GB of memory, and its ranks need"),
        (("office", "--sweep", "draft"), "write NAME=VALUES"),
        (("office", "--sweep", "layers=1..2"), "layers cannot be swept; names are"),
        (("office", "--sweep", "draft=9..2"), "9..2 is empty"),
        (("office", "--sweep", "draft=1..1000"), "are 3000 simulations, at most 2000"),
        (("office", "--sweep", "draft=1", "--sweep", "draft=2"), "draft=… is given twice"),
        (("office", "--sweep", "pa=0.5..2"), "-pa/--p-accept must be a probability from 0 to 1"),
        (("office", "--sweep", "draft=1..2", "--mode", "iterative"), "makes no difference without draft tokens"),
        (("two-cores", "--sweep", "gbit=1..2"), "gbit is that of the network between machines"),
        (("office", "--sweep", "draft=1", "--trace", "/tmp/x.json"), "--trace needs a single simulation"),
        (("office", "--plot", "/tmp/x.txt"), "cannot draw /tmp/x.txt"),
        (("office", "--csv", "/nowhere/x.csv"), "no directory /nowhere"),
        (("office", "--sweep", "np=1", "--sweep", "pa=0", "--sweep", "ps=0", "--plot", "/tmp/x.svg"),
         "--plot can show one or two swept names, not 3"),
        (("office", "--users", "0"), "--users must be a number from 1 to 256, got 0"),
        (("office", "--users", "2", "--rate", "1"), "--users and --rate both say when requests arrive"),
        (("office", "--concurrent", "2"), "--concurrent needs several requests: give --users or --rate"),
        (("office", "--arrivals", "none"), "cannot read the arrivals none"),
        (("office", "--users", "2", "--trace", "x.json"), "--trace needs a single request"),
        (("office", "--users", "2", "--plot", "x.svg"), "--plot needs a single request, or a sweep"),
        (("office", "--users", "2", "--sweep", "rate=1,2"), "--users and --rate both say"),
        (("office", "--sweep", "users=1,2", "--requests-csv", "x"), "--requests-csv needs several"),
        (("office", "--users", "2", "--sweep", "np=1,2", "--requests-csv", "x"), "--requests-csv needs a single"),
    ],
)  # fmt: skip
def test_mistakes(refuse, arguments: tuple[object, ...], words: str) -> None:  # type: ignore[no-untyped-def]
    assert words in refuse(*arguments)


def test_as_a_command() -> None:
    result = ggpipe("simulate", "nodes4-gigabit", *SHORT)
    assert (result.returncode, result.stderr) == (0, "")
    assert "x iterative" in result.stdout


def test_without_models_no_libllama_is_loaded() -> None:
    lines = [["simulate", "nodes4-gigabit", *more] for more in (SHORT, ("--sweep", "np=0"))]
    modules, out = loaded_by("-c", f"from ggpipe.cli import run\nfor line in {lines}: run(line)")
    assert "x iterative" in out
    assert "ggpipe.sim.sweep" in modules
    assert not modules.intersection(HEAVY)
    assert not [module for module in modules if module.startswith(("matplotlib", "numpy"))]
