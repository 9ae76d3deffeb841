"""The file of answers, one line of JSON for each task, in OpenAI's batch output format. It is written as they come.

A job that was interrupted goes on with the same file: tasks that are answered there are not answered again, a last line
that was cut is dropped, and tasks that failed are tried again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from ggpipe.apis.batch_tasks import Task
from ggpipe.apis.chat import ChatBody, ChatChoices
from ggpipe.apis.completions import CompletionBody, CompletionChoices
from ggpipe.apis.embeddings import EmbeddingBody
from ggpipe.apis.replies import timings
from ggpipe.apis.responses import ResponsesBody, ResponseWriter
from ggpipe.core.request import Token
from ggpipe.errors import RunError, Setting, UsageError
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.answer import AnswerFormat, AnswerParser, WholeAnswer, whole_answer
from ggpipe.text.embeddings import Vector

OutputFormat = Literal["openai", "specinfer"]

_PART = ".part"
_OF_SPECINFER = (CompletionBody, ChatBody)
"""What SpecInfer's format has answers to."""


@dataclass(frozen=True, kw_only=True)
class TaskOutput:
    """A text that was written for a task, or an embedding that was made."""

    prompt: int
    """Its prompt's number in the task."""
    stats: RequestStats
    prompt_tokens: Sequence[int]
    tokens: Sequence[Token]
    rest: str
    """Text of a character whose last bytes never came."""
    marks: AnswerFormat | None
    """How reasoning and calls are marked in the answer to a conversation; None: it is a text."""
    key: str = ""
    """Ids of calls are made of it."""
    vector: Vector | None = None
    """The embedding; None: it is a text."""

    def answer(self, splits: bool) -> WholeAnswer:
        """Its parts. `splits`: reasoning is separated from the answer."""
        return whole_answer(self.marks, self.key, self.tokens, self.rest, splits)


