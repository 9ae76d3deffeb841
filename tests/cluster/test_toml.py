"""Cluster files: the bundled ones, all keys, and the message of each mistake."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.virtual import ASYNC, measured, tokens

from ggpipe.cluster import tables, toml
from ggpipe.cluster.links import Link, Overheads
from ggpipe.cluster.profile import write
from ggpipe.cluster.spec import TURNS
from ggpipe.cluster.toml import read_cluster, shipped
from ggpipe.config.layer_split import MAX_PARTS, LayerSplit
from ggpipe.errors import GgpipeError, UsageError
from ggpipe.sim.simulator import simulate
from ggpipe.sim.virtual_cluster import build, placement_of

PROFILE = measured()
NODES = """
[[node]]
name = "server"
count = 2
cores = 16
memory_gb = 64
memory_gb_per_s = 90
core_gb_per_s = 12
core_gflops = 60
"""
NETWORK = """
[network]
latency_us = 60
gbit_per_s = 1
"""
TARGET = """
[target]
layers = 80
weights_gb = 42.5
parameters_b = 70.6
width = 8192
kv_kb = 328
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", shipped())
def test_bundled_clusters(name: str) -> None:
    spec = read_cluster(Path(name))
    assert spec.target is not None
    assert spec.draft is not None
    assert spec.title != name
    first = (toml.CLUSTERS / f"{name}.toml").read_text().splitlines()[0]
    assert first.startswith("# "), "it says where its figures come from"
    if match := re.match(r"nodes(\d+)-", name):
        assert (len(spec.target_on), len(spec.draft_on)) == (int(match[1]), 1)
        assert len({*spec.target_on, *spec.draft_on}) == len(spec.nodes)
    cluster = build(spec, placement_of(spec, spec.target, spec.drafts), spec.target, spec.drafts)
    stats = simulate(cluster, tokens(0.8, 12), ASYNC, 12)
    assert stats.n_generated == 12


def test_names_of_bundled_clusters() -> None:
    assert {"two-cores", "nodes4-gigabit", "nodes8-gigabit", "nodes4-100g", "nodes8-100g"} <= set(shipped())
    assert {"gpt-oss-120b-pcs", "gpt-oss-120b-pcs-2g5", "qwen3-235b-xeons", "deepseek-v3-xeons", "glm-5-xeons"} <= set(
        shipped()
    )
    assert {"office", "nodes15-gigabit", "nodes32-gigabit", "qwen3-next-80b-pcs"} <= set(shipped())


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("office").write_text(NODES + NETWORK + TARGET)
    assert read_cluster(Path("office")).title == "office"
    assert read_cluster(Path("two-cores")).title != "two-cores"


def test_the_example_is_read(tmp_path: Path) -> None:
    """The one in the module's text, its draft and its office PC filled in."""
    example = (tables.__doc__ or "").split("\n\n", 1)[1].partition("\nA mixture of experts")[0]
    example = example.replace("    [draft]                                  # as [target], or -md FILE\n", "")
    office = NODES.replace('"server"\ncount = 2', '"office"')
    spec = read_cluster(written(tmp_path, "\n".join(line[4:] for line in example.splitlines()) + office))
    assert [node.name for node in spec.nodes] == ["server1", "server2", "office"]
    assert (spec.target_on, spec.draft_on, spec.threads) == ((0, 1), (2,), (16, 16, 6))
    assert (spec.layer_split, spec.draft_layer_splits) == (LayerSplit((0.5, 0.5)), (LayerSplit((1.0,)),))
    assert spec.network == Link(60e-6, 0.94e9 / 8)
    node = spec.nodes[0]
    assert (node.cores, node.memory_bytes, node.bytes_per_s) == (16, 64e9, 90e9)
    assert (node.core_bytes_per_s, node.core_flop_per_s, node.crowd) == (12e9, 60e9, 0.9)
    assert spec.overheads == replace(Overheads(), run_s=250e-6)
    assert spec.target is not None
    assert (spec.target.name, spec.target.n_layer, spec.target.n_embd) == ("70B Q4_K_M", 80, 8192)
    assert spec.target.weight_bytes == pytest.approx(42.5e9, rel=1e-6)
    assert spec.target.cell_bytes((0, 80)) == pytest.approx(328e3)


