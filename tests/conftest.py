"""Options of the whole suite, and the order of its files: the slowest first, so that all workers end together."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from math import inf

import pytest
from hypothesis import HealthCheck, settings
from support import examples
from support.durations import record, recorded
from support.pairwise import combinations

# Threads of libllama that wait for each other sleep: all tests together have more threads than there are cores, and a
# thread that spins keeps the one that it waits for from its core. Before libllama is loaded, and for child processes.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in the program

# A shell starts what runs in the background with Ctrl-C ignored, and so would every process that a test starts be.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is. (The profile `ci` has this already.)
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options; `scripts/test` passes them on."""
    group = parser.getgroup("ggpipe")
    group.addoption("--full", action="store_true", help="all combinations, longer outputs, and more examples")
    group.addoption("--record-durations", action="store_true", help="record how long each file of tests takes")


def pytest_configure(config: pytest.Config) -> None:
    examples.full = config.getoption("full")
    config.addinivalue_line("markers", "pairwise: without --full, any two values of its parameters meet, but not all")
    config.addinivalue_line("markers", "only_full: with --full only")
    config.addinivalue_line("markers", "each_value: without --full, each value of its parameters is tested")
    if config.getoption("record_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set() if config.getoption("full") else _left_out(items)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
    if hasattr(config, "workerinput"):
        seconds = recorded()
        items.sort(key=lambda item: -seconds.get(_file_of(item.nodeid), inf))


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether all combinations are wanted, of tests that take several in one go."""
    wanted: bool = pytestconfig.getoption("full")
    return wanted


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """The `only_full` tests, and the combinations of parameters that `pairwise` and `each_value` tests do without."""
    left_out = {item for item in items if item.get_closest_marker("only_full") is not None}
    tests: defaultdict[tuple[str, bool], list[tuple[pytest.Item, tuple[object, ...]]]] = defaultdict(list)
    for item in items:
        for marker, meet in (("pairwise", True), ("each_value", False)):
            if item.get_closest_marker(marker) is not None:
                assert isinstance(item, pytest.Function)
                tests[item.nodeid.partition("[")[0], meet].append((item, tuple(item.callspec.params.values())))
    return left_out | {
        item
        for (_, meet), rows in tests.items()
        for kept in [combinations([row for _, row in rows], full=False, meet=meet)]
        for item, row in rows
        if row not in kept
    }


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class Stopwatch:
    """How long the tests of each file take, with their fixtures."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[_file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        record(self._seconds)
