"""Flags of llama.cpp that ggpipe does not have: each is accepted or refused in one line that says what to do."""

import re

import pytest
from support.command_lines import options

from ggpipe.cli.advice import NEEDLESS, REASONS, check_foreign
from ggpipe.cli.app import run
from ggpipe.cli.command_line import HelpWanted, parse
from ggpipe.config.context import ContextConfig
from ggpipe.errors import UsageError
from ggpipe.options.commands import COMMANDS
from ggpipe.options.option import Command
from ggpipe.options.table import OPTIONS


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("-ngl 99", "-ngl: ggpipe runs on CPUs only"),
        ("--rpc=a:1", "--rpc: .* use --mpi-layer-split and --hostfile"),
        ("-dr a/b", "-dr: name a model on the Hugging Face Hub with -hf/--hf-repo, or a file with -m/--model"),
        ("-cnv", "-cnv: omit this flag: `ggpipe chat` starts a conversation"),
        ("-mli", "-mli: omit this flag: `ggpipe chat`"),
        ("--no-jinja", "--no-jinja: ggpipe always reads chat templates as Jinja"),
        ("--special", "--special: ggpipe returns no special tokens"),
        ("--models-dir a", "--models-dir: ggpipe serves one model"),
        (
            "--reasoning-effort high",
            "--reasoning-effort: pass it as a variable of the template: --chat-template-kwargs",
        ),
        ("--keep 4", "--keep: .* raise -c/--ctx-size"),
        ("-xyz", "no such option: -xyz"),
        ("--nope", "no such option: --nope"),
    ],
)
def test_refused(flags: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-m", "x.gguf", "-p", "-ngl", *flags.split()]) == 2
    assert re.fullmatch(f"ggpipe: error: {why}.*\n", capsys.readouterr().err)


def test_harmless_flags_are_taken() -> None:
    for flag, n_values in NEEDLESS.items():
        words = [flag, *["1"] * n_values, "-c", "77"]
        assert options(["-m", "m", *words], "serve")[ContextConfig].n_ctx == 77, flag


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_no_flag_of_ours_is_foreign(command: Command) -> None:
    own = {flag for row in command.options(OPTIONS) for text in row.flags for flag in re.split("[ /]", text) if flag}
    foreign = {flag for flags in REASONS.values() for flag in flags}
    for flag in own & (foreign | set(NEEDLESS)):
        with pytest.raises((UsageError, HelpWanted)) as caught:
            parse(command, OPTIONS, [flag, "1", "-h"])
        assert not str(caught.value).startswith(f"{flag}: "), flag


def test_each_reason_is_given_for_its_flags() -> None:
    for reason, flags in REASONS.items():
        for flag in flags:
            assert flag not in NEEDLESS
            with pytest.raises(UsageError, match=re.escape(f"{flag}: {reason}")):
                check_foreign(flag, [])
