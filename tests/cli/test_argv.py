"""Command lines are made fit for typer, and prompts unescaped, as llama.cpp does it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggpipe.cli.argv import normalise
from ggpipe.options.escapes import unescape


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("", ""),
        ("generate -m a.gguf -p x", "generate -m a.gguf -p x"),
        ("--top_k 5 --repeat_last_n 3", "--top-k 5 --repeat-last-n 3"),
        ("--top_k=5 --json=a_b.json", "--top-k=5 --json=a_b.json"),
        ("-m my_model.gguf", "-m my_model.gguf"),
        ("--numa", "--numa distribute"),
        ("--numa -p x", "--numa distribute -p x"),
        ("--numa isolate -p x", "--numa isolate -p x"),
        ("--numa numactl", "--numa numactl"),
        ("--numa=isolate", "--numa=isolate"),
        ("-fa -p x", "-fa on -p x"),
        ("-fa off", "-fa off"),
        ("--flash_attn", "--flash-attn on"),
        ("--flash_attn auto", "--flash-attn auto"),
        ("--color", "--color on"),
        ("--color off --numa", "--color off --numa distribute"),
        ("-fa --color --numa", "-fa on --color on --numa distribute"),
        ("-fa 1 -p on", "-fa on -p on"),
        ("-fa disabled --color", "-fa off --color on"),
        ("-co", "--color on"),
        ("-co off", "--color off"),
        ("-n -1", "-n -1"),
    ],
)
def test_normalise(given_: str, expected: str) -> None:
    assert normalise(given_.split()) == expected.split()


WORDS = st.sampled_from(
    [
        "-p",
        "-fa",
        "--numa",
        "--color",
        "--flash_attn",
        "on",
        "off",
        "auto",
        "isolate",
        "--top_k=4",
        "--top_k",
        "a_b",
        "",
    ]
)


@given(st.lists(WORDS))
def test_normalising_twice_changes_nothing(arguments: list[str]) -> None:
    once = normalise(arguments)
    assert normalise(once) == once


@given(st.lists(st.text()))
def test_other_arguments_stay(arguments: list[str]) -> None:
    plain = [a for a in arguments if not a.startswith("-")]
    assert normalise(plain) == plain


@pytest.mark.parametrize("prompt", ["--a_b", "-fa", "--numa", "-co", "--log-jsonl"])
def test_a_prompt_that_looks_like_an_option_stays(prompt: str) -> None:
    """llama.cpp changes names of options only: the word behind -p is taken as it is."""
    assert normalise(["-p", prompt, "-n", "5"]) == ["-p", prompt, "-n", "5"]


# unescape


def string_process_escapes(data: bytes) -> bytes:
    """llama.cpp's function of that name (common/common.cpp), byte by byte."""
    out = bytearray()
    i = 0
    while i < len(data):
        if data[i : i + 1] == b"\\" and i + 1 < len(data):
            i += 1
            c = data[i : i + 1]
            value = strtol_16(data[i + 1 : i + 3]) if c == b"x" and i + 2 < len(data) else None
            if c in (b"n", b"r", b"t", b"'", b'"', b"\\"):
                out += {b"n": b"\n", b"r": b"\r", b"t": b"\t"}.get(c, c)
            elif value is not None:
                out.append(value & 0xFF)
                i += 2
            else:
                out += b"\\" + c
        else:
            out.append(data[i])
        i += 1
    return bytes(out)


def strtol_16(two: bytes) -> int | None:
    """strtol(two, &end, 16), None unless it takes both characters: spaces and a sign may come in front."""
    rest = two.lstrip(b" \t\n\v\f\r")
    sign = -1 if rest[:1] == b"-" else 1
    digits = rest[1:] if rest[:1] in (b"+", b"-") else rest
    if not digits or any(d not in b"0123456789abcdefABCDEF" for d in digits):
        return None
    return sign * int(digits, 16)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        (r"a\nb\rc\td", "a\nb\rc\td"),
        (r"\'\"\\", "'\"\\"),
        (r"\\n", r"\n"),
        (r"\\\n", "\\\n"),
        (r"\a\q\0\é", r"\a\q\0\é"),
        ("ends with \\", "ends with \\"),
        (r"\x41\x7e", "A~"),
        (r"\xc3\xa9 \xF0\x9f\x99\x82", "é 🙂"),
        (r"\x4", r"\x4"),
        (r"\x", r"\x"),
        (r"\x4g \xg4 \xé", r"\x4g \xg4 \xé"),
        (r"\x\n", "\\x\n"),
        (r"\x0x41", r"\x0x41"),
        (r"\x5cn", r"\n"),  # what comes of an escape is not processed again
        (r"\x00", "\0"),
    ],
)
def test_unescape(text: str, expected: str) -> None:
    assert unescape(text) == expected
    assert string_process_escapes(text.encode()).decode() == expected


def test_bytes_that_are_no_utf8_stay_bytes() -> None:
    assert unescape(r"\xff\xc3").encode("utf-8", "surrogateescape") == b"\xff\xc3"
    raw = b"\xe9\\n".decode("utf-8", "surrogateescape")  # as Python reads argv
    assert unescape(raw).encode("utf-8", "surrogateescape") == b"\xe9\n"


ESCAPES = st.lists(st.sampled_from([*r"\\\xnrt'\"04aAfFgé🙂q", r"\x", r"\xc3", r"\n"])).map("".join)


@given(st.text() | ESCAPES)
def test_unescape_is_llama_cpps(text: str) -> None:
    assert unescape(text).encode("utf-8", "surrogateescape") == string_process_escapes(text.encode())
