"""The terminal to draw on. The first rank under a user's mpirun finds it, too, though its stderr is a pipe to mpirun.

| started by          | terminal                                                                 |
|---------------------|--------------------------------------------------------------------------|
| the user            | stderr, if it is one                                                     |
| the user's mpirun   | mpirun's own stderr, if it is one (found in /proc, among the ancestors)  |
| anyone, --color on  | stderr, whatever it is                                                   |

A rank's own stdout is no help: Open MPI makes it a pseudo terminal even if the output goes to a file.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TextIO, cast

from rich.console import Console

from ggpipe.launch.environment import is_rank
from ggpipe.options.settings import Color

_LAUNCHERS = ("prterun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun")
_BEGIN_FRAME, _END_FRAME = "\x1b[?2026h", "\x1b[?2026l"  # "synchronized output"; ignored where unknown


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """A terminal, as the live display needs it."""

    console: Console
    stdout_shared: bool
    """stdout is shown here as well, so the output is written through the display only."""
    fd: int | None = None
    """File descriptor for reading the size. None: the size does not change."""
    own_stderr: bool = False
    """The terminal is this process's stderr, so other output there must not disturb the live region."""
    reflows: bool = True
    """The terminal wraps long rows when it becomes narrower. Most do; xterm, screen and the Linux console cut them."""

    def measure(self) -> None:
        """Read the terminal's current size."""
        if self.fd is None:
            return
        try:
            columns, lines = os.get_terminal_size(self.fd)
        except OSError:
            return
        if columns > 0 and lines > 0:
            self.console.size = (columns, lines)


def open_terminal(color: Color = "auto") -> Terminal | None:
    """The terminal to draw on, or None if no control codes may be written.

    `off` draws without colours, and so does NO_COLOR unless `color` is `on`. A dumb terminal does not count unless
    `color` is `on`.
    """
    colourless = color == "off" or (color == "auto" and bool(os.environ.get("NO_COLOR")))
    if color != "on" and os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return None
    if _is_terminal(sys.stderr):
        return _on_stream(sys.stderr, _is_terminal(sys.stdout), colourless)
    launcher = launcher_process()
    device, shared = "", _same_file("/dev/fd/1", "/dev/fd/2")
    if launcher is not None:
        device = f"/proc/{launcher}/fd/2"  # opens the same file, whatever its name
        shared = _same_file(f"/proc/{launcher}/fd/1", device)
    terminal = _on_device(device, shared, colourless)
    if terminal is None and color == "on":
        return _on_stream(sys.stderr, shared, colourless)
    return terminal


def open_launcher_stderr() -> TextIO | None:
    """stderr of the mpirun that started us, if it is on this machine and a pipe or a terminal; else None."""
    launcher = launcher_process()
    if launcher is not None:
        with contextlib.suppress(OSError):
            path = f"/proc/{launcher}/fd/2"
            mode = os.stat(path).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
                fd = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)
                return os.fdopen(fd, "w", buffering=1, encoding="utf-8", errors="replace")
    return None


@contextlib.contextmanager
def unechoed() -> Iterator[None]:
    """Turn off the echo of typed characters. They can still be read later, including Enter, and Ctrl-C works as usual.
    Does nothing if stdin is not a terminal."""
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        quiet = [before[0] & ~termios.ICRNL, *before[1:3], before[3] & ~termios.ECHO, *before[4:]]
        termios.tcsetattr(fd, termios.TCSANOW, quiet)
    except (OSError, ValueError, termios.error):
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSANOW, before)


class _Console(Console):
    """Always draws: `open_terminal` has already decided whether to."""

    @property
    def is_dumb_terminal(self) -> bool:
        return False


class _Sink:
    """The part of a file that Rich uses. If the terminal disappears, only the drawing stops."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        """Write one frame."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(_BEGIN_FRAME + text + _END_FRAME)
        return len(text)

    def flush(self) -> None:
        """Flush the file."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        """True, for Rich."""
        return True


def _on_stream(stream: TextIO, shared: bool, colourless: bool) -> Terminal:
    console = _console(stream, colourless)
    fd = stream.fileno() if _is_terminal(stream) else None
    terminal = Terminal(
        console=console, stdout_shared=shared, fd=fd, own_stderr=stream is sys.stderr, reflows=_reflows()
    )
    terminal.measure()
    return terminal


def _on_device(path: str, shared: bool, colourless: bool) -> Terminal | None:
    if not path:
        return None
    try:
        if not stat.S_ISCHR(os.stat(path).st_mode):  # opening a FIFO would wait for a reader
            return None
        fd = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    if not os.isatty(fd):
        os.close(fd)
        return None
    device = os.fdopen(fd, "w", encoding="utf-8", errors="replace")
    terminal = Terminal(console=_console(device, colourless), stdout_shared=shared, fd=fd, reflows=_reflows())
    terminal.measure()
    return terminal


def _console(stream: TextIO, colourless: bool) -> Console:
    return _Console(
        file=cast(IO[str], _Sink(stream)),
        force_terminal=True,
        force_interactive=True,
        legacy_windows=False,
        no_color=colourless,
        width=80,
        height=24,
        markup=False,
        emoji=False,
        highlight=False,
    )


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _reflows() -> bool:
    term = os.environ.get("TERM", "")
    inner_cuts = term.startswith(("linux", "screen")) and "TMUX" not in os.environ
    return not inner_cuts and ("XTERM_VERSION" not in os.environ or "TMUX" in os.environ)


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def launcher_process() -> int | None:
    """Process id of the mpirun that started us; None without one, or if it is on another machine."""
    if not is_rank():
        return None
    process = os.getppid()
    while process > 1:
        try:
            with open(f"/proc/{process}/stat") as file:
                head, _, tail = file.read().rpartition(")")
        except OSError:
            return None
        if head.partition("(")[2] in _LAUNCHERS:
            return process
        process = int(tail.split()[1])
    return None
