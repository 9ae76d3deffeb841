"""Finds and runs the command that a command line names."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

from ggpipe.cli.command_line import HelpWanted, named_command, parse
from ggpipe.cli.messages import name_variables, warn
from ggpipe.cli.outputs import check_outputs
from ggpipe.cli.variables import read_variables
from ggpipe.errors import UsageError
from ggpipe.options.commands import COMMANDS
from ggpipe.options.hub import HubSettings
from ggpipe.options.option import Command, Options
from ggpipe.options.table import OPTIONS


def dispatch(arguments: Sequence[str]) -> int:
    """Parse a command line, run its command, and return the exit code. Only the module of that command is loaded."""
    command: Command | None = None
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    try:
        command = named_command(COMMANDS, arguments)
        if command is None and (code := _about(arguments)) is not None:
            return code
        if command is None:
            raise HelpWanted
        variables = read_variables(command, OPTIONS, os.environ, warn)
        options = parse(command, OPTIONS, arguments[1:], variables, name_variables)
    except HelpWanted as e:
        from ggpipe.cli.help import show_help  # Rich is slow to import

        show_help(COMMANDS, OPTIONS, command, e.is_full)
        return 0 if arguments else UsageError.exit_code
    if options[HubSettings].is_given:
        from ggpipe.cli.downloads import with_models  # needed by few

        options = with_models(command, options)
    check_outputs(options)
    return _call(command, options)


def _about(words: Sequence[str]) -> int | None:
    """Answer a flag that comes without a command. Returns the exit code, or None for other words."""
    if words[:1] == ["--version"]:
        from ggpipe.cli.version import version_lines

        for line in version_lines():
            print(line, flush=True)
        return 0
    if words[:1] == ["--install-completion"]:
        from ggpipe.cli.completion import install_completion

        path, loads = install_completion(COMMANDS, OPTIONS, *words[1:2])
        print(f"wrote {path}: {loads}")
        return 0
    if words[:1] == ["--man"]:
        from ggpipe.cli.man import manual

        print(manual(COMMANDS, OPTIONS), end="")
        return 0
    return None


def _call(command: Command, options: Options) -> int:
    """Run a command: its module has one public function, `run`."""
    code: int = importlib.import_module(f"ggpipe.cli.commands.{command.name}").run(options)
    return code