def test_defaults(tmp_path: Path) -> None:
    spec = read_cluster(written(tmp_path, NODES.replace("core_gb_per_s = 12\n", "") + NETWORK))
    assert spec.title == "own"
    assert (spec.target_on, spec.draft_on, spec.target, spec.draft) == ((0, 1), (), None, None)
    assert (spec.layer_split, spec.draft_layer_splits, spec.threads, spec.links) == (None, (), (), {})
    assert spec.nodes[0].core_bytes_per_s == spec.nodes[0].bytes_per_s
    assert spec.nodes[0].crowd is None
    assert spec.nodes[0].turns == TURNS
    assert spec.overheads == Overheads()
    spec = read_cluster(written(tmp_path, 'draft_on = ["server2"]\n' + NODES + NETWORK))
    assert (spec.target_on, spec.draft_on) == ((0,), (1,))
    alone = read_cluster(written(tmp_path, NODES.replace("count = 2", "count = 1")))
    assert alone.network == alone.local
    assert [node.name for node in alone.nodes] == ["server"]


def test_a_tied_output_is_held_once(tmp_path: Path) -> None:
    own, tied = (
        read_cluster(written(tmp_path, NODES + NETWORK + TARGET + more)).target for more in ("", "tied = true")
    )
    assert own is not None
    assert tied is not None
    assert tied.output_bytes == own.output_bytes > 0
    assert sum(tied.layer_bytes) == pytest.approx(sum(own.layer_bytes) + own.output_bytes, rel=1e-6)


EXPERTS = """
experts = 8
experts_used = 2
expert_gb = 30
dense_layers = 4
"""


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """The first layers have no experts; a run reads the experts that its rows use, together."""
    dense, mixture = (read_cluster(written(tmp_path, NODES + NETWORK + TARGET + more)).target for more in ("", EXPERTS))
    assert dense is not None
    assert mixture is not None
    assert mixture.weight_bytes == pytest.approx(dense.weight_bytes, rel=1e-6)
    assert (mixture.n_expert, mixture.n_expert_used) == (8, 2)
    assert set(mixture.layer_expert_bytes[:4]) == {0}
    assert sum(mixture.layer_expert_bytes) == pytest.approx(30e9, rel=1e-6)
    assert mixture.layer_bytes[4] - mixture.layer_bytes[3] == pytest.approx(30e9 / 76, rel=1e-6)
    layers = (0, mixture.n_layer)
    assert mixture.read_bytes(layers, 1) == pytest.approx(dense.read_bytes(layers) - 30e9 * 0.75, rel=1e-6)
    assert mixture.read_bytes(layers, 2) == pytest.approx(dense.read_bytes(layers) - 30e9 * 0.75**2, rel=1e-6)


def test_how_many_parts_a_group_may_have(tmp_path: Path) -> None:
    plain, heads, latent = (
        read_cluster(written(tmp_path, NODES + NETWORK + TARGET + more)).target
        for more in ("", "kv_heads = 4\n", "kv_heads = 128\nlatent_kv = true\n")
    )
    assert plain is not None
    assert heads is not None
    assert latent is not None
    assert [shape.max_parts for shape in (plain, heads, latent)] == [MAX_PARTS, 4, MAX_PARTS]
    assert heads.part(0.25).cell_bytes((0, 80)) == pytest.approx(plain.cell_bytes((0, 80)) / 4)
    assert latent.part(0.25).cell_bytes((0, 80)) == latent.cell_bytes((0, 80))


# From profiles


def profiled(tmp_path: Path, text: str) -> Path:
    write(tmp_path / "measured.json", PROFILE)
    return written(tmp_path, text)


MEASURED = """
[[node]]
name = "a"
profile = "measured.json"
[[node]]
name = "b"
profile = "measured.json"
profile_rank = 1
"""


def test_nodes_that_were_measured(tmp_path: Path) -> None:
    spec = read_cluster(profiled(tmp_path, MEASURED))
    assert [(node.name, node.cores, node.memory_bytes) for node in spec.nodes] == [("a", 8, 2**34), ("b", 8, 2**34)]
    assert [node.profile for node in spec.nodes] == list(PROFILE.ranks)
    assert spec.links == {(0, 1): Link(5e-5, 1e9), (1, 0): Link(6e-5, 1e9)}
    assert spec.network == Link(5.5e-5, 1e9), "the median, for pairs that were not measured"
    overheads = spec.overheads
    assert overheads.hand_s == pytest.approx(PROFILE.ranks[0].overheads.hand_s)
    swapped = read_cluster(profiled(tmp_path, 'target_on = ["b", "a"]\n' + MEASURED))
    assert swapped.links == {(1, 0): Link(5e-5, 1e9), (0, 1): Link(6e-5, 1e9)}


