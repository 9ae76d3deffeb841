"""Request bodies: the settings that they become, and the errors of wrong ones."""

from __future__ import annotations

import json

import pytest

from ggpipe.apis.chat import ChatBody
from ggpipe.apis.completions import CompletionBody
from ggpipe.apis.decode import convert, decode
from ggpipe.apis.embeddings import EmbeddingBody
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prompt import ToolChoice
from ggpipe.errors import BodyError


def completion(**changes: object) -> CompletionBody:
    return convert(CompletionBody, {"prompt": "Once", **changes})


def test_bytes_and_values_are_read_alike() -> None:
    body = {"prompt": [5, 6], "stop": ["x", ""], "samplers": "kp", "logit_bias": [[5, False]], "temp": 0.5, "any": [1]}
    own = convert(CompletionBody, body)
    assert own == decode(CompletionBody, json.dumps(body).encode())
    assert own.sampling(SamplingConfig(top_p=0.5)) == SamplingConfig(
        stop=("x",), samplers=("top_k", "top_p"), logit_bias=((5, float("-inf")),), temp=0.5, top_p=0.5
    )


def test_probabilities() -> None:
    usual = SamplingConfig(n_probs=4)
    for changes, n_probs in (
        ({}, 4), ({"logprobs": 3}, 3), ({"logprobs": True}, 1), ({"logprobs": True, "top_logprobs": 2}, 2),
        ({"logprobs": False}, 4), ({"n_probs": 7}, 7),
    ):  # fmt: skip
        assert completion(**changes).sampling(usual).n_probs == n_probs


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
    body = completion(**changes)
    drawn = body.sampling(SamplingConfig(grammar='root ::= "no"'))
    if "grammar" in changes:
        assert (drawn.grammar, drawn.json_schema) == ('root ::= "yes"', "")
    else:
        is_object = changes == {"response_format": {"type": "json_object"}}
        assert (drawn.grammar, json.loads(drawn.json_schema)) == ("", {} if is_object else {"type": "integer"})
        assert body.schema_field in changes


def test_messages_as_templates_take_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = convert(ChatBody, {"messages": [{"role": "developer", "content": parts}, {"role": "assistant"}]})
    (conversation,) = body.prompts
    assert conversation.messages == ({"role": "system", "content": "a\nb"}, {"role": "assistant", "content": ""})


@pytest.mark.parametrize(
    ("seed", "drawn"), [(7, 7), (-1, -1), (2**32 - 1, -1), (2**32 + 7, 7), (-5, 2**32 - 5), (2**63 - 1, 2**32 - 2)]
)
def test_seeds_of_64_bits(seed: int, drawn: int) -> None:
    assert completion(seed=seed).sampling(SamplingConfig()).seed == drawn


def test_whole_numbers_may_be_written_with_a_point() -> None:
    """Some languages have no integers."""
    body = {"prompt": [5.0, 6], "max_tokens": 3.0, "temperature": 1.0, "logit_bias": [[7.0, 0.5]]}
    for own in (convert(CompletionBody, body), decode(CompletionBody, json.dumps(body).encode())):
        assert (own.prompt, own.max_tokens, own.temperature, own.logit_bias) == ([5, 6], 3, 1.0, [(7, 0.5)])
    with pytest.raises(BodyError, match="`max_tokens`: expected"):
        completion(max_tokens=3.5)
    with pytest.raises(BodyError, match="`grammar` is nested more than 64 times"):
        decode(CompletionBody, b'{"prompt": "a", "max_tokens": 1.0, "grammar": ' + b"[" * 900 + b"]" * 900 + b"}")


FUNCTIONS = [{"name": "look", "parameters": {"type": "object"}}]


