"""Ranks that are asked to end while native code computes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from support.commands import HANG_S

BUSY = """
import ctypes
import threading
from ggpipe.engine.signals import Signals

Signals({rank}, has_user=False).connected(None)
threading.Timer(0.5, print, ("ready",), {{"flush": True}}).start()
own, native = ctypes.create_string_buffer(64), ctypes.CDLL(None)  # a free pthread_mutex_t
for _ in range(2):
    native.pthread_mutex_lock(own)  # the second time it never returns; the interpreter's lock is free
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_computes_ends_after_sigterm(rank: int) -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY.format(rank=rank)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(HANG_S) == -signal.SIGALRM
