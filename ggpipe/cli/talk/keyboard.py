"""Reads the user's input, with the keys of a shell, while other work continues.

| key               | action                                                    |
|-------------------|-----------------------------------------------------------|
| Enter             | send; after a backslash, start a new line                 |
| Alt-Enter, Ctrl-J | start a new line                                          |
| up, down, Ctrl-R  | previous inputs                                           |
| Tab               | complete commands and file names                          |
| Ctrl-C            | discard the input, or KeyboardInterrupt if there is none  |
| Ctrl-D            | EOFError if there is no input                             |
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style

from ggpipe.cli.talk.commands import COMMANDS

PROMPT = "> "
_STYLE = Style.from_dict({"prompt": "bold ansicyan", "placeholder": "ansibrightblack"})


class Keyboard:
    """Belongs to the main thread. stdin must be a terminal."""

    def __init__(self, history: Path | None) -> None:
        """`history`: file for previous inputs, or None."""
        self._output = create_output(always_prefer_tty=True)
        self._session: PromptSession[str] = PromptSession(
            [("class:prompt", PROMPT)],
            style=_STYLE,
            multiline=True,
            prompt_continuation=" " * len(PROMPT),
            key_bindings=_keys(),
            history=_history(history),
            completer=_Completer(),
            complete_while_typing=Condition(self._is_command),
            output=self._output,
        )

    def ask(self, attend: Callable[[], None], default: str = "", hint: str = "") -> str:
        """Read an input, of one line or more. Meanwhile, `attend` is called repeatedly; its exceptions are raised.

        `default`: initial text. `hint`: shown while there is no input. Output on stderr is printed above. Raises
        EOFError and KeyboardInterrupt, see the module's docstring.
        """
        typed: Future[str] = Future()

        def read() -> None:
            try:
                placeholder = FormattedText([("class:placeholder", hint)])
                typed.set_result(self._session.prompt(default=default, placeholder=placeholder, handle_sigint=False))
            except BaseException as e:
                typed.set_exception(e)

        thread = threading.Thread(target=read, name="keyboard", daemon=True)
        with contextlib.redirect_stderr(_Above(self._show_above)):
            thread.start()
            try:
                while not typed.done():
                    attend()
            finally:
                while not typed.done():
                    self._leave()
                    thread.join(0.1)
                thread.join()
        return typed.result()

    def _show_above(self, text: str) -> None:
        def show() -> None:
            self._output.write_raw(text)
            self._output.flush()

        app = self._session.app
        if app.loop is not None and app.is_running:
            app.loop.call_soon_threadsafe(run_in_terminal, show)
        else:
            show()

    def _leave(self) -> None:
        app = self._session.app
        if app.loop is not None and app.is_running:
            with contextlib.suppress(Exception):  # it is already exiting
                app.loop.call_soon_threadsafe(lambda: app.exit(exception=EOFError()))

    def _is_command(self) -> bool:
        return self._session.default_buffer.text.startswith("/")


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
            buffer.complete_state = None
        elif buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return keys


class _Above(io.TextIOBase):
    """A stream that passes on complete lines."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._started = ""

    def write(self, text: str) -> int:
        """Pass on all lines that are complete."""
        lines, end, self._started = (self._started + text).rpartition("\n")
        if end:
            self._show(lines + end)
        return len(text)


class _Completer(Completer):
    """Completes commands and file names."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        name, blank, argument = text.partition(" ")
        for command in COMMANDS if text.startswith("/") else ():
            if not blank and command.name.startswith(name):
                shown = f"{command.name} {command.argument}".strip()
                end = " " if command.argument else ""
                yield Completion(command.name + end, -len(name), display=shown, display_meta=command.help)
            elif blank and command.name == name and command.takes_file:
                yield from self._paths.get_completions(Document(argument), complete_event)


class _FileHistory(FileHistory):
    """A history that ignores errors of its file."""

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


def _history(path: Path | None) -> History:
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600))  # private
            return _FileHistory(str(path))
    return InMemoryHistory()
