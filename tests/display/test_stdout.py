"""Where a text goes as it comes: all of it to a reader that reads, and no hang with one that does not."""

from __future__ import annotations

import io
import os
import pty
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import HANG_S

from ggpipe.display import stdout
from ggpipe.display.stdout import Stdout
from ggpipe.errors import RunError

TEXT = "".join(f"{i} é\n" for i in range(50_000))


@pytest.fixture
def pipe() -> Iterator[tuple[int, io.TextIOWrapper]]:
    """What reads, and a stream that writes."""
    read, write = os.pipe()
    with os.fdopen(write, "w", encoding="utf-8") as stream:
        yield read, stream
        os.close(read)


def reader(fd: int, into: bytearray) -> threading.Thread:
    def read() -> None:
        while len(into) < len(TEXT.encode()) and (data := os.read(fd, 1000)):
            into.extend(data)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def test_all_of_a_text_arrives(pipe: tuple[int, io.TextIOWrapper]) -> None:
    got = bytearray()
    thread = reader(pipe[0], got)
    assert Stdout(pipe[1]).write(TEXT)
    thread.join(HANG_S)
    assert got.decode() == TEXT


def test_a_reader_that_reads_again_loses_nothing(
    pipe: tuple[int, io.TextIOWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins to read when the user wants an end."""
    monkeypatch.setattr(stdout, "_READS_AGAIN_S", 3600)
    got = bytearray()
    threads: list[threading.Thread] = []

    def stopping() -> bool:
        if not threads:  # a slow machine may ask again
            threads.append(reader(pipe[0], got))
        return True

    assert Stdout(pipe[1]).write(TEXT, stopping)
    (thread,) = threads
    thread.join(HANG_S)
    assert got.decode() == TEXT


def test_a_reader_that_does_not_read_is_given_up(
    pipe: tuple[int, io.TextIOWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdout, "_READS_AGAIN_S", 0)
    out, answers = Stdout(pipe[1]), iter((False, False, True))
    assert not out.write(TEXT, lambda: next(answers))
    assert not out.write("more", lambda: pytest.fail("it was given up"))


def test_a_reader_that_has_gone() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        out = Stdout(stream)
        assert not out.write("text")
        assert not out.write("more")


def test_a_full_disk() -> None:
    with open("/dev/full", "w") as stream, pytest.raises(RunError, match="cannot write to stdout: No space left"):
        Stdout(stream).write("text")


@pytest.mark.parametrize(
    ("encoding", "expected"), [("ascii", b"a?b?"), ("latin-1", b"a?b\xe9"), ("utf-8", "a�bé".encode())]
)
def test_characters_that_an_encoding_lacks(encoding: str, expected: bytes, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w", encoding=encoding) as stream:
        out = Stdout(stream)
        for piece in ("a", "\ufffdb", "é"):
            assert out.write(piece)
    assert path.read_bytes() == expected


def test_a_stream_that_is_no_file() -> None:
    stream = io.StringIO()
    assert Stdout(stream).write("text")
    assert stream.getvalue() == "text"


def test_what_was_printed_before_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w") as stream:
        stream.write("before ")
        assert Stdout(stream).write("after")
    assert path.read_text() == "before after"


@pytest.mark.parametrize(("text", "drawn"), [("a text", "a text\r\n"), ("a line\n", "a line\r\n"), ("", "")])
def test_what_follows_a_text_on_a_terminal_begins_a_line(text: str, drawn: str) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        own = Stdout(stream)
        own.write(text)
        own.write("")
        own.end_line()
        os.write(slave, b".")
        seen = b""
        while not seen.endswith(b"."):
            seen += os.read(master, 100)
        assert seen.decode() == f"{drawn}."
    os.close(master)


def test_nothing_is_added_to_a_text_in_a_file(tmp_path: Path) -> None:
    with (tmp_path / "text").open("w") as stream:
        own = Stdout(stream)
        own.write("a text")
        own.end_line()
    assert (tmp_path / "text").read_text() == "a text"
