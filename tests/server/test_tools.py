"""Tool calls over HTTP, with OpenAI's client, and in Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.chat_model import add_tokens
from support.commands import TARGET
from support.servers import Serving, server

import ggpipe

TEMPLATE = Path(__file__).parents[1] / "text" / "chat" / "templates" / "mistral.jinja"
HELLO: Any = [{"role": "user", "content": "Tell me of a king."}]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["hall", "tower"]}, "days": {"enum": [1, 2]}},
            "required": ["place", "days"],
        },
    },
}
TOOLS: Any = [LOOK, {"type": "function", "function": {"name": "wait"}}]
NAMED: Any = {"type": "function", "function": {"name": "look"}}
SHORT: dict[str, Any] = {"model": "", "messages": HELLO, "tools": TOOLS, "max_tokens": 300, "seed": 1}
ONE: dict[str, Any] = {**SHORT, "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mark is a special token, which has no text when it is generated."""
    path = tmp_path_factory.mktemp("tools") / "chat.gguf"
    return add_tokens(TARGET, path, ("[TOOL_CALLS]",), like=14, chat_template=TEMPLATE.read_text())


@pytest.fixture(scope="module")
def serving(model: Path) -> Iterator[Serving]:
    with server("-m", str(model), "-c", "4096", "-np", "4", "--alias", "tales") as own:
        own.wait_until_ready()
        yield own


def is_valid(arguments: str) -> bool:
    found = json.loads(arguments)
    return set(found) == {"place", "days"} and found["place"] in ("hall", "tower") and found["days"] in (1, 2)


def test_a_call_whole_and_streamed_is_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ONE, tool_choice=NAMED).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "look"
    assert is_valid(call.function.arguments)
    assert len(call.id) == 9  # as this family's template requires
    chunks = list(client.chat.completions.create(**ONE, tool_choice=NAMED, stream=True))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[-1].finish_reason == "tool_calls"
    assert not any(choice.delta.content for choice in choices)
    begun, *parts = [one for choice in choices for one in choice.delta.tool_calls or ()]
    assert (begun.index, begun.type, len(begun.id or "")) == (0, "function", 9)
    assert begun.function is not None
    assert (begun.function.name, begun.function.arguments) == ("look", "")
    assert all(part.id is None and part.function is not None and part.function.name is None for part in parts)
    assert "".join(part.function.arguments or "" for part in parts if part.function) == call.function.arguments
    assert parts  # their number depends on how many tokens arrive at once


def test_functions_are_tools(client: openai.OpenAI) -> None:
    """OpenAI's form of tools until 2023."""
    old: dict[str, Any] = {name: value for name, value in ONE.items() if name != "tools"}
    old |= {"functions": [LOOK["function"]], "function_call": {"name": "look"}}
    assert client.chat.completions.create(**old).choices[0].message.tool_calls


def test_required_calls_and_several_texts(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(**ONE, tool_choice="required", n=3, temperature=1.5)
    for choice in chat.choices:
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name in ("look", "wait")
    assert len({choice.message.tool_calls[0].id for choice in chat.choices if choice.message.tool_calls}) == 3
    several = client.chat.completions.create(**{**SHORT, "max_tokens": 60}, tool_choice="required").choices[0]
    assert several.message.tool_calls


def test_a_special_token_begins_a_call(serving: Serving, client: openai.OpenAI) -> None:
    (mark,) = serving.ask("POST", "/tokenize", {"content": "[TOOL_CALLS]"})[1]["tokens"]
    choice = client.chat.completions.create(**ONE, logit_bias={str(mark): 100}).choices[0]
    assert choice.message.tool_calls
    assert choice.finish_reason in ("tool_calls", "length")
    text = client.chat.completions.create(**{**ONE, "max_tokens": 3}, logit_bias={str(mark): -100}).choices[0]
    assert (text.message.tool_calls, text.finish_reason) == (None, "length")
    assert text.message.content
    none = client.chat.completions.create(**{**ONE, "max_tokens": 3}, tool_choice="none").choices[0]
    assert none.message.tool_calls is None


def test_a_result_goes_back(serving: Serving, client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**ONE, tool_choice=NAMED).choices[0].message
    (call,) = first.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": '"a king"'}
    messages = [*HELLO, first.model_dump(exclude_none=True), result, {"role": "user", "content": "And?"}]
    again = client.chat.completions.create(model="", messages=messages, tools=TOOLS, max_tokens=4)
    assert again.usage is not None
    status, answer, _ = serving.ask("POST", "/apply-template", {"messages": messages, "tools": TOOLS})
    assert status == 200
    assert f'"id": "{call.id}"' in answer["prompt"]
    assert '"name": "look", "arguments": {"place"' in answer["prompt"]
    assert f'"call_id": "{call.id}"' in answer["prompt"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "leap"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "extra_body": {"grammar": 'root ::= "a"'}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [LOOK, {"type": "function"}]}, "tools[1]"),
    ],
)
def test_errors_name_the_field(client: openai.OpenAI, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**{**ONE, **changes})
    assert wrong.value.param == field


def test_from_python(model: Path) -> None:
    with ggpipe.Engine(model, n_ctx=4096, threads=1) as engine:
        one = {"tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False}
        answer = engine.chat(HELLO, **one, n_predict=300, seed=1).wait()
        (call,) = answer.tool_calls
        assert (call.name, is_valid(call.arguments)) == ("look", True)
        assert answer.message["tool_calls"][0]["id"] == call.id == answer.tool_calls[0].id
        assert (answer.content, answer.message["content"]) == ("", None)
        result = {"role": "tool", "tool_call_id": call.id, "content": '"a king"'}
        assert engine.chat([*HELLO, answer.message, result, *HELLO], tools=TOOLS, n_predict=3).wait().text
        with pytest.raises(ggpipe.UsageError, match="tool_choice"):
            engine.chat(HELLO, tool_choice="required")
