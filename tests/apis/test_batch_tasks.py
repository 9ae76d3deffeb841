"""Files of prompts in all formats, and bad lines in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ggpipe.apis.batch_tasks import Format, Task, read_tasks
from ggpipe.apis.chat import CHAT, ChatBody
from ggpipe.apis.completions import COMPLETIONS, CompletionBody
from ggpipe.apis.embeddings import EMBEDDINGS
from ggpipe.apis.responses import RESPONSES
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prompt import Conversation
from ggpipe.errors import UsageError


def read(folder: Path, text: str, format: Format | None = None, chat: Conversation | None = None) -> list[Task]:
    path = folder / "in"
    path.write_text(text)
    return read_tasks(path, format, lambda _: chat)


def prompts(tasks: list[Task]) -> list[object]:
    return [task.body.prompts[0] if task.body is not None else None for task in tasks]


def line(custom_id: object = "a", body: Any = None, **changes: object) -> str:
    body = {"prompt": "Once"} if body is None else body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body, **changes})


def test_formats_are_found_in_the_content(tmp_path: Path) -> None:
    assert prompts(read(tmp_path, "Once\n\n There \r\n[not a list\n")) == ["Once", " There ", "[not a list"]
    assert prompts(read(tmp_path, ' ["Once", "There\\n"]\n')) == ["Once", "There\n"]
    assert prompts(read(tmp_path, line())) == ["Once"]
    assert prompts(read(tmp_path, "[not a list\nOnce")) == ["[not a list", "Once"]
    assert prompts(read(tmp_path, '["Once"]', "lines")) == ['["Once"]']


def test_names(tmp_path: Path) -> None:
    assert [task.custom_id for task in read(tmp_path, "a\n\nb")] == ["1", "3"]
    assert [task.custom_id for task in read(tmp_path, '["a", "a"]')] == ["1", "2"]
    first, again = read(tmp_path, "a\nb"), read(tmp_path, "a\nc")
    assert first[0].id == again[0].id
    assert first[1].id != again[1].id


def test_plain_prompts_may_be_a_users_messages(tmp_path: Path) -> None:
    chat = Conversation(messages=({"role": "user", "content": "Hello"},))
    assert prompts(read(tmp_path, "Hello", chat=chat)) == [chat]


def test_bad_lines_are_errors_beside_the_others(tmp_path: Path) -> None:
    lines = [line("a"), "{bad", "5", line(5), line("a"), line("b", []), line("c", url="/v1/images"), line("d")]
    tasks = read(tmp_path, "\n".join(lines), "openai")
    assert [task.custom_id for task in tasks if task.body is not None] == ["a", "d"]
    errors = [task.error for task in tasks if task.body is None]
    assert errors[0].startswith("line 2: ")
    assert errors[1:] == [
        "line 3: must be an object",
        "line 4: custom_id must be a string",
        "custom_id a occurs twice",
        "line 6: body must be an object",
        f"line 7: url must be one of {COMPLETIONS}, {CHAT}, {RESPONSES}, {EMBEDDINGS}, got '/v1/images'",
    ]
    tasks = read(tmp_path, '["a", 3, ""]')
    assert [task.error for task in tasks] == ["", "must be a string, got 3", 'must be a string, got ""']


@pytest.mark.parametrize("text", ["", "\n\n", "[]"])
def test_an_empty_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="contains no prompts"):
        read(tmp_path, text)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the prompts"):
        read_tasks(tmp_path / "none", None, lambda _: None)
    with pytest.raises(UsageError, match="must be a JSON list of strings"):
        read(tmp_path, "Once", "specinfer")


def body_error(folder: Path, url: str, body: dict[str, object]) -> str:
    """The error of a line with this body."""
    (task,) = read(folder, line(body=body, url=url), "openai")
    return task.error


def test_settings_of_a_body(tmp_path: Path) -> None:
    body = {"prompt": [5, 6], "max_tokens": 7, "temperature": 0, "top_k": 3, "seed": 9, "stop": "x", "model": "any",
            "logit_bias": {"5": -1}, "n": 2, "ignore_eos": True, "frequency_penalty": None, "user": "me"}  # fmt: skip
    (task,) = read(tmp_path, line(body=body))
    assert isinstance(task.body, CompletionBody)
    assert (task.body.prompts, task.body.most_tokens(5), task.body.n_choices) == ([[5, 6]], 7, 2)
    assert task.body.sampling(SamplingConfig(top_p=0.5)) == SamplingConfig(
        temp=0.0, top_k=3, seed=9, stop=("x",), logit_bias=((5, -1.0),), ignore_eos=True, top_p=0.5
    )


def test_a_conversation(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 4, "tools": [tool],
            "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
    (task,) = read(tmp_path, line(body=body, url=CHAT))
    assert isinstance(task.body, ChatBody)
    assert task.body.prompts == [
        Conversation(
            messages=({"role": "user", "content": "Hello"},), tools=(tool,), further={"enable_thinking": False}
        )
    ]


def test_responses_and_embeddings(tmp_path: Path) -> None:
    response = {"model": "any", "input": "Hello", "instructions": "Be brief.", "max_output_tokens": 4, "store": False}
    texts = {"model": "any", "input": ["a", "b"], "encoding_format": "float"}
    tasks = read(
        tmp_path, f"{line('r', response, url=RESPONSES)}\n{line('e', texts, url=EMBEDDINGS)}"
    )  # fmt: skip
    assert [task.error for task in tasks] == ["", ""]
    ((conversation,), found) = prompts_of_all(tasks)
    assert isinstance(conversation, Conversation)
    assert [message["content"] for message in conversation.messages] == ["Be brief.", "Hello"]
    assert found == ["a", "b"]


def prompts_of_all(tasks: list[Task]) -> list[list[object]]:
    return [[*task.body.prompts] for task in tasks if task.body is not None]


@pytest.mark.parametrize(
    ("url", "body", "message"),
    [
        (RESPONSES, {"input": "a", "background": True}, "`background` is not supported: leave it out"),
        (RESPONSES, {"input": []}, "`input` is empty: give a string or items"),
        (EMBEDDINGS, {}, "`input` is missing"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "`encoding_format`: invalid enum value 'int8'"),
        (EMBEDDINGS, {"input": "a", "temperature": 1}, "body.temperature is not supported"),
    ],
)
def test_bad_bodies_of_these(tmp_path: Path, url: str, body: dict[str, object], message: str) -> None:
    assert body_error(tmp_path, url, body) == f"line 1: {message}"


def test_several_prompts_in_a_line(tmp_path: Path) -> None:
    (task,) = read(tmp_path, line(body={"prompt": ["a", "b"], "n": 3}))
    assert task.body is not None
    assert (task.body.prompts, task.key) == (["a", "b"], "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 1.5}, "`max_tokens`: expected `int | null`, got `float`"),
        ({"max_tokens": -3}, "`max_tokens`: expected `int` >= -1"),
        ({"n": 0}, "`n`: expected `int` >= 1"),
        ({"suffix": "x"}, "`suffix` is not supported: leave it out"),
        ({"temperature": float("nan")}, "`temperature` must be a finite number, got nan"),
        ({"max_tokenz": 3}, "body.max_tokenz is not supported"),
        ({"prompt": None}, "`prompt`: expected `str | object | array`, got `null`"),
    ],
)
def test_bad_bodies(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    assert body_error(tmp_path, COMPLETIONS, {"prompt": "Once", **changes}) == f"line 1: {message}"


def test_prompts_that_begin_alike_are_next_to_each_other(tmp_path: Path) -> None:
    tasks = read(tmp_path, "Be short. A\nHello\nBe short. B\n")
    assert [task.custom_id for task in sorted(tasks, key=lambda task: task.key)] == ["1", "3", "2"]
