"""The table of options: its rows, what a command line makes of them, and the settings that a command line gives."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
from support.command_lines import REQUIRED, command_named, given, options, options_of

from ggpipe.cli.help import show_help
from ggpipe.cli.messages import spellings
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.errors import UsageError
from ggpipe.launch.rank_setup import VARIABLE, RankSetup, own_setup
from ggpipe.options import engine_config
from ggpipe.options.commands import COMMANDS
from ggpipe.options.option import Command, Option, Options
from ggpipe.options.settings import (
    LoadSettings,
    LogSettings,
    PromptSettings,
    RankSettings,
)
from ggpipe.options.table import OPTIONS, PANELS

CONFIGS = (ModelConfig, ContextConfig, SamplingConfig, SpeculationConfig, PipelineConfig, DraftConfig)
ELSEWHERE = {  # fields that no row sets: the command line has them in another form, or finds them out
    ModelConfig: {"path", "load_mode", "loras"},
    ContextConfig: {"n_seq", "n_branches", "n_states"},
    PipelineConfig: {"layer_split", "auto"},
    DraftConfig: {"model", "is_mtp", "context", "layer_split"},
    SamplingConfig: {
        "min_keep", "n_probs", "post_sampling_probs", "grammar", "json_schema", "call_grammar", "reasoning_marks",
    },
}  # fmt: skip


# The table


@pytest.mark.parametrize("record", CONFIGS)
def test_each_setting_has_an_option(record: type) -> None:
    fields = {field.name for field in dataclasses.fields(record)}
    set_by_rows = {row.field for row in OPTIONS if row.record is record}
    assert set_by_rows | ELSEWHERE.get(record, set()) == fields
    assert not set_by_rows & ELSEWHERE.get(record, set())


def test_panels_stand_in_order() -> None:
    panels = [PANELS.index(row.panel) for row in OPTIONS]
    assert panels == sorted(panels)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_command_has_each_flag_once(command: Command) -> None:
    rows = command.options(OPTIONS)
    flags = [name.strip() for row in rows for flag in row.flags for name in flag.split("/") if name.strip()]
    assert len(flags) == len(set(flags))
    assert len({row.name for row in rows}) == len(rows)
    assert command.required | set(command.defaults) <= {row.name for row in rows}
    assert command.leave_out <= {row.name for row in OPTIONS if row.record in command.records}


def test_a_setting_has_one_spelling() -> None:
    for row in OPTIONS:
        assert row.spelling == spellings()[row.name], row.name


def test_help_texts_stand_alone() -> None:
    for row in OPTIONS:
        assert row.help[0].isupper() or row.help.startswith(("async", "-")), row.help
        assert row.help.endswith("."), row.help


# What a command line makes of it


@pytest.mark.parametrize("name", ["", "generate", "serve"])
def test_help_shows_switches_without_a_value(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_help(COMMANDS, OPTIONS, command_named(name) if name else None)
    shown = capsys.readouterr().out
    assert "--help" in shown
    assert "bool" not in shown.lower()
    assert "\\\\" not in shown  # a doubled backslash


def test_defaults_are_the_records_own() -> None:
    nothing = given("")
    for record in (
        ContextConfig,
        PipelineConfig,
        SamplingConfig,
        SpeculationConfig,
        PromptSettings,
        LoadSettings,
        RankSettings,
    ):
        assert nothing[record] == record()
    config = engine_config.engine_config(nothing)
    assert config.context == ContextConfig()
    assert config.pipeline == PipelineConfig()
    assert config.model == ModelConfig(path=Path("m.gguf"))
    assert config.drafts == ()
    assert engine_config.speculation_config(nothing) == SpeculationConfig()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_each_record_of_each_command_has_its_defaults(command: Command) -> None:
    read = options([word for name in sorted(command.required) for word in REQUIRED[name]], command.name)
    for row in command.options(OPTIONS):
        if row.name in {*command.required, *command.defaults} or row.record in (ModelConfig, DraftConfig, EngineConfig):
            continue
        assert getattr(read[row.record], row.field) == row.default, row


def test_a_command_has_its_own_defaults() -> None:
    assert options_of("-m m", "bench")[PromptSettings] == PromptSettings(n_predict=128)
    assert options_of("-m m -n 5", "bench")[PromptSettings].n_predict == 5
    assert options_of("-m m", "bench")[SamplingConfig] == SamplingConfig(seed=1)


def test_a_model_may_be_required_or_not() -> None:
    with pytest.raises(UsageError, match="-m/--model is missing: "):
        options_of("")
    with pytest.raises(UsageError, match="name a model with `model`"):
        engine_config.model_config(options_of("", "plan"))


VALUES = (
    "3", "0.5", "1,2", "a b", "on", "a=int:1", "d:0.5", "0.5,0.5", "async", "iterative", "svg", "none", "f16",
    "distribute", "yarn", "overconfident", "3-4", "{}", "top_k", "kt", "5+1", "json", "auto",
    "openai", "best-first", "ngram",
)  # fmt: skip


def words(row: Option, value: object) -> list[str]:
    on, _, off = next(flag for text in row.flags for flag in [text.strip()] if flag.startswith("--")).partition("/")
    return [f"{on}={value}"] if not isinstance(value, bool) else [on if value else off]


def with_a_value(row: Option) -> Options | None:
    """A command line with the first value that the option takes."""
    command = next(c for c in COMMANDS if row in c.options(OPTIONS))
    required = [word for name in sorted(command.required - {row.name}) for word in REQUIRED[name]]
    for value in [not row.default] if row.reads is bool else VALUES:
        with contextlib.suppress(UsageError):
            return options([*required, *words(row, value)], command.name)
    return None


def test_what_any_option_sets_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    read = {row.spelling: with_a_value(row) for row in OPTIONS if row.flags}
    assert [name for name, found in read.items() if found is None] == []
    n_configs = 0
    for found in filter(None, read.values()):
        with contextlib.suppress(UsageError):
            settings = RankSetup(config=engine_config.engine_config(found), verbose=found[LogSettings].verbose)
            monkeypatch.setenv(VARIABLE, settings.environment[VARIABLE])
            assert own_setup() == settings
            n_configs += 1
    assert n_configs > 100


def test_switches_and_repeated_options() -> None:
    read = given("--no-cancel -nr --lora a --lora b --lora-scaled c:d:0.5 --override-kv x=int:1")
    assert not read[SpeculationConfig].cancel
    model = engine_config.model_config(read)
    assert not model.repack
    assert model.override_kv == ("x=int:1",)
    assert model.loras == ((Path("a"), 1.0), (Path("b"), 1.0), (Path("c:d"), 0.5))


@pytest.mark.parametrize(
    ("line", "draft"),
    [("--draft-max 3", 3), ("--draft-n 4", 4), ("--spec-draft-n-max 5", 5), ("--draft 2 --draft-min 9", 2)],
)
def test_other_spellings_of_the_draft(line: str, draft: int) -> None:
    speculation = engine_config.speculation_config(given(line))
    assert speculation.n_draft == draft
    assert speculation.n_min == (2 if "--draft-min" in line else 0)


def test_a_record_in_the_place_of_another() -> None:
    read = given("-n 5 -c 100")
    other = read.having(PromptSettings(text="x"))
    assert other[PromptSettings] == PromptSettings(text="x")
    assert other[ContextConfig] == read[ContextConfig]
    assert read[PromptSettings] == PromptSettings(n_predict=5)
