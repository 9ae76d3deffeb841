"""What the terminal holds in the end is the exact text, whatever was drawn below it in between."""

from __future__ import annotations

import re
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.screen import Rig, speculating_ranks, texts

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.request import Counters
from ggpipe.display.live import live
from ggpipe.display.live.stream import TextStream
from ggpipe.display.origins import origin_style
from ggpipe.stats.records import RankStats, RequestStats

TRICKY = "[bold]x[/bold] [/] :smile: \\[esc] https://x.y/ 1234 'quoted' None 漢字 👍🏽 👨‍👩‍👧 ❤️ e\u0301\n\n"


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoThread:
        def __init__(self, **_: object) -> None:
            pass

        def start(self) -> None:
            pass

        join = start

    monkeypatch.setattr(threading, "Thread", NoThread)


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize(("width", "height"), [(100, 30), (60, 15), (20, 8), (20, 3), (7, 2)])
def test_screen_holds_exactly_prompt_and_text(width: int, height: int) -> None:
    rig = Rig(width, height)
    prompt, text = "Say [b]hi[/b] :wave:\nnow: ", (TRICKY + "long " * 100 + "\n") * 3 + "end"
    rig.display.request(RequestStats(n_prompt=3, arrived=rig.now))
    rig.display.prompt(prompt)
    for i in range(0, len(text), 7):
        rig.display.text(text[i : i + 7], origin_style(("draft",) * (i % 3)))
        rig.frame()
    rig.display.stop()
    assert rig.screen.text == prompt + text + "\n"
    assert rig.screen.cursor_shown
    assert rig.display.error is None


PIECES = st.lists(
    st.text(
        st.sampled_from("ab[]/:\\ \n\n漢👍é\u0301\u200d\ufe0f") | st.characters(exclude_categories=["C", "Z", "M"])
    ),
    max_size=30,
)


@pytest.mark.usefixtures("no_thread")
@given(PIECES, st.lists(st.booleans(), min_size=30, max_size=30), st.integers(2, 60), st.integers(2, 20))
@settings(deadline=None, max_examples=150)
def test_any_text_in_any_pieces_survives(pieces: list[str], frames: list[bool], width: int, height: int) -> None:
    rig = Rig(width, height)
    rig.display.request(RequestStats())
    for piece, frame in zip(pieces, frames, strict=False):
        rig.display.text(piece)
        if frame:
            rig.frame()
    rig.display.stop()
    assert rig.screen.text == ("".join(pieces) + "\n" if pieces else "")


def test_any_text_survives_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_FRAME_S", 0.0005)
    rig = Rig()
    text = (TRICKY + "word " * 30) * 40
    with rig.display as display:
        display.loading()
        display.request(RequestStats())
        for i in range(0, len(text), 5):
            display.text(text[i : i + 5])
    assert rig.screen.text == text + "\n"


@pytest.mark.usefixtures("no_thread")
def test_requests_follow_each_other() -> None:
    rig = Rig()
    for text in ("one", "two\n", ""):
        rig.display.request(RequestStats())
        rig.frame()
        rig.display.text(text)
        rig.frame()
        rig.display.stop()
        rig.display.stop()
    assert rig.screen.text == "one\ntwo\n\n\n"


@pytest.mark.usefixtures("no_thread")
def test_control_characters_are_harmless() -> None:
    rig = Rig()
    rig.display.request(RequestStats())
    rig.display.text("a\x1b[31mb\x1b]0;title\x07c\rd\x9b2Je\x00\x7f\ud800\tf")
    rig.frame()
    before = rig.screen.raw
    rig.display.stop()
    shown = "a␛[31mb␛]0;title␇c␍d�2Je␀␡�"
    assert shown in before
    assert f"{shown}\tf\n" in rig.screen.raw[len(before) :].replace("\t", "\t")


