"""Completion of command lines by bash: `ggpipe --install-completion` writes a script that bash-completion loads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ggpipe.display.files import make_folder, write_text
from ggpipe.options.option import Command, Option

_SCRIPT = """# bash completion for ggpipe, written by `ggpipe --install-completion`
_ggpipe() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words
  case ${{COMP_WORDS[1]}} in
{cases}
    *) words="{commands} help --help --version" ;;
  esac
  if [[ $COMP_CWORD == 1 || $word == -* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  fi
}}
complete -o default -F _ggpipe ggpipe
"""


def install_completion(commands: Sequence[Command], table: Sequence[Option]) -> Path:
    """Write the script, and return its path. Raises UsageError if it cannot be written."""
    root = os.environ.get("XDG_DATA_HOME", "")
    folder = Path(root) if os.path.isabs(root) else Path.home() / ".local" / "share"
    path = folder / "bash-completion" / "completions" / "ggpipe"
    make_folder(path.parent)
    write_text(path, completion_script(commands, table))
    return path


def completion_script(commands: Sequence[Command], table: Sequence[Option]) -> str:
    """The script: the flags of each command. Values are completed as names of files."""
    shown = [command for command in commands if not command.hidden]
    cases = "\n".join(f'    {command.name}) words="{" ".join(_flags(command, table))}" ;;' for command in shown)
    return _SCRIPT.format(cases=cases, commands=" ".join(command.name for command in shown))


def _flags(command: Command, table: Sequence[Option]) -> list[str]:
    texts = [flag.strip() for row in command.options(table) for text in row.flags for flag in text.split("/")]
    return sorted({*(text for text in texts if text.startswith("--")), "--help", "--help-all"})
