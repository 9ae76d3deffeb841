"""The report on PipeInfer's settings: all files are written, always the same, and the numbers hold what must hold."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SVG_FILES = {
    "acceptance.svg", "bound.svg", "costs-50.svg", "costs-80.svg", "latency.svg", "nodes.svg", "pairs.svg",
    "parts.svg", "timeline-async.svg", "timeline-speculative.svg",
}  # fmt: skip


@pytest.fixture
def studies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module scripts/experiments/studies.py; its neighbours can be imported too."""
    monkeypatch.syspath_prepend(str(ROOT))
    from scripts.experiments import studies as module

    return module


def experiments(*arguments: object) -> subprocess.CompletedProcess[str]:
    return child("-m", "scripts.experiments.run", *arguments)


def child(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)


TWICE = """
import sys
from scripts.experiments import run, simulations

class Kept(simulations.Simulations):
    earlier = {}  # of which a quarter is simulated again

    def __init__(self, n_workers):
        super().__init__(n_workers)
        self._known |= dict(known for i, known in enumerate(Kept.earlier.items()) if i % 4)
        Kept.earlier = self._known

run.Simulations = Kept
for folder, n_processes in zip(sys.argv[1:], "21"):
    sys.argv = ["run", "--quick", "--out", folder, "-j", n_processes]
    assert run.main() == 0
"""


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_files(tmp_path: Path, full: bool) -> None:
    folders = [tmp_path / "some" / "folder", tmp_path / "again"]
    if full:
        runs = [experiments("--quick", "--out", folder, "-j", n) for folder, n in zip(folders, (2, 1), strict=True)]
    else:
        runs = [child("-c", TWICE, *folders)]
    for done in runs:
        progress = r"(ggpipe: \d+ of \d+ simulations\n)*"  # now and then, while it lasts
        assert (done.returncode, re.sub(progress, "", done.stderr)) == (0, "")
    lines = "".join(done.stdout for done in runs).splitlines()
    for line, folder in zip(lines, folders, strict=True):
        assert re.fullmatch(rf"\d+ requests simulated, see {folder}/report.md", line)
    files = {path.name: path.read_bytes() for path in folders[0].iterdir()}
    assert {name for name in files if name.endswith(".svg")} == SVG_FILES
    assert all(b"<svg" in files[name] for name in SVG_FILES)
    assert {name for name in files if name.endswith(".csv")} == set(
        re.findall(r"\w+\.csv", files["report.md"].decode())
    )
    assert files == {path.name: path.read_bytes() for path in folders[1].iterdir()}, "the same on one core and on two"
    report = files["report.md"].decode()
    assert re.findall(r"^## (\d)\.", report, re.MULTILINE) == list("12345678")
    assert not re.search(r"\bnan\b|\binf\b|None", report)
    pairs = rows_of(folders[0] / "pairs.csv")
    assert len(pairs) == 2 * 2 * 2 * 5, "sites, pairs, numbers of nodes, settings"
    assert {float(row["gain"]) for row in pairs if row["mode"] == "iterative"} == {1.0}
    for row in rows_of(folders[0] / "bound.csv"):
        assert 0.9 < float(row["gain"]) <= float(row["bound"])


def test_chains_come_near_their_bound(studies: Any) -> None:
    from scripts.experiments.simulations import Simulations

    acceptances = (0.5, 0.7)
    scale = replace(studies.QUICK, bound_acceptances=acceptances, bound_nodes=(2, 32), bound_text=128)
    found = studies.bound(Simulations(1), scale)
    for a in acceptances:
        assert found[a, 2] * (1 - a) < found[a, 32] * (1 - a)
        assert 0.9 <= found[a, 32] * (1 - a) <= 1


def test_waiting_takes_what_the_formula_says(studies: Any) -> None:
    from scripts.experiments.places import EvenPlace, costs_of
    from scripts.experiments.simulations import Job, Simulations

    place = EvenPlace()
    speed, n = costs_of(place).best_waiting(0.7)
    job = Job(place, 0.7, replace(studies.FOUR, n_draft=n), 128, (1, 2))
    simulations = Simulations(1)
    simulations.run([job])
    assert simulations.gain(job) == pytest.approx(speed, rel=0.05)
    assert 1 < costs_of(place).one_by_one(0.7) < 1 / (1 - 0.7)


def test_shares_of_chains(studies: Any) -> None:
    for share in (0.0, 0.3, 0.79, 1.0):
        a = studies._chance(share, 4)
        assert (a + a**2 + a**3 + a**4) / 4 == pytest.approx(share, abs=1e-9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "/dev/null/there"), "experiments: cannot write to /dev/null/there: Not a directory\n"),
        (("-j", "0"), "-j must be 1 or more, got 0\n"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], words: str) -> None:
    done = experiments("--quick", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(words)
