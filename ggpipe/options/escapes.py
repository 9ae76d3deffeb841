"""Escape sequences in text that users give."""

from __future__ import annotations

import re

_ESCAPE = re.compile(rb"""\\(?:x([0-9a-fA-F]{2})|([nrt'"\\]))""")
_MEANING = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def unescape(text: str) -> str:
    r"""Replace `\n \r \t \' \" \\` and `\xHH` (a byte), as llama.cpp's -e does. Other backslashes stay."""

    def meaning(match: re.Match[bytes]) -> bytes:
        return bytes.fromhex(match[1].decode()) if match[1] else _MEANING.get(match[2], match[2])

    return _ESCAPE.sub(meaning, text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")
