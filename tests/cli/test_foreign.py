"""Flags of llama.cpp that ggpipe does not have: each is accepted or refused in one line that says what to do."""

import re

import pytest

from ggpipe.cli.app import run
from ggpipe.cli.foreign import _NEEDLESS, _REASONS, without_foreign
from ggpipe.errors import UsageError
from ggpipe.options.commands import COMMANDS
from ggpipe.options.option import Command
from ggpipe.options.table import OPTIONS

GENERATE = next(command for command in COMMANDS if command.name == "generate").options(OPTIONS)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("-ngl 99", "-ngl: ggpipe runs on CPUs only"),
        ("--rpc=a:1", "--rpc: .* use --mpi-layer-split and --hostfile"),
        ("-hf a/b", "-hf: ggpipe downloads nothing: name a file with -m/--model"),
        ("-cnv", "-cnv: `ggpipe chat` is a conversation"),
        ("-mli", "-mli: `ggpipe chat`"),
        ("--keep 4", "--keep: .* raise -c/--ctx-size"),
        ("-xyz", "No such option: -xyz"),
        ("--nope", "No such option: --nope"),
    ],
)
def test_refused(flags: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-m", "x.gguf", "-p", "-ngl", *flags.split()]) == 2
    assert re.fullmatch(f"ggpipe: error: {why}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    "arguments",
    ["-p -hf -n -1", "-m -ngl -c512 -n5", "--prompt -cnv --temp -inf", "--prompt=-cnv", "-e -st -nr", "-h", "-- -ngl"],
)
def test_values_and_own_flags_stay(arguments: str) -> None:
    assert without_foreign(GENERATE, arguments.split()) == arguments.split()


def test_what_happens_anyway_is_accepted() -> None:
    assert without_foreign(GENERATE, ["-no-cnv", "-p", "-no-cnv", "--jinja"]) == ["-p", "-no-cnv"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_no_flag_of_ours_is_foreign(command: Command) -> None:
    rows = command.options(OPTIONS)
    for row in rows:
        for flag in (flag for text in row.flags for flag in re.split("[ /]", text) if flag):
            assert without_foreign(rows, [flag, "1"])[0] == flag


def test_each_reason_is_given_for_its_flags() -> None:
    for reason, flags in _REASONS.items():
        for flag in flags:
            assert flag not in _NEEDLESS
            with pytest.raises(UsageError, match=re.escape(f"{flag}: {reason}")):
                without_foreign([], [flag])