def test_functions_become_tools() -> None:
    """OpenAI's form of tools until 2023."""
    messages = [{"role": "user", "content": "Weather?"}]
    body = convert(ChatBody, {"messages": messages, "functions": FUNCTIONS, "function_call": {"name": "look"}})
    (conversation,) = body.prompts
    conversation.check()
    assert [one["function"] for one in conversation.tools] == FUNCTIONS
    assert conversation.choice == ToolChoice(must_call=True, name="look", parallel=False)
    with pytest.raises(BodyError, match="tools"):
        convert(ChatBody, {"messages": messages, "functions": [{}]}).prompts  # noqa: B018


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": True}, "top_k"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stop": [1]}, "stop[...]"),
        ({"logit_bias": {"a": "b"}}, "logit_bias"),
        ({"logit_bias": {str(i) + "a": 1 for i in range(257)}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3000}, "logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"grammar": "a", "json_schema": {}}, "grammar"),
        ({"best_of": 2}, "best_of"),
        ({"reasoning_format": "deepsek"}, "reasoning_format"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": ["a", 1, [2]]}, "prompt"),
        ({"prompt": [{"prompt_string": "a", "multimodal_data": ["x"]}]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[...]"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": {"content": [{"type": "image_url"}]}}, "prompt"),
        ({"response_format": {"type": "json_schema", "schema": json.loads("[" * 99 + "]" * 99)}}, "response_format"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], param: str) -> None:
    with pytest.raises(BodyError) as caught:
        read(changes)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param.removesuffix("[...]"))


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a", 1, "b"], [["a", 1, "b"]]),
        (["a", "b"], ["a", "b"]),
        ({"prompt_string": "a"}, ["a"]),
        (["a", {"content": [{"type": "text", "text": "b "}, {"type": "text", "text": "c"}]}], ["a", "b c"]),
        (["a", [1, 2], [1, "b"], {"prompt_string": "c"}], ["a", [1, 2], [1, "b"], "c"]),
    ],
)
def test_llama_servers_forms_of_prompts(prompt: object, found: list[object]) -> None:
    assert completion(prompt=prompt).prompts == found


@pytest.mark.parametrize(
    ("fields", "asked", "answered"),
    [({}, None, None), ({"logprobs": 0}, 1, 0), ({"logprobs": True}, 1, 0), ({"logprobs": 3}, 3, 3),
     ({"logprobs": True, "top_logprobs": 2}, 2, 2), ({"logprobs": False}, None, None)],
)  # fmt: skip
def test_log_probabilities(fields: dict[str, object], asked: int | None, answered: int | None) -> None:
    body = completion(**fields)
    assert (body.most_probs(), body.n_best_probs) == (asked, answered)


def read(changes: dict[str, object]) -> None:
    body = completion(**changes)
    body.sampling(SamplingConfig())
    assert body.prompts


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        ([5, 6], [[5, 6]]),
        (["a", [5, 6], {"prompt_string": "b"}, [7, "c"]], ["a", [5, 6], "b", [7, "c"]]),
        ([5, "a", 6], [[5, "a", 6]]),
        ({"prompt_string": "b"}, ["b"]),
    ],
)
@pytest.mark.parametrize("name", ["input", "content"])
def test_forms_of_texts_to_embed(name: str, given: object, prompts: list[object]) -> None:
    assert convert(EmbeddingBody, {name: given}).prompts == prompts


@pytest.mark.parametrize("given", [[], [[]], ["a", []]])
def test_nothing_to_embed(given: object) -> None:
    with pytest.raises(BodyError, match="`input` is empty: give at least one token"):
        assert convert(EmbeddingBody, {"input": given}).prompts


def test_prompts_come_before_outputs_that_echo_them() -> None:
    body = completion(prompt=["Once", "The king"], echo=True)
    assert [body.echoed(i) for i in range(2)] == ["Once", "The king"]
    assert completion().echoed(0) == ""
    for wrong in ({"prompt": [5, 6]}, {"logprobs": 1}):
        with pytest.raises(BodyError, match="`echo` "):
            completion(echo=True, **wrong)


@pytest.mark.parametrize("form", ["list", "object"])
def test_a_string_is_biased_as_all_its_tokens(form: str) -> None:
    given = {"king": -2.0, "5": False}
    biases = given if form == "object" else [*map(list, given.items())]
    body = convert(CompletionBody, {"prompt": "a", "logit_bias": biases})
    assert body.biased_strings == ["king"]
    body.tokenize_biases({"king": (8, 9)})
    assert body.sampling(SamplingConfig()).logit_bias == ((8, -2.0), (9, -2.0), (5, float("-inf")))


def test_the_last_message_is_continued_or_answered_but_not_both() -> None:
    body = {"messages": [{"role": "assistant", "content": "Once"}], "continue_final_message": True}
    assert convert(ChatBody, body | {"add_generation_prompt": False}).prompts[0].add_generation_prompt
    with pytest.raises(BodyError, match="cannot both be true"):
        convert(ChatBody, body | {"add_generation_prompt": True})
