"""`ggpipe plan` and `--mpi-layer-split auto`, as a user meets them."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from support import commands, examples
from support.commands import TARGET, mpirun, on_ranks
from support.in_process import ggpipe, ggpipe_on_threads
from support.virtual import measured
from support.zoo import make

from ggpipe.cluster.links import Link
from ggpipe.cluster.model_shape import even_shape
from ggpipe.cluster.recording import BUNDLED
from ggpipe.cluster.spec import ClusterSpec, NodeSpec
from ggpipe.config.layer_split import LayerSplit, n_ranks_of, parse_layer_split
from ggpipe.core.layout import lay_out
from ggpipe.display.tables.plan import GenerateCommand, command_line
from ggpipe.launch.hostfile import hostfile_lines, hosts_of
from ggpipe.planning import profile_cache
from ggpipe.planning.candidates import Constraints
from ggpipe.planning.placements import Place
from ggpipe.planning.plan import Plan
from ggpipe.planning.planner import PlanRequest, make_plan
from ggpipe.sim.simulation_spec import SyntheticText

DRAFT = TARGET.with_name("tales-draft.gguf")
PAIR = ("-m", TARGET, "-md", DRAFT, "-c", 1024)
TWO_SERVERS = """
[target]
name = "some 8B"
layers = 32
weights_gb = 4.9
parameters_b = 8.0
width = 4096
kv_kb = 131

[draft]
layers = 16
weights_gb = 0.8
parameters_b = 1.2
width = 2048
kv_kb = 33

[network]
latency_us = 50
gbit_per_s = 10

[[node]]
name = "fast"
cores = 16
memory_gb = 32
memory_gb_per_s = 80
core_gb_per_s = 12
core_gflops = 60

[[node]]
name = "slow"
cores = 8
memory_gb = 16
memory_gb_per_s = 40
core_gb_per_s = 10
core_gflops = 50
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(TWO_SERVERS)
    return path


def without_progress(stderr: str) -> str:
    """Without the lines that a plan writes now and then."""
    return re.sub(r"^ggpipe: \d+ of \d+ simulations\n", "", stderr, flags=re.MULTILINE)


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_a_plan_for_a_cluster(cluster: Path, tmp_path: Path) -> None:
    done = ggpipe("plan", cluster, "--json", tmp_path / "plan.json", "-c", 8192)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    plan = json.loads((tmp_path / "plan.json").read_text())
    command = shlex.split(plan["command"])
    assert plan["command"] in done.stdout.splitlines()
    assert command[:2] == ["ggpipe", "generate"]
    assert value_of(command, "-c") == "8192"
    assert plan["best"] in ("async", "speculative")
    assert plan["modes"][plan["best"]]["tokens_per_s"] > plan["modes"]["iterative"]["tokens_per_s"]
    split, *drafts = parse_layer_split(value_of(command, "--mpi-layer-split"))
    target = [rank for rank in plan["ranks"] if not rank["draft"]]
    layout = lay_out(32, len(target), split)
    assert list(layout.stages[0].ranks) == list(range(plan["group_sizes"][0]))
    assert plan["alternative"]["tokens_per_s"] <= plan["modes"][plan["best"]]["tokens_per_s"]
    assert " t/s estimated, against " in done.stdout
    assert re.search(r"^draft .* per token, while the slowest stage takes .* per row$", done.stdout, re.M)
    assert 0 < plan["draft_rate"]["token_s"] < plan["draft_rate"]["stage_s"]
    if plan["tensor_split"]:
        assert value_of(command, "--tensor-split") == ",".join(f"{share:g}" for share in plan["tensor_split"])
    assert [tuple(rank["layers"]) for rank in target] == list(layout.layers)
    assert n_ranks_of(drafts) == len(plan["ranks"]) - len(target)
    for rank in plan["ranks"]:
        assert sum(rank["memory_bytes"].values()) < rank["has_bytes"]
    lines = done.stdout.splitlines()
    start = lines.index(f"Save this as {value_of(command, '--hostfile')}:")
    assert lines[start + 1 :] == plan["hostfile"] == hostfile_lines([rank["node"] for rank in plan["ranks"]])
    for rank in plan["ranks"]:
        (row,) = (line for line in lines if re.match(rf"{rank['rank']}( draft| \+ draft)? +{rank['node']} ", line))
        assert " GB" in row or " MB" in row


def test_shipped_clusters_and_own_models() -> None:
    done = ggpipe("plan", "two-cores", *PAIR, "--recording", BUNDLED, "--mode", "iterative")
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    last = shlex.split(done.stdout.splitlines()[-1])
    assert value_of(last, "-m") == str(TARGET)
    assert "-md" not in last
    assert "tales-target" in done.stdout