def test_the_file_overrides_the_profile(tmp_path: Path) -> None:
    more = "cores = 4\nmemory_gb = 8\ncrowd = 0.5\nturns = 1.5\n[overheads]\nrun_us = 7\n"
    spec = read_cluster(profiled(tmp_path, MEASURED + more + NETWORK))
    assert spec.links == {}
    assert spec.network == Link(6e-5, 1e9 / 8)
    assert (spec.nodes[1].cores, spec.nodes[1].memory_bytes, spec.nodes[1].crowd) == (4, 8e9, 0.5)
    assert [node.turns for node in spec.nodes] == [TURNS, 1.5]
    assert spec.overheads.run_s == pytest.approx(7e-6)


def test_measured_nodes_beside_others(tmp_path: Path) -> None:
    spec = read_cluster(profiled(tmp_path, MEASURED + NODES + NETWORK))
    assert [node.profile is None for node in spec.nodes] == [False, False, True, True]
    many = read_cluster(profiled(tmp_path, MEASURED.replace('name = "b"', 'name = "b"\ncount = 3')))
    assert [node.name for node in many.nodes] == ["a", "b1", "b2", "b3"]
    assert set(many.links) == {(0, 1), (1, 0), (0, 2), (2, 0), (0, 3), (3, 0)}


def test_a_profile_is_a_cluster(tmp_path: Path) -> None:
    write(tmp_path / "measured.json", PROFILE)
    spec = read_cluster(tmp_path / "measured.json")
    assert (spec.title, spec.target_on, spec.threads) == ("measured", (0, 1), (8, 8))
    assert set(spec.links) == {(0, 1), (1, 0)}


def test_bad_profiles(tmp_path: Path) -> None:
    refused(tmp_path, MEASURED, "cannot read the profile", "measured.json")
    (tmp_path / "measured.json").write_text(json.dumps({"format": "something else"}))
    refused(tmp_path, MEASURED, "measured.json is not a profile")
    write(tmp_path / "measured.json", PROFILE)
    text = MEASURED.replace("profile_rank = 1", "profile_rank = 2")
    refused(tmp_path, text, "[[node]] 2 profile_rank is 2, and", "has ranks 0 to 1")
    refused(tmp_path, MEASURED + "core_gflops = 3", "core_gflops is not known here")
    one_host = replace(PROFILE, ranks=tuple(replace(rank, host="one") for rank in PROFILE.ranks))
    write(tmp_path / "measured.json", one_host)
    refused(tmp_path, MEASURED, "[network] is missing")


# Mistakes


