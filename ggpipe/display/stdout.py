"""Results on stdout: output as it comes, and whole pages, in colour on a terminal."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import select
import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from ggpipe.display.live.terminal import open_terminal
from ggpipe.display.tables.columns import LOG_WIDTH
from ggpipe.errors import RunError
from ggpipe.launch.environment import is_rank

_POLL_MS = 100
_READS_AGAIN_S = 1.0  # time for a reader that has stopped reading to continue, once the user wants to stop


class Stdout:
    """Writes output without the stream's own buffer.

    Pipes are written to only when they have room, since signals are not handled during a blocking write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._is_terminal = (
            stream.isatty() and not is_rank()
        )  # under a user's mpirun, the first rank's stdout is one, too
        self._is_in_line = False
        self._fd: int | None = None
        with contextlib.suppress(OSError):  # not backed by a file descriptor
            self._fd = stream.fileno()
        self._encoder = codecs.getincrementalencoder(stream.encoding or "utf-8")(errors="replace")

    def write(self, text: str, stopping: Callable[[], bool] = lambda: False) -> bool:
        """Write all of it. Returns False if the reader has left.

        If the reader does not read, this waits until shortly after `stopping` says that the user wants to stop. Raises
        RunError if the text cannot be written.
        """
        self._is_in_line = not text.endswith("\n") if text else self._is_in_line
        try:
            if self._stream is not None and not self._write(self._stream, text, stopping):
                self._stream = None
        except BrokenPipeError:
            self._stream = None
        except OSError as e:
            raise RunError(f"cannot write to stdout: {e.strerror}") from e
        return self._stream is not None

    def end_line(self) -> None:
        """On a terminal, make sure that what follows starts on a new line."""
        if self._is_terminal and self._is_in_line:
            self.write("\n")

    def _write(self, stream: TextIO, text: str, stopping: Callable[[], bool]) -> bool:
        if self._fd is None:
            stream.write(text)
            return True
        stream.flush()
        rest = memoryview(self._encoder.encode(text))
        while rest:
            if not _has_room(self._fd, stopping):
                return False
            rest = rest[os.write(self._fd, rest[: select.PIPE_BUF]) :]
        return True


def _has_room(fd: int, stopping: Callable[[], bool]) -> bool:
    """Wait until a pipe takes PIPE_BUF bytes without blocking (other files: some bytes). False after the deadline."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    deadline: float | None = None
    while not poll.poll(_POLL_MS):
        if deadline is None and stopping():
            deadline = time.monotonic() + _READS_AGAIN_S
        if deadline is not None and time.monotonic() > deadline:
            return False
    return True


def page_console() -> Console:
    """The console for which to lay out a page."""
    if not is_rank():
        if sys.stdout.isatty():
            return Console(highlight=False)
    else:
        terminal = open_terminal()
        if terminal is not None and terminal.stdout_shared:
            terminal.measure()
            return terminal.console
    return Console(file=io.StringIO(), width=LOG_WIDTH, color_system=None, force_terminal=False, highlight=False)


def print_page(console: Console, *parts: RenderableType) -> None:
    """Print a page that was made for this console on stdout. Long lines of `Text` are not wrapped.

    Raises RunError if it cannot be written.
    """
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text), highlight=False)
    if isinstance(console.file, io.StringIO):
        Stdout(sys.stdout).write("\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n")