def test_a_draft_that_is_slower_than_a_stage(cluster: Path) -> None:
    cluster.write_text(
        cluster.read_text().replace("[draft]\nlayers = 16\nweights_gb = 0.8", "[draft]\nlayers = 16\nweights_gb = 8")
    )
    cluster.write_text(cluster.read_text().replace("parameters_b = 1.2", "parameters_b = 12"))
    done = ggpipe("plan", cluster, "--mode", "speculative")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("draft "))
    wanted = r"draft model (in the head )?on \w+: .* per token, which is slower than a stage \(.* per row\): use .*"
    assert re.fullmatch(wanted, line)


def test_as_many_ranks_as_wanted_with_flags_of_the_user(cluster: Path) -> None:
    done = ggpipe("plan", cluster, "-r", 2, "-t", 6, "-ub", 128, "-ctk", "q8_0", "--acceptance", 0.9)
    assert done.returncode == 0, done.stderr
    command = shlex.split(next(line for line in done.stdout.splitlines() if line.startswith("ggpipe generate")))
    target, *drafts = parse_layer_split(value_of(command, "--mpi-layer-split"))
    assert target is not None
    assert (target.n_ranks, drafts, target.group_sizes) in ((2, [], (2,)), (2, [], ()), (1, [LayerSplit((1.0,))], ()))
    assert (value_of(command, "-t"), value_of(command, "-ub"), value_of(command, "-ctk")) == ("6", "128", "q8_0")


def test_machines_of_a_hostfile_are_measured(tmp_path: Path) -> None:
    hosts, to = tmp_path / "hosts", tmp_path / "plan.json"
    hosts.write_text("localhost slots=2\n")
    done = commands.ggpipe("plan", *PAIR, "--hostfile", hosts, "-t", 1, "-r", 2, "--seconds", 1, "--json", to)
    assert done.returncode == 0, done.stderr
    assert "measuring layers" in done.stderr
    assert "\x1b" not in done.stdout
    plan = json.loads(to.read_text())
    assert len(plan["ranks"]) == 2
    command = shlex.split(plan["command"])
    assert value_of(command, "--hostfile") == str(hosts)
    assert plan["hostfile"] is None
    words = [word for word in command[1:] if word != "prompt.txt"] + ["prompts/tale.txt", "-n", "8"]
    real = commands.ggpipe(*words)
    assert real.returncode == 0, real.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a model with -m/--model, or a cluster file that describes one"),
        (("nowhere.toml",), "cluster file nowhere.toml does not exist; clusters that come with ggpipe are .*"),
        (("CLUSTER", "-c", "100000000"), r"some 8B does not fit: .*fast 30.4 GB, slow 15.2 GB; .* missing: .*"),
        (("CLUSTER", "-m", "nofile.gguf"), "cannot open model file nofile.gguf: No such file or directory"),
        (("-m", "nofile.gguf"), "cannot open model file nofile.gguf: No such file or directory"),
        (("CLUSTER", "-r", "3"), "-r/--ranks 3: there is room for 2 ranks, .*"),
        (("CLUSTER", "-r", "0"), "-r/--ranks must be a number of ranks from 1 to 1024, got 0"),
        (("CLUSTER", "--users", "0"), "--users must be a number from 1 to 256, got 0"),
        (
            ("CLUSTER", "-c", "600", "--users", "4"),
            f"4 users need {1024 if examples.full else 640} tokens, more than the context of 600: raise .*",
        ),
        (("CLUSTER", "-t", "4,4"), "-t/--threads must be a single number for all ranks, got 2: plan chooses the rest"),
        (("CLUSTER", "-t", "x"), "-t/--threads x: give one number, or one per rank, as in 6,32,20"),
        (("CLUSTER", "--acceptance", "1.5"), "--acceptance must be a share between 0 and 1, got 1.5"),
        (("CLUSTER", "--recording", "none.json"), "cannot read the recording none.json: No such file or directory"),
        (("CLUSTER", "--mode", "fast"), "--mode must be iterative, speculative or async, got fast"),
        (("CLUSTER", "-m", str(TARGET), "--mode", "async"), "--mode async needs a draft model: name .*"),
        (("CLUSTER", "--hostfile", "h"), "give either a cluster file, or machines to measure with --hostfile, .*"),
        (("-m", str(TARGET), "--hostfile", "nohosts"), "--hostfile nohosts: No such file or directory"),
        (("CLUSTER", "--seconds", "0"), "--seconds must be positive, got 0"),
        (("CLUSTER", "--json", "/no/such/plan.json"), "cannot write to /no/such/plan.json: .*"),
    ],
)
def test_mistakes_end_in_one_line(arguments: tuple[str, ...], message: str, cluster: Path) -> None:
    done = ggpipe("plan", *(str(cluster) if word == "CLUSTER" else word for word in arguments))
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(f"ggpipe: error: {message}\n", done.stderr)


