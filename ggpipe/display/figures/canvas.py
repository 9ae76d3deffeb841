"""Writes figures to files: formats, style, colours.

matplotlib is an extra, imported only for drawing. The file's suffix is its format: .png, .svg or .pdf. The same data
give the same file, byte for byte (with the same matplotlib). The colours are suitable for colour-blind readers.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggpipe.display.files import write_bytes
from ggpipe.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, FAINT = "#222222", "#6E6E6E", "#D9D9D9"
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"  # Okabe and Ito's
_CYCLE = (BLUE, ORANGE, GREEN, "#CC79A7", RED, "#56B4E9", "#222222", "#A6761D")
_MODES = {"single": "#BFBFBF", "iterative": "#7F7F7F", "speculative": ORANGE, "async": BLUE}

_ENDINGS: dict[str, dict[str, Any]] = {  # without the date and the program that wrote the file
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_STYLE: Any = {  # Any: mypy wants literal names
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "axes.titlepad": 12,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "savefig.dpi": 150,
    "savefig.facecolor": "white",
    "svg.hashsalt": "ggpipe",
}


def check_plottable(path: Path) -> None:
    """Check, before a long run, that a figure can be drawn. Raises UsageError for other suffixes or
    without matplotlib."""
    if path.suffix.lower() not in _ENDINGS:
        raise UsageError(f"cannot draw {path}: the name must end in .png, .svg or .pdf")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("plots need matplotlib: run pip install 'ggpipe[plots]'") from None


@contextlib.contextmanager
def figure(path: Path, width_in: float, height_in: float) -> Iterator[Figure]:
    """An empty figure of this size in inches, in our style. It is written at the end of the block."""
    check_plottable(path)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs its caching
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not the user's matplotlibrc
        matplotlib.rcParams.update(_STYLE)
        canvas = Figure(figsize=(width_in, height_in), layout="constrained")
        yield canvas
        data = io.BytesIO()
        ending = path.suffix.lower()
        canvas.savefig(data, format=ending[1:], metadata=_ENDINGS[ending])
    write_bytes(path, data.getvalue())


def short(value: float) -> str:
    """Three significant digits: `0.012`, `1.25`, `31.2`, `312`, `4810`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(places, 0), 6)}f}"


def colours_of(names: Collection[str]) -> dict[str, str]:
    """A colour for each name. Modes have the same colours in all figures."""
    known = {name: _MODES[name] for name in names if name in _MODES}
    free = itertools.cycle([colour for colour in _CYCLE if colour not in known.values()])
    return {name: known.get(name) or next(free) for name in names}
