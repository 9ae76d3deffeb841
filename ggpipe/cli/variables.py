"""Environment variables that llama.cpp's programs read for their flags, as defaults of a command line.

Only the process that the user started reads them. It passes its settings to its ranks, so all ranks have the same,
whatever the environment of their machines is. Under the user's own mpirun or srun no rank knows the environment of the
others: the first one reads what only a server's first rank needs, and names the variables that it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ggpipe.errors import UsageError
from ggpipe.launch import environment
from ggpipe.options.chat import ChatSettings
from ggpipe.options.option import Command, Option
from ggpipe.options.server import ServerConfig

SWITCHES = {"1": "on", "true": "on", "enabled": "on", "0": "off", "false": "off", "disabled": "off"}
"""Further words for on and off that llama.cpp takes."""

_PREFIX, _NO = "LLAMA_ARG_", "LLAMA_ARG_NO_"
_OF_RANKS = ("n_slots",)  # of a server's settings, those that all of its ranks need
_SAME_MATTER = ({"chat_template", "chat_template_file"}, {"load_mode", "mmap", "mlock"})
"""Options of which a flag for one comes before a variable for another."""


def read_variables(
    command: Command, table: Sequence[Option], environ: Mapping[str, str], warn: Callable[[str], None]
) -> dict[str, Any]:
    """What the environment says, by the options' names. Raises UsageError that names the variable."""
    if not command.reads_variables or (environment.is_rank() and not environment.has_user()):
        return {}
    values: dict[str, Any] = {}
    left_out: list[str] = []
    for row in command.options(table):
        variable, text = _find(row, environ)
        if not text:
            continue
        if environment.is_rank() and (row.record is not ServerConfig or row.name in _OF_RANKS):
            left_out.append(variable)
        else:
            values[row.name] = _value(row, variable, text)
    if left_out:
        warn(f"{', '.join(left_out)}: not read under mpirun or srun, where ranks may have other values; give flags")
    return values


def settled(
    command: Command,
    given: Mapping[Option, Any],
    from_variables: Sequence[Option],
    from_command_line: Sequence[Option],
) -> tuple[dict[Option, Any], dict[str, str]]:
    """What was given for all options, without what a variable says where it does not apply; and the variables that
    values came from, by the options' names."""
    named = {row.name for row in from_command_line}
    single_turn = next((value for row, value in given.items() if row.name == "single_turn"), True)
    out, variables = dict(given), {}
    for row in from_variables:
        overruled = any(row.name in names and named & names for names in _SAME_MATTER)
        if overruled or (row.record is ChatSettings and not single_turn):
            out[row] = command.default_of(row)
        else:
            variables[row.name] = row.variable
    return out, variables


def _find(row: Option, environ: Mapping[str, str]) -> tuple[str, str]:
    """The variable that is set for an option, and its text; empty: none is. An empty variable counts as none."""
    if row.variable.startswith(_PREFIX) and any("/" in text for text in row.flags):
        negative = row.variable.replace(_PREFIX, _NO)
        if negative in environ:  # whatever its value is, as in llama.cpp
            return negative, "0"
    return row.variable, environ.get(row.variable, "")


def _value(row: Option, variable: str, text: str) -> Any:
    if row.name == "flash_attn":
        return SWITCHES.get(text, text)
    if row.reads is bool:
        switch = SWITCHES.get(text, text)
        if switch not in ("on", "off"):
            raise UsageError(f"{variable} must be on or off (or 1 or 0), got {text}")
        return switch == "on"
    if row.reads in (int, float):
        try:
            return row.reads(text)
        except ValueError:
            kind = "whole number" if row.reads is int else "number"
            raise UsageError(f"{variable} must be a {kind}, got {text}") from None
    return [text] if row.many else text