def test_mistakes_end_a_process_too(cluster: Path) -> None:
    done = commands.ggpipe("plan", cluster, "--users", 0)
    message = "--users must be a number from 1 to 256, got 0"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"ggpipe: error: {message}\n")


def test_hostfiles(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# all\nnode1 slots=2\nnode2:3\nnode3\n")
    assert hosts_of(path) == ["node1", "node1", "node2", "node2", "node2", "node3"]
    assert hostfile_lines(["b", "b", "a", "b"]) == ["b slots=2", "a slots=1", "b slots=1"]


def planned(text: str, n_ranks: int) -> tuple[ClusterSpec, Plan]:
    """A plan for the machines a, b and c, with a rank on each machine that the letters name."""
    nodes = tuple(
        NodeSpec(name=name, cores=8, memory_bytes=64e9, bytes_per_s=4e10, core_bytes_per_s=1e10, core_flop_per_s=5e10)
        for name in "abc"
    )
    link = Link(1e-4, 1e8)
    target_on = tuple("abc".index(name) for name in text)
    spec = ClusterSpec(
        title="test", nodes=nodes, target_on=target_on, draft_on=(), target=None, draft=None, network=link, local=link
    )
    shape = even_shape(
        name="some", n_layer=12, weight_bytes=9e9, parameters=16e9, n_embd=4096, cell_bytes=1e5, n_vocab=32000
    )
    request = PlanRequest(
        constraints=Constraints(n_ctx=4096, n_ubatch=512, n_ranks=n_ranks),
        tokens=SyntheticText(),
        mode="iterative",
        tunes=False,
    )
    return spec, make_plan(spec, shape, None, request)


@pytest.mark.parametrize(
    ("hostfile", "order", "name", "lines"),
    [
        ("n1\nn2\nn3\n", (0, 1), "hosts", []),
        ("n1\nn2\nn3\n", (2, 0), "hosts.plan", ["n3 slots=1", "n1 slots=1"]),
        ("n1:1\nn2:1\nn3:1\n", (1, 2), "hosts.plan", ["n2:1", "n3:1"]),
    ],
)
def test_other_orders_get_hostfiles_of_their_own(
    hostfile: str, order: tuple[int, int], name: str, lines: list[str], tmp_path: Path
) -> None:
    spec, plan = planned("abc", 2)
    plan = replace(plan, places=tuple(Place(node, node) for node in order))
    path = tmp_path / "hosts"
    path.write_text(hostfile)
    command = GenerateCommand(model=Path("m.gguf"), drafters=[], extras=[], hosts=hosts_of(path), hostfile=path)
    line, found, new = command_line(spec, plan, command)
    assert (found, new) == (tmp_path / name, lines)
    assert shlex.split(line)[-3:] == [str(tmp_path / name), "-f", "prompt.txt"]


def test_sockets_are_slots_of_their_machine() -> None:
    spec, plan = planned("abc", 3)
    spec = replace(spec, nodes=(*(replace(node, machine="m") for node in spec.nodes[:2]), spec.nodes[2]))
    command = GenerateCommand(model=Path("m.gguf"), drafters=[], extras=[], hosts=(), hostfile=None)
    assert command_line(spec, plan, command)[2] == ["m slots=2", "c slots=1"]


# auto

TEXT = (*PAIR, "-f", "prompts/tale.txt", "-n", 24, "--temp", 0, "-t", 1, "--exact")
CHOSEN = r"ggpipe: layer split ([\d.,/]+): layers (.*)"


def chosen(stderr: str) -> tuple[str, str]:
    (found,) = re.findall(CHOSEN, stderr)
    return found[0], found[1]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ggpipe" / "profiles"


def test_ranks_plan_their_split(cache: Path, tmp_path: Path) -> None:
    """What was chosen is what is run, and gives the same text; the second time nothing is measured."""
    done = mpirun(3, "generate", *TEXT, "--mpi-layer-split", "auto", "--json", tmp_path / "stats.json")
    assert done.returncode == 0, done.stderr
    text, layers = chosen(done.stderr)
    splits = parse_layer_split(text)
    assert n_ranks_of(splits) == 3
    assert layers.endswith("the draft on rank 2" if splits[1:] else "the draft inside the first rank")
    ranks = json.loads((tmp_path / "stats.json").read_text())["ranks"]
    target = [tuple(rank["layers"]) for rank in ranks if not rank["draft"]]
    assert target == list(lay_out(8, n_ranks_of(splits[:1]), splits[0]).layers)
    (kept,) = cache.iterdir()
    written = kept.stat().st_mtime_ns
    again = mpirun(3, "generate", *TEXT, "--mpi-layer-split", "auto")
    assert again.returncode == 0, again.stderr
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [written]
    assert chosen(again.stderr) == (text, layers)
    explicit = ggpipe_on_threads("generate", *TEXT, "--mpi-layer-split", text)
    assert explicit.stdout == done.stdout == again.stdout


def test_one_machine_alone_gets_one_rank_or_two(cache: Path) -> None:
    done = commands.ggpipe("generate", *TEXT, "--mpi-layer-split", "auto")  # one rank or two
    assert done.returncode == 0, done.stderr
    text, _ = chosen(done.stderr)
    assert len(text.replace("/", ",").split(",")) <= 2, "what was measured beside other work may favour 0,1.0"
    assert len(list(cache.iterdir())) >= 1
    without = ggpipe("generate", *(word for word in TEXT if word not in ("-md", DRAFT)), "--mpi-layer-split", "auto")
    assert chosen(without.stderr) == ("1.0", "0-7")
    assert without.stdout == done.stdout


def test_hosts_of_a_hostfile_plan_their_split(cache: Path, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    done = commands.ggpipe("generate", *TEXT, "--mpi-layer-split", "auto", "--hostfile", hosts)
    assert done.returncode == 0, done.stderr
    assert n_ranks_of(parse_layer_split(chosen(done.stderr)[0])) == 2


PLANS_LATE = """
import sys
from support.commands import ranks_of, wait_for
from ggpipe.cli import main
from ggpipe.planning import planner

make_plan = planner.make_plan

def after_all_left(*arguments):
    wait_for(lambda: 1 not in ranks_of(sys.argv[-1]))  # this is rank 0
    return make_plan(*arguments)

planner.make_plan = after_all_left
main(sys.argv[1:])
"""


def test_ranks_leave_before_the_first_one_plans(cache: Path, tmp_path: Path) -> None:
    """A plan of a large model takes longer than a rank waits for others after an error."""
    out = tmp_path / "plan-late.json"
    done = on_ranks(2, PLANS_LATE, "plan", "-m", TARGET, "-t", 1, "--seconds", 0.5, "--json", out)
    assert done.returncode == 0, done.stderr
    assert "ggpipe generate" in done.stdout
    assert json.loads(out.read_text())


def test_memory_is_respected_before_anything_is_loaded(cache: Path) -> None:
    arguments = ("generate", *TEXT[:4], "-p", "Once", "-n", 4, "-t", 1, "-c", 100_000_000, "--mpi-layer-split", "auto")
    for done in (ggpipe(*arguments), mpirun(2, *arguments)):
        assert done.returncode == 2
        assert re.search(r"ggpipe: error: tales-target does not fit: .* missing: .*lower -c/--ctx-size", done.stderr)
        assert "Traceback" not in done.stderr


def test_a_missing_model_ends_all_ranks(cache: Path) -> None:
    done = mpirun(2, "generate", "-m", "nofile.gguf", "-p", "Once", "--mpi-layer-split", "auto")
    assert done.returncode == 2
    assert "ggpipe: error: cannot open model file nofile.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_models_that_cannot_be_cut(cache: Path, tmp_path: Path) -> None:
    path = make("mamba", tmp_path / "mamba.gguf")
    arguments = ("generate", "-m", path, "-p", "68656c6c6f", "-n", 4, "-t", 1, "-c", 128, "--mpi-layer-split", "auto")
    alone = ggpipe(*arguments)
    assert alone.returncode == 0, alone.stderr
    assert chosen(alone.stderr) == ("1.0", "0-2")
    two = mpirun(2, *arguments)
    assert two.returncode == 2
    assert "'mamba' models cannot be divided between ranks; run it on one rank" in two.stderr


def test_damaged_old_and_other_profiles_are_not_used(cache: Path) -> None:
    profile, key = measured(), profile_cache.key_of([{"host": "a"}])
    assert key != profile_cache.key_of([{"host": "b"}])
    assert profile_cache.find(key, 2) is None
    profile_cache.keep(key, profile)
    assert profile_cache.find(key, 2) == profile
    assert profile_cache.find(key, 3) is None
    (path,) = cache.iterdir()
    content = path.read_bytes()
    os.utime(path, (0, 0))
    assert profile_cache.find(key, 2) is None
    for other in (b"", b"{}", b"\xff\xfe", content[:200], content.replace(b'"version": 4', b'"version": 3')):
        path.write_bytes(other)
        assert profile_cache.find(key, 2) is None


def test_an_unwritable_cache_is_skipped(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the cache's folder would be")
    profile_cache.keep("key", measured())
    assert profile_cache.find("key", 2) is None