def test_tabs_keep_their_place() -> None:
    stream = TextStream()
    stream.feed("a\tb\n\tc\td")
    stream.take()
    assert "".join(s.text for s in stream.complete) == "a\tb\n"
    assert texts(stream.rows(20, 5)) == [" " * 8 + "c" + " " * 7 + "d"]
    assert texts(stream.rows(12, 5)) == [" " * 8 + "c   ", "d"]


def test_what_is_no_answer_stands_apart() -> None:
    stream = TextStream()
    for text, plain in (("thinking", True), (" on", True), ("answer", False), (" goes on", False)):
        stream.feed(text, plain=plain)
    stream.end()
    stream.take()
    assert "".join(s.text for s in stream.complete) == "thinking on\n\nanswer goes on\n"
    stream = TextStream()
    stream.feed("only thinking", plain=True)
    stream.end()
    stream.take()
    assert "".join(s.text for s in stream.complete) == "only thinking\n"


def test_rows_break_at_the_edge_and_keep_the_tail() -> None:
    stream = TextStream()
    stream.feed("abcdefgh漢字ij")
    stream.take()
    assert texts(stream.rows(4, 9)) == ["abcd", "efgh", "漢字", "ij"]
    assert texts(stream.rows(5, 9)) == ["abcde", "fgh漢", "字ij"]
    assert texts(stream.rows(5, 1)) == ["字ij"]
    stream.feed("k\n")
    stream.take()
    assert texts(stream.rows(5, 9)) == [""]


@pytest.mark.usefixtures("no_thread")
def test_narrowing_leaves_nothing_behind() -> None:
    rig = Rig(100, 30)
    rig.display.request(RequestStats(n_prompt=5, arrived=rig.now))
    text = "x" * 250
    rig.display.text("first line\n" + text)
    rig.frame()
    for width, height in [(70, 30), (41, 25), (100, 30), (40, 20)]:
        rig.resize(width, height)
        rig.frame()
        assert rig.screen.text.count("rank 1") == 1
        assert rig.screen.text.count("x") == 250
    rig.display.stop()
    assert rig.screen.text == f"first line\n{text}\n"


@pytest.mark.usefixtures("no_thread")
def test_failing_to_draw_does_not_stop_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.display.request(RequestStats())
    rig.display.text("some [text]\nand ")
    rig.frame()
    monkeypatch.setattr(live, "generating_panel", lambda *_: 1 / 0)
    rig.display.text("more")
    rig.frame()
    rig.display.text(", still")
    rig.frame()
    rig.display.stop()
    assert isinstance(rig.display.error, ZeroDivisionError)
    assert rig.screen.text == "some [text]\nand more, still\n"
    assert rig.screen.cursor_shown


@pytest.mark.usefixtures("no_thread")
def test_loading_then_generating() -> None:
    rig = Rig(100, 30)
    rig.display.loading()
    rig.ranks[0].loaded_bytes, rig.ranks[1].loaded_bytes = 10**9, 5 * 10**9
    assert not any(rig.frame()), "a short load does not flash"
    rig.now += 1
    rows = rig.frame()
    assert rows[0] == "loading  6.0 GB of 9.0 GB"
    assert re.fullmatch(r"rank 0  node-a     layers  0-7  ━+╾?─+   1.0 GB /  4.0 GB   25 %", rows[1])
    assert re.fullmatch(r"rank 1  10.0.0.23  layers 8-15  ━+   5.0 GB /  5.0 GB  100 %", rows[2])
    stats = RequestStats(n_prompt=12, arrived=rig.now)
    rig.display.request(stats)
    rig.display.prompt("Once ")
    rig.frame()
    rig.ranks[0].busy_s += 0.05
    rows = rig.frame()
    assert rows[:2] == ["Once ", ""]
    assert re.fullmatch(r"rank 0  node-a     layers  0-7  ━+─+   50 %", rows[2])
    assert re.fullmatch(r"rank 1  10.0.0.23  layers 8-15  ─+    0 %", rows[3])
    assert rows[4] == "prompt    12 tokens  200 ms"
    stats.token_times = [rig.now + i / 4 for i in range(9)]
    rows = rig.frame()
    assert rows[4] == "generating     9 tokens  4.00 t/s  TTFT 200 ms  ITL 250 ms"
    rig.display.stop()
    assert rig.screen.text == "Once \n"


