"""Machines as their kernels describe them, in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def sysfs(folder: Path, nodes: Mapping[str, Sequence[int]], has_memory: str | None = None) -> Path:
    """A folder as the kernel's: for the CPUs of each node, as the kernel writes them, the package of each."""
    system = folder / "devices/system"
    (system / "node").mkdir(parents=True)
    (system / "node/has_memory").write_text(has_memory or f"0-{len(nodes) - 1}\n")
    for i, (cpus, packages) in enumerate(nodes.items()):
        (system / f"node/node{i}").mkdir()
        (system / f"node/node{i}/cpulist").write_text(f"{cpus}\n")
        numbers = [n for part in cpus.split(",") for n in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)]
        for cpu, package in zip(numbers, packages, strict=True):
            topology = system / f"cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{package}\n")
    return folder


TWO = {"0-3,8-11": [0] * 8, "4-7,12-15": [1] * 8}
"""Two sockets of four cores, each with two hardware threads."""
