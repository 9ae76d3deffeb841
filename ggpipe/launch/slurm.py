"""The machines of a Slurm job, according to its environment variables.

| variable | contents |
|---|---|
| SLURM_JOB_NODELIST, SLURM_STEP_NODELIST | machines of a job, and of a step (`node[1-3,07],gpu1`) |
| SLURM_TASKS_PER_NODE, SLURM_STEP_TASKS_PER_NODE | tasks per machine (`2(x3),1`), or cores |
| SLURM_NTASKS, SLURM_NTASKS_PER_NODE | set only if the user has asked for tasks |
| SLURMD_NODENAME | this machine; set only in the job's processes, not where `salloc` was called |
"""

from __future__ import annotations

import itertools
import os
import re

_ASKED = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
_FIRST_STEP_OF_SLURM = 0xFFFFFFF0
"""Slurm's own steps, whose ids start here, concern the whole job: batch scripts, and the shells of `salloc`."""
_NODE = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def allocated_hosts() -> list[str]:
    """Machine of each task of the Slurm job, or each machine once if the user has not asked for tasks. Empty outside of
    a job, and if this machine is the only one."""
    if os.environ.get("SLURM_JOB_NODELIST") == os.environ.get("SLURMD_NODENAME"):
        return []
    step = os.environ.get("SLURM_STEP_ID", "")
    kind = "STEP" if step.isdecimal() and int(step) < _FIRST_STEP_OF_SLURM else "JOB"
    hosts = hosts_in(os.environ.get(f"SLURM_{kind}_NODELIST", ""))
    tasks = tasks_in(os.environ.get("SLURM_STEP_TASKS_PER_NODE" if kind == "STEP" else "SLURM_TASKS_PER_NODE", ""))
    if len(tasks) != len(hosts) or not any(variable in os.environ for variable in _ASKED):
        return hosts
    return [host for host, n_tasks in zip(hosts, tasks, strict=True) for _ in range(n_tasks)]


def hosts_in(nodelist: str) -> list[str]:
    """The machines of a Slurm list such as `node[1-3,07],gpu1`, as `scontrol show hostnames` would print them."""
    return [host for node in _NODE.findall(nodelist) for host in _expanded(node)]


def tasks_in(text: str) -> list[int]:
    """Tasks on each machine: 2, 2, 2, 1 for `2(x3),1`."""
    return [int(tasks) for tasks, times in _TASKS.findall(text) for _ in range(int(times or 1))]


def _expanded(node: str) -> list[str]:
    parts = re.split(r"\[([^\]]*)\]", node)  # bracketed parts have odd indices
    choices = [_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(ranges: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found += [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)] if last else [first]
    return found
