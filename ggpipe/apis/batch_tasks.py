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

from ggpipe.apis.bodies import BODY_NAMES, BodyPrompt, GenerationBody, Mixed
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
"""A request for texts, or for embeddings."""

_KINDS: dict[str, type[TaskBody]] = {
    COMPLETIONS: CompletionBody, CHAT: ChatBody, RESPONSES: ResponsesBody, EMBEDDINGS: EmbeddingBody,
}  # fmt: skip
_IGNORED = frozenset(
    {
        "metadata", "model", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "service_tier", "store", "truncation", "user",
    }
)  # fmt: skip
"""Fields of OpenAI's API that change nothing here."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One prompt of a file."""

    id: str
    """Made of its place in the file and of its text."""
    custom_id: str | None
    """The user's name for it; else its number, from 1 on. None: it has none that can be read."""
    body: TaskBody | None = None
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
            raise ValueError("custom_id must be a text")
        body = _body(found.get("method", "POST"), found.get("url"), found.get("body"))
        key = _key(body.prompts)
    except (ValueError, UsageError, RecursionError) as e:
        return Task(id=identity, custom_id=custom_id, error=f"line {number}: {_named(e)}")
    return Task(id=identity, custom_id=custom_id, body=body, key=key)


def _body(method: object, url: object, body: object) -> TaskBody:
    """What a line asks for. Raises UsageError that names what is wrong."""
    if method != "POST":
        raise UsageError(f"method must be POST, got {method!r}")
    if not isinstance(url, str) or url not in _KINDS:
        raise UsageError(f"url must be one of {', '.join(_KINDS)}, got {url!r}")
    if not isinstance(body, dict):
        raise UsageError("body must be an object")
    kind = _KINDS[url]
    for name, value in body.items():
        if value is not None and name not in kind.__struct_fields__ and name not in _IGNORED:
            raise UsageError(f"body.{name} is not known here")
    own = convert(kind, body)
    if isinstance(own, GenerationBody):
        own.check()
        own.sampling(SamplingConfig())
        own.most_tokens(-1)
    return own


def _named(error: Exception) -> str:
    """What is wrong, with the names that bodies have."""
    return str(error.renamed(BODY_NAMES) if isinstance(error, GgpipeError) else error)


def _key(prompts: Sequence[BodyPrompt]) -> str:
    """Those of prompts that begin alike begin alike."""
    match prompts[0]:
        case str() as text:
            return text
        case Conversation(messages=messages, tools=tools):
            return json.dumps([tools, messages])
        case Mixed(parts=tokens) | tokens:
            return " ".join(map(str, tokens))


def _id(number: int, text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"batch_req_{number}_{digest[:_ID_DIGITS]}"


def _without_doubles(tasks: Sequence[Task]) -> list[Task]:
    """Of two tasks of one name, only the first is answered."""
    seen: set[str | None] = {None}
    kept = []
    for task in tasks:
        if task.body is not None and task.custom_id in seen:
            task = Task(id=task.id, custom_id=task.custom_id, error=f"custom_id {task.custom_id} occurs twice")
        seen.add(task.custom_id)
        kept.append(task)
    return kept
