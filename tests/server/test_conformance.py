"""OpenAI's own client, sync and async, against a server with the bundled pair on two ranks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from support.servers import DRAFT, Serving, server

KEY = "right"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me of a king."}]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with server(
        "-md", str(DRAFT), "--mpi-layer-split", "0.5,0.5", "-c", "4096", "-np", "8", "--alias", "yarns,tales",
        "--tags", "old, short",
        "--api-key", f"other,{KEY}", "--metrics",
        "--embeddings", "--pooling", "mean", "--max-waiting", "8", "--sse-ping-interval", "0.2",
    ) as own:  # fmt: skip
        own.wait_until_ready()
        yield own


def authorized(serving: Serving, method: str, path: str, body: object = None) -> tuple[int, object]:
    status, answer, _ = serving.ask(method, path, body, {"Authorization": f"Bearer {KEY}"})
    return status, answer


def test_a_chat_whole_and_streamed_is_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="any", messages=HELLO, max_tokens=12, seed=3, temperature=0.7)
    (choice,) = whole.choices
    assert (choice.message.role, choice.finish_reason, whole.model) == ("assistant", "length", "tales")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    chunks = list(
        client.chat.completions.create(
            model="any", messages=HELLO, max_tokens=12, seed=3, temperature=0.7, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens


def test_completions(client: openai.OpenAI) -> None:
    both = client.completions.create(model="", prompt=["Once upon a time", "The king"], max_tokens=8, temperature=0)
    assert [choice.index for choice in both.choices] == [0, 1]
    streamed = client.completions.create(model="", prompt="The king", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == both.choices[1].text
    several = client.completions.create(model="", prompt="The king", max_tokens=5, seed=1, n=3, temperature=2)
    assert len({choice.text for choice in several.choices}) > 1
    assert several.usage is not None
    assert several.usage.completion_tokens == 15


def test_a_stop_string_ends_a_text_and_is_not_shown(client: openai.OpenAI) -> None:
    text = client.completions.create(model="", prompt="Once upon a time", max_tokens=20, temperature=0).choices[0].text
    word = text.split()[3]
    short = client.completions.create(
        model="", prompt="Once upon a time", max_tokens=20, temperature=0, stop=[word, "never that"]
    ).choices[0]
    assert short.finish_reason == "stop"
    assert short.text == text[: text.index(word)]


def test_log_probabilities(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="", messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert [len(token.top_logprobs) for token in content] == [2, 2, 2, 2]
    assert all(token.logprob == token.top_logprobs[0].logprob for token in content)  # greedy
    assert "".join(token.token for token in content) == chat.choices[0].message.content
    streamed = client.completions.create(
        model="", prompt="The king", max_tokens=4, temperature=0, logprobs=1, stream=True
    )
    found = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices]
    assert sum(len(probs.tokens or ()) for probs in found if probs is not None) == 4


def test_none_of_the_best_log_probabilities(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "", "max_tokens": 3, "temperature": 0, "logprobs": True}
    chat = client.chat.completions.create(messages=HELLO, **asked).choices[0]
    assert chat.logprobs is not None
    assert [token.top_logprobs for token in chat.logprobs.content or ()] == [[], [], []]
    text = client.completions.create(prompt="The king", **asked | {"logprobs": 0}).choices[0]
    assert text.logprobs is not None
    assert text.logprobs.tokens is not None
    assert [list(best) for best in text.logprobs.top_logprobs or ()] == [[token] for token in text.logprobs.tokens]
    chunks = client.completions.create(prompt="The king", **asked | {"logprobs": 0}, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    offsets = [offset for part in parts if part is not None for offset in part.text_offset or ()]
    assert offsets == text.logprobs.text_offset
    assert offsets[2] > offsets[1] > 0


def test_prompts_come_before_outputs_that_echo_them(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "", "prompt": ["The king", "Once"], "max_tokens": 4, "temperature": 0}
    bare = [choice.text for choice in client.completions.create(**asked).choices]
    expected = ["The king" + bare[0], "Once" + bare[1]]
    assert [choice.text for choice in client.completions.create(**asked, echo=True).choices] == expected
    streamed = ["", ""]
    for chunk in client.completions.create(**asked, echo=True, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == expected


def test_prompts_of_llama_server(serving: Serving) -> None:
    def ask(prompt: object) -> Any:
        status, found = authorized(serving, "POST", "/completion", {"prompt": prompt, "n_predict": 3, "temperature": 0})
        assert status == 200
        return found

    one, other = ask("Once upon a time"), ask("The king")
    several = ask(["Once upon a time", {"prompt_string": "The king"}])
    assert [text["content"] for text in several] == [one["content"], other["content"]]
    _, counted = authorized(serving, "POST", "/tokenize", {"content": " upon a time"})
    assert isinstance(counted, dict)
    mixed = ask(["Once", *counted["tokens"]])
    assert (mixed["content"], mixed["tokens_evaluated"]) == (one["content"], one["tokens_evaluated"])


def test_a_compressed_body_is_refused(serving: Serving) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Encoding": "gzip"}
    status, answer, _ = serving.ask("POST", "/completion", b"\x1f\x8b", headers)
    assert (status, "error" in answer) == (415, True)


def test_a_prompt_that_is_too_long(client: openai.OpenAI, serving: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens") as wrong:
        client.completions.create(model="", prompt=[5] * 4096)
    assert wrong.value.type == "exceed_context_size_error"
    assert isinstance(wrong.value.body, dict)
    assert (wrong.value.body["n_prompt_tokens"], wrong.value.body["n_ctx"]) == (4096, 4096)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="", prompt="a" * 400_000)
    assert wrong.value.type == "exceed_context_size_error"


def test_a_text_is_held_to_a_schema(client: openai.OpenAI) -> None:
    schema: dict[str, object] = {"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"]}
    schema["additionalProperties"] = False
    chat = client.chat.completions.create(
        model="", messages=HELLO, max_tokens=40, seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "king", "schema": schema}},
    )  # fmt: skip
    assert json.loads(chat.choices[0].message.content or "")["age"] in (1, 2)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="", messages=HELLO, extra_body={"grammar": "root ::= nothing"})
    assert wrong.value.param == "grammar"
    assert "line 1: there is no rule 'nothing'" in wrong.value.message
    schema["properties"] = {"age": {"not": {}}}
    with pytest.raises(openai.BadRequestError, match="`response_format` has 'not', which is not supported") as wrong:
        client.chat.completions.create(
            model="", messages=HELLO,
            response_format={"type": "json_schema", "json_schema": {"name": "king", "schema": schema}},
        )  # fmt: skip
    assert wrong.value.param == "response_format"


def test_embeddings_beside_texts(client: openai.OpenAI, serving: Serving) -> None:
    texts = ["The king sleeps.", "The queen is awake, and she waits for a ship. " * 30, "A"]
    stream = client.chat.completions.create(model="", messages=HELLO, max_tokens=200, temperature=0, stream=True)
    with stream:
        next(iter(stream))
        found = client.embeddings.create(model="", input=texts)
    assert ([one.index for one in found.data], found.model) == ([0, 1, 2], "tales")
    _, counted = authorized(serving, "POST", "/tokenize", {"content": "".join(texts), "add_special": True})
    assert isinstance(counted, dict)
    assert found.usage.prompt_tokens == found.usage.total_tokens
    assert abs(found.usage.prompt_tokens - len(counted["tokens"])) < 6
    vectors = [np.array(one.embedding) for one in found.data]
    assert [float(vector @ vector) for vector in vectors] == pytest.approx([1, 1, 1], abs=1e-5)
    _, tokens = authorized(serving, "POST", "/tokenize", {"content": texts[0], "add_special": True})
    assert isinstance(tokens, dict)
    again = client.embeddings.create(model="", input=[tokens["tokens"]], encoding_format="float")
    np.testing.assert_allclose(again.data[0].embedding, vectors[0], atol=0.01)
    body = {"content": texts[:2], "embd_normalize": -1}
    status, native = authorized(serving, "POST", "/embedding", body)
    assert status == 200
    assert isinstance(native, list)
    raw = np.array(native[1]["embedding"][0])
    np.testing.assert_allclose(raw / np.linalg.norm(raw), vectors[1], atol=0.01)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", []]}, "input"),
        ({"input": [1, -1]}, "input[1]"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "embd_normalize": -2}, "embd_normalize"),
        ({"input": "tale " * 5000}, None),
        ({"input": [99999]}, None),
    ],
    ids=str,
)
def test_wrong_embeddings(serving: Serving, body: object, field: str | None) -> None:
    status, answer = authorized(serving, "POST", "/v1/embeddings", body)
    assert status == 400
    assert isinstance(answer, dict)
    assert answer["error"]["param"] == field


def test_errors_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="", messages=HELLO, temperature="warm")  # type: ignore[call-overload]
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as negative:
        client.chat.completions.create(model="", messages=HELLO, extra_body={"repeat_penalty": -1})
    assert negative.value.param == "repeat_penalty"
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="", prompt="tale " * 5000)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="", input="a", dimensions=3)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert [model.id for model in client.models.list()] == ["tales"]
    assert client.models.retrieve("tales").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_tokens_are_counted_and_timed(serving: Serving, client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="", input="Tell me of a king.")
    chat = authorized(serving, "POST", "/v1/chat/completions/input_tokens", {"messages": HELLO})
    assert chat == (200, counted.to_dict())
    chunks = list(
        client.chat.completions.create(
            model="", messages=HELLO, max_tokens=3, stream=True, reasoning_effort="none",
            extra_body={"timings_per_token": True, "return_origins": True, "sse_ping_interval": -1},
        )
    )  # fmt: skip
    timings = [own for chunk in chunks if (own := (chunk.model_extra or {}).get("timings")) is not None]
    assert [own["predicted_n"] for own in timings] == sorted(own["predicted_n"] for own in timings)
    assert len(timings) > 1
    assert timings[-1]["prompt_n"] + timings[-1]["cache_n"] == counted.input_tokens


def test_eight_at_a_time(serving: Serving) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model="", messages=HELLO, max_tokens=10, seed=seed, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{serving.url}/v1", api_key=KEY, timeout=120) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(8)))

    assert all(asyncio.run(all_of_them()))


def test_a_client_that_leaves_makes_room(serving: Serving, client: openai.OpenAI) -> None:
    with client.completions.create(
        model="", prompt="Once", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        assert processing(serving) == 1
    impatient = client.with_options(timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(model="", prompt="Once", max_tokens=3000, extra_body={"ignore_eos": True})
    serving.wait_for(lambda: processing(serving) == 0)


def processing(serving: Serving) -> float:
    _, text = authorized(serving, "GET", "/metrics")
    values = dict(line.rsplit(" ", 1) for line in str(text).splitlines() if not line.startswith("#"))
    return float(values["llamacpp:requests_processing"])


def test_more_than_may_wait_are_refused_and_may_come_again(serving: Serving, client: openai.OpenAI) -> None:
    body = {"prompt": "Once", "n": 17, "max_tokens": 2}
    status, answer = authorized(serving, "POST", "/v1/completions", body)
    assert isinstance(answer, dict)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")  # never
    many = client.completions.create(
        model="any", prompt="Once", n=16, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )  # fmt: skip
    next(iter(many))
    status, answer, headers = serving.ask("POST", "/v1/completions", {**body, "n": 2}, {"X-Api-Key": KEY})
    many.close()
    assert (status, answer["error"]["type"]) == (503, "unavailable_error")
    assert int(headers["retry-after"]) > 0
    serving.wait_for(lambda: processing(serving) == 0)


def test_llama_servers_endpoints(serving: Serving) -> None:
    text = "Once upon a time, é"
    status, answer = authorized(serving, "POST", "/tokenize", {"content": text})
    assert isinstance(answer, dict)
    assert authorized(serving, "POST", "/detokenize", answer) == (200, {"content": text})
    assert authorized(serving, "POST", "/detokenize", {"tokens": [10**6]})[0] == 400
    special = {"content": "<|endoftext|>a", "with_pieces": True}
    status, answer = authorized(serving, "POST", "/tokenize", special)
    assert isinstance(answer, dict)
    assert [one["piece"] for one in answer["tokens"]] == ["<|endoftext|>", "a"]
    tokens = [one["id"] for one in answer["tokens"]]
    assert authorized(serving, "POST", "/detokenize", {"tokens": tokens}) == (200, {"content": "<|endoftext|>a"})
    body = {"prompt": text, "n_predict": 5, "temperature": 0}
    status, answer = authorized(serving, "POST", "/completion", body)
    assert isinstance(answer, dict)
    assert (status, answer["tokens_predicted"], answer["stop_type"]) == (200, 5, "limit")
    content = answer["content"]
    status, events = authorized(serving, "POST", "/completion", {**body, "stream": True})
    parts = [json.loads(line[6:]) for line in str(events).splitlines() if line.startswith("data: ")]
    assert "".join(part["content"] for part in parts) == answer["content"]
    assert parts[-1]["stop"]
    assert [token for part in parts for token in part["tokens"]] == answer["tokens"]
    status, answer = authorized(serving, "POST", "/completion", {**body, "n_probs": 2, "post_sampling_probs": True})
    assert isinstance(answer, dict)
    assert [one["id"] for one in answer["completion_probabilities"]] == answer["tokens"]
    assert {len(one["top_probs"]) for one in answer["completion_probabilities"]} <= {1, 2}
    word = answer["content"].split()[1]
    stopped = authorized(serving, "POST", "/completions", {**body, "n_predict": 20, "stop": ["never", word]})[1]
    assert isinstance(stopped, dict)
    assert (stopped["stop_type"], stopped["stopping_word"], stopped["has_new_line"]) == ("word", word, False)
    assert {"seed", "top_k", "n_predict"} <= set(stopped["generation_settings"])
    assert stopped["generation_settings"]["stop"] == ["never", word]
    fields = ["content", "timings/predicted_n", "nothing/content", "stop/a"]
    chosen = authorized(serving, "POST", "/completion", {**body, "response_fields": fields})
    assert chosen == (200, {"content": content, "timings/predicted_n": 5})
    for path in ("/infill", "/v1/rerank"):
        status, error = authorized(serving, "POST", path, {})
        assert isinstance(error, dict)
        assert (status, error["error"]["type"]) == (501, "not_supported_error")
    models = authorized(serving, "GET", "/v1/models")[1]
    assert isinstance(models, dict)
    assert models["models"][0]["name"] == models["data"][0]["id"] == "tales"
    assert (models["data"][0]["aliases"], models["data"][0]["tags"]) == (["tales", "yarns"], ["old", "short"])
    assert authorized(serving, "GET", "/v1/models/yarns")[0] == 200
    status, answer = authorized(serving, "POST", "/apply-template", {"messages": HELLO})
    assert isinstance(answer, dict)
    assert status == 200
    assert "Tell me of a king." in answer["prompt"]
    status, answer = authorized(serving, "GET", "/props")
    assert isinstance(answer, dict)
    assert answer["total_slots"] == 8
    assert authorized(serving, "GET", "/nothing")[0] == 404
    assert authorized(serving, "GET", "/tokenize")[0] == 405
    assert serving.ask("GET", "/health")[:2] == (200, {"status": "ok"})  # without a key
    assert serving.ask("GET", "/props")[0] == 401


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"\xff", b"[]", b"null", b'{"messages": "no"}', b'{"messages": []}', b'{"messages": [[]]}',
        b'{"messages": [{"role": "user", "content": 1}]}', b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "a", "b": ' + b"9" * 50 + b"}]}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "n": 0}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e400}',
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": -5}',
        b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"a": "b"}}',
        b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"99999999": 1}}',
        b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 40 + b"}",
        b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "nothing"}}',
        b'{"messages": [{"role": "user", "content": "a"}], "tools": [1]}',
    ],
)  # fmt: skip
def test_bad_bodies_are_the_clients_mistakes(serving: Serving, body: bytes) -> None:
    status, answer, _ = serving.ask("POST", "/v1/chat/completions", body, {"X-Api-Key": KEY})
    assert 400 <= status < 500, answer
    assert answer["error"]["message"]


def test_pings_while_nothing_is_written(serving: Serving) -> None:
    """The stream of a long prompt begins with comments."""
    body = {"prompt": "Once upon a time there was a king. " * 350, "max_tokens": 1, "stream": True}
    status, text, headers = serving.ask("POST", "/v1/completions", body, {"X-Api-Key": KEY})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert str(text).endswith("data: [DONE]\n\n")