def refused(tmp_path: Path, text: str, *words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(GgpipeError) as caught:
        read_cluster(path)
    message = str(caught.value)
    assert isinstance(caught.value, UsageError)
    assert "\n" not in message
    assert len(message) < 400
    for word in words:
        assert word in message


def changed(old: str, new: str) -> str:
    text = NODES + NETWORK + TARGET
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("target_on = [", ("own.toml is not a TOML file: Invalid value",)),
        ("", ("[[node]] is missing",)),
        ("node = []", ("[[node]] is missing",)),
        ("[node]\ncores = 1", ("node must be a list of tables, got a table",)),
        ("node = [1]", ("node[0] must be a table, got 1",)),
        (changed("cores = 16\n", ""), ("[[node]] 1: cores missing: give a value, or the processor",)),
        (changed("cores = 16\nmemory_gb = 64\nmemory_gb_per_s = 90", "memory_gb = 64"),
         ("[[node]] 1: cores and memory_gb_per_s missing",)),
        (changed("kv_kb = 328", "kv_kb = 328\nlatent_kv = true\nattention_width = 8192"),
         ("target: attention_width cannot be given with latent_kv",)),
        (changed("kv_kb = 328", "kv_kb = 328\nwindow_layers = 4"), ("target: window missing: window_layers needs it",)),
        (changed("kv_kb = 328", "kv_kb = 328\nwindow = 4\nwindow_layers = 81"),
         ("target: window_layers must be at most layers (80), got 81",)),
        (changed("cores = 16", 'cpu = "EPYC 7763X"'),
         ("[[node]] 1: cpu EPYC 7763X is not in ggpipe's table; similar ones are EPYC 7763,",)),
        (changed("cores = 16", "cores = 16\nsockets = 3"), ("cores must be a multiple of sockets (3), got 16",)),
        (changed("cores = 16", "cores = 16\nsockets = 2") + NODES.replace('"server"\ncount = 2', '"server1/1"'),
         ("names server1/1 twice",)),
        (changed("cores = 16", "cores = 16\ncoers = 16"), ("coers is not known here", "cores, memory_gb")),
        (changed("cores = 16", "cores = 16.5"), ("cores must be a whole number from 1 to 4096, got 16.5",)),
        (changed("cores = 16", 'cores = "16"'), ("cores must be a whole number from 1 to 4096, got '16'",)),
        (changed("cores = 16", "cores = true"), ("cores must be a whole number from 1 to 4096, got true",)),
        (changed("cores = 16", "cores = 0"), ("cores must be a whole number from 1 to 4096, got 0",)),
        (changed("cores = 16", "cores = 100000"), ("cores must be a whole number from 1 to 4096, got 100000",)),
        (changed("count = 2", "count = 100000"), ("count must be a whole number from 1 to 1024, got 100000",)),
        (changed("memory_gb = 64", "memory_gb = -1"), ("memory_gb must be a number above 0 and", "got -1")),
        (changed("memory_gb = 64", "memory_gb = nan"), ("memory_gb must be a number above 0", "got nan")),
        (changed("memory_gb = 64", "memory_gb = inf"), ("at most 1e+15, got inf",)),
        (changed("memory_gb = 64", "memory_gb = [64]"), ("1e+15, got [64]",)),
        (changed("memory_gb = 64", "memory_gb = { a = 1 }"), ("1e+15, got a table",)),
        (changed("core_gflops = 60", "core_gflops = 60\ncrowd = 1.5"), ("above 0 and at most 1, got 1.5",)),
        (changed('name = "server"', "name = 7"), ("[[node]] 1 name must be a non-empty string in quotes",)),
        (changed('name = "server"', 'name = ""'), ("name must be a non-empty string in quotes, got ''",)),
        (NODES + NODES + NETWORK, ("names server1 twice",)),
        (NODES, ("[network] is missing: give latency_us and gbit_per_s",)),
        (changed("latency_us = 60\n", ""), ("[network] latency_us is missing",)),
        (changed("gbit_per_s = 1", "gbit_per_s = 0"), ("[network] gbit_per_s must be a number above 0", "got 0")),
        (changed("gbit_per_s = 1", "gbit_per_s = 1\nspeed = 3"), ("[network] speed is not known here",)),
        ("network = [1]\n" + NODES, ("network must be a table, got [1]",)),
        ("local = 5\n" + NODES + NETWORK, ("local must be a table, got 5",)),
        (changed("layers = 80", "layers = 0"), ("[target] layers must be a whole number from 1 to 4096, got 0",)),
        (changed("kv_kb = 328\n", ""), ("[target] kv_kb is missing",)),
        (changed("weights_gb = 42.5", "weights_gb = 42500"), ("weights_gb and parameters_b give 4.8e+03 bits",)),
        (changed("kv_kb = 328", "kv_kb = 328\nexperts = 8"), ("target: experts_used and expert_gb missing: a",)),
        (changed("kv_kb = 328", "kv_kb = 328\ndense_layers = 1"), ("a mixture of experts needs experts",)),
        (
            changed("kv_kb = 328", "kv_kb = 328" + EXPERTS.replace("used = 2", "used = 8")),
            ("experts_used must be below experts (8), got 8",),
        ),
        (
            changed("kv_kb = 328", "kv_kb = 328" + EXPERTS.replace("layers = 4", "layers = 80")),
            ("dense_layers must be below layers (80), got 80",),
        ),
        (
            changed("kv_kb = 328", "kv_kb = 328" + EXPERTS.replace("gb = 30", "gb = 42.4")),
            ("experts of 42.4 GB do not fit into layers of",),
        ),
        (changed("kv_kb = 328", 'kv_kb = 328\ntied = "yes"'), ("[target] tied must be true or false, got 'yes'",)),
        ("target = 5\n" + NODES + NETWORK, ("target must be a table, got 5",)),
        ("draft = []\n" + NODES + NETWORK, ("draft must be a table, got []",)),
        ("targets_on = []\n" + NODES + NETWORK, ("targets_on is not known here; known are title, node, target_on",)),
        ("title = 5\n" + NODES + NETWORK, ("title must be a non-empty string in quotes, got 5",)),
        ('target_on = "server1"\n' + NODES + NETWORK, ("must be a list of strings in quotes, got 'server1'",)),
        ("target_on = [[1]]\n" + NODES + NETWORK, ("target_on[0] must be a string in quotes, got [1]",)),
        ("target_on = []\n" + NODES + NETWORK, ("target_on names no node",)),
        ('target_on = ["server"]\n' + NODES + NETWORK, ("names 'server', but the nodes are server1, server2",)),
        ('draft_on = ["x"]\n' + NODES + NETWORK, ("draft_on names 'x'",)),
        ('draft_on = ["server1", "server2"]\n' + NODES + NETWORK, ("target_on names no node",)),
        ("threads = 4\n" + NODES + NETWORK, ("threads must be a list of whole numbers from 1 to 1e+15, got 4",)),
        ("threads = [4]\n" + NODES + NETWORK, ("threads is a list of 1 numbers for 2 ranks",)),
        ("threads = [4, 0]\n" + NODES + NETWORK, ("threads[1] must be a whole number from 1 to 1e+15, got 0",)),
        ("threads = [4, true]\n" + NODES + NETWORK, ("threads[1] must be a whole number from 1 to 1e+15, got true",)),
        ("layer_split = 0.5\n" + NODES + NETWORK, ("layer_split must be a non-empty string in quotes",)),
        ('layer_split = "a,b"\n' + NODES + NETWORK, ("layer_split a,b: give one share per rank",)),
        ('layer_split = "0.9,0.9"\n' + NODES + NETWORK, ("layer_split 0.9,0.9: shares add up to 1.8",)),
        ('layer_split = "1.0"\n' + NODES + NETWORK, ("1 shares for 2 target ranks, 0 for 0 draft ranks",)),
        ('layer_split = "0.5,0.5/1"\n' + NODES + NETWORK, ("1 for 0 draft ranks",)),
        ('layer_split = "1.0*3"\n' + NODES + NETWORK, ("3 shares for 2 target ranks, 0 for 0 draft ranks",)),
        ("[overheads]\nrun_us = -1\n" + NODES + NETWORK, ("[overheads] run_us must be a number from 0", "got -1")),
        ("[overheads]\nrun_s = 1\n" + NODES + NETWORK, ("[overheads] run_s is not known here", "run_us")),
        ("overheads = 3\n" + NODES + NETWORK, ("overheads must be a table, got 3",)),
        (changed('name = "server"', f'name = {[*range(99)]}'), ("a non-empty string in quotes, got [0, 1,",)),
    ],
)  # fmt: skip
def test_each_mistake_has_one_line(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    refused(tmp_path, text, "own.toml", *words)


ODD = ("-1", "0", "0.5", "1e400", "true", '"x"', "[]", "[1]", "{}", "{ a = 1 }", "1979-05-27", "9" * 30)


@pytest.mark.parametrize("name", ["office", "two-cores"])
def test_any_value_anywhere(name: str, tmp_path: Path) -> None:
    """It makes a cluster, or one line."""
    lines = (toml.CLUSTERS / f"{name}.toml").read_text().splitlines()
    messages = []
    for i, line in enumerate(lines):
        key, equals, _ = line.partition(" = ")
        for odd in ODD if equals and not line.startswith("#") else ():
            path = written(tmp_path, "\n".join([*lines[:i], f"{key} = {odd}", *lines[i + 1 :]]))
            try:
                spec = read_cluster(path)
                assert spec.target is not None
                build(spec, placement_of(spec, spec.target, spec.drafts), spec.target, spec.drafts)
            except GgpipeError as e:
                messages.append(str(e))
    assert len(messages) > 100
    assert not [message for message in messages if "\n" in message]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cluster file .*nothing\.toml does not exist; clusters that come .* office"):
        read_cluster(tmp_path / "nothing.toml")
    with pytest.raises(UsageError, match=r"cannot read .*: Is a directory"):
        read_cluster(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not a TOML file"):
        read_cluster(tmp_path / "binary")
    shutil.copy(toml.CLUSTERS / "office.toml", tmp_path / "office.json")
    with pytest.raises(UsageError, match="is not a profile"):
        read_cluster(tmp_path / "office.json")
