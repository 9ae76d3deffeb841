"""Commands take groups of flags, typer sees one flat list, and groups become settings."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from ggpipe.cli import flags, settings
from ggpipe.cli.flags import (
    ComputeFlags,
    DraftFlags,
    ModelFlags,
    OptionalModelFlags,
    PromptFlags,
    RankFlags,
    SamplingFlags,
    SpeculationFlags,
    option,
    takes_flags,
)
from ggpipe.cli.generate import generate
from ggpipe.cli.ranks import start_ranks
from ggpipe.config import ContextConfig, PipelineConfig, SamplingConfig, SpeculationConfig
from ggpipe.errors import UsageError
from ggpipe.runtime import launch

GROUPS = [
    group
    for group in vars(flags).values()
    if dataclasses.is_dataclass(group) and isinstance(group, type) and group.__name__.endswith("Flags")
]
MODEL = ModelFlags(model=Path("m.gguf"))
DRAFT = DraftFlags(model_draft=Path("d.gguf"))


def names_of(command: Callable[..., int]) -> list[str]:
    return list(inspect.signature(command).parameters)


def run(command: Callable[..., int], line: str) -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return app(line.split(), standalone_mode=False)


# What typer sees


def test_groups_arrive_filled_in() -> None:
    got: list[object] = []

    @takes_flags()
    def command(
        speculation: SpeculationFlags,
        cluster: Annotated[Path, typer.Argument()],
        model: ModelFlags,
        sweep: Annotated[list[str] | None, option("--sweep", panel="Sweep", help="x")] = None,
    ) -> int:
        got.extend([speculation, cluster, model, sweep])
        return 7

    assert run(command, "c.toml -m m.gguf -pa 0.5 --no-cancel -nr --sweep a --sweep b -lm dio") == 7
    assert got == [
        SpeculationFlags(p_accept=0.5, cancel=False),
        Path("c.toml"),
        ModelFlags(model=Path("m.gguf"), repack=False, load_mode="dio"),
        ["a", "b"],
    ]


def test_every_group_has_the_defaults_that_typer_gives() -> None:
    for group in GROUPS:
        got: list[object] = []

        def command(flags: Any, got: list[object] = got) -> int:
            got.append(flags)
            return 0

        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter("flags", inspect.Parameter.KEYWORD_ONLY, annotation=group)]
        )
        given = {"model": Path("m.gguf")} if group is ModelFlags else {}
        run(takes_flags()(command), "-m m.gguf" if given else "")
        assert got == [group(**given)]


def test_a_model_may_be_required_or_not() -> None:
    @takes_flags()
    def needs(model: ModelFlags) -> int:
        return 0

    @takes_flags()
    def can_do_without(model: OptionalModelFlags) -> int:
        return 3 if model.model is None else 4

    with pytest.raises(Exception, match="Missing parameter: model"):
        run(needs, "")
    assert run(can_do_without, "") == 3
    assert run(can_do_without, "-m m.gguf") == 4
    assert names_of(needs) == names_of(can_do_without)


def test_a_command_has_its_own_defaults_and_leaves_flags_out() -> None:
    got: list[PromptFlags] = []

    @takes_flags(leave_out=("prompt", "file", "escape"), n_predict=128)
    def command(prompt: PromptFlags) -> int:
        got.append(prompt)
        return 0

    assert names_of(command) == ["n_predict"]
    run(command, "")
    run(command, "-n 5")
    assert got == [PromptFlags(n_predict=128), PromptFlags(n_predict=5)]


def test_help_has_one_order() -> None:
    """Panels stand in the same order whatever the order of a command's groups, its own ones first."""

    @takes_flags()
    def command(
        sampling: SamplingFlags,
        draft: DraftFlags,
        speculation: SpeculationFlags,
        compute: ComputeFlags,
        own: Annotated[int, option("--own", panel="Own", help="x")] = 1,
    ) -> int:
        return 0

    names = names_of(command)
    assert names[:2] == ["own", "ctx_size"]
    assert names.index("exact") < names.index("model_draft") < names.index("temp") < names.index("rope_scaling")
    at = names.index("parallel")
    assert names[at : at + 4] == ["parallel", "threads_draft", "threads_batch_draft", "cancel"]

    @takes_flags()
    def drafts(draft: DraftFlags) -> int:
        return 0

    assert names_of(drafts) == ["model_draft", "threads_draft", "threads_batch_draft"]


