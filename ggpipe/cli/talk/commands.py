"""Commands of a conversation: lines that begin with a slash."""

from __future__ import annotations

from dataclasses import dataclass

from ggpipe.errors import UsageError


@dataclass(frozen=True)
class SlashCommand:
    """A command."""

    name: str
    help: str
    argument: str = ""
    """What it is called in the help."""
    needs_argument: bool = False

    @property
    def takes_file(self) -> bool:
        """The argument is a file's name."""
        return self.argument == "FILE"


COMMANDS = (
    SlashCommand("/help", "list the commands"),
    SlashCommand("/regen", "answer the last question anew"),
    SlashCommand("/edit", "change the last question, and have it answered anew"),
    SlashCommand("/clear", "begin a new conversation, with the same instructions"),
    SlashCommand("/system", "show or give instructions to the model; - removes them", "[TEXT]"),
    SlashCommand("/read", "put a file's text in front of the next question", "FILE", needs_argument=True),
    SlashCommand("/save", "write the conversation to a file", "FILE", needs_argument=True),
    SlashCommand("/load", "go on with the conversation of a file", "FILE", needs_argument=True),
    SlashCommand("/stats", "show the figures of the last answer"),
    SlashCommand("/quit", "leave"),
)
_ALIASES = {"/exit": "/quit", "/?": "/help"}


def command_in(line: str) -> tuple[str, str] | None:
    """The command's name and its argument; None: the line is a question.

    Raises UsageError where there is no such command, or its argument is missing or not wanted.
    """
    if not line.startswith("/"):
        return None
    name, _, argument = line.partition(" ")
    name, argument = _ALIASES.get(name.strip(), name.strip()), argument.strip()
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None:
        raise UsageError(f"there is no {name}: /help lists the commands; a blank in front makes a question of it")
    if command.needs_argument and not argument:
        raise UsageError(f"{name} needs a {command.argument.lower()}: {name} {command.argument}")
    if argument and not command.argument:
        raise UsageError(f"{name} stands alone; a blank in front makes a question of it")
    return name, argument
