"""An engine in a notebook, run headless: answers, and panels below the cells."""

from __future__ import annotations

import threading
from typing import Any

import nbformat
from nbclient import NotebookClient
from support.commands import HANG_S, ROOT, TARGET, wait_for

from ggpipe.api.feed import Feed
from ggpipe.api.panel import Panel
from ggpipe.display.live.notebook import SPACE, html_of, in_notebook
from ggpipe.display.live.panel import loading_panel
from ggpipe.stats.records import RankStats

DRAWN = (
    "import threading\n"
    "for thread in threading.enumerate():\n    if thread.name == 'ggpipe panel':\n        thread.join()\n"
)
"""Until all panels have their last state: nbclient drops what comes between two cells."""
CELLS = (
    "import ggpipe\n"
    f"engine = ggpipe.Engine({str(TARGET)!r}, n_ctx=512, threads=1, temp=0, n_predict=8).load()\n{DRAWN}",
    'answer = engine.generate("Once upon a time").wait()\nprint(answer.text)',
    'print((await engine.generate("There was a king")).text)',
    f"{DRAWN}engine.close()",
)


def test_a_notebook() -> None:
    v4: Any = nbformat.v4
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=HANG_S, resources={"metadata": {"path": ROOT}}).execute()
    outputs: list[list[Any]] = [cell.outputs for cell in notebook.cells]
    texts = ["".join(output.get("text", "") for output in cell) for cell in outputs]
    panels = ["".join(output.data["text/html"] for output in cell if "data" in output) for cell in outputs]
    assert all(texts[1:3])
    assert panels[0] == ""  # everything is loaded
    assert "tokens" in panels[1]
    assert not any(output.output_type == "error" for cell in outputs for output in cell)


class FakePanel:
    def __init__(self) -> None:
        self.frames: list[int] = []
        self.drawn = threading.Event()

    def show(self, rows: list[Any]) -> None:
        self.frames.append(len(rows))
        self.drawn.set()


def test_one_panel_for_requests_at_a_time() -> None:
    made: list[FakePanel] = []

    def make() -> Any:
        made.append(FakePanel())
        return made[-1]

    panel = Panel(lambda: [RankStats(rank=0)], make)
    first, second = Feed(), Feed()
    for feed in (first, second):
        panel.request(feed)
    assert made[0].drawn.wait(HANG_S)
    assert len(made) == 1
    first.end()
    second.end()
    wait_for(lambda: not panel._feeds)
    panel.request(Feed())
    assert len(made) == 2


def test_a_panel_that_breaks_keeps_no_requests() -> None:
    made: list[int] = []

    class Broken:
        def show(self, _: list[Any]) -> None:
            raise ArithmeticError

    def make() -> Any:
        made.append(1)
        return Broken()

    panel = Panel(lambda: [RankStats(rank=0)], make)
    for n in (1, 2):
        panel.request(Feed())
        wait_for(lambda: not panel._feeds)
        assert len(made) == n


def test_rows_are_html() -> None:
    ranks = [RankStats(rank=0, host="<node>", layers=(0, 4), load_bytes=100, loaded_bytes=50)]
    html = html_of(loading_panel(ranks, SPACE))
    assert html.startswith("<pre")
    assert "&lt;node&gt;" in html
    assert "50 %" in html
    assert not in_notebook()
