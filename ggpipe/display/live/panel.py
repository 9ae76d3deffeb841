"""The panel below the output: a row per rank, a line of figures, and another line if there is a draft model.

It is made of segments instead of Rich tables, which are slower: the process that schedules draws ten frames per second.
If the screen is too small, the least important parts are omitted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from ggpipe.display.format import counted, harmless, human_bytes, human_rate, human_seconds, percent
from ggpipe.display.live.stream import ScreenRow
from ggpipe.display.origins import OWN, SEVERAL, style_of
from ggpipe.stats.activity import drafters_of, layer_texts, speculates
from ggpipe.stats.records import RankStats, RequestStats, percentile

DIM = Style(dim=True)
_LOADING = Style(color="cyan")
_DONE = Style(color="green")
_BUSY = Style(color="cyan")
_PHASE = Style(color="cyan", bold=True)
_DRAFTED = Style(color="green")

_GAP = "  "
_MIN_BAR, _MAX_BAR = 10, 40
_MAX_HOST = 16
_ITL_TOKENS = 32


@dataclass(frozen=True)
class PanelSize:
    """Space for the panel."""

    width: int
    """Cells in a row. Rows are shorter, so that the cursor never stays at the right edge."""
    height: int
    """Number of rows."""
    ascii_only: bool = False
    colours: bool = True


@dataclass(frozen=True, kw_only=True)
class _RankLine:
    """Contents of a rank's row. `share` is drawn as a bar."""

    stats: RankStats
    share: float
    style: Style
    detail: str = ""
    note: str = ""


def loading_panel(ranks: Sequence[RankStats], space: PanelSize) -> list[ScreenRow]:
    """How far each rank has loaded."""
    total, loaded = sum(r.load_bytes for r in ranks), sum(r.loaded_bytes for r in ranks)
    lines = []
    for r in ranks:
        share = 1.0 if r.load_s > 0 else r.loaded
        detail = f"{human_bytes(r.loaded_bytes):>7} / {human_bytes(r.load_bytes):>7}" if r.load_bytes else ""
        note = percent(share) if r.load_bytes or r.load_s > 0 else "-"
        lines.append(_RankLine(stats=r, share=share, style=_DONE if share == 1 else _LOADING, detail=detail, note=note))
    progress = f"{human_bytes(loaded)} of {human_bytes(total)}" if total else ""
    title = _fields([("", "loading", _PHASE), ("", progress, None)], (0, 1), space)
    return _panel([title], lines, [], space)


def generating_panel(
    ranks: Sequence[RankStats], busy: Sequence[float], request: RequestStats, now: float, space: PanelSize
) -> list[ScreenRow]:
    """How busy each rank is, and the request's figures."""
    lines = [
        _RankLine(stats=r, share=share, style=_BUSY, note=percent(share)) for r, share in zip(ranks, busy, strict=True)
    ]
    more = []
    if speculates(request):
        drafters = [own.label for own in drafters_of(request, ranks)]
        more = [_speculation(request, drafters, space)]
        if len(drafters) > 1 and space.colours:
            more.append(_legend(drafters, space))
    return _panel([[]], lines, [_status(request, now, space)], space, more)


def _panel(
    above: list[ScreenRow],
    lines: list[_RankLine],
    below: list[ScreenRow],
    space: PanelSize,
    more: Sequence[ScreenRow] = (),
) -> list[ScreenRow]:
    """The panel's rows. `more` is at the bottom; it is omitted before the ranks are merged into one row."""
    full = [*above, *_rank_rows(lines, space), *below]
    for rows in ([*full, *more], [*full, *more[:1]], full):
        if len(rows) <= space.height:
            return rows
    compact = _compact(lines, space)
    smaller = ([*above, compact, *below, *more], [compact, *below, *more], [compact, *below], below or above)
    return next((rows for rows in smaller if len(rows) <= space.height), [])


def _rank_rows(lines: list[_RankLine], space: PanelSize) -> list[ScreenRow]:
    if not lines:
        return []
    digits = max(len(str(line.stats.rank)) for line in lines)
    numbers = [f"{line.stats.rank:>{digits}}" for line in lines]
    shorts = _aligned([f"d{n}" if line.stats.draft else n for n, line in zip(numbers, lines, strict=True)], right=True)
    hosts = _aligned([_short(harmless(line.stats.host)) for line in lines])
    ranges = _aligned(layer_texts([line.stats for line in lines]), right=True)
    details = _aligned([line.detail for line in lines], right=True)
    notes = _aligned([line.note for line in lines], right=True, at_least=5)
    columns = {
        "number": _aligned(
            [f"{'draft' if line.stats.draft else 'rank'} {n}" for n, line in zip(numbers, lines, strict=True)]
        ),
        "host": hosts,
        "layers": [f"layers {r}" for r in ranges],
        "bar": [],
        "detail": details,
        "note": notes,
    }
    columns = {name: cells for name, cells in columns.items() if name == "bar" or any(cells)}
    less: list[tuple[str, list[str] | None]]
    less = [("host", None), ("layers", ranges), ("number", shorts), ("detail", None), ("layers", None)]

    def room() -> int:
        others = [cell_len(cells[0]) for name, cells in columns.items() if name != "bar"]
        return space.width - 1 - sum(others) - len(_GAP) * len(others)

    for name, shorter in less:
        if room() >= _MIN_BAR:
            break
        if shorter is None:
            columns.pop(name, None)
        elif name in columns:
            columns[name] = shorter
    bar = min(room(), _MAX_BAR)
    if bar < 2:
        del columns["bar"]
    rows = []
    for i, line in enumerate(lines):
        row: ScreenRow = []
        for name, cells in columns.items():
            if row:
                row.append(Segment(_GAP))
            if name == "bar":
                row += _bar(line.share, bar, line.style, space.ascii_only)
            else:
                row.append(Segment(cells[i], None if name == "note" else DIM))
        rows.append(row)
    return rows


