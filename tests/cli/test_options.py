"""The table of options: its rows, what a command line makes of them, and the settings that a command line gives."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support import command_lines
from support.command_lines import REQUIRED

from ggpipe.cli.help import show_help
from ggpipe.cli.messages import SPELLINGS, in_flags
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.errors import SettingError, UsageError
from ggpipe.launch.rank_setup import VARIABLE, RankSetup, own_setup
from ggpipe.options import engine_config, lists
from ggpipe.options.commands import COMMANDS
from ggpipe.options.option import Command, Option, Options
from ggpipe.options.sampling import sampling_config
from ggpipe.options.settings import (
    BenchSettings,
    LoadSettings,
    LogSettings,
    PlanSettings,
    ProfileSettings,
    PromptSettings,
    RankSettings,
    SimulatedText,
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


def options(line: str, command: str = "generate") -> Options:
    return command_lines.options(line.split(), command)


def given(line: str) -> Options:
    return options(f"-m m.gguf {line}")


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
        assert row.spelling == SPELLINGS[row.name], row.name


def test_help_texts_stand_alone() -> None:
    for row in OPTIONS:
        assert row.help[0].isupper() or row.help.startswith(("async", "-")), row.help
        assert row.help.endswith("."), row.help


# What a command line makes of it


@pytest.mark.parametrize("name", ["", "generate", "serve"])
def test_help_shows_switches_without_a_value(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_help(COMMANDS, OPTIONS, command_lines.command_named(name) if name else None)
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
    read = command_lines.options([word for name in sorted(command.required) for word in REQUIRED[name]], command.name)
    for row in command.options(OPTIONS):
        if row.name in {*command.required, *command.defaults} or row.record in (ModelConfig, DraftConfig, EngineConfig):
            continue
        assert getattr(read[row.record], row.field) == row.default, row


def test_a_command_has_its_own_defaults() -> None:
    assert options("-m m", "bench")[PromptSettings] == PromptSettings(n_predict=128)
    assert options("-m m -n 5", "bench")[PromptSettings].n_predict == 5
    assert options("-m m", "bench")[SamplingConfig] == SamplingConfig(seed=1)


def test_a_model_may_be_required_or_not() -> None:
    with pytest.raises(UsageError, match="-m/--model is missing: "):
        options("")
    with pytest.raises(UsageError, match="name a model with `model`"):
        engine_config.model_config(options("", "plan"))


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
            return command_lines.options([*required, *words(row, value)], command.name)
    return None


def test_what_any_option_sets_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    read = {row.spelling: with_a_value(row) for row in OPTIONS if row.flags}
    assert [name for name, options in read.items() if options is None] == []
    n_configs = 0
    for options in filter(None, read.values()):
        with contextlib.suppress(UsageError):
            settings = RankSetup(config=engine_config.engine_config(options), verbose=options[LogSettings].verbose)
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


# Checks


@pytest.mark.parametrize(
    ("line", "drafters", "n_seq"),
    [
        ("", None, 1),
        ("-md d -np 3", None, 4),
        ("--spec-type ngram", ("ngram",), 1),
        ("--spec-type ngram-simple --mode speculative", ("ngram",), 1),
        ("-md d --spec-type ngram,draft", ("ngram", "draft"), 2),
        ("-md d --spec-type draft", ("draft",), 1),
        ("-md d --spec-type none", (), 1),
    ],
)
def test_each_further_drafter_has_room_for_a_path_of_its_own(
    line: str, drafters: tuple[str, ...] | None, n_seq: int
) -> None:
    config = engine_config.engine_config(given(line))
    assert config.context.n_seq == n_seq
    assert engine_config.speculation_config(given(line)).drafters == drafters


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: given("-lm x")[LoadSettings], "must be auto, mmap, none, mlock, mmap\\+mlock or dio, got x"),
        (lambda: engine_config.model_config(given("--numa x")), "`numa` must be distribute, isolate or numactl, got x"),
        (lambda: given("-fa x")[ContextConfig], "`flash_attn` must be on, off or auto, got x"),
        (lambda: given("--mode x")[SpeculationConfig], "`mode` must be iterative, speculative or async, got x"),
        (lambda: given("-n -2")[PromptSettings], "`n_predict` must be -1 .*, got -2"),
        (lambda: given("-s -2")[SamplingConfig], "`seed` must be -1 .*, got -2"),
        (lambda: engine_config.engine_config(given("--mode async")), "name one with `draft.model`"),
        (lambda: engine_config.engine_config(given("--mpi-layer-split 1/1")), "ranks after the / needs a draft model"),
        (
            lambda: given("--spec-type a"),
            "`spec_type` a: name one or more of draft, eagle3, dflash, mtp, ngram, separated",
        ),
        (
            lambda: engine_config.engine_config(given("--spec-type draft")),
            "`spec_type` draft needs a draft model",
        ),
        (
            lambda: engine_config.engine_config(given("--spec-type draft-eagle3")),
            "`spec_type` eagle3 needs an EAGLE-3 head: name one with",
        ),
        (
            lambda: engine_config.engine_config(given("--spec-type draft-mtp -md d")),
            "`draft.model` is not used with `spec_type` mtp: omit it, or add draft",
        ),
        (
            lambda: engine_config.engine_config(given("--spec-type draft-mtp --mpi-layer-split 1/1/1")),
            "`layer_split` has ranks for 2 draft models",
        ),
        (
            lambda: engine_config.engine_config(given("--spec-type draft-mtp --mpi-layer-split auto")),
            "`layer_split` auto does not plan for MTP layers: give shares",
        ),
        (lambda: engine_config.engine_config(given("--spec-type none --mode async")), "`spec_type` is none: name one"),
        (lambda: engine_config.engine_config(given("--spec-type ngram -md d")), "`draft.model` is not used with"),
        (lambda: given("-tb a"), "`threads_batch` a: give one number"),
        (lambda: given("--lora-scaled a"), "`lora_scaled` a: write FILE:SCALE"),
        (lambda: given("--lora-scaled a:b"), "`lora_scaled` a:b: write FILE:SCALE"),
        (lambda: given("--mpi-layer-split 2"), "`layer_split` 2: shares add up to 2, more than 1"),
        (lambda: given("")[PromptSettings].read(), "give one prompt"),
        (lambda: given("-p x -f y")[PromptSettings].read(), "give one prompt"),
        (lambda: given("-f nowhere")[PromptSettings].read(), "`file` nowhere: cannot read the prompt: No such file"),
        (lambda: options("-m m --rounds 0", "bench")[BenchSettings], "`rounds` must be 1 or more, got 0"),
        (lambda: options("-m m --modes async,x", "bench")[BenchSettings], "`modes` must be iterative, .*, got x"),
        (lambda: options("-m m --layers 5-3", "profile"), "`layers` 5-3: write the first and the last layer"),
        (lambda: options("-m m --seconds nan", "profile")[ProfileSettings], "`seconds` must be positive"),
        (lambda: options("-r 0", "plan")[PlanSettings], "`n_ranks` must be 1 or more, got 0"),
        (lambda: options("office -n 0", "simulate")[SimulatedText], "`n_predict` must be -1 .*, 1 or more, got 0"),
    ],
)
def test_bad_values_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(("text", "expected"), [("4-7", (4, 8)), ("4", (4, 5)), ("0-0", (0, 1))])
def test_layers(text: str, expected: tuple[int, int]) -> None:
    assert lists.layers(text) == expected


@pytest.mark.parametrize("text", ["", "-", "1-", "-1", "a", "1-2-3", "3-2", "²"])
def test_bad_layers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write the first and the last layer"):
        lists.layers(text)


# The engine's settings


def test_sequences_are_those_of_the_branches() -> None:
    assert engine_config.engine_config(given("-np 4")).context.n_seq == 1
    config = engine_config.engine_config(given("-np 4 -md d.gguf"))
    assert (config.context.n_seq, config.drafts[0].context.n_seq) == (5, 4), "n-grams may name another token"
    exact = given("-np 4 -md d.gguf --exact -fa off")
    config = engine_config.engine_config(exact)
    assert (config.context.n_seq, config.drafts[0].context.n_seq) == (2, 1)
    assert engine_config.speculation_config(exact).n_parallel == 1
    assert [in_flags(w) for w in engine_config.warnings_of(exact)] == [
        "--exact without flash attention drafts only chains: using -np/--parallel 1"
    ]
    assert engine_config.warnings_of(given("-np 4 --exact -fa off")) == []
    assert engine_config.warnings_of(given("-md d.gguf --exact -fa off")) == []
    assert engine_config.warnings_of(given("-np 4 -md d.gguf --exact")) == []
    assert engine_config.speculation_config(given("-np 4 -md d.gguf --exact")).n_parallel == 4


def test_the_draft_is_loaded_as_the_target_and_keeps_its_own_positions() -> None:
    line = (
        "-c 99 -ctk q8_0 --exact --rope-scale 2 -t 1,2/3 --mlock -nr --numa isolate --lora a -md d.gguf -td 5 "
        "--mpi-layer-split 0.5,0.5/1.0 --override-kv a=int:1"
    )
    config = engine_config.engine_config(given(line))
    (draft,) = config.drafts
    for weights in (config.model, draft.model):
        assert (weights.load_mode, weights.repack, weights.numa) == ("mmap+mlock", False, "isolate")
    assert config.model.loras == ((Path("a"), 1.0),)
    assert (draft.model.loras, draft.model.override_kv) == ((), ())
    assert (config.context.exact, config.context.rope_scale) == (True, 2.0)
    assert draft.context == ContextConfig(n_ctx=99, cache_type_k="q8_0", n_branches=128)
    assert config.pipeline == PipelineConfig(LayerSplit((0.5, 0.5)), (1, 2, 3))
    assert (draft.layer_split, draft.threads, draft.threads_batch) == (LayerSplit((1.0,)), 5, -1)


def test_mtp_layers_are_a_part_of_the_target() -> None:
    line = "--spec-type draft-mtp --exact -ctk f32 --lora a --rope-freq-base 5 --mpi-layer-split 0.5,0.5/1.0 -td 3"
    config = engine_config.engine_config(given(line))
    (own,) = config.drafts
    assert own.is_mtp
    assert own.layer_split == LayerSplit((1.0,))
    assert own.model == dataclasses.replace(config.model, loras=())
    assert (own.context.rope_freq_base, own.context.cache_type_k, own.context.exact, own.threads) == (
        5,
        "f32",
        False,
        3,
    )
    assert config.is_mtp(1)
    assert not config.is_mtp(0)
    several = engine_config.engine_config(given("-md d --spec-type draft,mtp,ngram --mpi-layer-split 1/0.5,0.5/1"))
    assert [(draft.is_mtp, draft.n_ranks) for draft in several.drafts] == [(False, 2), (True, 1)]
    (inside,) = engine_config.engine_config(given("--spec-type mtp")).drafts
    assert inside.layer_split is None


def test_draft_models_with_ranks_come_first() -> None:
    config = engine_config.engine_config(given("-md a.gguf -md b.gguf -md c.gguf --mpi-layer-split 0.5,0.5//1*2"))
    assert [draft.model.path.name for draft in config.drafts] == ["b.gguf", "a.gguf", "c.gguf"]
    assert [draft.n_ranks for draft in config.drafts] == [2, 0, 0]
    assert (config.n_draft_ranks, config.draft_heads(4)) == (2, (2,))
    assert [config.model_of(rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert config.context.n_seq == 4, "each draft model may name another token, and n-grams"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--mpi-layer-split 0.5,0.5/1", "a split with ranks after the / needs a draft model: .*"),
        (
            "-md a.gguf --mpi-layer-split 1/1/1",
            "`layer_split` has ranks for 2 draft models, but `draft.model` names 1: .*",
        ),
        ("-md a.gguf -md b.gguf --mpi-layer-split auto", "`layer_split` auto plans for one draft model at most: .*"),
    ],
)
def test_draft_models_without_ranks_and_ranks_without_draft_models(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine_config.engine_config(given(line))


def test_a_split_may_be_planned() -> None:
    pipeline = engine_config.engine_config(given("--mpi-layer-split auto")).pipeline
    assert (pipeline.layer_split, pipeline.auto) == (None, True)


@pytest.mark.parametrize(
    ("line", "mode"),
    [
        ("", "mmap"),
        ("--no-mmap", "none"),
        ("--no-mmap --mlock", "mlock"),
        ("-lm dio --mlock", "dio"),
        ("-lm mmap --no-mmap", "mmap"),
        ("-lm none --mlock", "mlock"),
        ("-lm auto --no-mmap", "none"),
    ],
)
def test_ways_to_load(line: str, mode: str) -> None:
    assert engine_config.model_config(given(line)).load_mode == mode


def test_a_prompt_file_loses_its_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"a\\tb\n\n")
    assert PromptSettings(file=path).read() == "a\tb\n"
    assert PromptSettings(file=path, escape=False).read() == "a\\tb\n"


def test_a_row_names_the_value_it_refuses() -> None:
    row = next(row for row in OPTIONS if row.name == "threads")
    with pytest.raises(SettingError) as caught:
        row.value("1,x")
    assert caught.value.field == "threads"
    assert isinstance(row, Option)


def test_constraints_are_settings_of_sampling(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["a"]}')
    for line in ('-j {"enum":["a"]}', f"-jf {file}", '--json-schema {"const":"a"}'):
        sampling = sampling_config(options(f"-m x {line}"), SamplingConfig())
        assert sampling.grammar == ""
        assert json.loads(sampling.json_schema) in ({"enum": ["a"]}, {"const": "a"})
    assert sampling_config(options("-m x --grammar root::=.")).grammar == "root::=."
    assert sampling_config(options("-m x")) == SamplingConfig()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("-j {} --grammar root::=.", "give either `grammar` or `json_schema`, not both"),
        ("--grammar-file /nowhere", "`grammar_file` /nowhere: cannot read it"),
        ("--grammar root::=a", "there is no rule 'a'"),
        ('-j {"not":{}}', "`json_schema` has 'not'"),
    ],
)
def test_what_no_text_can_be_held_to_is_refused(line: str, why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        sampling_config(options(f"-m x {line}"))
