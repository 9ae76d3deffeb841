"""Parses command lines, as users of llama.cpp and PipeInfer write them, into options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from ggpipe.cli import advice
from ggpipe.cli.variables import SWITCHES, settled
from ggpipe.errors import SettingError, UsageError
from ggpipe.options.option import Command, Option, Options

_BARE = {  # options whose value is optional: the value to assume, and the possible values
    "numa": ("distribute", ("distribute", "isolate", "numactl")),
    "flash_attn": ("on", ("on", "off", "auto", *SWITCHES)),
    "color": ("on", ("on", "off", "auto")),
}
_SAME = {"--log-jsonl": "--log-format=json", "-co": "--color"}
"""llama.cpp's flags that have other names here."""
_HELP = ("-h", "--help")
_FULL_HELP = "--help-all"
_WORD = re.compile("-[A-Za-z][A-Za-z-]+")
"""A flag of several letters: `-xyz` is not `-x` with a value."""
_KINDS = {int: "a whole number", float: "a number"}


class HelpWanted(Exception):
    """The user asks for a help page."""

    def __init__(self, is_full: bool = False) -> None:
        """`is_full`: with all options, instead of the most common ones."""
        super().__init__()
        self.is_full = is_full


def named_command(commands: Sequence[Command], arguments: Sequence[str]) -> Command | None:
    """The command that a command line starts with, or None if it asks for the program's help or version.

    Raises UsageError if it starts with something else.
    """
    first = arguments[0] if arguments else _HELP[0]
    if first in (*_HELP, _FULL_HELP, *advice.ALONE):
        return None
    command = next((command for command in commands if command.name == first), None)
    if command is None:
        raise advice.no_command(commands, arguments)
    return command


def parse(
    command: Command,
    table: Sequence[Option],
    arguments: Sequence[str],
    variables: Mapping[str, Any] | None = None,
    on_variables: Callable[[Mapping[str, str]], None] = lambda _: None,
) -> Options:
    """Parse the arguments that follow a command's name.

    `variables` has values from environment variables, by option name. `on_variables` gets the names of those that
    apply, before an error can mention one. Raises UsageError with advice, SettingError for a value that its option
    cannot take, and HelpWanted.
    """
    rows = command.options(table)
    words = _Words(rows)
    words.read(arguments)
    given = words.given
    if words.stray:
        raise advice.stray(words.stray[0], rows, {row.name for row in given})
    from_variables = [row for row in rows if row.name in (variables or {}) and row not in given]
    replaced = {row.instead_of for row in (*given, *from_variables)}
    for row in rows:
        if row.name in command.required - replaced and row not in (*given, *from_variables):
            raise advice.missing(row)
    values = {row: given.get(row, command.default_of(row)) for row in rows}
    values |= {row: (variables or {})[row.name] for row in from_variables}
    values, applied = settled(command, values, from_variables, list(given))
    on_variables(applied)
    return Options(command, {row: _converted(row, value) for row, value in values.items()})


@dataclass
class _Words:
    """Collects options from the words of a command line."""

    rows: Sequence[Option]
    given: dict[Option, Any] = field(default_factory=dict)
    """The value of each option that was given: the last one, or a list of all."""
    stray: list[advice.Stray] = field(default_factory=list)
    """Words that do not belong to an option."""

    def __post_init__(self) -> None:
        self._flags = {flag: (row, is_on) for row in self.rows for flag, is_on in _flags(row)}
        self._positional = [row for row in self.rows if not row.flags]
        self._last: Option | None = None
        """The option whose value was read last, unless a flag has followed."""

    def read(self, arguments: Sequence[str]) -> None:
        """Read all words. Raises UsageError, SettingError and HelpWanted."""
        at = 0
        while at < len(arguments):
            argument = arguments[at]
            at += 1
            if argument == "--":
                for word in arguments[at:]:
                    self._word(word)
                return
            if not argument.startswith("-") or argument == "-":
                self._word(argument)
                continue
            name, equals, value = _SAME.get(argument, argument).partition("=")
            if name.startswith("--"):
                name = name.replace("_", "-")
            if name in (*_HELP, _FULL_HELP):
                raise HelpWanted(name == _FULL_HELP)
            if name not in self._flags:
                short = self._flags.get(argument[:2])
                if short is None or short[0].reads is bool or argument[1] == "-" or _WORD.fullmatch(name):
                    self._last = None
                    n_values = advice.check_foreign(name, self._flags)
                    at += 0 if equals else n_values
                    continue
                name, equals, value = argument[:2], "=", argument[2:]
            row, is_on = self._flags[name]
            if row.reads is bool:
                if equals:
                    raise UsageError(f"{name} takes no value, got {value}")
                self.given[row], self._last = is_on, None
                continue
            if not equals:
                value, n_words = self._value_of(row, name, arguments[at:])
                at += n_words
            self._give(row, SWITCHES.get(value, value) if row.name == "flash_attn" else value)

    def _value_of(self, row: Option, flag: str, following: Sequence[str]) -> tuple[str, int]:
        """An option's value, and how many of the following words it uses. Raises UsageError if the value is missing."""
        if row.name in _BARE:
            meaning, values = _BARE[row.name]
            word = following[0] if following else "-"
            is_value = word in values or not (word.startswith("-") or self._positional)
            return (word, 1) if is_value else (meaning, 0)
        if not following:
            raise UsageError(f"{flag} needs a value: {row.help}")
        return following[0], 1

    def _word(self, word: str) -> None:
        """Read a word that is neither a flag nor its value."""
        row = next((row for row in self._positional if row not in self.given), None)
        if row is not None:
            self.given[row] = _converted(row, word)
        else:
            self.stray.append(advice.Stray(word, self._last))

    def _give(self, row: Option, text: str) -> None:
        self._last = row
        if row.many:
            self.given.setdefault(row, []).append(_one(row, get_args(row.reads)[0], text))
        else:
            self.given[row] = _converted(row, text)


def _flags(row: Option) -> list[tuple[str, bool]]:
    """A row's flags. For switches, each with the value that it sets."""
    texts = [text.split("/") for text in row.flags]
    return [(flag.strip(), i == 0) for text in texts for i, flag in enumerate(text) if flag.strip()]


def _converted(row: Option, value: Any) -> Any:
    """The value in the type that the option reads. Raises SettingError."""
    if isinstance(value, list):
        return [_one(row, get_args(row.reads)[0], text) for text in value]
    return _one(row, row.reads, value)


def _one(row: Option, kind: type, value: Any) -> Any:
    if not isinstance(value, str) or kind is str:
        return value
    if kind is Path:
        return Path(value)
    try:
        return kind(value)
    except ValueError:
        raise SettingError(row.name, f"must be {_KINDS[kind]}, got {value}") from None