def _bar(share: float, width: int, style: Style, ascii_only: bool) -> ScreenRow:
    full, half, rest = ("#", "", "-") if ascii_only else ("━", "╾", "─")
    halves = round(share * width * 2) if half else round(share * width) * 2
    filled = full * (halves // 2) + half * (halves % 2)
    return [Segment(filled, style), Segment(rest * (width - len(filled)), DIM)]


def _compact(lines: list[_RankLine], space: PanelSize) -> ScreenRow:
    """All ranks in one row, with a column whose height shows each share."""
    levels = "0123456789" if space.ascii_only else "▁▂▃▄▅▆▇█"
    row: ScreenRow = []
    for label, draft in (("ranks", False), ("draft", True)):
        shares = [line.share for line in lines if line.stats.draft is draft]
        if draft and not shares:
            break
        columns = "".join(levels[min(int(share * len(levels)), len(levels) - 1)] for share in shares)
        row += [Segment(_GAP)] if row else []
        row += [Segment(label + _GAP, DIM), Segment(columns, _BUSY)]
    return list(Segment.adjust_line_length(row, max(space.width - 1, 0), pad=False))


def _status(request: RequestStats, now: float, space: PanelSize) -> ScreenRow:
    if not request.n_generated:
        waited = human_seconds(max(request.elapsed_s(now), 0.0)) if request.n_prompt else ""
        prompt = ("", f"{request.n_prompt:>4} tokens", None)
        return _fields([("", "prompt", _PHASE), prompt, ("", f"{waited:>6}", None)], (1, 0, 2), space)
    recent = request.token_times[-_ITL_TOKENS - 1 :]
    itl = percentile((b - a for a, b in itertools.pairwise(recent)), 0.5)
    fields = [
        ("", "generating" if request.ended is None else "done", _PHASE),
        ("", f"{request.n_generated:>4} tokens", None),
        ("", f"{human_rate(request.decode_tps):>8}", None),
        ("TTFT ", human_seconds(request.ttft_s), None),
        ("ITL ", f"{human_seconds(itl):>6}", None),
    ]
    return _fields(fields, (2, 1, 4, 3, 0), space)


def _speculation(request: RequestStats, drafters: Sequence[str], space: PanelSize) -> ScreenRow:
    counters = request.counters
    cancelled = f"{counted(counters.cancelled_runs, 'run')}, {counted(counters.cancelled_tokens, 'token')}"
    fields: list[tuple[str, str, Style | None]] = [
        ("", request.speculation.mode, _PHASE),
        ("", f"{request.n_in_flight:>2} in flight", None),
        ("acceptance ", f"{percent(counters.acceptance):>5}", None),
        ("cancelled ", cancelled, None),
    ]
    priority: tuple[int, ...] = (2, 1, 3, 0)
    if space.colours and len(drafters) < 2:
        fields += [("text: ", "drafted", style_of(*drafters) if drafters else _DRAFTED), ("", "own", None)]
        priority = (2, 1, 3, 4, 5, 0)
    return _fields(fields, priority, space)


def _legend(drafters: Sequence[str], space: PanelSize) -> ScreenRow:
    """What the colours of the text mean if there are several drafters."""
    fields = [("" if i else "text: ", name, style_of(name)) for i, name in enumerate((*drafters, SEVERAL, OWN))]
    return _fields(fields, range(len(fields)), space)


def _fields(fields: Sequence[tuple[str, str, Style | None]], priority: Sequence[int], space: PanelSize) -> ScreenRow:
    """A row of (label, value, style). Items that do not fit are omitted, from the end of `priority`."""
    room = space.width - 1
    shown: set[int] = set()
    for i in priority:
        room -= len(fields[i][0]) + len(fields[i][1]) + (len(_GAP) if shown else 0)
        if room < 0:
            break
        shown.add(i)
    row: ScreenRow = []
    for i in sorted(shown):
        label, value, style = fields[i]
        value = value if row or label else value.lstrip()
        row += [Segment(_GAP)] if row else []
        row += [Segment(label, DIM), Segment(value, style)] if label else [Segment(value, style)]
    return row


def _short(host: str) -> str:
    """The host name without its domain."""
    name = host if host.replace(".", "").isdigit() else host.partition(".")[0]
    return name[:_MAX_HOST]


def _aligned(cells: list[str], right: bool = False, at_least: int = 0) -> list[str]:
    width = max(at_least, *map(cell_len, cells))
    pads = [" " * (width - cell_len(cell)) for cell in cells]
    return [pad + cell if right else cell + pad for pad, cell in zip(pads, cells, strict=True)]
