"""How a thread waits until another one wakes it."""

from __future__ import annotations

import contextlib
import threading


class WakeEvent:
    """Lets one thread wait, for microseconds or for ever, until another wakes it.

    Not a queue.SimpleQueue: in CPython 3.11 its get() can wait for ever when a timeout of microseconds runs out at the
    wrong moment.
    """

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def set(self) -> None:
        """Wake the waiting thread, or let its next wait return at once. Safe in threads and signal handlers."""
        with contextlib.suppress(RuntimeError):  # set already
            self._silent.release()

    def wait(self, timeout_s: float | None) -> None:
        """Until it is set or `timeout_s` seconds passed; None waits without a limit."""
        self._silent.acquire(timeout=-1 if timeout_s is None else timeout_s)
