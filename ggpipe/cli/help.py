"""The pages of --help, made from the options table (`options/table.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ggpipe.options.option import Command, Option

_ABOUT = "Run one large GGUF model on several CPU-only machines. `ggpipe COMMAND --help` lists a command's options."
_HELP = ("-h, --help", "Show this page and exit.")
_MOST_FLAGS = 34  # cells


def show_help(commands: Sequence[Command], table: Sequence[Option], command: Command | None) -> None:
    """Print a command's page, or the program's if there is no command."""
    console = Console(highlight=False)
    if command is None:
        _print_head(console, "COMMAND [OPTIONS]", _ABOUT)
        shown = [(own.name, paragraphs(own.help).partition("\n")[0]) for own in commands if not own.hidden]
        _print_section(console, "Commands", shown)
        _print_section(console, "Options", [_HELP, ("--version", "Show the version and exit.")])
        return
    rows = command.options(table)
    arguments = "".join(f" {row.metavar if row.name in command.required else f'[{row.metavar}]'}"
                        for row in rows if not row.flags)  # fmt: skip
    _print_head(console, f"{command.name} [OPTIONS]{arguments}", paragraphs(command.help))
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
    for row in rows:
        sections.setdefault(row.panel if row.flags else "Arguments", []).append((_flags(row), _meaning(row, command)))
    sections.setdefault("Other", []).append(_HELP)
    for title, lines in sections.items():
        if lines:
            _print_section(console, title, lines)


def paragraphs(text: str) -> str:
    """The text without indentation, with one line per paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _print_head(console: Console, usage: str, about: str) -> None:
    console.print(Text.assemble(("Usage:", "bold"), f" ggpipe {usage}\n\n{about}"))


def _print_section(console: Console, title: str, lines: Iterable[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(max_width=_MOST_FLAGS, style="cyan")
    for flags, meaning in lines:
        table.add_row(Text(flags), Text(meaning))
    console.print(Text(f"\n{title}", "bold"), Padding(table, (0, 0, 0, 2)))


def _flags(row: Option) -> str:
    flags = [flag.strip() for text in row.flags for flag in text.split("/") if flag.strip()]
    return f"{', '.join(flags)} {row.metavar or ''}".strip()


def _meaning(row: Option, command: Command) -> str:
    default = command.default_of(row)
    if isinstance(default, bool):
        default = "on" if default else None
    notes = [f"({row.variable})"] if row.variable and command.reads_variables else []
    if row.name in command.required:
        notes.append("[required]")
    elif row.flags and default is not None:
        notes.append(f"[default: {default}]")
    return " ".join([row.help, *notes])
