"""Processors that cluster files know by name, and machines with several sockets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ggpipe.cluster.links import SumTimes
from ggpipe.cluster.processors import PROCESSORS, processor
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.cluster.toml import read_cluster
from ggpipe.sim.virtual_cluster import build, placement_of

NETWORK = "[network]\nlatency_us = 60\ngbit_per_s = 1\n"
TARGET = "[target]\nlayers = 80\nweights_gb = 42.5\nparameters_b = 70.6\nwidth = 8192\nkv_kb = 328\n"
NODES = "[[node]]\nname = 'node'\ncount = 2\nmemory_gb = 64\n"
SOCKETS = NODES + "sockets = 2\ncores = 16\nmemory_gb_per_s = 90\ncore_gb_per_s = 12\n"


def cluster(tmp_path: Path, text: str) -> ClusterSpec:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return read_cluster(path)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("EPYC 7763", "EPYC 7763"),
        ("7763", "EPYC 7763"),
        ("AMD EPYC 7763 64-Core Processor", "EPYC 7763"),
        ("Intel(R) Xeon(R) Gold 6248R CPU @ 3.00GHz", "Xeon Gold 6248R"),
        ("xeon gold 6248", "Xeon Gold 6248"),
        ("Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz", "Xeon E5-2680 v4"),
        ("Intel(R) Xeon(R) Platinum 8480+", "Xeon Platinum 8480+"),
        ("AMD Ryzen Threadripper PRO 5975WX 32-Cores", "Threadripper PRO 5975WX"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "Ryzen 9 7950X"),
        ("Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz", "Core i7-8700"),
        ("12th Gen Intel(R) Core(TM) i7-12700", "Core i7-12700"),
    ],
)
def test_names_as_machines_and_people_write_them(written: str, name: str) -> None:
    assert processor(written).name == name


@pytest.mark.parametrize("name", ["EPYC", "Gold", "", "Pentium", "8"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not in ggpipe's table.*: give cores and memory_gb_per_s instead"):
        processor(name)


def test_similar_names_are_proposed() -> None:
    with pytest.raises(ValueError, match=re.escape("similar ones are Xeon Gold 6230")):
        processor("Xeon Gold 6230R")


def test_figures_are_plausible() -> None:
    for own in PROCESSORS.values():
        assert own.core_gb_per_s < own.gb_per_s < 400
        assert own.cores * own.core_gflops < 8000
        assert own.core_gb_per_s * own.cores > own.gb_per_s / 2


def test_a_processor_gives_what_is_left_out(tmp_path: Path) -> None:
    cpu = "cpu = 'AMD EPYC 7543 32-Core Processor'\n"
    (node, _) = cluster(tmp_path, NETWORK + NODES + cpu).nodes
    assert (node.cores, node.memory_bytes, node.core_bytes_per_s) == (32, 64e9, 11e9)
    assert node.bytes_per_s == pytest.approx(0.6 * 204.8e9)
    assert node.core_flop_per_s == pytest.approx(58.8e9)
    own = "cores = 16\nmemory_gb_per_s = 90\n"
    (node, _) = cluster(tmp_path, NETWORK + NODES + cpu + own + "core_gflops = 70").nodes
    assert (node.cores, node.bytes_per_s, node.core_flop_per_s) == (16, 90e9, 70e9)
    (node, _) = cluster(tmp_path, NETWORK + NODES + own).nodes
    assert (node.core_bytes_per_s, node.core_flop_per_s) == (90e9, 60e9)


def test_sockets_are_nodes_on_one_machine(tmp_path: Path) -> None:
    spec = cluster(tmp_path, NETWORK + TARGET + SOCKETS)
    assert [(node.name, node.host, node.cores) for node in spec.nodes] == [
        ("node1/1", "node1", 8), ("node1/2", "node1", 8), ("node2/1", "node2", 8), ("node2/2", "node2", 8)
    ]  # fmt: skip
    assert {(node.memory_bytes, node.bytes_per_s, node.core_bytes_per_s) for node in spec.nodes} == {(32e9, 45e9, 12e9)}
    assert spec.sums_between(0, 1) == spec.local_sums
    assert spec.sums_between(1, 2) == SumTimes.of_link(spec.network, spec.network_skew)
    assert spec.target is not None
    built = build(spec, placement_of(spec, spec.target, ()), spec.target, ())
    assert (built.link(0, 1), built.link(1, 2)) == (spec.local, spec.network)
    alone = cluster(tmp_path, SOCKETS.replace("count = 2", ""))
    assert alone.network == alone.local


def test_a_machine_stands_for_its_sockets(tmp_path: Path) -> None:
    spec = cluster(tmp_path, "target_on = ['node2', 'node1/2']\n" + NETWORK + SOCKETS)
    assert spec.target_on == (2, 3, 1)
