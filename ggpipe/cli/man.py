"""The manual page, made from the commands and the options table: `ggpipe --man` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ggpipe._version import __version__
from ggpipe.cli.help import paragraphs
from ggpipe.options.option import Command, Option

_DESCRIPTION = """ggpipe runs one large GGUF model on several CPU-only machines.
MPI ranks hold ranges of its layers, and draft tokens stream through the pipeline.
.PP
.B ggpipe
.I COMMAND
.B \\-\\-help
shows the common options of a command, and
.B \\-\\-help\\-all
all of them. Flags that llama.cpp has as well have the same names, meanings and defaults."""


def manual(commands: Sequence[Command], table: Sequence[Option]) -> str:
    """The page, in roff for man(1)."""
    return "\n".join(_lines([command for command in commands if not command.hidden], table)) + "\n"


def _lines(commands: Sequence[Command], table: Sequence[Option]) -> Iterator[str]:
    yield f'.TH GGPIPE 1 "" "ggpipe {__version__}" "User Commands"'
    yield ".SH NAME\nggpipe \\- run one large GGUF model on several CPU-only machines"
    yield ".SH SYNOPSIS\n.B ggpipe\n.I COMMAND\n[\\fIOPTION\\fR]..."
    yield f".SH DESCRIPTION\n{_DESCRIPTION}"
    yield ".SH COMMANDS"
    for command in commands:
        needed = [row.spelling for row in command.options(table) if row.name in command.required]
        needs = f"\n.br\nRequired: {_text(', '.join(needed))}." if needed else ""
        about = "\n.IP\n".join(_text(line) for line in paragraphs(command.help).split("\n\n"))
        yield f".TP\n.B ggpipe {command.name}\n{about}{needs}"
    for panel in dict.fromkeys(row.panel for row in table):
        yield f'.SH "{_text(panel.upper())}"'
        for row in table:
            names = [command.name for command in commands if row in command.options(table)]
            if row.panel == panel and names:
                yield f".TP\n{_heading(row)}\n{_text(row.help)}\n.br\nCommands: {', '.join(names)}."
    variables = [row for row in table if row.variable]
    readers = ", ".join(command.name for command in commands if command.reads_variables)
    yield f".SH ENVIRONMENT\n{readers} read llama.cpp's variables. Flags take precedence."
    for row in variables:
        yield f".TP\n.B {_text(row.variable)}\n{_text(row.spelling)}"
    yield ".SH EXIT STATUS\n0 on success, 2 for a mistake in the command line or the input, 1 for a later failure."


def _heading(row: Option) -> str:
    flags = [flag.strip() for text in row.flags for flag in text.split("/") if flag.strip()]
    value = f" \\fI{_text(row.metavar)}\\fR" if row.metavar else ""
    return ", ".join(f"\\fB{_text(flag)}\\fR" for flag in flags) + value if flags else value.lstrip()


def _text(text: str) -> str:
    """Plain text in roff, with `code` in bold."""
    safe = text.replace("\\", "\\e").replace("-", "\\-")
    pieces = safe.split("`")
    shown = "".join(f"\\fB{piece}\\fR" if i % 2 else piece for i, piece in enumerate(pieces))
    return "\\&" + shown if shown.startswith((".", "'")) else shown
