"""Environment variables that llama.cpp's programs read, as defaults for flags.

Only the process that the user has started reads them. It passes its settings to the ranks that it starts, so the
environment of their machines does not matter. Under the user's own mpirun or srun, the environment may differ between
ranks. There, the first rank reads only variables that concern it alone, as the server, and names those that it ignores.
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
"""llama.cpp's other words for on and off."""

_PREFIX, _NO = "LLAMA_ARG_", "LLAMA_ARG_NO_"
_OF_RANKS = ("n_slots",)  # server settings that all ranks need
_ALTERNATIVES = (
    {"chat_template", "chat_template_file"},
    {"load_mode", "mmap", "mlock"},
    {"model", "hf_repo"},
    {"draft.model", "draft.hf_repo"},
)
"""Options of which a flag for one overrides a variable for another."""


def read_variables(
    command: Command, table: Sequence[Option], environ: Mapping[str, str], warn: Callable[[str], None]
) -> dict[str, Any]:
    """The values of variables that are set, by option name. Raises UsageError that names the variable."""
    if not command.reads_variables or (environment.is_rank() and not environment.has_user()):
        return {}
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for row in command.options(table):
        variable, text = _find(row, environ)
        if not text:
            continue
        if environment.is_rank() and (row.record is not ServerConfig or row.name in _OF_RANKS):
            ignored.append(variable)
        else:
            values[row.name] = _value(row, variable, text)
    if ignored:
        names = ", ".join(ignored)
        warn(f"ignoring {names}: under mpirun or srun, other ranks may have different values. Use flags instead")
    return values


def settled(
    command: Command,
    given: Mapping[Option, Any],
    from_variables: Sequence[Option],
    from_command_line: Sequence[Option],
) -> tuple[dict[Option, Any], dict[str, str]]:
    """The values of all options, with the default where a variable does not apply; and the variables that do apply, by
    option name."""
    named = {row.name for row in from_command_line}
    single_turn = next((value for row, value in given.items() if row.name == "single_turn"), True)
    out, variables = dict(given), {}
    for row in from_variables:
        overruled = any(row.name in names and named & names for names in _ALTERNATIVES)
        if overruled or (row.record is ChatSettings and not single_turn):
            out[row] = command.default_of(row)
        else:
            variables[row.name] = row.variable
    return out, variables


def _find(row: Option, environ: Mapping[str, str]) -> tuple[str, str]:
    """The variable for an option, and its value; empty if it is not set. An empty variable counts as not set."""
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
    return [text] if row.many else text
