"""Profiles of a pair: the draft measured beside the target, kept, and what the simulator makes of it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import in_process
from support.commands import TARGET, ggpipe, mpirun
from support.profiles import check, config_of, measure, refuse, refused
from support.virtual import measured
from support.zoo import make

from ggpipe.cluster.from_profile import spec_from_profile
from ggpipe.cluster.model_shape import ModelShape, even_shape
from ggpipe.cluster.profile import MeasuredLayers, ModelFacts, Point, Profile, as_text, read, write
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.layout import lay_out
from ggpipe.engine import wiring
from ggpipe.errors import UsageError
from ggpipe.llama import machine
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_shape import facts_of
from ggpipe.planning import profile_cache
from ggpipe.sim.stage_costs import stage_cost
from ggpipe.sim.virtual_cluster import VirtualPlacement, build

DRAFT = TARGET.with_name("tales-draft.gguf")
FACTS = ModelFacts(
    name="small",
    architecture="llama",
    fingerprint="fedcba9876543210",
    n_layer=2,
    n_embd=32,
    n_vocab=128,
    n_expert=0,
    n_expert_used=0,
    layer_bytes=(4, 4),
    input_bytes=2,
    output_bytes=2,
)
PART = MeasuredLayers((0, 2), 10, (Point(1, 32, 0.004), Point(8, 32, 0.010), Point(1, 512, 0.005)))


def with_draft(profile: Profile) -> Profile:
    return replace(profile, drafts=(FACTS,), ranks=tuple(replace(rank, drafts=(PART,)) for rank in profile.ranks))


# Data


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    both = with_draft(measured())
    some = replace(both, ranks=(both.ranks[0], replace(both.ranks[1], drafts=(None,))))
    for profile in (measured(), both, some):
        write(path, profile)
        assert read(path) == profile


def test_files_from_before_drafts_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    content = json.loads(as_text(measured())) | {"version": 1}
    del content["drafts"]
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"a profile in format 1, but this ggpipe reads 4: profile again"):
        read(path)


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "missing": (lambda p: p.pop("drafts"), "rank 0 has 1 of 0 drafts"),
    "of which model": (lambda p: p["ranks"][1].pop("drafts"), "rank 1 has 0 of 1 drafts"),
    "some layers": (lambda p: p["ranks"][1]["drafts"][0].update(layers=[0, 1]), "rank 1 does not have all layers"),
    "layer_bytes": (lambda p: p["drafts"][0].update(n_layer=3), r"drafts\[0\]\.layer_bytes"),
    "no weights": (lambda p: p["ranks"][0]["drafts"][0].update(weight_bytes=0), "a draft without weights"),
    "no single row": (lambda p: p["ranks"][0]["drafts"][0].update(alone=p["ranks"][0]["drafts"][0]["alone"][1:2]),
                      "single row"),
    "no time": (lambda p: p["ranks"][0]["drafts"][0]["alone"][1].update(seconds=0), r"alone\[1\]\.seconds must"),
    "type": (lambda p: p["ranks"][0]["drafts"][0].update(alone=3), r"ranks\[0\]\.drafts\[0\]\.alone must be a list"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_profiles(what: str, tmp_path: Path) -> None:
    spoil, why = BROKEN[what]
    content = json.loads(as_text(with_draft(measured())))
    spoil(content)
    refuse(content, why, tmp_path / "profile.json")


# Costs


def draft_shape(n_layer: int = 2) -> ModelShape:
    return replace(
        even_shape(name="small", n_layer=n_layer, weight_bytes=12, parameters=20, n_embd=32, cell_bytes=4, n_vocab=128),
        layer_bytes=(4,) * n_layer,
        output_bytes=2,
    )


def test_the_draft_takes_what_it_took() -> None:
    node = spec_from_profile(with_draft(measured()), "measured").nodes[0]
    whole = stage_cost(node, draft_shape(), (0, 2), 8, is_draft=True)
    assert [whole.seconds(p.rows, p.n_past) for p in PART.alone] == [pytest.approx(p.seconds) for p in PART.alone]
    fixed_s = 0.004 / 4  # less than the target's
    last = stage_cost(node, draft_shape(), (1, 2), 8, is_draft=True)
    assert last.seconds(1, 32) == pytest.approx(fixed_s + (0.004 - fixed_s) * 6 / 10)
    slower = stage_cost(node, draft_shape(), (0, 2), 4, is_draft=True)
    assert slower.seconds(8, 32) == pytest.approx(fixed_s + (0.010 - fixed_s) * 2)
    assert stage_cost(node, draft_shape(), (0, 2), 80, is_draft=True).seconds(1, 32) == pytest.approx(0.004)
    larger = stage_cost(node, draft_shape(4), (0, 4), 8, is_draft=True)
    assert larger.seconds(1, 32) == pytest.approx(fixed_s + (0.004 - fixed_s) * 18 / 10)


def test_little_that_is_fixed_stays_as_it_was_measured() -> None:
    profile = with_draft(measured())
    profile = replace(profile, ranks=tuple(replace(rank, fixed_s=2e-4) for rank in profile.ranks))
    node = spec_from_profile(profile, "measured").nodes[0]
    slower = stage_cost(node, draft_shape(), (0, 2), 4, is_draft=True)
    assert slower.seconds(1, 32) == pytest.approx(2e-4 + (0.004 - 2e-4) * 2)


def test_without_long_contexts_the_draft_rises_as_the_target_does() -> None:
    profile = with_draft(measured())
    part = replace(PART, alone=PART.alone[:2])
    profile = replace(profile, ranks=tuple(replace(rank, drafts=(part,)) for rank in profile.ranks))
    node = spec_from_profile(profile, "measured").nodes[0]
    cost = stage_cost(node, draft_shape(), (0, 2), 8, is_draft=True)
    assert cost.seconds(1, 32) == pytest.approx(0.004)
    assert cost.seconds(1, 512) == pytest.approx(0.004 * 0.012 / 0.010)
    assert cost.seconds(8, 32) == pytest.approx(0.010)
    assert profile.ranks[0].drafts == (part,)
    short = replace(profile.ranks[0], alone=profile.ranks[0].alone[:2])
    flat = stage_cost(replace(node, profile=short), draft_shape(), (0, 2), 8, is_draft=True)
    assert flat.seconds(1, 512) == pytest.approx(0.004)


def test_a_draft_of_experts_counts_all_of_them() -> None:
    node = spec_from_profile(with_draft(measured()), "measured").nodes[0]
    shape = replace(draft_shape(), layer_expert_bytes=(3, 3), n_expert=8, n_expert_used=2)
    assert stage_cost(node, shape, (0, 2), 8, is_draft=True).seconds(1, 32) == pytest.approx(0.004)


@pytest.mark.parametrize("outside", [False, True])
def test_only_the_drafts_pipeline_takes_its_times(outside: bool) -> None:
    target = replace(
        even_shape(name="same", n_layer=4, weight_bytes=50, parameters=50, n_embd=64, cell_bytes=8, n_vocab=128),
        layer_bytes=(10,) * 4,
        output_bytes=5,
    )
    layout = lay_out(4, 2, None)
    placement = VirtualPlacement(
        target_on=(0, 1),
        draft_on=(1,) if outside else (),
        layout=layout,
        draft_layouts=(lay_out(2, 1, None, 2),) if outside else (),
    )
    seconds = {}
    for profile in (measured(), with_draft(measured())):
        spec = replace(spec_from_profile(profile, "measured"), threads=())
        cluster = build(spec, replace(placement, threads=(8,) * len(placement.node_of)), target, [draft_shape()])
        (draft,) = cluster.drafts
        pipelines = (*cluster.target.stages.values(), *draft.stages.values())
        seconds[profile.drafts] = [stage.cost.seconds(1, 32) for stage in pipelines]
    without, beside = seconds[()], seconds[FACTS,]
    assert without[:-1] == beside[:-1]
    assert beside[-1] == pytest.approx(0.004)
    assert without[-1] == pytest.approx(2e-3 + (0.010 - 2e-3) * 10 / 20), "by its bytes"


# Measured inside one process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def pair(folder: Path) -> EngineConfig:
    target, draft = make("llama", folder / "llama.gguf", n_layer=8), make("qwen2", folder / "draft.gguf")
    return replace(config_of(target, exact=True), drafts=(DraftConfig(model=ModelConfig(path=draft), threads=3),))


def check_drafts(profile: Profile, *drafts: Path) -> None:
    assert profile.drafts == tuple(facts_of(ModelFile.open(draft)) for draft in drafts)
    for rank in profile.ranks:
        for own, facts in zip(rank.drafts, profile.drafts, strict=True):
            assert own is not None
            assert own.layers == (0, facts.n_layer)
            assert own.weight_bytes == facts.weight_bytes((0, facts.n_layer))
            assert {1, 2, 4, 8} <= {point.rows for point in own.alone}


def test_the_draft_is_measured_whole_before_the_target(
    pair: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, stage_loader = [], wiring.stage_loader

    def seen(
        config: EngineConfig, transport: Any, file: ModelFile, layers: tuple[int, int], model: int, group: None
    ) -> Any:
        threads = wiring.threads_of(config, transport, model)
        loaded.append((config.model.path, layers, threads, config.context.exact))
        return stage_loader(config, transport, file, layers, model, group=group)

    monkeypatch.setattr(wiring, "stage_loader", seen)
    profile, _ = measure([pair], (2, 6), budget_s=20)  # as many runs as ever
    assert profile is not None
    check(profile, pair.model.path, (2, 6))
    check_drafts(profile, pair.drafts[0].model.path)
    (rank,) = profile.ranks
    (draft,) = rank.drafts
    assert draft is not None
    assert {p.n_past for p in draft.alone} == {32, 512}
    assert loaded == [
        (pair.drafts[0].model.path, (0, 3), (1, 1), False),
        (pair.model.path, (2, 3), (1, 1), True),
        (pair.model.path, (2, 4), (1, 1), True),
        (pair.model.path, (2, 6), (1, 1), True),
    ]
    write(tmp_path / "profile.json", profile)
    assert read(tmp_path / "profile.json") == profile


def test_two_ranks(pair: EngineConfig) -> None:
    profile, _ = measure([pair, pair], (2, 6))
    assert profile is not None
    check(profile, pair.model.path, (2, 6))
    check_drafts(profile, pair.drafts[0].model.path)


def test_several_drafts(pair: EngineConfig, folder: Path, tmp_path: Path) -> None:
    """Each is measured whole on each rank, and the simulator takes the times of the one that it simulates."""
    other = make("qwen3moe", folder / "qwen3moe.gguf")
    both = replace(pair, drafts=(*pair.drafts, DraftConfig(model=ModelConfig(path=other))))
    profile, _ = measure([both, both], (2, 6))
    assert profile is not None
    check_drafts(profile, pair.drafts[0].model.path, other)
    write(tmp_path / "profile.json", profile)
    assert read(tmp_path / "profile.json") == profile
    node = spec_from_profile(profile, "measured").nodes[0]
    for number, facts in enumerate(profile.drafts):
        shape = replace(draft_shape(facts.n_layer), layer_bytes=facts.layer_bytes, output_bytes=facts.output_bytes)
        assert node.profile is not None
        part = node.profile.drafts[number]
        assert part is not None
        cost = stage_cost(node, shape, (0, facts.n_layer), 1, is_draft=True)
        (point,) = [p for p in part.alone if (p.rows, p.n_past) == (1, min(p.n_past for p in part.alone))]
        assert cost.seconds(1, point.n_past) == pytest.approx(point.seconds)


@pytest.mark.parametrize("name", ["mamba", "jamba", "qwen3moe"])
def test_drafts_of_all_kinds(name: str, pair: EngineConfig, folder: Path) -> None:
    """Those that cannot be cut, or cannot take rows back, as well."""
    path = make(name, folder / f"{name}.gguf")
    profile, _ = measure(
        [replace(pair, drafts=(DraftConfig(model=ModelConfig(path=path), context=ContextConfig(n_ctx=64)),))]
    )
    assert profile is not None
    check_drafts(profile, path)


def test_a_draft_that_memory_does_not_hold(pair: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 1000)
    profile, _ = measure([pair])
    assert profile is not None
    assert profile.drafts == (facts_of(ModelFile.open(pair.drafts[0].model.path)),)
    assert profile.ranks[0].drafts == (None,)


def test_errors_end_all_ranks(pair: EngineConfig, folder: Path) -> None:
    def drafted(path: Path) -> EngineConfig:
        return dataclasses.replace(pair, drafts=(DraftConfig(model=ModelConfig(path=path)),))

    missing, other = drafted(folder / "no.gguf"), drafted(make("gpt2", folder / "other.gguf"))
    assert "cannot open model file" in refused([missing, pair])
    assert refused([pair, missing]).startswith("rank 1 ")
    assert re.search(
        r"^rank 2 .* has another model than rank 0 .* as `draft.model`: copy it", refused([pair, pair, other])
    )


# The commands

PAIR = ("-m", TARGET, "-md", DRAFT)


def test_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    done = in_process.ggpipe("profile", *PAIR, "-t", 1, "--seconds", 0.5, "--layers", "2-3", "-o", path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    check(read(path), TARGET, (2, 4))
    check_drafts(read(path), DRAFT)
    assert "measuring layers 2-3 of 0-7" in done.stderr
    assert "and the draft (" in done.stderr
    assert "draft, 1 row" in done.stderr
    done = ggpipe("profile", *PAIR, "-r", 2, "-t", 1, "--seconds", 0.6, "-o", path)
    assert done.returncode == 0, done.stderr
    check_drafts(read(path), DRAFT)
    assert "draft, 1 row" in done.stderr
    simulated = in_process.ggpipe("simulate", path, *PAIR, "--mpi-layer-split", "1.0/1.0", "-n", 16)
    assert simulated.returncode == 0, simulated.stderr


@pytest.mark.parametrize(
    "command",
    [("profile",), ("profile", "-r", "2"), ("plan",), ("generate", "-p", "a", "--mpi-layer-split", "auto")],
    ids=["profile", "profile -r", "plan", "auto"],
)
def test_drafts_that_are_not_there(command: tuple[str, ...], tmp_path: Path) -> None:
    start = ggpipe if "-r" in command else in_process.ggpipe
    done = start(*command, "-m", TARGET, "-md", "nofile.gguf", "-t", 1, XDG_CACHE_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("ggpipe: error: cannot open model file nofile.gguf: No such file or directory\n")


def test_plans_measure_the_draft_where_they_need_it() -> None:
    given = ("-t", 1, "-c", 1024, "--seconds", 0.5)
    assert "and the draft (" in in_process.ggpipe("plan", *PAIR, *given).stderr
    iterative = in_process.ggpipe("plan", *PAIR, *given, "--mode", "iterative")
    assert iterative.returncode == 0, iterative.stderr
    assert "measuring layers" in iterative.stderr
    assert "the draft (" not in iterative.stderr


def test_what_is_kept_is_for_this_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile_cache.keep("with", with_draft(measured()))
    profile_cache.keep("without", measured())
    assert profile_cache.find("with", 2, [FACTS.fingerprint]) == with_draft(measured())
    assert profile_cache.find("with", 2) == with_draft(measured())
    assert profile_cache.find("with", 2, ["0123456789abcdef"]) is None
    assert profile_cache.find("without", 2) == measured()
    assert profile_cache.find("without", 2, [FACTS.fingerprint]) is None


def test_auto_measures_each_pair_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = make("llama", tmp_path / "other.gguf", n_layer=2)

    def kept(*draft: object) -> dict[str | None, int]:
        """When what was kept was written, by the draft's fingerprint."""
        words = ("generate", "-m", TARGET, *draft, "-p", "Once", "-n", 4, "-t", 1, "-c", 256)
        done = mpirun(2, *words, "--mpi-layer-split", "auto")
        assert done.returncode == 0 or other in draft, done.stderr  # that one has other tokens
        found = {}
        for path in (tmp_path / "ggpipe" / "profiles").iterdir():
            profile = read(path)
            assert all(len(rank.drafts) == len(profile.drafts) for rank in profile.ranks)
            found[profile.drafts[0].fingerprint if profile.drafts else None] = path.stat().st_mtime_ns
        return found

    drafts = {path: ModelFile.open(path).fingerprint for path in (DRAFT, other)}
    first = kept()
    assert first.keys() == {None}
    second = kept("-md", DRAFT)
    assert second == first | {drafts[DRAFT]: second[drafts[DRAFT]]}
    assert kept("-md", DRAFT) == second
    third = kept("-md", other)
    assert third == second | {drafts[other]: third[drafts[other]]}
