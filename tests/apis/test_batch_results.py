"""The output file of batches, and interrupted jobs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from ggpipe.apis.batch_results import OutputFormat, Results, TaskOutput, body_of
from ggpipe.apis.batch_tasks import Task, read_tasks
from ggpipe.core.request import Finish, Token
from ggpipe.errors import UsageError
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.answer import AnswerFormat
from ggpipe.text.chat.reasoning import ReasoningFormat


def tasks_of(folder: Path, text: str = "b\na\nc\n") -> list[Task]:
    (folder / "in").write_text(text)
    return read_tasks(folder / "in", None, lambda _: None)


def answered(text: str = "one", marks: AnswerFormat | None = None) -> list[TaskOutput]:
    stats = RequestStats(n_prompt=2, arrived=1.0, token_times=[1.5, 2.5], finish=Finish.LENGTH)
    tokens = [Token(5, text), Token(6, "!")]
    return [TaskOutput(prompt=0, stats=stats, prompt_tokens=(7, 8), tokens=tokens, rest="", marks=marks)]


def results(folder: Path, tasks: list[Task], format: OutputFormat = "openai") -> Results:
    return Results(folder / "out", format, tasks, "m.gguf")


def entries(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "out").read_text().splitlines()]


def test_tasks_are_left_in_the_order_of_their_prompts(tmp_path: Path) -> None:
    with results(tmp_path, tasks_of(tmp_path)) as found:
        assert [task.custom_id for task in found.left] == ["2", "1", "3"]


def test_an_entry(tmp_path: Path) -> None:
    tasks = tasks_of(tmp_path)
    with results(tmp_path, tasks) as found:
        found.answer(tasks[0], answered())
        found.fail(tasks[1], "too long")
        assert (found.n_answered, found.n_failed) == (1, 1)
    answer, failure = entries(tmp_path)
    assert (answer["custom_id"], answer["error"], failure["custom_id"], failure["response"]) == ("1", None, "2", None)
    assert failure["error"] == {"code": "invalid_request", "message": "too long"}
    response = answer["response"]
    assert isinstance(response, dict)
    body = response["body"]
    assert body["choices"] == [{"index": 0, "logprobs": None, "finish_reason": "length", "text": "one!"}]
    assert body["usage"]["total_tokens"] == 4
    assert (body["timings"]["prompt_ms"], body["timings"]["predicted_per_second"]) == (500, 1.0)


def test_a_conversations_entry(tmp_path: Path) -> None:
    (task, *_) = tasks_of(tmp_path)
    marks = AnswerFormat(reasoning=ReasoningFormat(begins=("<think>",), ends=("</think>",)))
    with results(tmp_path, [task]) as found:
        found.answer(task, answered("<think>well</think>yes", marks))
    (entry,) = entries(tmp_path)
    (choice,) = entry["response"]["body"]["choices"]  # type: ignore[index]
    assert choice["message"] == {"role": "assistant", "content": "yes!", "reasoning_content": "well"}


def task_of(folder: Path, url: str, body: dict[str, object]) -> Task:
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    (task,) = tasks_of(folder, json.dumps(line))
    assert not task.error
    return task


def test_a_response(tmp_path: Path) -> None:
    task = task_of(tmp_path, "/v1/responses", {"input": "Hello", "max_output_tokens": 2})
    marks = AnswerFormat(reasoning=ReasoningFormat(begins=("<think>",), ends=("</think>",)))
    body = body_of(task, "m", answered("<think>well</think>", marks))
    assert (body["object"], body["status"], body["incomplete_details"]) == (
        "response", "incomplete", {"reason": "max_output_tokens"},
    )  # fmt: skip
    thought, message = body["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "well")
    assert (message["content"][0]["text"], message["status"]) == ("!", "incomplete")
    assert (body["usage"]["output_tokens"], body["usage"]["output_tokens_details"]) == (2, {"reasoning_tokens": 1})
    task = task_of(tmp_path, "/v1/responses", {"input": "Hello", "reasoning_format": "none"})
    (message,) = body_of(task, "m", answered("<think>well</think>", marks))["output"]
    assert message["content"][0]["text"] == "<think>well</think>!"


def test_embeddings(tmp_path: Path) -> None:
    task = task_of(tmp_path, "/v1/embeddings", {"input": ["a", "b"]})
    (one,) = answered()
    texts = [dataclasses.replace(one, vector=np.array([0.5, i], np.float32)) for i in range(2)]
    body = body_of(task, "m", texts)
    assert [(found["index"], found["embedding"]) for found in body["data"]] == [(0, [0.5, 0]), (1, [0.5, 1])]
    assert body["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    with pytest.raises(UsageError, match="custom_id a: SpecInfer's format is for"):
        Results(tmp_path / "out", "specinfer", [task], "m")


def test_several_texts_are_choices(tmp_path: Path) -> None:
    body = body_of(tasks_of(tmp_path)[0], "m", [*answered("one"), *answered("two")])
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "one!"), (1, "two!")]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (2, 4)


@pytest.mark.parametrize("cut", [b"", b'{"id": "batch_re', b'{"id": "batch_req_9", "response": {"a"', b"\n\n"])
def test_an_interrupted_job_goes_on(tmp_path: Path, cut: bytes) -> None:
    tasks = tasks_of(tmp_path)
    with results(tmp_path, tasks) as found:
        found.answer(tasks[1], answered())
        found.fail(tasks[2], "try again")
    before = (tmp_path / "out").read_bytes().splitlines(keepends=True)[0]
    with (tmp_path / "out").open("ab") as file:
        file.write(cut)
    with results(tmp_path, tasks) as found:
        assert (tmp_path / "out").read_bytes() == before
        assert (found.n_answered, [task.custom_id for task in found.left]) == (1, ["1", "3"])
        for task in found.left:
            found.answer(task, answered())
    assert [entry["custom_id"] for entry in entries(tmp_path)] == ["2", "1", "3"]
    with results(tmp_path, tasks) as found:
        assert found.left == []
    assert len(entries(tmp_path)) == 3


@pytest.mark.parametrize(("format", "is_kept"), [("openai", False), ("specinfer", True)])
def test_only_specinfers_format_keeps_answers_in_memory(tmp_path: Path, format: OutputFormat, is_kept: bool) -> None:
    tasks = tasks_of(tmp_path)
    for n in (1, 2):  # the second job continues the file of the first
        with results(tmp_path, tasks, format) as own:
            own.answer(own.left[0], answered())
            assert own.n_answered == n
            assert [bool(entry) for entry in own._answered.values()] == [is_kept] * n


def test_two_jobs_at_a_time_do_not_share_a_file(tmp_path: Path) -> None:
    with results(tmp_path, []), pytest.raises(UsageError, match=r"another job is writing to .*out"):
        results(tmp_path, [])
    results(tmp_path, [])


def test_answers_to_other_prompts_stay(tmp_path: Path) -> None:
    tasks = tasks_of(tmp_path)
    with results(tmp_path, tasks) as found:
        found.answer(tasks[1], answered())
    with pytest.raises(UsageError, match=r"has an answer to another prompt \(custom_id 2\)"):
        results(tmp_path, tasks_of(tmp_path, "b\nother\nc\n"))
    assert len(entries(tmp_path)) == 1


def test_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("my thesis")
    with pytest.raises(UsageError, match="contains no answers"):
        results(tmp_path, tasks_of(tmp_path))
    assert (tmp_path / "out").read_text() == "my thesis"
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", Path("/dev/full")):
        with pytest.raises(UsageError, match="is not a regular file"):
            Results(path, "openai", tasks_of(tmp_path), "m")
    with pytest.raises(UsageError, match="cannot write the answers: No such file"):
        Results(tmp_path / "none" / "out", "openai", tasks_of(tmp_path), "m")


def test_specinfers_file_is_written_when_all_is_answered(tmp_path: Path) -> None:
    tasks = tasks_of(tmp_path)
    with results(tmp_path, tasks, "specinfer") as found:
        found.answer(tasks[1], answered())
    assert not (tmp_path / "out").exists()
    with results(tmp_path, tasks, "specinfer") as found:
        assert found.n_answered == 1
        for task in found.left:
            found.answer(task, answered("two"))
    one = "end-to-end latency: 1500000.000\nnum decoding steps: 2\ntoken IDs: 7,8,5,6\n"
    assert (tmp_path / "out").read_text() == f"{one}btwo!\n{one}aone!\n{one}ctwo!\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
