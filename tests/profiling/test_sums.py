"""Sums over two ranks: measured, kept in a profile, and used by the simulator."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.commands import TARGET, mpirun
from support.profiles import config_of, measure
from support.virtual import measured
from support.zoo import make

from ggpipe.cluster.from_profile import spec_from_profile
from ggpipe.cluster.links import NETWORK_SKEW, Skew
from ggpipe.cluster.profile import DecodeSums, Profile, SumPoint, SumProfile, read, write
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.cluster.toml import read_cluster
from ggpipe.display.tables.profile import profile_table
from ggpipe.errors import UsageError
from ggpipe.profiling.sums import ROWS, decode_sums, measure_sums, sum_pairs, sum_profile
from ggpipe.transport.control import decode, encode
from ggpipe.transport.local import LocalWorld
from ggpipe.transport.profile_messages import DecodesMeasured, SumsMeasured

WIDTH = 64  # of the profiles here


def sums(a: int, b: int, one_s: float, is_message: bool = True) -> SumProfile:
    points = (SumPoint(1, one_s), SumPoint(8, 2 * one_s), SumPoint(128, 20 * one_s))
    return SumProfile((a, b), points, (points[0], SumPoint(128, 10 * one_s)) if is_message else ())


def profile() -> Profile:
    """Two ranks on the first machine, one on the second."""
    found = (sums(0, 1, 5e-6, is_message=False), sums(0, 2, 40e-6))
    return replace(measured(("a", "a", "b")), sums=found)


def test_two_ranks_measure_together() -> None:
    world = LocalWorld(3)
    for ranks in ((0, 2), (0, 2), (1, 2)):  # the same two may do it again
        with ThreadPoolExecutor(2) as threads:
            both = list(
                threads.map(lambda rank, ranks=ranks: measure_sums(world.transports[rank], ranks, WIDTH, 0.02), ranks)
            )
        found = sum_profile(ranks, both)
        assert [point.rows for point in found.f32] == list(ROWS)
        assert (found.ranks, found.f16) == (ranks, ())
        assert all(0 < point.seconds < 10 for point in found.f32)
        assert decode(encode(both[0])) == both[0]


def test_the_rank_that_comes_later_counts() -> None:
    slow, fast = SumsMeasured(((9.0, 1.0, 3.0),) * 3, ()), SumsMeasured(((2.0, 8.0, 7.0),) * 3, ())
    assert sum_profile((0, 1), [slow, fast]).f32 == tuple(SumPoint(rows, 2.0) for rows in ROWS)
    halves = SumsMeasured(((1.0,),) * 3, ((2.0,),) * 3)
    assert sum_profile((0, 1), [halves, halves]).f16 == tuple(SumPoint(rows, 2.0) for rows in ROWS)


def test_waits_inside_decodes_are_those_of_equal_parts() -> None:
    """The second part has less to do, so that it waits most of the time; the first one waits once."""
    first = DecodesMeasured(((1.0, 1.0, 4.0, 1.0),) * 3)
    second = DecodesMeasured(((9.0, 8.0, 1.0, 8.0),) * 3)
    assert decode_sums([first, second]) == DecodeSums(wait_s=0.75, transfer_s=1.0)
    assert decode_sums([DecodesMeasured(())] * 2) is None
    assert decode_sums([DecodesMeasured(((),))] * 2) is None, "layers without sums"


def test_the_skew_of_a_profile_is_that_of_its_kind() -> None:
    found = [replace(sums(*ranks, 5e-6), in_decodes=inside) for ranks, inside in (
        ((0, 1), DecodeSums(30e-6, 6e-6)), ((0, 2), DecodeSums(50e-6, 20e-6)), ((1, 2), None)
    )]  # fmt: skip
    spec = spec_from_profile(replace(profile(), sums=tuple(found)), "some")
    assert [spec.sums_between(*pair).skew for pair in ((0, 0), (1, 1))] == [Skew(30e-6)] * 2
    assert (spec.sums_between(0, 1).skew, spec.network_skew) == (Skew(50e-6),) * 2
    spec = spec_from_profile(profile(), "some")
    assert [spec.sums_between(*pair).skew for pair in ((0, 0), (0, 1))] == [Skew(), NETWORK_SKEW]


def test_two_ranks_decode_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama", tmp_path / "llama.gguf")
    monkeypatch.setattr("ggpipe.profiling.profile._LEAST_DECODES_S", 0)
    made, raised = measure([config_of(model)] * 2, (0, 2))
    assert (made is not None, raised) == (True, [])
    assert made is not None
    (found,) = made.sums
    assert found.in_decodes is not None
    assert 0 <= found.in_decodes.wait_s < 10
    assert 0 < found.in_decodes.transfer_s < 10
    whole, raised = measure([config_of(model, exact=True)] * 2, (0, 2))
    assert raised == []
    assert whole is not None
    assert [one.in_decodes for one in whole.sums] == [None], "these settings do not work with groups"


def test_which_ranks() -> None:
    assert sum_pairs(["a"]) == []
    assert sum_pairs(["a", "a", "a"]) == [(0, 1)]
    assert sum_pairs(["a", "a", "b", "c"]) == [(0, 1), (0, 2), (0, 3), (2, 3)]
    assert sum_pairs(list("abcdef")) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def row_s(spec: ClusterSpec, a: int, b: int) -> float:
    """Of a sum of one row."""
    return spec.sums_between(a, b).seconds(16 + 4 * WIDTH)


def test_a_profile_has_its_sums(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write(path, profile())
    assert read(path) == profile()
    spec = spec_from_profile(profile(), "some")
    assert [row_s(spec, 0, 0), row_s(spec, 0, 1), row_s(spec, 1, 0)] == pytest.approx([5e-6, 40e-6, 40e-6])
    assert spec.sums_between(1, 1) == spec.local_sums  # a single rank was measured there
    times = spec.sums_between(0, 1)
    assert times.seconds(16 + 2 * 128 * WIDTH, as_halves=True) == pytest.approx(400e-6)
    content = json.loads(path.read_text())
    content["sums"][0]["ranks"] = [0, 3]
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="the sums over 0 and 3 name ranks that do not exist"):
        read(path)
    del content["sums"]  # of an earlier version
    path.write_text(json.dumps(content))
    assert read(path).sums == ()


def test_a_cluster_file_takes_sums_from_profiles(tmp_path: Path) -> None:
    write(tmp_path / "own.json", profile())
    nodes = "".join(f'[[node]]\nname = "n{i}"\nprofile = "own.json"\nprofile_rank = {i}\n' for i in (0, 2))
    (tmp_path / "own.toml").write_text(nodes)
    spec = read_cluster(tmp_path / "own.toml")
    assert [row_s(spec, 0, 0), row_s(spec, 0, 1)] == pytest.approx([5e-6, 40e-6])
    (tmp_path / "own.toml").write_text(
        nodes + "[network]\nlatency_us = 100\ngbit_per_s = 8\nsum_latency_us = 70\n"
        "[local]\nlatency_us = 50\ngbit_per_s = 8\n"
    )
    spec = read_cluster(tmp_path / "own.toml")
    assert [row_s(spec, 0, 0), row_s(spec, 0, 1)] == pytest.approx([5.05e-6, 70.27e-6], rel=1e-2)
    assert (spec.sums_between(0, 0).skew, spec.sums_between(0, 1).skew) == (Skew(), NETWORK_SKEW)


@pytest.mark.parametrize("sum_latency", ["", "sum_latency_us = 70\n"])
def test_a_cluster_file_gives_the_skew_of_sums(tmp_path: Path, sum_latency: str) -> None:
    file = tmp_path / "own.toml"
    node = "[[node]]\ncount = 2\ncores = 4\nmemory_gb = 8\nmemory_gb_per_s = 10\ncore_gflops = 10\n"
    link = f"latency_us = 100\ngbit_per_s = 8\n{sum_latency}skew_us = "
    file.write_text(f"{node}[network]\n{link}20\n[local]\n{link}0\n")
    spec = read_cluster(file)
    assert (spec.sums_between(0, 0).skew, spec.sums_between(0, 1).skew) == (Skew(0.0), Skew(20e-6))
    file.write_text(f"{node}[network]\n{link}-1\n")
    with pytest.raises(UsageError, match=r"\[network\] skew_us must be a number from 0 to"):
        read_cluster(file)


def test_the_table_shows_sums() -> None:
    plain = io.StringIO()
    Console(file=plain, width=100, color_system=None).print(profile_table(profile(), 100))
    table = [line.split() for line in plain.getvalue().splitlines()]
    assert ["0", "and", "1", "5", "µs", "10", "µs", "100", "µs"] in table
    assert ["0", "and", "2,", "f16", "40", "µs", "-", "400", "µs"] in table
    inside = replace(profile().sums[0], in_decodes=DecodeSums(30e-6, 6e-6))
    plain = io.StringIO()
    own = replace(profile(), sums=(inside, *profile().sums[1:]))
    Console(file=plain, width=120, color_system=None).print(profile_table(own, 120))
    table = [line.split() for line in plain.getvalue().splitlines()]
    assert ["0", "and", "1", "5", "µs", "10", "µs", "100", "µs", "30", "+", "6", "µs"] in table


def test_over_mpi(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    done = mpirun(2, "profile", "-m", TARGET, "-t", 1, "--seconds", 0.5, "-o", path)
    assert done.returncode == 0, done.stderr
    (found,) = read(path).sums
    assert (found.ranks, [point.rows for point in found.f32], found.f16) == ((0, 1), list(ROWS), ())
    assert "sum over" in done.stderr
