"""Commands within a conversation: lines that start with a slash."""

from __future__ import annotations

from dataclasses import dataclass

from ggpipe.errors import UsageError


@dataclass(frozen=True)
class SlashCommand:
    """A command."""

    name: str
    help: str
    argument: str = ""
    """Name of the argument in the help, in brackets if it is optional."""

    @property
    def takes_file(self) -> bool:
        """Whether the argument is a file name."""
        return self.argument == "FILE"


COMMANDS = (
    SlashCommand("/help", "list the commands"),
    SlashCommand("/regen", "answer the last question again"),
    SlashCommand("/edit", "change the last question, and answer it again"),
    SlashCommand("/clear", "start a new conversation, with the same instructions"),
    SlashCommand("/system", "show or set the model's instructions (- removes them)", "[TEXT]"),
    SlashCommand("/read", "put the contents of a file before the next question", "FILE"),
    SlashCommand("/save", "save the conversation to a file", "FILE"),
    SlashCommand("/load", "continue the conversation in a file", "FILE"),
    SlashCommand("/stats", "show the figures of the last answer"),
    SlashCommand("/quit", "quit"),
)
_ALIASES = {"/exit": "/quit", "/?": "/help"}


def command_in(line: str) -> tuple[str, str] | None:
    """The command's name and its argument, or None if the line is a question.

    Raises UsageError for unknown commands, and for missing or unexpected arguments.
    """
    if not line.startswith("/"):
        return None
    name, _, argument = line.partition(" ")
    name, argument = _ALIASES.get(name.strip(), name.strip()), argument.strip()
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None:
        raise UsageError(f"no such command: {name} (see /help; to send it as a question, put a space before it)")
    if command.argument and command.argument[0] != "[" and not argument:
        raise UsageError(f"{name} needs a {command.argument.lower()}: {name} {command.argument}")
    if argument and not command.argument:
        raise UsageError(f"{name} takes no argument (to send it as a question, put a space before it)")
    return name, argument
