"""Values that options take, and those that are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_lines import given, options, options_of

from ggpipe.config.context import ContextConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.errors import SettingError, UsageError
from ggpipe.options import engine_config, lists
from ggpipe.options.option import Option
from ggpipe.options.sampling import sampling_config
from ggpipe.options.settings import (
    BenchSettings,
    LoadSettings,
    PlanSettings,
    ProfileSettings,
    PromptSettings,
    SimulatedText,
)
from ggpipe.options.table import OPTIONS


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
        (lambda: given("-lm x")[LoadSettings], "must be auto, mmap, none, mlock, mmap\\+mlock, dio or stream, got x"),
        (lambda: engine_config.model_config(given("--numa x")), "`numa` must be distribute, isolate or numactl, got x"),
        (lambda: given("-fa x")[ContextConfig], "`flash_attn` must be on, off or auto, got x"),
        (lambda: given("--mode x")[SpeculationConfig], "`mode` must be iterative, speculative or async, got x"),
        (lambda: given("-n -2")[PromptSettings], "`n_predict` must be -1 .*, got -2"),
        (lambda: given("-s -2")[SamplingConfig], "`seed` must be -1 .*, got -2"),
        (lambda: engine_config.engine_config(given("--mode async")), "name one with `draft.model`"),
        (lambda: engine_config.engine_config(given("--mpi-layer-split 1/1")), "ranks after the / needs a draft model"),
        (
            lambda: given("--spec-type a"),
            "`spec_type` a: name one or more of draft, eagle3, dflash, mtp, ngram, grammar, separated",
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
        (lambda: options_of("-m m --rounds 0", "bench")[BenchSettings], "`rounds` must be 1 or more, got 0"),
        (lambda: options_of("-m m --modes async,x", "bench")[BenchSettings], "`modes` must be iterative, .*, got x"),
        (lambda: options_of("-m m --layers 5-3", "profile"), "`layers` 5-3: write the first and the last layer"),
        (lambda: options_of("-m m --seconds nan", "profile")[ProfileSettings], "`seconds` must be positive"),
        (lambda: options_of("-r 0", "plan")[PlanSettings], "`n_ranks` must be a number .* 1 to 1024, got 0"),
        (lambda: options_of("office -n 0", "simulate")[SimulatedText], "`n_predict` must be -1 .*, 1 or more, got 0"),
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
        sampling = sampling_config(options_of(f"-m x {line}"), SamplingConfig())
        assert sampling.grammar == ""
        assert json.loads(sampling.json_schema) in ({"enum": ["a"]}, {"const": "a"})
    assert sampling_config(options_of("-m x --grammar root::=.")).grammar == "root::=."
    assert sampling_config(options_of("-m x")) == SamplingConfig()


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
        sampling_config(options_of(f"-m x {line}"))


def test_an_empty_constraint_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for words in (["--grammar", ""], ["-j", ""], ["--grammar-file", str(empty)], ["-jf", str(empty)]):
        with pytest.raises(SettingError, match="is empty, and would constrain nothing"):
            sampling_config(options(["-m", "x", *words]))
