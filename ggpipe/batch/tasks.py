"""Files of prompts: plain lines, a list in JSON as SpecInfer takes it, or lines in JSON of OpenAI's batch format.

Each of the file's prompts is a task. One that cannot be read is a task with an error, so the others are answered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ggpipe.batch.bodies import Ask, ask_of
from ggpipe.chat.conversation import Conversation
from ggpipe.errors import UsageError

Format = Literal["lines", "specinfer", "openai"]

_ID_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class Task:
    """One prompt of a file."""

    id: str
    """Made of its place in the file and of its text."""
    custom_id: str | None
    """The user's name for it; else its number, from 1 on. None: it has none that can be read."""
    ask: Ask | None = None
    """What is to be answered."""
    error: str = ""
    """Why it cannot be."""
    key: str = field(default="", compare=False)
    """Tasks that begin alike are next to each other when they are sorted by it."""


ToConversation = Callable[[str], Conversation | None]
"""What a plain prompt is as a user's message; None: a text to continue."""


def read_tasks(path: Path, format: Format | None, to_conversation: ToConversation) -> list[Task]:
    """The prompts of a file, in its order. `format`: None finds it in the content. Raises UsageError."""
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as e:
        raise UsageError(f"{path}: cannot read the prompts: {e.strerror}") from e
    match format or _format_of(text):
        case "openai":
            tasks = [_from_line(number, line) for number, line in _lines(text)]
        case "specinfer":
            tasks = [_from_text(number, item, to_conversation) for number, item in enumerate(_list(path, text), 1)]
        case _:
            tasks = [_from_text(number, line, to_conversation) for number, line in _lines(text)]
    if not tasks:
        raise UsageError(f"{path}: there are no prompts in it")
    return _without_doubles(tasks)


def _format_of(text: str) -> Format:
    start = text.lstrip()[:1]
    if start == "[":
        try:
            return "specinfer" if isinstance(json.loads(text), list) else "lines"
        except (ValueError, RecursionError):
            return "lines"
    return "openai" if start == "{" else "lines"


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, and their numbers. (Not `splitlines`: JSON may hold other line ends.)"""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.removesuffix("\r")


def _list(path: Path, text: str) -> list[Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{path}: must be a list of texts in JSON: {e}") from e
    if not isinstance(found, list):
        raise UsageError(f"{path}: must be a list of texts in JSON")
    return found


def _from_text(number: int, prompt: Any, to_conversation: ToConversation) -> Task:
    identity = _id(number, repr(prompt))
    if not isinstance(prompt, str) or not prompt:
        return Task(id=identity, custom_id=str(number), error=f"must be a text, got {json.dumps(prompt)[:100]}")
    ask = Ask(prompt=to_conversation(prompt) or prompt)
    return Task(id=identity, custom_id=str(number), ask=ask, key=ask.key)


def _from_line(number: int, line: str) -> Task:
    identity, custom_id = _id(number, line), None
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("must be an object")
        custom_id = found.get("custom_id")
        if not isinstance(custom_id, str):
            custom_id = None
            raise ValueError("custom_id must be a text")
        ask = ask_of(found.get("method", "POST"), found.get("url"), found.get("body"))
    except (ValueError, UsageError, RecursionError) as e:
        return Task(id=identity, custom_id=custom_id, error=f"line {number}: {e}")
    return Task(id=identity, custom_id=custom_id, ask=ask, key=ask.key)


def _id(number: int, text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"batch_req_{number}_{digest[:_ID_DIGITS]}"


def _without_doubles(tasks: Sequence[Task]) -> list[Task]:
    """Of two tasks of one name, only the first is answered."""
    seen: set[str | None] = {None}
    kept = []
    for task in tasks:
        if task.ask is not None and task.custom_id in seen:
            task = Task(id=task.id, custom_id=task.custom_id, error=f"custom_id {task.custom_id} occurs twice")
        seen.add(task.custom_id)
        kept.append(task)
    return kept
