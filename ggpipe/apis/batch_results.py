"""The output file of a batch: one line of JSON per answered task, in OpenAI's batch output format.

An interrupted job continues with the same file. Tasks that have an answer there are skipped, an incomplete last line is
dropped, and failed tasks are tried again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ggpipe.apis.batch_tasks import Task
from ggpipe.apis.chat import ChatBody, ChatWriter
from ggpipe.apis.completions import CompletionBody, CompletionWriter
from ggpipe.apis.embeddings import EmbeddingBody
from ggpipe.apis.replies import timings
from ggpipe.apis.responses import ResponsesBody, ResponseWriter
from ggpipe.core.request import Token
from ggpipe.errors import RunError, Setting, UsageError
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.answer import AnswerFormat
from ggpipe.text.embeddings import Vector

OutputFormat = Literal["openai", "specinfer"]

_PART = ".part"
_OF_SPECINFER = (CompletionBody, ChatBody)
"""The APIs that SpecInfer's format covers."""


@dataclass(frozen=True, kw_only=True)
class TaskOutput:
    """An output of a task, or an embedding."""

    prompt: int
    """Index of its prompt in the task."""
    stats: RequestStats
    prompt_tokens: Sequence[int]
    tokens: Sequence[Token]
    rest: str
    """Text after the last token's."""
    marks: AnswerFormat | None
    """How reasoning and tool calls are marked; None unless the output answers a conversation."""
    key: str = ""
    """Prefix of the ids of tool calls."""
    vector: Vector | None = None
    """The embedding; None for other outputs."""


class Results:
    """The output file, as a context manager. On exit, SpecInfer's format is written if it was requested and no task is
    left."""

    def __init__(self, path: Path, format: OutputFormat, tasks: Sequence[Task], model: str) -> None:
        """`model`: its name in responses. Raises UsageError for a file that cannot be continued or written."""
        self._path, self._format, self._tasks, self._model = path, format, tasks, model
        self._lines_path = path if format == "openai" else path.with_name(path.name + _PART)
        if format == "specinfer" and path.exists() and not self._lines_path.exists():
            raise UsageError(f"{path} exists: name another output file, or remove it")
        others = [task for task in tasks if task.body is not None and not isinstance(task.body, _OF_SPECINFER)]
        if format == "specinfer" and others:
            raise UsageError(
                f"custom_id {others[0].custom_id}: SpecInfer's format is for /v1/completions and "
                "/v1/chat/completions; omit ",
                Setting("output_format"),
            )
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a regular file, which the answers need: interrupted jobs read them again")
        self._answered: dict[str, dict[str, Any]] = {}
        """Entries of the file by task id; empty unless SpecInfer's format needs them."""
        try:
            self._read()
            self._file = self._lines_path.open("ab")
        except OSError as e:
            raise UsageError(f"{self._lines_path}: cannot write the answers: {e.strerror}") from e
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UsageError(
                f"another job is writing to {self._lines_path}: name another output file, or wait until it has ended"
            ) from None
        except OSError:
            pass  # a file system without locks
        self.n_failed = 0
        """Tasks that got an error instead of an answer."""

    @property
    def left(self) -> list[Task]:
        """Tasks without an answer, sorted by key: prompts with a common prefix are next to each other."""
        return sorted((task for task in self._tasks if task.id not in self._answered), key=lambda task: task.key)

    @property
    def n_answered(self) -> int:
        """Tasks with an answer."""
        return len(self._answered)

    def answer(self, task: Task, outputs: Sequence[TaskOutput]) -> None:
        """Write an answer. Raises RunError."""
        response = {"status_code": 200, "request_id": task.id, "body": body_of(task, self._model, outputs)}
        entry: dict[str, Any] = {"id": task.id, "custom_id": task.custom_id, "response": response, "error": None}
        if self._format == "specinfer":
            entry["token_ids"] = [[*one.prompt_tokens, *(token.id for token in one.tokens)] for one in outputs]
        self._write(entry)
        self._note(entry)

    def fail(self, task: Task, message: str) -> None:
        """Write an error instead of an answer. Raises RunError."""
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
        """Mark a task as answered."""
        self._answered[entry["id"]] = entry if self._format == "specinfer" else {}

    def _read(self) -> None:
        """Read the file, and rewrite it without lines that are no answers. Raises UsageError for answers to other
        prompts."""
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
                raise UsageError(f"{self._lines_path} exists and contains no answers: name another file")
            own = self._lines_path.with_name(self._lines_path.name + ".new")
            own.write_bytes(whole)
            os.replace(own, self._lines_path)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(OSError):  # everything has been flushed
            self._file.close()
        if kind is None and self._format == "specinfer" and self.n_answered + self.n_failed == len(self._tasks):
            self._write_specinfer()

    def _write_specinfer(self) -> None:
        """SpecInfer's four lines per output: latency in microseconds, target runs, tokens, prompt with output."""
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
    """The answer in a line; None if it has none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_answer = isinstance(entry, dict) and isinstance(entry.get("id"), str) and isinstance(entry.get("response"), dict)
    return entry if is_answer else None


def body_of(task: Task, model: str, outputs: Sequence[TaskOutput]) -> dict[str, Any]:
    """The response of OpenAI's API to a task."""
    body = task.body
    if isinstance(body, EmbeddingBody):
        vectors = [one.vector for one in outputs if one.vector is not None]
        return body.answer(model, vectors, sum(one.stats.n_prompt for one in outputs))
    assert body is not None  # it was answered
    splits = body.reasoning_format != "none"
    if isinstance(body, ResponsesBody):
        return {**ResponseWriter(body, model, splits).whole(outputs), "timings": timings(outputs[0].stats)}
    kind = CompletionWriter if outputs[0].marks is None else ChatWriter
    return kind(body, model, splits=splits, identity=task.id).whole(outputs)
