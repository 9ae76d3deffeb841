"""Writes docs/flags.md, the reference of all flags, from the table in ggpipe/options/table.py."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ggpipe.cli.help import paragraphs
from ggpipe.options.commands import COMMANDS
from ggpipe.options.option import Command, Option
from ggpipe.options.table import OPTIONS, PANELS

_FLAG = re.compile(r"(?<![\w/])(--?[a-z][a-z-]*)")
PAGE = Path(__file__).parents[1] / "docs" / "flags.md"

_HEAD = """# All flags

This page is made by `scripts/flag_reference` from the table in `ggpipe/options/table.py`; do not edit it.

Names, meanings and defaults are llama.cpp's where llama.cpp has the flag, and PipeInfer's spellings work too. In long
names `_` and `-` are the same. `--numa`, `-fa` and `--color` may stand without a value: `--numa distribute`, `-fa on`,
`--color on`.

`generate`, `chat` and `serve` read llama.cpp's environment variables, which stand behind the meaning. A flag comes
before a variable. An empty variable counts as not set. For switches a variable is `on`, `off`, `1` or `0`.
`LLAMA_ARG_NO_REPACK` (for `LLAMA_ARG_REPACK`, with any value) turns a switch off that has a `--no-` flag. Ranks that
ggpipe starts get all settings from it. Under your own mpirun or srun the environment of ranks may differ: there only
what the first rank of a server needs (address, keys, endpoints) is read, and a line names the variables that are not.
"""


def page() -> str:
    """The whole page."""
    commands = [command for command in COMMANDS if not command.hidden]
    parts = [_HEAD, *(_command(command) for command in commands)]
    for panel in PANELS:
        rows = [row for row in OPTIONS if row.panel == panel]
        parts.append("\n".join([f"## {panel}\n", *_table(rows, commands)]) + "\n")
    return "\n".join(parts)


def _command(command: Command) -> str:
    needed = [row.spelling for row in command.options(OPTIONS) if row.name in command.required]
    needs = f" Required: {', '.join(f'`{text}`' for text in needed)}." if needed else ""
    return f"## ggpipe {command.name}\n\n{_plain(paragraphs(command.help))}{needs}\n"


def _table(rows: Iterable[Option], commands: Iterable[Command]) -> Iterator[str]:
    yield "| flag | meaning | default | commands |"
    yield "|---|---|---|---|"
    for row in rows:
        taken = [command for command in commands if row in command.options(OPTIONS)]
        names = ", ".join(command.name for command in taken)
        yield f"| {_flags(row)} | {_meaning(row, taken)} | {_default(row, taken)} | {names} |"


def _meaning(row: Option, commands: Iterable[Command]) -> str:
    has_variable = row.variable and any(command.reads_variables for command in commands)
    return _plain(row.help) + (f" `{row.variable}`" if has_variable else "")


def _flags(row: Option) -> str:
    if not row.flags:
        return f"`{row.metavar}`"
    alternatives = [flag.strip() for text in row.flags for flag in text.split("/") if flag.strip()]
    value = f" {row.metavar}" if row.metavar else ""
    return ", ".join(f"`{flag}`" for flag in [*alternatives[:-1], alternatives[-1] + value]).replace("|", "\\|")


def _default(row: Option, commands: Iterable[Command]) -> str:
    own = [
        f"{_value(command.defaults[row.name])} ({command.name})" for command in commands if row.name in command.defaults
    ]
    return ", ".join([_value(row.default_text), *own])


def _value(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "" if default is None else f"{default}"


def _plain(text: str) -> str:
    """As Markdown: flags as code, no bars."""
    text = text.replace("|", "\\|")
    parts = text.split("`")
    parts[::2] = [_FLAG.sub(r"`\1`", part) for part in parts[::2]]  # the others are code already
    return "`".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
