"""What to change in a command line that cannot be read: typer says what is wrong, this says what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import typer

from ggpipe.errors import UsageError
from ggpipe.options.option import Command, Option

_KINDS = {int: "a whole number", float: "a number"}


def check_command(commands: Iterable[Command], arguments: Sequence[str]) -> None:
    """Raise UsageError for a command line that begins with something else than a command."""
    names = [command.name for command in commands if not command.hidden]
    first = arguments[0] if arguments else ""
    if not arguments or first in [command.name for command in commands] or first in ("-h", "--help", "--version"):
        return
    known = f"commands are {', '.join(names)}"
    if first.startswith("-") and (named := [name for name in names if name in arguments]):
        raise UsageError(f"{first} comes before the command: write `ggpipe {named[0]} {first} ...`")
    if first.startswith("-"):
        raise UsageError(f"{first} comes before a command, such as `ggpipe generate {first} ...`; {known}")
    similar = difflib.get_close_matches(first, names, 1)
    raise UsageError(f"there is no command {first}: " + (f"did you mean {similar[0]}?" if similar else known))


def explained(error: typer.TyperException, rows: Sequence[Option], arguments: Sequence[str]) -> str:
    """What is wrong with the arguments of a command that has these options."""
    if getattr(error, "option_name", None) is not None:  # no such option, or one without its value
        return error.format_message().replace("\n", " ")
    read = _read(rows, arguments)
    n_positional = sum(not row.flags for row in rows)
    for word in read.positional[n_positional:]:
        if hint := _hint(word, rows, read):
            return hint
    row = _row(error, rows)
    if row is None:
        return error.format_message().replace("\n", " ")
    given = read.values.get(row.name)
    if given is None and (row.flags or not read.positional):
        return f"{row.spelling} is missing: {row.help}"
    if row.reads in _KINDS and given is not None:
        return f"`{row.name}` must be {_KINDS[row.reads]}, got {given}"
    return error.format_message().replace("\n", " ")


@dataclass(frozen=True)
class _Read:
    """Words of a command line."""

    positional: list[str]
    values: dict[str, str]
    """The last value of each option that has one, by the option's name."""
    before: dict[str, Option]
    """The option with whose value a positional word follows, without another option between them."""


def _read(rows: Sequence[Option], arguments: Sequence[str]) -> _Read:
    options = {flag: row for row in rows for text in row.flags for flag in re.split("[ /]", text)}
    read = _Read([], {}, {})
    row: Option | None = None  # the last option
    waits = False  # for its value
    for argument in arguments:
        name, _, value = argument.partition("=")
        if row is not None and waits:
            read.values[row.name] = argument
            waits = False
        elif argument.startswith("-") and argument != "-":
            row = options.get(name)
            waits = row is not None and row.reads is not bool and not value
            if row is not None and value:
                read.values[row.name] = value
        else:
            read.positional.append(argument)
            if row is not None and row.name in read.values:
                read.before[argument] = row
    return read


def _hint(word: str, rows: Sequence[Option], read: _Read) -> str | None:
    """For a word that belongs to no option."""
    by_name = {row.name: row for row in rows}
    before = read.before.get(word)
    if word.endswith(".gguf") and "model" in by_name and "model" not in read.values:
        return f"{word} stands alone: name the model with `model`, as in -m {word}"
    if before is not None and before.name in ("prompt", "system"):
        return f"{word} stands behind the text of `{before.name}`: put a text of several words into quotes"
    if "prompt" in by_name and "prompt" not in read.values and "file" not in read.values:
        return f"{word} stands alone: give a prompt with `prompt`, in quotes"
    return f"{word} stands alone: no option takes it; a text of several words needs quotes"


def _row(error: typer.TyperException, rows: Sequence[Option]) -> Option | None:
    """The option that typer complains of."""
    name = getattr(getattr(error, "param", None), "name", None)
    return next((row for row in rows if row.name.replace(".", "_") == name), None)
