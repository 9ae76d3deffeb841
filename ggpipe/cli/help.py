"""The pages of --help, which typer draws from the options table (`options/table.py`)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ggpipe.options.commands import COMMON
from ggpipe.options.option import Command, Option


def show_help(
    commands: Sequence[Command], table: Sequence[Option], command: Command | None, is_full: bool = True
) -> None:
    """Print a command's page; None: the program's. `is_full`: with all options, instead of the most common ones."""
    app = typer.Typer(
        cls=_Program,
        add_completion=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Run one large GGUF model on several CPU-only machines. `ggpipe COMMAND --help` lists the options.",
    )

    @app.callback()
    def _main(
        version: Annotated[bool, typer.Option("--version", metavar="", help="Show the version and exit.")] = False,
    ) -> None:
        pass

    for own in commands if command is None else [command]:  # typer takes 10 ms for each
        _add(app, own, table, is_full)
    words = ["--help"] if command is None else [command.name, "--help"]
    app(words, standalone_mode=False, prog_name="ggpipe")


class _PlainHelp:
    """Shows --help as a switch; typer shows a value, <bool>."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = ""
        return option


class _Command(_PlainHelp, TyperCommand):
    pass


class _Program(_PlainHelp, TyperGroup):
    pass


def _add(app: typer.Typer, command: Command, table: Sequence[Option], is_full: bool) -> None:
    def page(**_: Any) -> None:
        """Nothing is run here."""

    rows = command.options(table)
    shown = [row for row in rows if is_full or row.name in COMMON or row.name in command.required]
    text = paragraphs(command.help)
    if len(shown) < len(rows):
        text += f"\n\n`ggpipe {command.name} --help-all` lists all {len(rows)} options."
    parameters = [_parameter(row, command) for row in shown]
    page.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    page.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(command.name, help=text, hidden=command.hidden, cls=_Command)(page)


def paragraphs(text: str) -> str:
    """Without indents, a line for each paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _parameter(row: Option, command: Command) -> inspect.Parameter:
    default = command.default_of(row)
    is_required = row.name in command.required
    help = f"{row.help} ({row.variable})" if row.variable and command.reads_variables else row.help
    metavar = "" if row.reads is bool else row.metavar  # a switch takes no value: without it, typer shows <bool>
    common: dict[str, Any] = {"metavar": metavar, "help": help}
    if not row.flags:
        info: Any = typer.Argument(**common, show_default=False)
    else:
        info = typer.Option(*row.flags, **common, rich_help_panel=row.panel, show_default=default is not None)
    kind = row.reads if is_required or default is not None else row.reads | None
    return inspect.Parameter(
        row.name.replace(".", "_"),
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if is_required else default,
        annotation=Annotated[kind, info],
    )
