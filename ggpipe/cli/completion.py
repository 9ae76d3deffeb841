"""Completion of command lines: `ggpipe --install-completion` writes a script for bash, zsh or fish."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ggpipe.display.files import make_folder, write_text
from ggpipe.errors import UsageError
from ggpipe.options.option import Command, Option

_BASH = """# bash completion for ggpipe, written by `ggpipe --install-completion bash`
_ggpipe() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words
  case ${{COMP_WORDS[1]}} in
{cases}
    *) words="{words}" ;;
  esac
  if [[ $COMP_CWORD == 1 || $word == -* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  fi
}}
complete -o default -F _ggpipe ggpipe
"""
_ZSH = """#compdef ggpipe
# zsh completion for ggpipe, written by `ggpipe --install-completion zsh`
local -a flags
if (( CURRENT == 2 )); then
  compadd -- {words}
  return
fi
case $words[2] in
{cases}
esac
if [[ $PREFIX == -* ]]; then
  compadd -- $flags
else
  _files
fi
"""
_FISH = """# fish completion for ggpipe, written by `ggpipe --install-completion fish`
complete -c ggpipe -n __fish_use_subcommand -f
{lines}
"""
_ALONE = ("help", "--help", "--version", "--man", "--install-completion")


@dataclass(frozen=True)
class _Shell:
    folder: str
    """The variable of the folder that its script is in, and the default, in the home folder."""
    default: str
    path: str
    script: Callable[[Sequence[Command], Sequence[Option]], str]
    loads: str
    """When the script is loaded."""


def install_completion(commands: Sequence[Command], table: Sequence[Option], shell: str = "") -> tuple[Path, str]:
    """Write the script for a shell; empty: the user's own, or else bash. Returns its path, and when it is loaded.

    Raises UsageError for another shell, or if it cannot be written.
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    own = SHELLS.get(name, None if shell else SHELLS["bash"])
    if own is None:
        raise UsageError(f"no completion for {shell}: choose {', '.join(SHELLS)}")
    root = os.environ.get(own.folder, "")
    folder = Path(root) if os.path.isabs(root) else Path.home() / own.default
    path = folder / own.path
    make_folder(path.parent)
    write_text(path, own.script(commands, table))
    return path, own.loads.format(folder=path.parent)


def _bash(commands: Sequence[Command], table: Sequence[Option]) -> str:
    """The flags of each command. Values are completed as names of files."""
    cases = "\n".join(f'    {command.name}) words="{_flags(command, table)}" ;;' for command in _shown(commands))
    return _BASH.format(cases=cases, words=_first_words(commands))


def _zsh(commands: Sequence[Command], table: Sequence[Option]) -> str:
    cases = "\n".join(f"  {command.name}) flags=({_flags(command, table)}) ;;" for command in _shown(commands))
    return _ZSH.format(cases=cases, words=_first_words(commands))


def _fish(commands: Sequence[Command], table: Sequence[Option]) -> str:
    return _FISH.format(lines="\n".join(_fish_lines(commands, table)))


def _fish_lines(commands: Sequence[Command], table: Sequence[Option]) -> Iterator[str]:
    """The commands and flags, each with the first sentence of its description."""
    for command in _shown(commands):
        about = _quoted(" ".join(command.help.split()))
        yield f"complete -c ggpipe -n __fish_use_subcommand -a {command.name} -d {about}"
    for word in _ALONE:
        kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
        yield f"complete -c ggpipe -n __fish_use_subcommand {kind}"
    for command in _shown(commands):
        condition = f"-n '__fish_seen_subcommand_from {command.name}'"
        for row in command.options(table):
            takes = "" if row.reads is bool else " -r"
            for flag in _long_flags(row):
                yield f"complete -c ggpipe {condition} -l {flag[2:]}{takes} -d {_quoted(row.help)}"


def _quoted(text: str) -> str:
    sentence = text.partition(". ")[0].rstrip(".")
    return "'" + sentence.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: Mapping[str, _Shell] = {
    "bash": _Shell(
        "XDG_DATA_HOME", ".local/share", "bash-completion/completions/ggpipe", _bash,
        "bash-completion loads it in new shells",
    ),
    "zsh": _Shell(
        "XDG_DATA_HOME", ".local/share", "zsh/site-functions/_ggpipe", _zsh,
        "zsh loads it in new shells if ~/.zshrc has fpath=({folder} $fpath) before compinit",
    ),
    "fish": _Shell("XDG_CONFIG_HOME", ".config", "fish/completions/ggpipe.fish", _fish, "fish loads it in new shells"),
}  # fmt: skip
"""By name."""


def _shown(commands: Sequence[Command]) -> list[Command]:
    return [command for command in commands if not command.hidden]


def _first_words(commands: Sequence[Command]) -> str:
    return " ".join([*(command.name for command in _shown(commands)), *_ALONE])


def _long_flags(row: Option) -> list[str]:
    return [flag for text in row.flags for flag in map(str.strip, text.split("/")) if flag.startswith("--")]


def _flags(command: Command, table: Sequence[Option]) -> str:
    found = {flag for row in command.options(table) for flag in _long_flags(row)}
    return " ".join(sorted({*found, "--help", "--help-all"}))
