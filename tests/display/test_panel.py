"""The rows below the text: they fit, and say what there is to say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.screen import speculated_request, speculating_ranks, texts

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.layout import layer_range
from ggpipe.display.format import harmless, human_bytes, human_rate, human_seconds
from ggpipe.display.live.panel import PanelSize, generating_panel, loading_panel
from ggpipe.stats.occupancy import Occupancy
from ggpipe.stats.records import RankStats, RequestStats


@pytest.mark.parametrize("n_ranks", [0, 1, 4, 60])
@pytest.mark.parametrize(("width", "height"), [(200, 50), (100, 30), (60, 15), (20, 5), (20, 2), (3, 1), (1, 0)])
def test_panels_fit(n_ranks: int, width: int, height: int) -> None:
    ranks = [
        RankStats(rank=i, model=0, host="host" * 9, layers=(i, i + 1), load_bytes=10**12, loaded_bytes=10**11)
        for i in range(n_ranks)
    ]
    stats = RequestStats(n_prompt=10**6, arrived=0.0)
    for ascii_only in (False, True):
        space = PanelSize(width, height, ascii_only)
        loading = loading_panel(ranks, space)
        prompt = generating_panel(ranks, [0.5] * n_ranks, stats, 5000.0, space)
        stats.token_times = [float(i) for i in range(99)]
        generating = generating_panel(ranks, [0.5] * n_ranks, stats, 5000.0, space)
        speculating = generating_panel(
            ranks, [0.5] * n_ranks, replace(stats, speculation=SpeculationConfig()), 5e3, space
        )
        for rows in map(texts, (loading, prompt, generating, speculating)):
            assert len(rows) <= height
            if width >= 20:
                assert all(len(row) < width for row in rows)
            assert not ascii_only or all(row.isascii() for row in rows)
    if n_ranks == 4 and height >= 15:
        assert sum("rank" in row or "draft" in row for row in texts(generating)) == 4


def test_less_room_leaves_the_least_needed_out() -> None:
    stats = speculated_request()
    stats.n_in_flight = 2
    ranks = speculating_ranks()

    def panel(width: int, height: int) -> list[str]:
        return texts(generating_panel(ranks, [0.5, 1.0, 0.0], stats, 11.0, PanelSize(width, height)))

    full = panel(100, 20)
    assert full[-1] == "async   2 in flight  acceptance  40 %  cancelled 1 run, 2 tokens  text: drafted  own"
    assert panel(100, 6) == full
    assert panel(100, 5) == full[:-1]
    assert panel(100, 4) == ["", "ranks  ▅█  draft  ▁", *full[-2:]]
    assert panel(100, 3) == ["ranks  ▅█  draft  ▁", *full[-2:]]
    assert panel(100, 2) == ["ranks  ▅█  draft  ▁", full[-2]]
    assert panel(100, 1) == [full[-2]]
    assert [panel(width, 6)[-1] for width in (84, 76, 70, 60, 38, 28)] == [
        "2 in flight  acceptance  40 %  cancelled 1 run, 2 tokens  text: drafted  own",
        "2 in flight  acceptance  40 %  cancelled 1 run, 2 tokens  text: drafted",
        "2 in flight  acceptance  40 %  cancelled 1 run, 2 tokens",
        "2 in flight  acceptance  40 %  cancelled 1 run, 2 tokens",
        "2 in flight  acceptance  40 %",
        "acceptance  40 %",
    ]
    assert [row.split()[0] for row in panel(24, 6)[1:4]] == ["0", "1", "d0"]


def test_the_legend_of_several_drafters_fits_80_columns() -> None:
    stats, ranks = speculated_request(), speculating_ranks()
    ranks.append(RankStats(rank=3, model=2, drafter="eagle3", layers=(0, 1)))
    stats.counters.by_drafter = {0: [9, 5], 1: [8, 4], 2: [3, 1]}

    def last(width: int, height: int = 20, colours: bool = True) -> list[str]:
        size = PanelSize(width, height, colours=colours)
        return texts(generating_panel(ranks, [0.5, 1.0, 0.0, 0.0], stats, 11.0, size))[-2:]

    mode, legend = last(80)
    assert mode == "async   0 in flight  acceptance  40 %  cancelled 1 run, 2 tokens"
    assert legend == "text: draft  eagle3  ngram  several  own"
    assert last(30)[1] == "text: draft  eagle3  ngram"
    assert last(80, height=7)[1] == mode, "the legend goes first"
    assert last(80, colours=False)[1] == mode
    ranks[-1].drafter = ranks[-2].drafter = "draft"
    assert last(80)[1] == "text: draft model 1  draft model 2  ngram  several  own"
    rows = generating_panel(ranks, [0.0] * 4, stats, 11.0, PanelSize(80, 20))
    styles = [segment.style for segment in rows[-1] if segment.text.strip() and segment.text != "text: "]
    assert len({str(style) for style in styles}) == len(styles) == 5, "a colour each"


def test_occupancy_is_of_the_last_second() -> None:
    occupancy, rank = Occupancy(), RankStats(rank=0)
    assert occupancy.sample([rank], 0.0) == [0.0]
    for i in range(1, 51):  # 5 s at a quarter
        rank.busy_s, rank.runs = rank.busy_s + 0.025, rank.runs + 1
        (share,) = occupancy.sample([rank], i / 10)
    assert share == pytest.approx(0.25)
    for i in range(51, 62):  # 1 s at full
        rank.busy_s, rank.runs = rank.busy_s + 0.1, rank.runs + 1
        (share,) = occupancy.sample([rank], i / 10)
    assert share == pytest.approx(1.0)


def test_occupancy_waits_for_long_runs() -> None:
    occupancy, rank = Occupancy(), RankStats(rank=0)
    shares = []
    for i in range(100):  # a run of 1 s ends every 2 s
        if i % 20 == 0:
            rank.busy_s, rank.runs = rank.busy_s + 1, rank.runs + 1
        shares += occupancy.sample([rank], i / 10)
    assert all(0.3 <= share <= 0.8 for share in shares[70:])
    rank.busy_s = 0.0
    assert occupancy.sample([rank], 20.0) == [0.0]


def test_occupancy_tells_a_rank_from_the_draft_in_its_process() -> None:
    occupancy, ranks = Occupancy(), [RankStats(rank=0), RankStats(rank=0, model=1)]
    occupancy.sample(ranks, 0.0)
    ranks[0].busy_s = 0.75
    ranks[1].busy_s = 0.25
    assert occupancy.sample(ranks, 1.0) == [0.75, 0.25]


def test_words() -> None:
    assert [human_bytes(n) for n in (0, 999, 1000, 16400, 99949, 99950, 999499, 999500, 38.2e9, 5e15)] == (
        ["0 B", "999 B", "1.0 kB", "16.4 kB", "99.9 kB", "100 kB", "999 kB", "1.0 MB", "38.2 GB", "5000 TB"]
    )
    assert [human_seconds(s) for s in (None, 0, 0.0043, 0.231, 0.9996, 3.2, 31.25, 312)] == (
        ["-", "0 ms", "4.3 ms", "231 ms", "1.00 s", "3.20 s", "31.2 s", "312 s"]
    )
    assert [human_rate(r) for r in (None, 4.312, 43.12, 431.2)] == ["-", "4.31 t/s", "43.1 t/s", "431 t/s"]
    assert [layer_range(r) for r in ((0, 0), (3, 4), (0, 8))] == ["-", "3", "0-7"]
    assert harmless("a\tb\n\x1bc\u2028d") == "a\tb\n␛c\u2028d"
