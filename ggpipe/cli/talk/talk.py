"""A conversation: the user's questions and commands, and the model's answers."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from ggpipe.cli.messages import in_flags
from ggpipe.cli.talk.answer import Answerer, ModelReply
from ggpipe.cli.talk.commands import COMMANDS, command_in
from ggpipe.cli.talk.keyboard import PROMPT, Keyboard
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prompt import Conversation
from ggpipe.core.request import Finish
from ggpipe.display.files import write_text
from ggpipe.display.format import counted, harmless
from ggpipe.display.live.terminal import Terminal
from ggpipe.display.tables.summary import print_summary
from ggpipe.errors import GgpipeError, UsageError
from ggpipe.launch.cache_folder import cache_folder, whole_file
from ggpipe.text.chat.transcript import Transcript

_HINT = "Ask something; /help lists the commands"
_IDLE_S = 0.1
_SEEDS = 2**32 - 1
_KEYS = {
    "Alt-Enter": "start a new line, as does a backslash at the end of a line",
    "Ctrl-C": "stop an answer, and keep what was generated",
    "Ctrl-D": "quit",
}


class Talk:
    """Belongs to the main thread."""

    def __init__(
        self,
        answerer: Answerer,
        terminal: Terminal | None,
        sampling: SamplingConfig,
        settings: Conversation,
        system: str | None,
    ) -> None:
        """`settings`: a conversation without messages, with all other settings."""
        self._answerer = answerer
        self._terminal = terminal
        self._sampling = sampling
        self._settings = settings
        self._transcript = Transcript(system)
        self._keyboard = Keyboard(_file("history"))
        self._typed = ""
        """Initial text of the next input."""
        self._is_edited = False
        """The next input replaces the last question."""
        self._attached = ""
        """Contents of files, to put before the next question."""
        self._n_regenerated = 0
        self._last: ModelReply | None = None

    def run(self, first: str | None) -> None:
        """Talk until the user quits. `first`: the first question, if it is known.

        Errors that stop the engine are raised, after the conversation has been saved to a file.
        """
        try:
            if first is not None:
                self._say(PROMPT + first, style="")
                self._ask(first)
            while (line := self._line()) is not None:
                try:
                    command = command_in(line)
                    if command is None:
                        self._ask(line)
                    elif command[0] == "/quit":
                        return
                    else:
                        self._is_edited = False
                        getattr(self, f"_{command[0][1:]}")(command[1])  # see COMMANDS
                except UsageError as e:
                    self._say(in_flags(e), style="red")
        except GgpipeError:
            self._keep()
            raise

    # Input

    def _line(self) -> str | None:
        """The next input that is not empty, or None if the user quits."""
        engine, is_interrupted = self._answerer.engine, False
        while True:
            typed, self._typed = self._typed, ""
            hint = _HINT if not self._transcript.n_questions else ""
            self._say("")
            try:
                line = self._keyboard.ask(lambda: engine.idle(_IDLE_S), typed, hint)
            except EOFError:
                return None
            except KeyboardInterrupt:
                if is_interrupted:
                    return None
                is_interrupted, self._is_edited = True, False
                self._say("press Ctrl-C again, or Ctrl-D, to quit")
                continue
            is_interrupted = False
            if line.strip():
                return line.strip("\n")
            self._is_edited = False

    def _say(self, text: str, style: str = "dim") -> None:
        """Print text that is not part of the conversation."""
        text = harmless(text)
        if self._terminal is None:
            print(text)
            return
        self._terminal.measure()
        self._terminal.console.print(Text(text, style=style))

    # Questions

    def _ask(self, text: str) -> None:
        if self._is_edited:
            self._transcript.take_back_question()
        self._is_edited, self._n_regenerated = False, 0
        question, self._attached = self._attached + text, ""
        self._transcript.ask(question)
        self._answer()

    def _answer(self) -> None:
        """Answer the last question. If that is impossible, it becomes the initial text of the next input."""
        transcript, reply = self._transcript, ModelReply()
        seed, n = self._sampling.seed, self._n_regenerated
        sampling = replace(self._sampling, seed=(seed + n) % _SEEDS) if seed >= 0 else self._sampling
        conversation = replace(self._settings, messages=tuple(transcript.messages))
        self._say("")
        try:
            self._answerer.answer(conversation, sampling, reply)
        except UsageError:
            self._take_back()
            raise
        finally:
            if not reply.is_empty:
                transcript.answered(reply.text, reply.reasoning)
        self._last = reply
        self._say("" if reply.is_empty else f"\n{reply.line()}")
        if reply.is_empty and reply.stats.finish is Finish.STOPPED:
            self._take_back()

    def _take_back(self) -> None:
        self._typed = self._transcript.question or ""
        self._transcript.take_back_question()

    # Commands

    def _help(self, _: str) -> None:
        lines = {f"{command.name} {command.argument}": command.help for command in COMMANDS} | _KEYS
        width = max(map(len, lines))
        self._say("\n".join(f"{name:{width}}  {help}" for name, help in lines.items()))

    def _regen(self, _: str) -> None:
        if self._transcript.question is None:
            raise UsageError("there is no question to answer again")
        self._transcript.take_back_answer()
        self._n_regenerated += 1
        self._answer()

    def _edit(self, _: str) -> None:
        if self._transcript.question is None:
            raise UsageError("there is no question to change")
        self._typed, self._is_edited = self._transcript.question, True

    def _clear(self, _: str) -> None:
        self._transcript.clear()
        self._attached = ""
        self._say("new conversation" + (", with the same instructions" if self._transcript.system else ""))

    def _system(self, text: str) -> None:
        if text:
            self._transcript.system = None if text == "-" else text
        system = self._transcript.system
        self._say("the model has no instructions" if system is None else f"instructions: {system}")

    def _read(self, name: str) -> None:
        text = _contents(name)
        self._attached += f"--- File: {name} ---\n{text}" + ("" if text.endswith("\n") else "\n")
        self._say(f"added {counted(len(text), 'character')} to the next question")

    def _save(self, name: str) -> None:
        write_text(Path(name).expanduser(), self._transcript.to_json())
        self._say(f"saved {counted(len(self._transcript.messages), 'message')} to {name}")

    def _load(self, name: str) -> None:
        text = _contents(name)
        try:
            self._transcript.load_json(text)
        except UsageError as e:
            raise UsageError(f"{name}: {e}") from e
        messages = self._transcript.messages
        self._attached = ""
        self._say(f"loaded {counted(len(messages), 'message')} from {name}")
        if messages and messages[-1]["role"] == "user":
            self._say("the last message is a question: /regen answers it")

    def _stats(self, _: str) -> None:
        if self._last is None:
            raise UsageError("there is no answer yet")
        engine, stats = self._answerer.engine, self._last.stats
        engine.measure()
        print_summary(self._terminal, stats, self._answerer.ranks.ranks, time.monotonic())
        used = stats.n_prompt + stats.n_generated
        asked = counted(self._transcript.n_questions, "question")
        self._say(f"\n{asked} so far; {used} of {engine.n_ctx} tokens of the context are used")

    def _keep(self) -> None:
        """Save the conversation before the error that has stopped the engine is raised."""
        path = _file("last.json")
        if path is None or not self._transcript.n_questions:
            return
        with contextlib.suppress(OSError):
            with whole_file(path) as file:
                file.write_text(self._transcript.to_json(), "utf-8")
            self._say(f"the conversation was saved: /load {path}")


def _contents(name: str) -> str:
    try:
        return Path(name).expanduser().read_text("utf-8")
    except (OSError, UnicodeError, RuntimeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not UTF-8" if isinstance(e, UnicodeError) else e
        raise UsageError(f"cannot read {name}: {why}") from e


def _file(name: str) -> Path | None:
    """A file that all conversations share, or None if there is no folder for it."""
    try:
        return cache_folder("chat") / name
    except UsageError:
        return None
