"""What launchers put into the environment of their processes."""

from __future__ import annotations

import os

import pytest

from ggpipe.launch import environment
from ggpipe.launch.environment import is_rank, leave_status, rank_in_environment, size_in_environment


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


@pytest.mark.parametrize(("rank", "served", "code"), [(0, False, 7), (1, False, 0), (0, True, 0), (1, True, 0)])
def test_the_exit_code_of_a_rank(rank: int, served: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own launcher has the exit code from its front end."""
    channel = dict.fromkeys(environment.CHANNEL_VARIABLES, "x") if served else {}
    monkeypatch.setattr(environment, "_OTHERS_LEAVE_S", 0.0)
    monkeypatch.setattr(os, "environ", {"PMI_RANK": str(rank), **channel})
    assert leave_status(7) == code
    assert environment.has_user() == (rank == 0 and not served)


def test_no_rank_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert leave_status(7) == 7
    assert environment.has_user()
