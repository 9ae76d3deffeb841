"""Templates from model files render in a process with limits, and cannot stop the head."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggpipe.errors import SettingError, UsageError
from ggpipe.text.chat import template_process
from ggpipe.text.chat.conversation import CHATML
from ggpipe.text.chat.template import ChatTemplate
from ggpipe.text.chat.template_process import TemplateProcess, check_template

SPECIALS = ("<|im_start|>", "<|im_end|>")
USER = {"role": "user", "content": "Hi<|im_end|> 🏰"}
SOURCE = (Path(__file__).parent / "templates" / "qwen3.jinja").read_text()


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    found = TemplateProcess("<s>", "</s>", SPECIALS)
    yield found
    found.close()
    found.close()


def rendered(process: TemplateProcess, source: str) -> tuple[str, str]:
    return process.conversation(source, [USER], [], True, {})


def test_a_template_is_checked_without_a_model() -> None:
    for source in (CHATML, SOURCE, "{{ raise_exception('no') }}"):
        check_template(source)
    for source in ("{% if", "{{ messages | nothing }}"):
        with pytest.raises(SettingError, match="`chat_template` is no template that Jinja can read"):
            check_template(source)


@pytest.mark.parametrize("source", [CHATML, SOURCE, SOURCE + "{# once more #}"])
def test_as_in_this_process(process: TemplateProcess, source: str) -> None:
    own = ChatTemplate(source, "<s>", "</s>", SPECIALS)
    expected = own.conversation([USER], [])
    assert rendered(process, source) == rendered(process, source) == expected
    assert process.pieces(expected[0]) == own.pieces(expected[0])
    assert ("<|im_end|>", True) in process.pieces(expected[0])


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than . s for"),
        ("{{ 'a' * 3000000000 }}", "does not take this conversation"),
        ("{% set a = namespace(b=[1]) %}{% for i in range(60) %}{% set a.b = [a.b, a.b] %}{% endfor %}{{ a.b }}", ""),
    ],
)
def test_what_takes_too_long_or_too_much(process: TemplateProcess, source: str, wrong: str) -> None:
    with pytest.raises(UsageError, match=f"the model's chat template .*{wrong}"):
        rendered(process, source)
    assert rendered(process, SOURCE) == ChatTemplate(SOURCE, "<s>", "</s>", SPECIALS).conversation([USER], [])


def test_errors_are_those_of_templates(process: TemplateProcess) -> None:
    with pytest.raises(SettingError, match="`chat_template` is no template that Jinja can read"):
        rendered(process, "{% if")
    with pytest.raises(UsageError, match="does not take this conversation: out of turn"):
        rendered(process, "{{ raise_exception('out of turn') }}")
    with pytest.raises(UsageError, match="`chat_template_kwargs` has tools"):
        process.conversation(SOURCE, [USER], [], True, {"tools": 1})
    with pytest.raises(UsageError, match="not PosixPath"):
        process.conversation(SOURCE, [{"role": "user", "content": Path()}], [], True, {})


def test_templates_that_take_turns_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    class Counted(ChatTemplate):
        def __init__(self, source: str, *others: str) -> None:
            compiled.append(source)
            super().__init__(source)

    monkeypatch.setattr("ggpipe.text.chat.template.ChatTemplate", Counted)
    answers = template_process._Answers()
    answers.answer(b'["", "", []]')
    for source in [CHATML, CHATML + "x", *(CHATML, CHATML + "x") * 2, *(f"{CHATML}{i}" for i in range(9)), CHATML]:
        answers.answer(json.dumps([source, [USER], [], True, {}]).encode())
    assert len(compiled) == 12
