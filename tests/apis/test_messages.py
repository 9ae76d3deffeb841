"""Anthropic's messages: content blocks as conversations, and the blocks of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from ggpipe.apis.batch_results import TaskOutput
from ggpipe.apis.decode import convert
from ggpipe.apis.messages import MessagesBody, MessageWriter
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.request import Finish
from ggpipe.errors import BodyError, SettingError
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.tools.events import Arguments, CallBegun, CallEnded, Reasoning, Text

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I look.", "signature": ""},
            {"type": "text", "text": "Well"},
            {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "And?"},
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]},
        ],
    },
]


def body(**changes: object) -> MessagesBody:
    return convert(MessagesBody, {"messages": MESSAGES, "max_tokens": 5, **changes})


def test_a_text_has_a_bound() -> None:
    assert body(max_tokens=None).most_tokens(-1) == 4096  # as in llama-server; Anthropic requires the field
    assert body(max_tokens=None).most_tokens(7) == 7  # -n of the server


def test_blocks_become_messages() -> None:
    tools = [{"name": "look", "description": "Looks", "input_schema": {"type": "object"}}, {"type": "bash_1"}]
    thinking = {"type": "enabled", "budget_tokens": 9}
    own = body(system=[{"type": "text", "text": "Be brief."}], tools=tools, thinking=thinking, stop_sequences=["x"])
    (conversation,) = own.prompts
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    assert list(conversation.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Well", "reasoning_content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "look", "parameters": {"type": "object"}, "description": "Looks"}
    assert list(conversation.tools) == [{"type": "function", "function": function}]
    assert conversation.further == {"enable_thinking": True}
    assert (own.stop, own.most_tokens(-1)) == (["x"], 5)
    assert own.sampling(SamplingConfig()).reasoning_budget == 9


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, 30),
        ({"thinking": {"type": "enabled"}}, 30),
        ({"reasoning_budget_tokens": 0, "thinking_budget_tokens": 4}, 0),
        ({"reasoning_budget_tokens": -1}, 30),
    ],
)
def test_how_long_a_model_may_think(fields: dict[str, Any], expected: int) -> None:
    assert body(**fields).sampling(SamplingConfig(reasoning_budget=30)).reasoning_budget == expected


def test_no_model_thinks_a_negative_number_of_tokens() -> None:
    with pytest.raises(BodyError, match=r"`thinking\.budget_tokens`: expected"):
        body(thinking={"type": "enabled", "budget_tokens": -3})
    with pytest.raises(SettingError, match=r"`reasoning_budget` must be"):
        body(reasoning_budget_tokens=-3).sampling(SamplingConfig())


def test_a_number_that_changes_with_each_request_is_left_out() -> None:
    first, second = (
        body(system=f"x-anthropic-billing-header: cc_version=2; cch={number};You").prompts for number in ("a5145", "b1")
    )
    assert first == second


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools[0]"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], param: str) -> None:
    with pytest.raises(BodyError) as caught:
        read(changes)
    assert caught.value.param == param


def read(changes: dict[str, object]) -> None:
    own = body(**changes)
    assert own.prompts
    own.sampling(SamplingConfig())


def output(finish: Finish) -> TaskOutput:
    stats = RequestStats(n_prompt=3, token_times=[1.0, 2.0], finish=finish)
    return TaskOutput(prompt=0, stats=stats, prompt_tokens=(), tokens=[], rest="", marks=None)


@pytest.mark.parametrize(
    ("finish", "reason"),
    [(Finish.END_OF_TEXT, "tool_use"), (Finish.LENGTH, "max_tokens")],
    ids=lambda value: str(value),
)
def test_blocks_of_an_answer(finish: Finish, reason: str) -> None:
    writer = MessageWriter("m", splits=True)
    own = output(finish)
    kinds: list[str] = []
    call = (CallBegun(0, "c1", "look"), Arguments(0, '{"at"'), Arguments(0, ": 1}"), CallEnded(0))
    for events in (
        writer.begin(own),
        writer.add(own, [Reasoning("I look."), Text("Well"), *call], ()),
        writer.end(own),
    ):
        kinds += [event["type"].removeprefix("content_") + str(event.get("index", "")) for event in events]
    assert kinds == [
        "message_start", "block_start0", "block_delta0", "block_delta0", "block_stop0", "block_start1", "block_delta1",
        "block_stop1", "block_start2", "block_delta2", "block_delta2", "block_stop2", "message_delta", "message_stop",
    ]  # fmt: skip
    message = writer.reply
    assert message["content"] == [
        {"type": "thinking", "thinking": "I look.", "signature": ""},
        {"type": "text", "text": "Well"},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},
    ]
    assert message["stop_reason"] == reason


def test_arguments_that_are_nested_too_deeply() -> None:
    writer = MessageWriter("m", splits=True)
    assert list(
        writer.add(output(Finish.LENGTH), [CallBegun(0, "c1", "look"), Arguments(0, "[" * 100_000), CallEnded(0)], ())
    )
    assert writer.reply["content"] == [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]
