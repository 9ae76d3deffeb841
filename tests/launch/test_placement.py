"""What is left of a placement when machines are away, and the jobs that follow."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.settings import SETTINGS

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit, n_ranks_of, parse_layer_split, text_of
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.core.layout import lay_out
from ggpipe.errors import LaunchError
from ggpipe.launch import job as jobs
from ggpipe.launch.hostfile import hosts_of
from ggpipe.launch.job import Job, jobs_again
from ggpipe.launch.placement import Placement
from ggpipe.launch.rank_setup import RankSetup


def placement(
    split: str, *slots: str, threads: tuple[int, ...] = (-1,), tensor_split: tuple[float, ...] = ()
) -> Placement:
    return Placement.on(slots, parse_layer_split(split), threads, tensor_split=tensor_split)


def text_of_splits(of: Placement) -> str:
    assert of.splits is not None
    return text_of(of.splits)


def layers(of: Placement, n_layer: int = 20) -> dict[str, int]:
    assert of.splits is not None
    layout = lay_out(n_layer, of.n_target, of.splits[0])
    return {host: b - a for host, (a, b) in zip(of.hosts, layout.layers, strict=False)}


def test_a_machines_layers_go_to_the_others() -> None:
    before = placement("0.2,0.4,0.4", "a", "b", "c")
    now = before.without({"b"})
    assert now.hosts == ("a", "c")
    assert layers(now, 30) == {"a": 10, "c": 20}
    assert now.changes_since(before) == "shares of the layers are now 0.333 on a and 0.667 on c"


def test_layers_that_the_head_took_are_its_share() -> None:
    assert layers(placement("0.16,0.4,0.4", "a", "b", "c").without({"c"}), 30) == {"a": 10, "b": 20}


def test_the_first_machine_is_away() -> None:
    now = placement("0,0.5,0.25,0.25", "a", "b", "c", "d").without({"a", "c"})
    assert now.hosts == ("b", "d")
    assert layers(now, 30) == {"b": 20, "d": 10}


def test_a_head_without_layers_is_all_that_is_left() -> None:
    assert layers(placement("0,1", "a", "b").without({"b"})) == {"a": 20}


def test_a_spare_machine_takes_over() -> None:
    before = placement("0.2,0.4,0.4", "a", "b", "c", threads=(1, 2, 3))
    now = before.without({"b"}, spare=["d"])
    assert (now.hosts, now.threads) == (("a", "d", "c"), (1, 2, 3))
    assert layers(now) == {"a": 4, "d": 8, "c": 8}
    assert now.changes_since(before) == "instead, ranks are on d"
    assert before.without({"b"}, spare=["a", "b"]).hosts == ("a", "c")


def test_a_ranks_threads_go_with_it() -> None:
    assert placement("0.2,0.4,0.4", "a", "b", "c", threads=(1, 2, 3)).without({"b"}).threads == (1, 3)


def test_the_drafts_machine_is_away() -> None:
    before = placement("0.5,0.5/1", "a", "b", "c")
    now = before.without({"c"})
    assert now.changes_since(before) == "the draft model is now on a"
    assert (now.hosts, text_of_splits(now)) == (("a", "b"), "0.5,0.5")
    now = placement("0.5,0.5/0.5,0.5", "a", "b", "c", "d").without({"c"})
    assert (now.hosts, text_of_splits(now)) == (("a", "b", "d"), "0.5,0.5/1.0")


def test_the_drafts_machine_is_left() -> None:
    before = placement("0.5,0.5/1", "a", "b", "c")
    now = before.without({"a", "b"})
    assert now.changes_since(before) == "shares of the layers are now 1 on c; the draft model is now on c"
    assert (now.hosts, text_of_splits(now)) == (("c",), "1.0")


def test_a_machine_with_several_ranks() -> None:
    assert placement("0.3,0.3,0.4", "a", "b", "b").without({"b"}).hosts == ("a",)
    assert placement("0.25,0.25,0.25,0.25", "a", "b").hosts == ("a", "b", "a", "b")


def test_a_group_goes_on_with_fewer_ranks() -> None:
    before = placement("0.5*2,0.5*2/1", "a", "b", "c", "d", "e", threads=(1, 2, 3, 4, 5))
    now = before.without({"b"})
    assert (now.hosts, now.threads) == (("a", "c", "d", "e"), (1, 3, 4, 5))
    assert layers(now, 30) == {"a": 10, "c": 20, "d": 20}
    assert now.changes_since(before) == "shares of the layers are now 0.333 on a and 0.667 on c+d"
    assert text_of_splits(now).endswith("*2/1.0")
    assert text_of_splits(before.without({"b", "d"})) == "0.5,0.5/1.0"
    assert text_of_splits(before.without({"c", "d"})) == "1.0*2/1.0"
    assert text_of_splits(before.without({"a", "b", "c", "d"})) == "1.0"


def test_a_group_of_unequal_ranks() -> None:
    before = placement("0.5*2,0.5*2", "a", "b", "c", "d", tensor_split=(3, 1))
    now = before.without({"b"})
    assert now.tensor_split == (3, 1)
    assert now.splits is not None
    assert now.splits[0] is not None
    assert now.splits[0].shares == pytest.approx((3 / 7, 4 / 7))
    assert now.without({"d"}).tensor_split == ()


def test_a_spare_machine_joins_a_group() -> None:
    now = placement("0.5*2,0.5", "a", "b", "c").without({"b"}, spare=["d"])
    assert (now.hosts, text_of_splits(now)) == (("a", "d", "c"), "0.5*2,0.5")


def test_a_drafts_group_loses_a_rank() -> None:
    before = placement("0.5,0.5/1.0*2", "a", "b", "c", "d")
    assert text_of_splits(before.without({"d"})) == "0.5,0.5/1.0"
    assert text_of_splits(before.without({"c", "d"})) == "0.5,0.5"


def test_each_draft_model_keeps_to_its_own_ranks() -> None:
    before = placement("0.5,0.5/1.0/0.5,0.5", "a", "b", "c", "d", "e")
    now = before.without({"d"})
    assert (now.hosts, text_of_splits(now)) == (("a", "b", "c", "e"), "0.5,0.5/1.0/1.0")
    assert now.changes_since(before) == "draft model 2 is now on e"
    now = before.without({"c"})
    assert (now.hosts, text_of_splits(now)) == (("a", "b", "d", "e"), "0.5,0.5//0.5,0.5")
    assert now.changes_since(before) == "draft model 1 is now on a"
    assert text_of_splits(before.without({"d", "e"})) == "0.5,0.5/1.0"
    assert text_of_splits(before.without({"a", "b", "d"})) == "0.5,0.5"


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.lists(st.integers(1, 3), max_size=4), st.data())
def test_what_is_left_of_several_models_can_be_written_and_read(
    sizes: list[int], drafts: list[int], data: st.DataObject
) -> None:
    target = LayerSplit((1 / len(sizes),) * len(sizes), tuple(sizes) if max(sizes) > 1 else ())
    splits = (target, *(LayerSplit((1 / n,) * n) for n in drafts))
    hosts = [f"host{i}" for i in range(n_ranks_of(splits))]
    away = data.draw(st.sets(st.sampled_from(hosts), max_size=len(hosts) - 1))
    now = Placement.on(hosts, splits).without(away)
    assert now.splits is not None
    assert parse_layer_split(text_of_splits(now)) == now.splits
    assert now.hosts == tuple(host for host in hosts if host not in away)
    assert n_ranks_of(now.splits) == len(now.hosts)
    if away.issuperset(hosts[: target.n_ranks]):
        assert len(now.splits) == 1
    first = target.n_ranks
    for old, new in zip(splits[1:], now.splits[1:], strict=False):
        assert n_ranks_of([new]) == old.n_ranks - len(away.intersection(hosts[first : first + old.n_ranks]))
        first += old.n_ranks


def test_none_is_left() -> None:
    with pytest.raises(LaunchError, match="none of the machines of `hostfile` can be reached"):
        placement("0.5,0.5", "a", "b").without({"a", "b"})


@given(st.lists(st.integers(1, 50), min_size=2, max_size=8), st.data())
def test_what_is_left_can_be_written_and_read(weights: list[int], data: st.DataObject) -> None:
    hosts = [f"host{i}" for i in range(len(weights))]
    away = data.draw(st.sets(st.sampled_from(hosts), max_size=len(hosts) - 1))
    shares = tuple(weight / sum(weights) for weight in weights)
    now = Placement.on(hosts, (LayerSplit(shares),)).without(away)
    assert now.splits is not None
    assert parse_layer_split(text_of_splits(now)) == now.splits
    left = [weight for host, weight in zip(hosts, weights, strict=True) if host not in away]
    assert now.splits[0] is not None
    assert now.splits[0].shares == pytest.approx([weight / sum(left) for weight in left])


# Jobs

MODEL = ModelConfig(path=Path("m.gguf"))


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("a slots=1\nb slots=1\nc slots=1\n")
    return path


def again(
    hostfile: Path, away: set[str], monkeypatch: pytest.MonkeyPatch, split: str | None, *drafts: str
) -> list[Job]:
    monkeypatch.setattr(jobs, "unreachable", lambda *_: away)
    target, *others = parse_layer_split(split) if split is not None else (None,)
    config = EngineConfig(
        MODEL,
        pipeline=PipelineConfig(layer_split=target, auto=split is None),
        drafts=tuple(
            DraftConfig(model=ModelConfig(path=Path(name)), layer_split=own)
            for name, own in itertools.zip_longest(drafts, others)
        ),
    )
    first = Job(RankSetup(config=config), 3, hostfile)
    made = jobs_again(first, lambda: None)
    if not away:
        assert made == [first]
    return made


def split_of(job: Job) -> str:
    """As on a command line, with the draft models' names."""
    config = job.settings.config
    parts = [config.pipeline.layer_split, *(draft.layer_split for draft in config.drafts)]
    return text_of(parts) + "".join(f" {draft.model.path.stem}" for draft in config.drafts)


