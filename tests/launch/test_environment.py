"""What launchers put into the environment of their processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggpipe.launch import environment
from ggpipe.launch.environment import StatusFolder, is_rank, leave_status, rank_in_environment, size_in_environment


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """`leave_status` ignores SIGUSR1, which further processes would inherit."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("variables", "rank", "size"),
    [
        ({}, None, None),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_RANK": "2"}, 2, 3),
        ({"PMIX_RANK": "1"}, 1, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, 0, 4),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}, 1, 2),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}, None, 1),  # a batch script
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, 0, 1),
        ({"OMPI_COMM_WORLD_RANK": "", "PMI_RANK": "x"}, None, None),
    ],
)
def test_ranks_and_their_number(
    variables: dict[str, str], rank: int | None, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    assert rank_in_environment() == rank
    assert is_rank() == (rank is not None)
    assert size_in_environment() == size


def test_the_first_rank_writes_the_exit_code_for_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = StatusFolder(tmp_path)
    assert launcher.exit_code() is None
    for rank, written in ((1, None), (0, 7)):
        monkeypatch.setattr(os, "environ", {"PMI_RANK": str(rank), **launcher.environment})
        assert leave_status(7) == 0
        assert launcher.exit_code() == written


def test_a_launcher_on_another_machine_gets_the_exit_code_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    there = StatusFolder(Path("/nowhere"))
    monkeypatch.setattr(environment, "_OTHERS_LEAVE_S", 0.0)
    monkeypatch.setattr(os, "environ", {"PMI_RANK": "0", **there.environment})
    assert StatusFolder.in_environment() is None
    assert leave_status(7) == 7


def test_all_ranks_lack_mpi_when_each_has_reported_it(tmp_path: Path) -> None:
    launcher = StatusFolder(tmp_path)
    launcher.expect(2)
    launcher.lacks_mpi(1)
    assert not launcher.all_lack_mpi
    launcher.lacks_mpi(0)
    assert launcher.all_lack_mpi