def test_generate_takes_all_groups() -> None:
    fields = {f.name for group in GROUPS for f in dataclasses.fields(group)}
    assert fields <= set(names_of(generate))
    flags_ = [name for f in inspect.signature(generate).parameters.values() for name in _flags_of(f)]
    assert len(flags_) == len(set(flags_))


def _flags_of(parameter: inspect.Parameter) -> list[str]:
    (info,) = [x for x in parameter.annotation.__metadata__ if isinstance(x, typer.models.OptionInfo)]
    declared = [info.default, *(info.param_decls or ())]
    return [name.strip() for text in declared for name in text.split("/") if name.strip()]


@dataclass(frozen=True, kw_only=True)
class Other:
    n_predict: Annotated[int, option("--other", panel="Other", help="x")] = 1


@dataclass(frozen=True, kw_only=True)
class Needed:
    needed: Annotated[int, option("--needed", panel="Other", help="x")] = field()


def test_mistakes_in_a_command_are_found_when_it_is_imported() -> None:
    def twice(prompt: PromptFlags, other: Other) -> int:
        return 0

    def needed(needed: Needed) -> int:
        return 0

    with pytest.raises(TypeError, match="n_predict is there twice"):
        takes_flags()(twice)
    with pytest.raises(TypeError, match="left out without a default"):
        takes_flags(leave_out=["needed"])(needed)
    with pytest.raises(TypeError, match="has no colour, needful"):
        takes_flags(leave_out=["needful"], colour=1)(needed)