def test_as_many_slots_as_can_be_written(tmp_path: Path) -> None:
    (path := tmp_path / "hosts").write_text(f"a slots={'9' * 5000}\nb:99999999999\nc\n")
    hosts = hosts_of(path)
    assert (hosts[0], hosts[-1]) == ("a", "c")
    assert hosts.count("a") == hosts.count("b") > 1000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a\nb slots=x\n", ", line 2: slots must be a number, got x"),
        ("node 1 slots=2\n", ", line 1: 'node 1 slots=2' is not a machine: write its name or address, as in"),
        ("nodé..x\n", "'nodé..x' is not a machine"),
        ("a:many\n", "'a:many' is not a machine"),
        ("a,b\n", "'a,b' is not a machine"),
        ("# nothing\n", "names no machines"),
    ],
)
def test_lines_that_name_no_machine(text: str, why: str, tmp_path: Path) -> None:
    (path := tmp_path / "hosts").write_text(text)
    with pytest.raises(LaunchError) as caught:
        hosts_of(path)
    assert why in str(caught.value)


def test_lines_that_name_a_machine(tmp_path: Path) -> None:
    (path := tmp_path / "hosts").write_text("10.0.0.1 slots = 2 max_slots=4 # old\nb-2.local:1 user=me\nc_3\n")
    assert hosts_of(path) == ["10.0.0.1", "10.0.0.1", "b-2.local", "c_3"]