class Results:
    """A context manager; when it is left, SpecInfer's file is made if that is wanted and all is answered."""

    def __init__(self, path: Path, format: OutputFormat, tasks: Sequence[Task], model: str) -> None:
        """`model`: its name in responses. Raises UsageError for a file that cannot be gone on with, or written."""
        self._path, self._format, self._tasks, self._model = path, format, tasks, model
        self._lines_path = path if format == "openai" else path.with_name(path.name + _PART)
        if format == "specinfer" and path.exists() and not self._lines_path.exists():
            raise UsageError(f"{path} exists: name another file for the answers, or remove it")
        others = [task for task in tasks if task.body is not None and not isinstance(task.body, _OF_SPECINFER)]
        if format == "specinfer" and others:
            raise UsageError(
                f"custom_id {others[0].custom_id}: SpecInfer's format is for /v1/completions and "
                "/v1/chat/completions; leave out ",
                Setting("output_format"),
            )
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file: name one for the answers, which are read again when a job goes on")
        self._answered: dict[str, dict[str, Any]] = {}
        """What the file has, by the tasks' ids; for SpecInfer's format the answers, too."""
        try:
            self._take_up()
            self._file = self._lines_path.open("ab")
        except OSError as e:
            raise UsageError(f"{self._lines_path}: cannot write the answers: {e.strerror}") from e
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UsageError(
                f"another job is writing its answers to {self._lines_path}: name another file, or wait for its end"
            ) from None
        except OSError:
            pass  # a file system without locks
        self.n_failed = 0
        """Tasks that have an error instead of an answer."""

    @property
    def left(self) -> list[Task]:
        """Tasks without an answer, in the order of their keys: prompts that begin alike follow each other."""
        return sorted((task for task in self._tasks if task.id not in self._answered), key=lambda task: task.key)

    @property
    def n_answered(self) -> int:
        """Tasks that have an answer."""
        return len(self._answered)

    def answer(self, task: Task, texts: Sequence[TaskOutput]) -> None:
        """Write an answer. Raises RunError."""
        response = {"status_code": 200, "request_id": task.id, "body": body_of(task, self._model, texts)}
        entry: dict[str, Any] = {"id": task.id, "custom_id": task.custom_id, "response": response, "error": None}
        if self._format == "specinfer":
            entry["token_ids"] = [[*text.prompt_tokens, *(token.id for token in text.tokens)] for text in texts]
        self._write(entry)
        self._note(entry)

    def fail(self, task: Task, message: str) -> None:
        """Write why there is no answer. Raises RunError."""
        error = {"code": "invalid_request", "message": message}
        self._write({"id": task.id, "custom_id": task.custom_id, "response": None, "error": error})
        self.n_failed += 1

    def _write(self, entry: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()
        except OSError as e:
            raise RunError(f"{self._lines_path}: cannot write the answers: {e.strerror}") from e

    def _note(self, entry: dict[str, Any]) -> None:
        """It is answered. What the answer is, only SpecInfer's file needs once more."""
        self._answered[entry["id"]] = entry if self._format == "specinfer" else {}

    def _take_up(self) -> None:
        """Read what is there, and leave out what is no answer. Raises UsageError for answers to other prompts."""
        if not self._lines_path.exists():
            return
        data = self._lines_path.read_bytes()
        known, kept = {task.id for task in self._tasks}, []
        for line in data.split(b"\n"):
            entry = _entry(line)
            if entry is None or entry["id"] in self._answered:
                continue
            if entry["id"] not in known:
                raise UsageError(
                    f"{self._lines_path} has an answer to another prompt (custom_id {entry.get('custom_id')}): "
                    "name another file, or remove it"
                )
            self._note(entry)
            kept.append(line + b"\n")
        if (whole := b"".join(kept)) != data:
            if data and not kept and b'"batch_req_' not in data:
                raise UsageError(f"{self._lines_path} exists, and has no answers in it: name another file")
            own = self._lines_path.with_name(self._lines_path.name + ".new")
            own.write_bytes(whole)
            os.replace(own, self._lines_path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # all was flushed
            self._file.close()
        if kind is None and self._format == "specinfer" and self.n_answered + self.n_failed == len(self._tasks):
            self._write_specinfer()

    def _write_specinfer(self) -> None:
        """As SpecInfer writes them: latency in microseconds, runs of the target, tokens, prompt and text."""
        parts = []
        for task in self._tasks:
            if (entry := self._answered.get(task.id)) is None or not isinstance(task.body, _OF_SPECINFER):
                continue
            body, prompts = entry["response"]["body"], task.body.prompts
            choices, timing = body["choices"], body["timings"]
            n_steps = body["usage"]["completion_tokens"] - timing.get("draft_n_accepted", 0)
            for i, (choice, tokens) in enumerate(zip(choices, entry["token_ids"], strict=True)):
                prompt = prompts[i * len(prompts) // len(choices)]
                text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
                parts += [
                    f"end-to-end latency: {(timing['prompt_ms'] + timing['predicted_ms']) * 1000:.3f}",
                    f"num decoding steps: {n_steps}",
                    f"token IDs: {','.join(map(str, tokens))}",
                    (prompt if isinstance(prompt, str) else "") + text,
                ]
        try:
            self._path.write_bytes("".join(part + "\n" for part in parts).encode("utf-8", "surrogateescape"))
            if not self.n_failed:
                self._lines_path.unlink()
        except OSError as e:
            raise RunError(f"{self._path}: cannot write the answers: {e.strerror}") from e


def _entry(line: bytes) -> dict[str, Any] | None:
    """An answer; None for what is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_answer = isinstance(entry, dict) and isinstance(entry.get("id"), str) and isinstance(entry.get("response"), dict)
    return entry if is_answer else None


def body_of(task: Task, model: str, texts: Sequence[TaskOutput]) -> dict[str, Any]:
    """A response of OpenAI's API to a task."""
    match task.body:
        case EmbeddingBody() as body:
            vectors = [text.vector for text in texts if text.vector is not None]
            return body.answer(model, vectors, sum(text.stats.n_prompt for text in texts))
        case ResponsesBody() as body:
            return _response(task.id, body, model, texts[0])
        case body:
            n_best = body.n_best_probs if body is not None else None
            kind = CompletionChoices if texts[0].marks is None else ChatChoices
            splits = body is None or body.reasoning_format != "none"
            return kind(model, n_best, task.id).whole(texts, splits)


def _response(identity: str, body: ResponsesBody, model: str, text: TaskOutput) -> dict[str, Any]:
    assert text.marks is not None  # it is a conversation's
    writer, parser = ResponseWriter(body, model), AnswerParser(text.marks, identity, body.reasoning_format != "none")
    parts = [(parser.feed(text.marks.text_of(token.id, token.text)), [token]) for token in text.tokens]
    parts.append(([*parser.feed(text.rest), *parser.finish()], []))
    for events, tokens in parts:
        for _ in writer.add(events, tokens):  # a stream's events
            pass
    for _ in writer.end(text.stats):
        pass
    return {**writer.whole, "timings": timings(text.stats)}
