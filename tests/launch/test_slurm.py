"""Machines and tasks of a Slurm job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.settings import SETTINGS

from ggpipe.launch import job as jobs
from ggpipe.launch.hostfile import hosts_of
from ggpipe.launch.job import Job, slots_of
from ggpipe.launch.slurm import allocated_hosts, hosts_in, tasks_in

BATCH = {
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_TASKS_PER_NODE": "1(x3)",
    "SLURM_NTASKS": "3",
    "SLURMD_NODENAME": "node1",
}


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("", []),
        ("node1", ["node1"]),
        ("node1,gpu-7.example.org", ["node1", "gpu-7.example.org"]),
        ("node[1-3,07]", ["node1", "node2", "node3", "node07"]),
        ("node[098-101],gpu[2,4]", ["node098", "node099", "node100", "node101", "gpu2", "gpu4"]),
        ("rack[1-2]node[01-02]x", ["rack1node01x", "rack1node02x", "rack2node01x", "rack2node02x"]),
    ],
)
def test_lists_of_machines(nodelist: str, hosts: list[str]) -> None:
    """As `scontrol show hostnames` has them."""
    assert hosts_in(nodelist) == hosts


def test_tasks_of_machines() -> None:
    assert tasks_in("2(x3),1,4(x2)") == [2, 2, 2, 1, 4, 4]
    assert tasks_in("") == []


@pytest.mark.parametrize(
    ("variables", "hosts"),
    [
        ({}, []),
        (BATCH, ["node1", "node2", "node3"]),
        (BATCH | {"SLURM_TASKS_PER_NODE": "2(x2),1"}, ["node1", "node1", "node2", "node2", "node3"]),
        # salloc --exclusive -N2: two cores each, and nobody asked for tasks
        ({"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}, ["node1", "node2"]),
        ({"SLURM_JOB_NODELIST": "node1", "SLURM_TASKS_PER_NODE": "1"}, ["node1"]),  # salloc on a login node
        ({"SLURM_JOB_NODELIST": "node1", "SLURM_TASKS_PER_NODE": "1", "SLURMD_NODENAME": "node1"}, []),
        (BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": "1"}, ["node1"]),
        (BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "node1"}, ["node1", "node2", "node3"]),
    ],
)
def test_machines_of_a_job(variables: dict[str, str], hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", variables)
    assert allocated_hosts() == hosts
    assert slots_of(None) == hosts


def test_ranks_are_started_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", BATCH)
    monkeypatch.setattr(jobs, "find_mpirun", lambda: "mpirun")
    monkeypatch.setattr(jobs, "is_open_mpi", lambda _: True)
    with Job(SETTINGS, 2, None).hosts_in_file() as path:
        assert path is not None
        assert hosts_of(path) == ["node1", "node2", "node3"]
    with Job(SETTINGS, 1, None).hosts_in_file() as path:
        assert path is None  # one rank is where its user is
    (tmp_path / "hosts").write_text("node3\n")
    with Job(SETTINGS, 2, tmp_path / "hosts").hosts_in_file() as path:
        assert path == tmp_path / "hosts"