# Checks


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptionalModelFlags(load_mode="x"), "--load-mode x: known modes are auto, mmap, none"),
        (lambda: ModelFlags(model=Path("m"), numa="x"), "--numa x: known strategies are distribute, isolate, numactl"),
        (lambda: ComputeFlags(flash_attn="x"), "-fa and --color take on, off or auto"),
        (lambda: SpeculationFlags(mode="x"), "--mode x: known modes are iterative, speculative, async"),
        (lambda: PromptFlags(n_predict=-2), "-s and -n are numbers from 0 up, or -1"),
        (lambda: SamplingFlags(seed=-2), "-s and -n are numbers from 0 up, or -1"),
        (lambda: settings.engine_config(MODEL, speculation=SpeculationFlags(mode="async")), "name one with -md"),
        (lambda: settings.engine_config(MODEL, ranks=RankFlags(mpi_layer_split="1/1")), "ranks behind the /"),
        (lambda: settings.engine_config(MODEL, ComputeFlags(threads_batch="a")), "-tb a: give a number"),
        (lambda: settings.engine_config(ModelFlags(model=Path("m"), lora_scaled=["a"])), "write FILE:SCALE"),
        (lambda: settings.read_prompt(PromptFlags()), "give one prompt"),
        (lambda: settings.read_prompt(PromptFlags(file=Path("nowhere"))), "cannot read the prompt file nowhere"),
    ],
)
def test_what_makes_no_sense_is_said(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


# Settings


def test_defaults_are_the_settings_own() -> None:
    config = settings.engine_config(MODEL)
    assert config.context == ContextConfig()
    assert config.pipeline == PipelineConfig()
    assert config.model.path == Path("m.gguf")
    assert config.draft is None
    assert settings.speculation_config(SpeculationFlags()) == SpeculationConfig()
    assert settings.sampling_config(SamplingFlags()) == SamplingConfig()


def test_sequences_are_those_of_the_guesses() -> None:
    branches = SpeculationFlags(parallel=4)
    assert settings.engine_config(MODEL, speculation=branches).context.n_seq == 1
    config = settings.engine_config(MODEL, draft=DRAFT, speculation=branches)
    assert config.draft is not None
    assert (config.context.n_seq, config.draft.context.n_seq) == (4, 4)
    exact = ComputeFlags(exact=True)
    config = settings.engine_config(MODEL, exact, draft=DRAFT, speculation=branches)
    assert config.draft is not None
    assert (config.context.n_seq, config.draft.context.n_seq) == (1, 1)
    assert settings.speculation_config(branches, exact=True).n_parallel == 1
    assert settings.warnings_of(exact, DRAFT, branches) == ["with --exact guesses are chains: -np 1 is used"]
    assert settings.warnings_of(exact, DraftFlags(), branches) == []
    assert settings.warnings_of(exact, DRAFT, SpeculationFlags()) == []


def test_the_draft_is_loaded_as_the_target_and_keeps_its_own_positions() -> None:
    compute = ComputeFlags(ctx_size=99, cache_type_k="q8_0", exact=True, rope_scale=2.0, threads="1,2/3")
    model = ModelFlags(model=Path("m"), mlock=True, repack=False, numa="isolate", lora=["a"], lora_scaled=["b:c:0.5"])
    ranks = RankFlags(mpi_layer_split="0.5,0.5/1.0")
    config = settings.engine_config(model, compute, ranks, DRAFT)
    assert config.draft is not None
    for weights in (config.model, config.draft.model):
        assert (weights.load_mode, weights.repack, weights.numa) == ("mmap+mlock", False, "isolate")
    assert config.model.loras == ((Path("a"), 1.0), (Path("b:c"), 0.5))
    assert config.draft.model.loras == ()
    assert (config.context.exact, config.context.rope_scale) == (True, 2.0)
    assert config.draft.context == ContextConfig(99, cache_type_k="q8_0")
    assert config.pipeline == PipelineConfig((0.5, 0.5), (1, 2, 3))
    assert config.draft.shares == (1.0,)


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, "mmap"),
        ({"mmap": False}, "none"),
        ({"mmap": False, "mlock": True}, "mlock"),
        ({"load_mode": "dio", "mlock": True}, "dio"),
        ({"load_mode": "mmap", "mmap": False}, "mmap"),
    ],
)
def test_ways_to_load(given: dict[str, Any], mode: str) -> None:
    assert settings.model_config(ModelFlags(model=Path("m"), **given)).load_mode == mode


def test_a_prompt_file_loses_its_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"a\\tb\n\n")
    assert settings.read_prompt(PromptFlags(file=path)) == "a\tb\n"
    assert settings.read_prompt(PromptFlags(file=path, escape=False)) == "a\\tb\n"


# Ranks


def test_ranks_are_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, Path | None]] = []
    monkeypatch.setattr(launch, "launch", lambda _arguments, n, hostfile, _env: started.append((n, hostfile)) or 0)
    monkeypatch.setattr(launch, "rank_in_environment", lambda: None)
    one = settings.engine_config(MODEL)
    three = settings.engine_config(MODEL, ranks=RankFlags(mpi_layer_split="0.5,0.5/1"), draft=DRAFT)
    assert start_ranks(one, None) is None
    with pytest.raises(UsageError, match="--hostfile needs --mpi-layer-split"):
        start_ranks(one, Path("hosts"))
    assert start_ranks(three, Path("hosts")) == 0
    assert started == [(3, Path("hosts"))]
    monkeypatch.setattr(launch, "rank_in_environment", lambda: 0)
    assert start_ranks(three, None) is None
    assert start_ranks(one, Path("hosts")) is None


def test_flags_load_nothing_heavy() -> None:
    script = "import sys, ggpipe.cli.flags, ggpipe.cli.settings; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert not {"numpy", "mpi4py", "llama_cpp", "matplotlib", "rich.live"} & set(done.stdout.split())
