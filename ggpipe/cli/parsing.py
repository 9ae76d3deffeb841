"""From rows of the options table (`options/table.py`) to a command line's reader, typer, and back to settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ggpipe._version import __version__
from ggpipe.cli.variables import settled
from ggpipe.options.option import Command, Option, Options


def reader(command: Command, table: Sequence[Option]) -> Callable[[Sequence[str]], Options]:
    """A function that reads the arguments of one command. It raises what typer raises, and SettingError."""
    app = typer.Typer(add_completion=False)
    _add(app, command, table)
    program = typer.main.get_command(app)

    def read(arguments: Sequence[str]) -> Options:
        found: Options = program.main(list(arguments), standalone_mode=False, prog_name=f"ggpipe {command.name}")
        return found

    return read


def parse(command: Command, table: Sequence[Option], arguments: Sequence[str]) -> Options:
    """Read the arguments of one command. Raises what typer raises, and SettingError."""
    return reader(command, table)(arguments)


def make_app(
    commands: Sequence[Command],
    table: Sequence[Option],
    run: Callable[[Command, Options], int],
    arguments: Sequence[str] = (),
    on_variables: Callable[[Mapping[str, str]], None] = lambda _: None,
) -> typer.Typer:
    """The program: `run` is called with the command that was named and what was read, and returns the exit code.

    Typer gets what environment variables say as its `default_map`. `on_variables` is told first which of them gave
    values, by the options' names. `arguments`: those that it will be given. Where they begin with a command, the
    program has only that one, since typer takes 10 ms for each.
    """
    app = typer.Typer(
        cls=_Program,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Run one large GGUF model over several CPU-only machines, and get a single answer fast.",
    )

    @app.callback()
    def _main(
        version: Annotated[
            bool,
            typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Show the version and exit."),
        ] = False,
    ) -> None:
        pass

    for command in [command for command in commands if command.name in arguments[:1]] or commands:
        _add(app, command, table, functools.partial(run, command), on_variables)
    return app


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


def default_map(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the options' names, as typer takes them for a command's defaults."""
    return {_parameter_name(name): value for name, value in values.items()}


def _version(show: bool) -> None:
    if show:
        print(f"ggpipe {__version__}")
        raise typer.Exit


def _parameter_name(name: str) -> str:
    return name.replace(".", "_")


def _add(
    app: typer.Typer,
    command: Command,
    table: Sequence[Option],
    run: Callable[[Options], Any] = lambda options: options,
    on_variables: Callable[[Mapping[str, str]], None] = lambda _: None,
) -> None:
    rows = {_parameter_name(row.name): row for row in command.options(table)}

    def read(ctx: typer.Context, **given: Any) -> Any:
        sources = {row: source.name for name, row in rows.items() if (source := ctx.get_parameter_source(name))}
        from_variables, from_command_line = (
            [row for row, source in sources.items() if source == kind] for kind in ("DEFAULT_MAP", "COMMANDLINE")
        )
        values = {rows[name]: value for name, value in given.items()}
        values, variables = settled(command, values, from_variables, from_command_line)
        on_variables(variables)
        return run(Options(command, values))

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *(_parameter(name, row, command) for name, row in rows.items())]
    read.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    read.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(command.name, help=paragraphs(command.help), hidden=command.hidden, cls=_Command)(read)


def paragraphs(text: str) -> str:
    """Without indents, a line for each paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _parameter(name: str, row: Option, command: Command) -> inspect.Parameter:
    default = command.default_of(row)
    is_required = row.name in command.required
    help = f"{row.help} ({row.variable})" if row.variable and command.reads_variables else row.help
    metavar = "" if row.reads is bool else row.metavar  # a switch takes no value: without it, typer shows <bool>
    common: dict[str, Any] = {"metavar": metavar, "help": help}
    if not row.flags:
        info: Any = typer.Argument(**common, show_default=False)
    else:
        shown = default is not None  # else --help would show what a variable says, even an API key
        info = typer.Option(*row.flags, **common, rich_help_panel=row.panel, show_default=shown)
    kind = row.reads if is_required or default is not None else row.reads | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if is_required else default,
        annotation=Annotated[kind, info],
    )
