"""How a thread waits until another one rings."""

from __future__ import annotations

import contextlib
import threading


class Bell:
    """Lets one thread wait, for microseconds or for ever, until another rings.

    Not a queue.SimpleQueue: in CPython 3.11 its get() can wait for ever when a timeout of microseconds runs out at the
    wrong moment.
    """

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """From any thread, and from signal handlers. Rings while nobody waits count once."""
        with contextlib.suppress(RuntimeError):  # rung already
            self._silent.release()

    def wait(self, timeout_s: float | None) -> None:
        """Until it rings or `timeout_s` seconds passed; None waits for the ring."""
        self._silent.acquire(timeout=-1 if timeout_s is None else timeout_s)
