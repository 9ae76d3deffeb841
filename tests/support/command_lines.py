"""Options as command lines give them, without running a command."""

from __future__ import annotations

from collections.abc import Sequence

from ggpipe.cli.command_line import parse
from ggpipe.options.commands import COMMANDS
from ggpipe.options.option import Command, Options
from ggpipe.options.table import OPTIONS

REQUIRED = {"model": ["-m", "m"], "output": ["-o", "o"], "cluster": ["office"], "input": ["i"]}
"""A value for each option that some command requires, by the option's name."""


def command_named(name: str) -> Command:
    """The command of this name."""
    return next(command for command in COMMANDS if command.name == name)


def options(words: Sequence[str], command: str = "generate") -> Options:
    """The options of `ggpipe COMMAND WORDS`. Raises UsageError."""
    return parse(command_named(command), OPTIONS, words)


def options_of(line: str, command: str = "generate") -> Options:
    """The options of `ggpipe COMMAND LINE`, whose words are divided at spaces. Raises UsageError."""
    return options(line.split(), command)


def given(line: str) -> Options:
    """The options of `ggpipe generate -m m.gguf LINE`. Raises UsageError."""
    return options_of(f"-m m.gguf {line}")
