"""Files of prompts in all formats, and what bad lines become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ggpipe.batch.bodies import CHAT, COMPLETIONS, ask_of
from ggpipe.batch.tasks import Format, Task, read_tasks
from ggpipe.chat.conversation import Conversation
from ggpipe.errors import UsageError
from ggpipe.sampling import SamplingConfig


def read(folder: Path, text: str, format: Format | None = None, chat: Conversation | None = None) -> list[Task]:
    path = folder / "in"
    path.write_text(text)
    return read_tasks(path, format, lambda _: chat)


def prompts(tasks: list[Task]) -> list[object]:
    return [task.ask.prompt if task.ask is not None else None for task in tasks]


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
    lines = [line("a"), "{bad", "5", line(5), line("a"), line("b", []), line("c", url="/v1/embeddings"), line("d")]
    tasks = read(tmp_path, "\n".join(lines), "openai")
    assert [task.custom_id for task in tasks if task.ask is not None] == ["a", "d"]
    errors = [task.error for task in tasks if task.ask is None]
    assert errors[0].startswith("line 2: ")
    assert errors[1:] == [
        "line 3: must be an object",
        "line 4: custom_id must be a text",
        "custom_id a occurs twice",
        "line 6: body must be an object",
        f"line 7: url must be {COMPLETIONS} or {CHAT}, got '/v1/embeddings'",
    ]
    tasks = read(tmp_path, '["a", 3, ""]')
    assert [task.error for task in tasks] == ["", "must be a text, got 3", 'must be a text, got ""']


@pytest.mark.parametrize("text", ["", "\n\n", "[]"])
def test_an_empty_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="there are no prompts in it"):
        read(tmp_path, text)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the prompts"):
        read_tasks(tmp_path / "none", None, lambda _: None)
    with pytest.raises(UsageError, match="must be a list of texts in JSON"):
        read(tmp_path, "Once", "specinfer")


def test_settings_of_a_body() -> None:
    body = {"prompt": [5, 6], "max_tokens": 7, "temperature": 0, "top_k": 3, "seed": 9, "stop": "x", "model": "any",
            "logit_bias": {"5": -1}, "n": 1, "ignore_eos": True, "frequency_penalty": None}  # fmt: skip
    ask = ask_of("POST", COMPLETIONS, body)
    assert (ask.prompt, ask.n_predict) == ((5, 6), 7)
    drawn = ask.drawn(SamplingConfig(top_p=0.5))
    assert drawn == SamplingConfig(
        temp=0.0, top_k=3, seed=9, stop=("x",), logit_bias=((5, -1.0),), ignore_eos=True, top_p=0.5
    )


def test_a_conversation() -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 4, "tools": [{"type": "f"}],
            "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
    ask = ask_of("POST", CHAT, body)
    assert ask.n_predict == 4
    assert ask.prompt == Conversation(
        messages=({"role": "user", "content": "Hello"},), tools=({"type": "f"},), further={"enable_thinking": False}
    )


def test_probabilities() -> None:
    for changes, n_probs in (({"logprobs": 3}, 3), ({"logprobs": True}, 1), ({"logprobs": True, "top_logprobs": 2}, 2)):
        ask = ask_of("POST", COMPLETIONS, {"prompt": "Once", **changes})
        assert ask.sampling == {"n_probs": n_probs}
    assert ask_of("POST", COMPLETIONS, {"prompt": "Once", "logprobs": False}).sampling == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}},
        {"json_schema": {"type": "integer"}},
        {"grammar": 'root ::= "yes"'},
    ],
)
def test_texts_that_are_held_to_a_grammar(changes: dict[str, object]) -> None:
    assert "root ::=" in ask_of("POST", COMPLETIONS, {"prompt": "Once", **changes}).sampling["grammar"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ""}, "body.prompt must be a text or a list of tokens"),
        ({"prompt": ["a", "b"]}, "body.prompt must be a text or a list of tokens"),
        ({"max_tokens": 1.5}, "body.max_tokens must be a whole number, got 1.5"),
        ({"max_tokens": -3}, "body.max_tokens must be a number of tokens, got -3"),
        ({"temperature": "hot"}, 'body.temperature must be a number, got "hot"'),
        ({"top_k": True}, "body.top_k must be a whole number, got true"),
        ({"ignore_eos": 1}, "body.ignore_eos must be true or false, got 1"),
        ({"n": 2}, "body.n must be 1 here"),
        ({"stop": [1]}, "body.stop must be a text or a list of texts"),
        ({"logit_bias": {"a": 1}}, "body.logit_bias must be an object of tokens and biases"),
        ({"top_logprobs": 3}, "body.top_logprobs needs body.logprobs: set it to true"),
        (
            {"response_format": {"type": "xml"}},
            "body.response_format must have the type text, json_object or json_schema",
        ),
        ({"grammar": "", "json_schema": {}}, "body must have one of grammar, json_schema and response_format"),
        ({"max_tokenz": 3}, "body.max_tokenz is not known here"),
        ({"top_p": float("nan")}, "`top_p` must be a finite number, got nan"),
    ],
)
def test_bad_bodies(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        ask_of("POST", COMPLETIONS, {"prompt": "Once", **changes})
    assert str(caught.value) == message


def test_prompts_that_begin_alike_are_next_to_each_other(tmp_path: Path) -> None:
    tasks = read(tmp_path, "Be short. A\nHello\nBe short. B\n")
    assert [task.custom_id for task in sorted(tasks, key=lambda task: task.key)] == ["1", "3", "2"]
