"""Escape sequences in texts that users give."""

from __future__ import annotations


def unescape(text: str) -> str:
    r"""Process `\n \r \t \' \" \\` and `\xHH` (a byte) as llama.cpp's -e does; other backslashes stay."""
    plain = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
    data, at = bytearray(), 0
    while at < len(text):
        c, following = text[at], text[at + 1 : at + 2]
        if c == "\\" and following in plain and following:
            data += plain[following].encode()
            at += 2
        elif c == "\\" and following == "x" and _is_byte(text[at + 2 : at + 4]):
            data.append(int(text[at + 2 : at + 4], 16))
            at += 4
        else:
            data += c.encode("utf-8", "surrogateescape")
            at += 1
    return data.decode("utf-8", "surrogateescape")


def _is_byte(digits: str) -> bool:
    return len(digits) == 2 and all(d in "0123456789abcdefABCDEF" for d in digits)