def test_all_machines_are_there(hostfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = again(hostfile, set(), monkeypatch, "0.4,0.3,0.3")
    with job.hosts_in_file() as path:
        assert path == hostfile


@pytest.mark.parametrize(
    ("text", "open_mpi_reads", "hydra_reads"),
    [
        ("a slots=2 # b:1\nc slots=1\n", True, False),
        ("a:2\n # slots=1\nc:1 # b\n", False, True),
        ("a\na\n\nc\n", True, True),
    ],
)
def test_a_hostfile_is_translated_for_another_mpirun(
    text: str, open_mpi_reads: bool, hydra_reads: bool, hostfile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostfile.write_text(text)
    monkeypatch.setattr(jobs, "find_mpirun", lambda: "mpirun")
    for is_open_mpi, reads in ((True, open_mpi_reads), (False, hydra_reads)):
        monkeypatch.setattr(jobs, "is_open_mpi", lambda _, answer=is_open_mpi: answer)
        with Job(SETTINGS, 3, hostfile).hosts_in_file() as path:
            assert path is not None
            assert (path == hostfile) is reads
            assert hosts_of(path) == ["a", "a", "c"]
            assert reads or path.read_text() == ("a slots=2\nc slots=1\n" if is_open_mpi else "a:2\nc:1\n")


def test_a_machine_is_away(hostfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, streaming = again(hostfile, {"b"}, monkeypatch, "0.5,0.25,0.25")
    assert streaming.settings.config.model.load_mode == "stream"
    assert streaming.line == "continuing with weights that are read from the file when they are needed, which is slow"
    assert (streaming.hosts, split_of(streaming)) == (job.hosts, split_of(job))
    assert job.n_ranks == 2
    assert job.line == "b cannot be reached: shares of the layers are now 0.667 on a and 0.333 on c"
    assert job.settings.config.pipeline.check_memory
    assert split_of(job).startswith("0.66666")
    with job.hosts_in_file() as path:
        assert path is not None
        assert hosts_of(path) == ["a", "c"]
    assert not path.exists()


@pytest.mark.parametrize(
    ("model", "context", "pipeline"),
    [
        (replace(MODEL, load_mode="mmap"), ContextConfig(), PipelineConfig()),
        (MODEL, ContextConfig(exact=True), PipelineConfig()),
        (MODEL, ContextConfig(), PipelineConfig(check_memory=True)),
    ],
)
def test_a_job_does_not_stream_against_the_users_will(
    hostfile: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: ModelConfig,
    context: ContextConfig,
    pipeline: PipelineConfig,
) -> None:
    monkeypatch.setattr(jobs, "unreachable", lambda *_: {"b"})
    split = parse_layer_split("0.5,0.25,0.25")[0]
    config = EngineConfig(model, context=context, pipeline=replace(pipeline, layer_split=split))
    assert len(jobs_again(Job(RankSetup(config=config), 3, hostfile), lambda: None)) == 1


def test_a_planned_split_is_planned_again(hostfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, streaming = again(hostfile, {"a"}, monkeypatch, None, "d.gguf")
    assert (streaming.settings.config.model.load_mode, streaming.settings.config.pipeline.auto) == ("stream", True)
    assert (job.n_ranks, job.hosts, job.settings.config.pipeline.auto) == (2, ("b", "c"), True)
    assert job.line == "a cannot be reached: the layers are planned again for b and c"


def test_a_draft_goes_to_the_head_or_is_left_out(hostfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, without, _ = again(hostfile, {"c"}, monkeypatch, "0.5,0.5/1", "d.gguf")
    assert (inside.hosts, without.hosts) == (("a", "b"), ("a", "b"))
    assert inside.line == "c cannot be reached: the draft model is now on a"
    assert without.line == "continuing without the draft model"
    assert (split_of(inside), split_of(without)) == ("0.5,0.5/ d", "0.5,0.5")


def test_one_of_several_drafts_loses_its_machine(hostfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostfile.write_text("a\nb\nc\nd\n")
    inside, without, _ = again(hostfile, {"c"}, monkeypatch, "0.5,0.5/1/1", "x.gguf", "y.gguf")
    assert split_of(inside) == "0.5,0.5/1.0/ y x"
    assert (without.line, without.hosts) == ("continuing without x.gguf", ("a", "b", "d"))
    assert split_of(without) == "0.5,0.5/1.0 y"


def test_a_draft_stays_where_it_is(hostfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _ = again(hostfile, {"b"}, monkeypatch, "0.5,0.5/1", "d.gguf")
    assert split_of(job) == "1.0/1.0 d"
