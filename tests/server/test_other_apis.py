"""`/v1/responses` and `/v1/messages` with the official clients, and the progress of prompts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from support.servers import Serving, server

KEY = "right"
HELLO = "Tell me of a king."
THINKS = 'root ::= "<think>He is old.</think>Once upon a time"'
SCHEMA = {"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"], "additionalProperties": False}


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with server(
        "--mpi-layer-split", "0.5,0.5", "-c", "8192", "-np", "8", "--alias", "tales", "--api-key", KEY, "--metrics",
        "--max-waiting", "16", "-ub", "64",
    ) as own:  # fmt: skip
        own.wait_until_ready()
        yield own


# /v1/responses


def test_a_response_whole_and_streamed_is_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "input": HELLO, "instructions": "Be brief.", "max_output_tokens": 12}
    asked |= {"temperature": 0.7, "extra_body": {"seed": 3, "ignore_eos": True}}
    whole = client.responses.create(**asked)
    assert (whole.status, whole.model, whole.instructions) == ("incomplete", "tales", "Be brief.")
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12
    assert whole.usage.total_tokens == whole.usage.input_tokens + 12
    assert whole.output_text
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert last.response.usage.input_tokens_details.cached_tokens > 0


def test_reasoning_of_a_response_is_an_item(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "", "input": HELLO, "extra_body": {"grammar": THINKS}}
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert (whole.output_text, whole.status) == ("Once upon a time", "completed")
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    with client.responses.stream(model="", input=HELLO, extra_body={"grammar": THINKS}) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_response()
    assert "response.reasoning_text.delta" in kinds
    assert found.output[0].to_dict()["content"] == [{"type": "reasoning_text", "text": "He is old."}]
    # the answer is part of the next input
    said: Any = [*(item.to_dict() for item in found.output), {"role": "user", "content": "Go on."}]
    again = client.responses.create(model="", max_output_tokens=3, input=said)
    assert again.output_text


def test_a_response_is_held_to_a_schema_and_has_probabilities(client: openai.OpenAI) -> None:
    whole = client.responses.create(
        model="", input=[{"role": "user", "content": [{"type": "input_text", "text": HELLO}]}], max_output_tokens=60,
        text={"format": {"type": "json_schema", "name": "king", "schema": SCHEMA}},
        include=["message.output_text.logprobs"], top_logprobs=2,
    )  # fmt: skip
    assert json.loads(whole.output_text)["age"] in (1, 2)
    (message,) = whole.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs
    assert len(part.logprobs[0].top_logprobs) == 2


def test_functions_are_called_in_responses(client: openai.OpenAI) -> None:
    function: Any = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
    asked: dict[str, Any] = {"model": "", "input": HELLO, "tools": [function], "tool_choice": "required"}
    asked |= {"extra_body": {"seed": 1}, "parallel_tool_calls": False, "max_output_tokens": 80}
    (call,) = client.responses.create(**asked).output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)["age"] in (1, 2)) == ("look", True)
    with client.responses.stream(**asked) as stream:
        parts = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert "".join(parts) == streamed.arguments == call.arguments
    given = {"type": "function_call_output", "call_id": streamed.call_id, "output": "He is one."}
    said: Any = [{"role": "user", "content": HELLO}, streamed.to_dict(), given]
    assert client.responses.create(model="", input=said, tools=[function], max_output_tokens=3).output


def test_mistakes_in_responses_are_named(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "", "input": HELLO}
    for changes, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}}, "text.format"),
        ({"background": True}, "background"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as wrong:
            client.responses.create(**asked | changes)
        assert wrong.value.param == param


# /v1/messages


def test_a_message_whole_and_streamed_is_the_same(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "any", "max_tokens": 12, "system": "Be brief."}
    own = {"seed": 3, "ignore_eos": True, "temperature": 0.7}
    asked |= {"messages": [{"role": "user", "content": HELLO}], "extra_body": own}
    whole = claude.messages.create(**asked)
    assert (whole.role, whole.model, whole.stop_reason) == ("assistant", "tales", "max_tokens")
    (block,) = whole.content
    assert block.type == "text"
    assert whole.usage.output_tokens == 12
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        found = stream.get_final_message()
    assert text == block.text
    assert (found.stop_reason, found.content[0].to_dict()) == (whole.stop_reason, block.to_dict())
    assert found.usage.output_tokens == 12
    n_read = found.usage.cache_read_input_tokens
    assert n_read
    del asked["max_tokens"], asked["extra_body"]
    assert claude.messages.count_tokens(**asked).input_tokens == found.usage.input_tokens + n_read


def test_thinking_is_a_block(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "", "max_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    asked |= {"messages": [{"role": "user", "content": HELLO}], "extra_body": {"grammar": THINKS}}
    whole = claude.messages.create(**asked)
    thinking, text = whole.content
    assert (thinking.type, text.type, whole.stop_reason) == ("thinking", "text", "end_turn")
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_message()
    assert [block.to_dict() for block in found.content] == [block.to_dict() for block in whole.content]
    assert (kinds[0], kinds[-1], kinds.count("content_block_stop")) == ("message_start", "message_stop", 2)
    said: Any = [
        *asked["messages"],
        {"role": "assistant", "content": [block.to_dict() for block in found.content]},
        {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
    ]
    again = claude.messages.create(model="", max_tokens=3, messages=said)
    assert again.content


def test_tools_are_used_in_messages(claude: anthropic.Anthropic) -> None:
    tool = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
    asked: dict[str, Any] = {"model": "", "max_tokens": 80, "messages": [{"role": "user", "content": HELLO}]}
    asked |= {"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    asked["extra_body"] = {"seed": 1}
    whole = claude.messages.create(**asked)
    (use,) = whole.content
    assert use.type == "tool_use"
    assert (whole.stop_reason, use.name, use.input["age"] in (1, 2)) == ("tool_use", "look", True)
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert (streamed.name, streamed.input) == (use.name, use.input)
    assert "input_json" in kinds
    result = {"type": "tool_result", "tool_use_id": streamed.id, "content": "He is one."}
    answered = [{"role": "assistant", "content": [streamed.to_dict()]}, {"role": "user", "content": [result]}]
    del asked["tool_choice"]
    assert claude.messages.create(**asked | {"messages": asked["messages"] + answered, "max_tokens": 3}).content


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic) -> None:
    held = {"grammar": 'root ::= "one two three four"'}
    found = claude.messages.create(
        model="", max_tokens=30, messages=[{"role": "user", "content": HELLO}], stop_sequences=["four", "three", "x"],
        extra_body=held,
    )  # fmt: skip
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "three")
    assert found.content[0].to_dict() == {"type": "text", "text": "one two "}


def test_a_message_is_held_to_a_schema(claude: anthropic.Anthropic) -> None:
    found = claude.messages.create(
        model="", max_tokens=60, messages=[{"role": "user", "content": HELLO}],
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )  # fmt: skip
    assert json.loads(str(found.content[0].to_dict()["text"]))["age"] in (1, 2)


def test_errors_have_anthropics_form(serving: Serving, claude: anthropic.Anthropic) -> None:
    picture: Any = [{"role": "user", "content": [{"type": "image"}]}]
    hello: Any = [{"role": "user", "content": HELLO}]
    with pytest.raises(anthropic.BadRequestError) as wrong:
        claude.messages.create(model="", max_tokens=5, messages=hello, extra_body={"temperature": "warm"})
    assert wrong.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": wrong.value.body["error"]["message"]},  # type: ignore[index]
    }
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]"):
        claude.messages.create(model="", max_tokens=5, messages=picture)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        claude.with_options(api_key="wrong").messages.create(model="", max_tokens=5, messages=hello)
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    status, answer, _ = serving.ask("GET", "/v1/messages", headers={"X-Api-Key": KEY})
    assert (status, answer["type"]) == (405, "error")
    with pytest.raises(anthropic.BadRequestError, match="context"):
        claude.messages.create(model="", max_tokens=5, messages=[{"role": "user", "content": "tale " * 9000}])


def test_clients_that_leave_make_room(serving: Serving, client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    endless = {"ignore_eos": True}
    with client.responses.create(model="", input=HELLO, stream=True, extra_body=endless) as stream:
        next(iter(stream))
    with claude.messages.create(
        model="", max_tokens=6000, messages=[{"role": "user", "content": HELLO}], stream=True, extra_body=endless
    ) as messages:
        next(iter(messages))

    def is_idle() -> bool:
        _, text, _ = serving.ask("GET", "/metrics", headers={"X-Api-Key": KEY})
        return "llamacpp:requests_processing 0.0" in str(text)

    serving.wait_for(is_idle)


def test_sixteen_at_a_time(serving: Serving) -> None:
    async def respond(own: openai.AsyncOpenAI) -> str:
        stream = await own.responses.create(
            model="", input=HELLO, max_output_tokens=8, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def message(own: anthropic.AsyncAnthropic) -> str:
        async with own.messages.stream(
            model="", max_tokens=8, messages=[{"role": "user", "content": HELLO}],
            extra_body={"ignore_eos": True},
        ) as stream:  # fmt: skip
            return "".join([text async for text in stream.text_stream])

    async def all_of_them() -> list[str]:
        async with (
            openai.AsyncOpenAI(base_url=f"{serving.url}/v1", api_key=KEY, timeout=120) as one,
            anthropic.AsyncAnthropic(base_url=serving.url, api_key=KEY, timeout=120) as other,
        ):
            return await asyncio.gather(*(respond(one) if i % 2 else message(other) for i in range(16)))

    found = asyncio.run(all_of_them())
    assert len(found) == 16
    assert all(found)


# Progress


def progress(serving: Serving, path: str, body: dict[str, object]) -> list[dict[str, int]]:
    """A stream's progress events; checks that all later events have text."""
    own = {"cache_prompt": False, **body, "stream": True, "return_progress": True}
    status, text, _ = serving.ask("POST", path, own, {"X-Api-Key": KEY})
    assert status == 200, text
    lines = [line[6:] for line in str(text).splitlines() if line.startswith("data: {")]
    return [found for line in lines if (found := json.loads(line).get("prompt_progress")) is not None]


def test_progress_of_long_prompts(serving: Serving) -> None:
    long = "Once upon a time there was a king. " * 60
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}], "max_tokens": 1}),
        ("/v1/completions", {"prompt": long, "max_tokens": 1}),
        ("/completion", {"prompt": long, "n_predict": 1}),
        ("/v1/responses", {"input": long, "max_output_tokens": 1}),
    ):  # fmt: skip
        found = progress(serving, path, body)
        assert found
        assert {"total", "cache", "processed", "time_ms"} == set(found[0])
        done = [one["processed"] for one in found]
        assert done == sorted(set(done))
        assert all(0 <= one["processed"] <= one["total"] for one in found)
        assert found[0]["processed"] == found[0]["cache"]
        assert found[-1]["processed"] == found[-1]["total"] > 200


def test_progress_of_a_prompt_that_is_nearly_cached(serving: Serving) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me of the king."}], "max_tokens": 8, "cache_prompt": True}
    for _ in range(2):
        first, *others = progress(serving, "/v1/chat/completions", body)
    assert 0 < first["cache"] == first["processed"] < first["total"]
    assert others[-1] == {**first, "processed": first["total"], "time_ms": others[-1]["time_ms"]}
