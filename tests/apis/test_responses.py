"""OpenAI's responses: items as conversations, and the events of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from ggpipe.apis.batch_results import TaskOutput
from ggpipe.apis.decode import convert
from ggpipe.apis.responses import ResponsesBody, ResponseWriter, messages_of
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.request import Finish, Token
from ggpipe.errors import BodyError
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.tools.events import Arguments, CallBegun, CallEnded, Reasoning, Text

TOKEN = Token(1, "")

ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It rains."}]},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
]


def test_items_become_messages() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    assert messages_of(ITEMS) == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
        {"role": "developer", "content": "Be brief."},
    ]


def test_settings() -> None:
    body = convert(
        ResponsesBody,
        {
            "input": "a", "instructions": "b", "reasoning": {"effort": "low"}, "max_output_tokens": 5,
            "text": {"format": {"type": "json_object"}}, "top_logprobs": 3,
            "include": ["message.output_text.logprobs"], "temperature": 0,
        },
    )  # fmt: skip
    (conversation,) = body.prompts
    assert [message["content"] for message in conversation.messages] == ["b", "a"]
    assert conversation.further == {"reasoning_effort": "low"}
    drawn = body.sampling(SamplingConfig())
    assert (drawn.n_probs, drawn.temp, body.most_tokens(-1)) == (3, 0, 5)
    assert (drawn.json_schema, body.schema_field) == ("{}", "text.format")


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "nobody", "content": "a"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0]"),
        ({"type": "function_call", "name": "a"}, "input[0].arguments"),
        ({"type": "function_call_output", "output": "a"}, "input[0].call_id"),
        ({"type": "item_reference", "id": "a"}, "input[0].type"),
    ],
)
def test_bad_items_are_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(BodyError) as caught:
        messages_of([item])
    assert caught.value.param == param


def writer_and_output(finish: Finish) -> tuple[ResponseWriter, TaskOutput]:
    stats = RequestStats(n_prompt=3, token_times=[1.0, 2.0], finish=finish)
    own = TaskOutput(prompt=0, stats=stats, prompt_tokens=(), tokens=[], rest="", marks=None)
    return ResponseWriter(convert(ResponsesBody, {"input": "a"}), "m", splits=True), own


def test_events_of_an_answer() -> None:
    writer, own = writer_and_output(Finish.END_OF_TEXT)
    kinds: list[str] = []
    call_parts = (CallBegun(0, "c1", "look"), Arguments(0, '{"at"'), Arguments(0, ": 1}"), CallEnded(0))
    for events in (
        writer.begin(own), writer.add(own, [Reasoning("I "), Reasoning("look.")], [TOKEN]),
        writer.add(own, [Text("Well"), *call_parts], [TOKEN]), writer.end(own),
    ):  # fmt: skip
        for event in events:
            assert event["sequence_number"] == len(kinds)
            kinds.append(event["type"].removeprefix("response."))
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    response = writer.reply
    assert [(item["type"], item["status"]) for item in response["output"]] == [
        ("reasoning", "completed"), ("message", "completed"), ("function_call", "completed"),
    ]  # fmt: skip
    call = response["output"][-1]
    assert (call["call_id"], call["name"], call["arguments"]) == ("c1", "look", '{"at": 1}')
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    writer, own = writer_and_output(Finish.LENGTH)
    for events in (writer.begin(own), writer.add(own, [Text("W")], [TOKEN]), writer.end(own)):
        assert list(events)
    assert writer.reply["status"] == writer.reply["output"][0]["status"] == "incomplete"
    assert writer.reply["incomplete_details"] == {"reason": "max_output_tokens"}
