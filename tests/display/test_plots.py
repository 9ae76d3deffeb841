"""Figures: each kind is drawn, as what its name says, and always the same."""

from __future__ import annotations

import builtins
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.screen import finished_request, speculated_request, speculating_ranks, two_ranks

from ggpipe.display.figures import canvas, plots
from ggpipe.errors import UsageError

SVG = "{http://www.w3.org/2000/svg}"


def draw_bars(path: Path) -> None:
    speeds: dict[str, list[plots.Value]] = {"iterative": [(9, 10, 11), 4.0], "async": [20.0, None]}
    plots.bars(path, ["short", "long"], speeds, title="Speed", unit="tokens/s")


def draw_one_group(path: Path) -> None:
    plots.bars(path, ["short"], {"iterative": [(9, 10, 11)], "no speculation": [0.0], "async": [None]})


def draw_lines(path: Path) -> None:
    series: dict[str, list[plots.Value]] = {
        "iterative": [1.0, 1.0, 1.0, 1.0],
        "async": [(1.8, 1.9, 2.0), 2.3, None, (3.0, 3.1, 3.2)],
        "early": [2.0, None, None, None],
        "limit": [3.3] * 4,
        "nothing": [None] * 4,
    }
    plots.lines(path, [4, 8, 15, 32], series, x_label="nodes", unit="x", log_x=True, bounds=["limit"])


def draw_many_lines(path: Path) -> None:
    """More than there is room for labels beside each other."""
    plots.lines(path, list(range(1, 40)), {f"line {i}": [1.0 + i] * 39 for i in range(20)})


def draw_heat(path: Path) -> None:
    plots.heat(path, [2, 4, 8], ["a", "b"], [[1.0, 2.5, 3.0], [None, 2.0, 1.5]], title="t/s", x_label="--draft")


def draw_timeline(path: Path) -> None:
    plots.occupancy_timeline(path, speculated_request(), speculating_ranks(), title="async")


def draw_part_of_a_timeline(path: Path) -> None:
    plots.occupancy_timeline(path, speculated_request(), speculating_ranks(), window_s=(0.2, 0.6))


def draw_timeline_of_no_speculation(path: Path) -> None:
    plots.occupancy_timeline(path, finished_request(), two_ranks())


def draw_acceptance(path: Path) -> None:
    by_lead = {
        "async": {1: [100, 70], 2: [60, 30], 9: [2, 2]},
        "speculative": {1: [50, 30], 3: [40, 0]},
        "iterative": {},
    }
    plots.acceptance_by_position(path, by_lead)


DRAWINGS = (
    draw_bars, draw_one_group, draw_lines, draw_many_lines, draw_heat, draw_timeline, draw_part_of_a_timeline,
    draw_timeline_of_no_speculation, draw_acceptance,
)  # fmt: skip


@pytest.mark.parametrize("draw", DRAWINGS, ids=lambda draw: draw.__name__)
def test_the_same_figure_every_time(draw: Callable[[Path], None], tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        draw(tmp_path / name)
    first = (tmp_path / "first.svg").read_text()
    assert first == (tmp_path / "second.svg").read_text()
    root = ElementTree.fromstring(first)
    assert root.tag == SVG + "svg"
    assert len(list(root.iter(SVG + "path"))) > 5
    assert "<dc:date>" not in first


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG\r\n\x1a\n"), ("PNG", b"\x89PNG"), ("pdf", b"%PDF-")])
def test_the_ending_is_the_format(ending: str, begins: bytes, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.{ending}" for name in ("first", "second")]
    for path in paths:
        draw_bars(path)
    first, second = (path.read_bytes() for path in paths)
    assert first.startswith(begins)
    assert first == second


def test_the_users_matplotlibrc_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    draw_lines(tmp_path / "a.svg")
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)
    draw_lines(tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert matplotlib.rcParams["font.size"] == 30


@pytest.mark.parametrize("name", ["speed", "speed.gif", "speed.svg.txt"])
def test_another_ending_is_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must end in \.png, \.svg or \.pdf$"):
        draw_bars(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write to .*: No such file"):
        draw_bars(tmp_path / "nowhere" / "speed.svg")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install 'ggpipe\[plots\]'$"):
        draw_bars(tmp_path / "speed.svg")


def test_labels_of_numbers() -> None:
    assert [canvas.short(v) for v in (0, 0.0123, 1.25, 31.24, 312.4, 4810, -2.5)] == [
        "0", "0.0123", "1.25", "31.2", "312", "4810", "-2.50"
    ]  # fmt: skip


def test_the_interval_holds_the_share() -> None:
    for n, hits in ((10, 0), (10, 10), (40, 13), (1000, 500)):
        low, share, high = plots._wilson(n, hits)
        assert 0 <= low <= share == hits / n <= high <= 1
    assert plots._wilson(10_000, 5000)[2] - 0.5 == pytest.approx(1.96 * math.sqrt(0.25 / 10_000), rel=0.01)


def test_a_rank_inside_the_head_has_a_lane_of_its_own() -> None:
    stats, ranks = speculated_request(), speculating_ranks()
    pieces = [plots._pieces(stats, rank) for rank in ranks]
    assert [len(of) for of in pieces] == [4, 4, 2]
    assert pieces[1][0][0] == pytest.approx(0.22), "by the head's clock"
    bars = plots._bars(pieces[0])
    assert sum(s for _, s in bars[canvas.RED, 0.0, 1.0]) == pytest.approx(0.1)
    ((at, length),) = bars[canvas.ORANGE, 0.75, 1.0]
    assert at == pytest.approx(0.2), "one row of four was rejected"
    assert length == 0.1