@pytest.mark.usefixtures("no_thread")
def test_ranks_that_load_again_are_shown_below_the_text() -> None:
    rig = Rig(80, 12)
    stats = RequestStats(n_prompt=5, arrived=rig.now)
    rig.display.request(stats)
    rig.display.text("Once upon a time")
    assert "loading" not in "".join(rig.frame())
    rig.is_loading = True
    shown = rig.frame()
    assert shown[0].startswith("Once upon a time")
    assert shown[1].startswith("loading")
    rig.is_loading = False
    assert "loading" not in "".join(rig.frame())
    rig.display.stop()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (20, 6), (20, 1), (3, 3)])
def test_region_stays_below_the_screens_height(width: int, height: int) -> None:
    rig = Rig(width, height, ranks=[RankStats(rank=i) for i in range(9)])
    rig.display.loading()
    rig.now += 1
    rig.frame()
    assert len(rig.display._region.rows) < max(height, 2)
    rig.display.request(RequestStats())
    rig.display.text("x" * 5000)
    rig.frame()
    assert len(rig.display._region.rows) < max(height, 2)
    rig.display.stop()
    assert rig.screen.text == "x" * 5000 + "\n"


@pytest.mark.usefixtures("no_thread")
def test_text_is_coloured_by_origin_and_the_panel_says_how() -> None:
    rig = Rig(120, 30, ranks=speculating_ranks())
    stats = RequestStats(n_prompt=3, arrived=rig.now)
    rig.display.request(stats)
    stats.speculation, stats.counters, stats.n_in_flight = SpeculationConfig(), Counters(6, 5, 2, 2, 2, 1, 1), 3
    for piece, drafters in (("its own ", ()), ("and two ", ("draft",)), ("drafts", ("draft",))):
        rig.display.text(piece, origin_style(drafters))
    rows = rig.frame()
    assert rows[0] == "its own and two drafts"
    assert rig.screen.raw.count("its own \x1b[32mand two drafts\x1b[0m") == 1
    assert re.fullmatch(r"rank 0   node-a     layers  0-7  ─+    0 %", rows[2])
    assert re.fullmatch(r"draft 0  node-a     layers  0-3  ─+    0 %", rows[4])
    assert rows[6] == "async   3 in flight  acceptance  40 %  cancelled 1 run, 2 tokens  text: drafted  own"
    assert "\x1b[32mdrafted\x1b[0m" in rig.screen.raw
    rig.display.stop()
    assert "its own \x1b[32mand two \x1b[0m\x1b[32mdrafts\x1b[0m\n" in rig.screen.raw, "and stays so"
    assert rig.screen.text == "its own and two drafts\n"


@pytest.mark.usefixtures("no_thread")
def test_without_colours_there_is_no_legend() -> None:
    rig = Rig(120, 30)
    rig.console.no_color = True
    rig.display.request(RequestStats(speculation=SpeculationConfig(mode="speculative")))
    rig.display.text("draft", origin_style(("draft",)))
    rows = rig.frame()
    assert rows[5] == "speculative   0 in flight  acceptance     -  cancelled 0 runs, 0 tokens"
    assert "[32m" not in rig.screen.raw


@pytest.mark.usefixtures("no_thread")
def test_a_draft_that_is_not_used_is_not_shown() -> None:
    rig = Rig(120, 30, ranks=speculating_ranks())
    rig.display.loading()
    rig.now += 1
    assert sum("draft 0" in row for row in rig.frame()) == 1
    rig.display.request(RequestStats(n_prompt=3, arrived=rig.now))
    assert [row.split()[0] for row in rig.frame() if row] == ["rank", "rank", "prompt"]
