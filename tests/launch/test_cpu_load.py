"""How busy the processors are, from what the kernel says."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from ggpipe.launch.cpu_load import busy_share


def line(name: str, busy: int, idle: int) -> str:
    return f"{name} {busy} 0 0 {idle} 0 0 0 0 99 99"


def test_only_own_processors_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    stat.write_text("\n".join([line("cpu", 0, 0), line("cpu0", 100, 900), line("cpu1", 5, 5), line("cpu2", 50, 950)]))
    later = "\n".join([line("cpu0", 130, 970), line("cpu1", 500, 5), line("cpu2", 60, 1040), "intr 5 5 5"])

    def sleep(seconds: float) -> None:
        stat.write_text(later)

    monkeypatch.setattr(time, "sleep", sleep)
    assert busy_share(0.1, stat) == pytest.approx(40 / 200)


def test_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    assert busy_share(0.01, tmp_path / "nothing") == 0
    (tmp_path / "empty").write_text("\n")
    assert busy_share(0.01, tmp_path / "empty") == 0


def test_this_machine() -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            pass

    worker = threading.Thread(target=work)
    worker.start()
    try:
        assert 0 < busy_share(0.2) <= 1
    finally:
        stop.set()
        worker.join()
