"""Format numbers and untrusted text for people."""

from __future__ import annotations

import re
from collections.abc import Mapping

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def harmless(text: str) -> str:
    """The text with symbols (␛) instead of control characters, except for newline and tab."""
    return _CONTROL.sub(_picture, text)


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def human_bytes(n_bytes: float | None) -> str:
    """Decimal units, as for files and networks: `812 B`, `16.4 kB`, `38.2 GB`; `-` for None."""
    if n_bytes is None:
        return "-"
    if n_bytes < 1000:
        return f"{n_bytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        n_bytes /= 1000
        if n_bytes < 99.95:
            return f"{n_bytes:.1f} {unit}"
        if n_bytes < 999.5 or unit == "TB":
            break
    return f"{n_bytes:.0f} {unit}"


def human_seconds(seconds: float | None) -> str:
    """`<0.1 ms`, `4.3 ms`, `231 ms`, `3.20 s`, `31.2 s`, `312 s`; `-` for None."""
    if seconds is None:
        return "-"
    if 0 < seconds < 0.05e-3:
        return "<0.1 ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.1f} ms" if 0 < seconds < 0.00995 else f"{seconds * 1e3:.0f} ms"
    return f"{three_digits(seconds)} s"


def human_rate(per_s: float | None) -> str:
    """Tokens per second: `4.31 t/s`; `-` for None."""
    return "-" if per_s is None else f"{three_digits(per_s)} t/s"


def percent(share: float | None) -> str:
    """`82 %` for 0.82; `-` for None."""
    return "-" if share is None else f"{share * 100:.0f} %"


def streamed_text(streamed: Mapping[str, float]) -> str:
    """A line about weights that are not in memory, in bytes by the name of their machine."""
    where = ", ".join(f"{human_bytes(n_bytes)} on {harmless(name)}" for name, n_bytes in streamed.items())
    return f"weights that do not fit into memory and are read from disk as they are used: {where}"


def counted(n: int, what: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def three_digits(value: float | None) -> str:
    """`1.25`, `31.2`, `312`; `-` for None."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
