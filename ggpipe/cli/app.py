"""The commands."""

from __future__ import annotations

from typing import Annotated

import typer

import ggpipe
from ggpipe.cli.bench import bench
from ggpipe.cli.demo import demo
from ggpipe.cli.generate import generate
from ggpipe.cli.plan import plan
from ggpipe.cli.profile import profile
from ggpipe.cli.record import record
from ggpipe.cli.simulate import simulate

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run one large GGUF model over several CPU-only machines, and get a single answer fast.",
)
app.command()(generate)
app.command()(record)
app.command()(simulate)
app.command()(plan)
app.command()(profile)
app.command()(bench)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(demo)


def _version(show: bool) -> None:
    if show:
        print(f"ggpipe {ggpipe.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
