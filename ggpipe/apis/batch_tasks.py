"""Files of prompts: plain lines, a JSON list as in SpecInfer, or the JSON lines of OpenAI's batch format.

Each prompt is a task. An unreadable one becomes a task with an error, so that the others are still answered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ggpipe.apis.bodies import BODY_NAMES, BodyPrompt, GenerationBody
from ggpipe.apis.chat import CHAT, ChatBody
from ggpipe.apis.completions import COMPLETIONS, CompletionBody
from ggpipe.apis.decode import convert
from ggpipe.apis.embeddings import EMBEDDINGS, EmbeddingBody
from ggpipe.apis.responses import RESPONSES, ResponsesBody
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prompt import Conversation
from ggpipe.errors import GgpipeError, UsageError

Format = Literal["lines", "specinfer", "openai"]

_ID_DIGITS = 16
TaskBody = GenerationBody | EmbeddingBody
"""A request for outputs, or for embeddings."""

_KINDS: dict[str, type[TaskBody]] = {
    COMPLETIONS: CompletionBody, CHAT: ChatBody, RESPONSES: ResponsesBody, EMBEDDINGS: EmbeddingBody,
}  # fmt: skip
_IGNORED = frozenset(
    {
        "metadata", "model", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "service_tier", "store", "truncation", "user",
    }
)  # fmt: skip
"""Fields of OpenAI's API that have no effect here."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One prompt of a file."""

    id: str
    """Derived from its position in the file and its content."""
    custom_id: str | None
    """The user's name for it, or else its line number. None if it is unreadable."""
    body: TaskBody | None = None
    """The request; None if there is an `error`."""
    error: str = ""
    """Why the task cannot be answered."""
    key: str = field(default="", compare=False)
    """Sort key that puts prompts with a common prefix next to each other."""


ToConversation = Callable[[str], Conversation | None]
"""Makes a conversation of a plain prompt; None: the prompt is continued instead."""


def read_tasks(path: Path, format: Format | None, to_conversation: ToConversation) -> list[Task]:
    """The tasks of a file, in order. `format`: None detects it. Raises UsageError."""
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as e:
        raise UsageError(f"{path}: cannot read the prompts: {e.strerror}") from e
    match format or _format_of(text):
        case "openai":
            tasks = [_from_line(number, line) for number, line in _lines(text)]
        case "specinfer":
            if (items := _list(text)) is None:
                raise UsageError(f"{path}: must be a JSON list of strings")
            tasks = [_from_text(number, item, to_conversation) for number, item in enumerate(items, 1)]
        case _:
            tasks = [_from_text(number, line, to_conversation) for number, line in _lines(text)]
    if not tasks:
        raise UsageError(f"{path} contains no prompts")
    return _without_doubles(tasks)


def _format_of(text: str) -> Format:
    match text.lstrip()[:1]:
        case "[" if _list(text) is not None:
            return "specinfer"
        case "{":
            return "openai"
    return "lines"


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, and their numbers. (`splitlines` would also split at line ends within JSON strings.)"""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.removesuffix("\r")


def _list(text: str) -> list[Any] | None:
    """The list in a JSON text; None if it has none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _from_text(number: int, prompt: Any, to_conversation: ToConversation) -> Task:
    identity = _id(number, repr(prompt))
    if not isinstance(prompt, str) or not prompt:
        return Task(id=identity, custom_id=str(number), error=f"must be a string, got {json.dumps(prompt)[:100]}")
    chat = to_conversation(prompt)
    body = CompletionBody(prompt=prompt) if chat is None else ChatBody(messages=list(chat.messages))
    return Task(id=identity, custom_id=str(number), body=body, key=_key(body.prompts))


def _from_line(number: int, line: str) -> Task:
    identity, custom_id = _id(number, line), None
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("must be an object")
        custom_id = found.get("custom_id")
        if not isinstance(custom_id, str):
            custom_id = None
            raise ValueError("custom_id must be a string")
        body = _body(found.get("method", "POST"), found.get("url"), found.get("body"))
        key = _key(body.prompts)
    except (ValueError, UsageError, RecursionError) as e:
        return Task(id=identity, custom_id=custom_id, error=f"line {number}: {_named(e)}")
    return Task(id=identity, custom_id=custom_id, body=body, key=key)


def _body(method: object, url: object, body: object) -> TaskBody:
    """The request in a line. Raises UsageError that names the wrong field."""
    if method != "POST":
        raise UsageError(f"method must be POST, got {method!r}")
    if not isinstance(url, str) or url not in _KINDS:
        raise UsageError(f"url must be one of {', '.join(_KINDS)}, got {url!r}")
    if not isinstance(body, dict):
        raise UsageError("body must be an object")
    kind = _KINDS[url]
    for name, value in body.items():
        if value is not None and name not in kind.__struct_fields__ and name not in _IGNORED:
            raise UsageError(f"body.{name} is not supported")
    own = convert(kind, body)
    if isinstance(own, GenerationBody):
        own.sampling(SamplingConfig())
    return own


def _named(error: Exception) -> str:
    """The message, with bodies' names of settings."""
    return str(error.renamed(BODY_NAMES) if isinstance(error, GgpipeError) else error)


def _key(prompts: Sequence[BodyPrompt]) -> str:
    """A sort key with the same prefix as the prompt."""
    match prompts[0]:
        case str() as text:
            return text
        case Conversation(messages=messages, tools=tools):
            return json.dumps([tools, messages])
        case tokens:
            return " ".join(map(str, tokens))


def _id(number: int, text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"batch_req_{number}_{digest[:_ID_DIGITS]}"


def _without_doubles(tasks: Sequence[Task]) -> list[Task]:
    """Of several tasks with one name, only the first is answered."""
    seen: set[str | None] = {None}
    kept = []
    for task in tasks:
        if task.body is not None and task.custom_id in seen:
            task = Task(id=task.id, custom_id=task.custom_id, error=f"custom_id {task.custom_id} occurs twice")
        seen.add(task.custom_id)
        kept.append(task)
    return kept
