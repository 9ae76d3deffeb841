"""Tools, calls and results reach templates as each of them wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ggpipe.text.chat.conversation import CHATML
from ggpipe.text.chat.template import ChatTemplate

TEMPLATES = Path(__file__).with_name("templates")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = '{"place": "château", "days": 3}'


def called(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": arguments}
    return [
        {"role": "user", "content": "Who lives there?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call00001", "function": function}]},
        {"role": "tool", "tool_call_id": "call00001", "content": "a king"},
    ]


def written(source: str, messages: list[dict[str, Any]]) -> str:
    return ChatTemplate(source, "<s>", "</s>").conversation(messages, [TOOL])[0]


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3coder", "mistral", "mistral-args", "granite", "llama3", "deepseek", "gemma", "phi3"]
)
def test_arguments_as_text_and_as_object_are_the_same(name: str) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    text = written(source, called(ARGUMENTS))
    assert text == written(source, called({"place": "château", "days": 3}))
    assert "château" in text
    assert "a king" in text
    assert '\\"place\\"' not in text


def test_a_template_that_wants_arguments_as_text() -> None:
    source = "{% if tools %}{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '<' + c.function.arguments }}" \
        "{% endfor %}{% endfor %}{% endif %}"  # fmt: skip
    assert written(source, called({"days": 3})) == '<{"days": 3}'
    assert written(source, called(ARGUMENTS)) == f"<{ARGUMENTS}"
    assert written(source, called('{"cut off')) == '<{"cut off'


def test_results_say_of_which_function_they_are() -> None:
    assert written("{{ tools[0].type }} {{ messages[-1].name }}", called(ARGUMENTS)) == "function look"


def test_templates_that_do_not_know_of_tools() -> None:
    text = written(CHATML, [{"role": "system", "content": "Be kind."}, *called(ARGUMENTS)])
    system, _, rest = text.partition("<|im_end|>")
    assert "Be kind.\n\n" in system
    assert '{"name": "look", "parameters": ' in system
    assert f'<|im_start|>assistant\n{{"name": "look", "arguments": {ARGUMENTS}}}<|im_end|>' in rest
    assert "<|im_start|>user\nResult of look:\na king<|im_end|>" in rest
    assert "look" in written(CHATML, called(ARGUMENTS)).partition("<|im_end|>")[0]
