"""Command lines as llama.cpp's users write them, and prompts unescaped, as llama.cpp does it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_lines import options

from ggpipe.cli.command_line import HelpWanted
from ggpipe.errors import UsageError
from ggpipe.options.escapes import unescape
from ggpipe.options.settings import BatchSettings, PromptSettings

LINES = {  # as users write it, and spelled out
    "": "",
    "-m a.gguf -p x": "--model a.gguf --prompt x",
    "--top_k 5 --repeat_last_n 3": "--top-k=5 --repeat-last-n=3",
    "--top_k=5 --json=a_b.json": "--top-k 5 --json a_b.json",
    "-m my_model.gguf": "--model=my_model.gguf",
    "--numa": "--numa distribute",
    "--numa -p x": "--numa distribute -p x",
    "--numa isolate -p x": "-p x --numa isolate",
    "--numa numactl": "--numa=numactl",
    "-fa -p x": "-fa on -p x",
    "-fa off": "--flash-attn=off",
    "--flash_attn": "--flash-attn on",
    "--flash_attn auto": "-fa auto",
    "--color": "--color on",
    "--color off --numa": "--color off --numa distribute",
    "-fa --color --numa": "-fa on --color on --numa distribute",
    "-fa 1 -p on": "-fa on -p on",
    "-fa disabled --color": "-fa off --color on",
    "-co": "--color on",
    "-co off": "--color off",
    "-n -1": "--n-predict=-1",
    "-c512 -n5 -t4": "-c 512 -n 5 -t 4",
    "-np=4": "-np 4",
    "-n 3 -n 4": "-n 4",
    "--cancel --no-cancel": "--no-cancel",
    "-p -hf --temp -inf": "--prompt=-hf --temp=-inf",
    "-no-cnv -p -no-cnv --jinja": "--prompt=-no-cnv",
    "--threads-http 8 --threads-http=4 --embeddings": "",
}


@pytest.mark.parametrize("line", LINES)
def test_lines_that_say_the_same(line: str) -> None:
    read, spelled = (options([*text.split(), "-m", "m"]) for text in (line, LINES[line]))
    assert read._values == spelled._values


@pytest.mark.parametrize("prompt", ["--a_b", "-fa", "--numa", "-co", "--log-jsonl", "-h", "--", ""])
def test_a_prompt_that_looks_like_an_option_stays(prompt: str) -> None:
    """llama.cpp changes names of options only: the word behind -p is taken as it is."""
    assert options(["-m", "m", "-p", prompt, "-n", "5"])[PromptSettings] == PromptSettings(text=prompt, n_predict=5)


@given(st.text())
def test_any_value_stays(text: str) -> None:
    assert options(["-m", "m", "-p", text])[PromptSettings].text == text
    assert options(["-m", "m", f"--prompt={text}"])[PromptSettings].text == text


WORDS = st.sampled_from(
    ["-p", "-fa", "--numa", "--color", "--flash_attn", "on", "off", "isolate", "--top_k=4", "--top_k", "a_b", "", "-",
     "--", "-c5", "-n", "5", "-h", "-ngl", "--jinja", "-e", "--mlock", "--mlock=1", "--lora", "x.gguf"]
)  # fmt: skip


@given(st.lists(WORDS | st.text()))
def test_any_words_are_options_or_one_line(words: list[str]) -> None:
    try:
        options(words)
    except UsageError as e:
        line = str(e)
        assert "\n" not in line or any("\n" in word for word in words)
    except HelpWanted:
        assert {"-h", "--help", "--help-all"} & {word.partition("=")[0] for word in words}


def test_files_after_two_dashes() -> None:
    assert options(["-m", "m", "-o", "o", "--", "-in"], "batch").fields(BatchSettings)["input"] == Path("-in")


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
