"""Grammars of calls let through what models of each form write, and what they let through is read as calls."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from support.grammars import followed

from ggpipe.core.prompt import ToolChoice
from ggpipe.core.request import Token
from ggpipe.llama.forced_text import ByteVocab
from ggpipe.llama.guided_grammar import GuidanceVocab, GuidedGrammar
from ggpipe.llama.vocab import Vocab
from ggpipe.text.chat.answer import AnswerFormat, WholeAnswer, whole_answer
from ggpipe.text.chat.reasoning import ReasoningFormat, reasoning_format
from ggpipe.text.chat.tools.forms import CALL_SYNTAXES, Form
from ggpipe.text.chat.tools.grammar import grammar_of_calls
from ggpipe.text.grammar.check import Constraint, check
from ggpipe.text.grammar.lark import Marks

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "enum": ["hall", "tower"]}, "days": {"type": "integer"},
                "why": {"type": "string"},
            },
            "required": ["place", "days"],
        },
    },
}  # fmt: skip
WAIT = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}
TOOLS = (LOOK, WAIT)
ARGUMENTS = '{"place": "hall", "days": 3}'
TEXTS = {
    Form.HERMES: f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>',
    Form.QWEN_XML: "<tool_call>\n<function=look>\n<parameter=place>\nhall\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=wait>\n</function>\n</tool_call>",
    Form.MISTRAL: f'[TOOL_CALLS][{{"name": "look", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}, '
    '{"name": "wait", "arguments": {}}]',
    Form.MISTRAL_ARGS: f"[TOOL_CALLS]look[ARGS]{ARGUMENTS}[TOOL_CALLS]wait[ARGS]{{}}",
    Form.GLM: "<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>hall</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>wait\n</tool_call>",
    Form.GLM_INLINE: "<tool_call>look<arg_key>place</arg_key><arg_value>hall</arg_value><arg_key>days</arg_key>"
    "<arg_value>3</arg_value></tool_call><tool_call>wait</tool_call>",
    Form.KIMI: "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.wait:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    Form.DEEPSEEK: f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>wait<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    Form.DEEPSEEK_BLOCK: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>wait\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    **{
        form: f'<｜DSML｜{block}>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="place" string="true">hall'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        f'<｜DSML｜invoke name="wait">\n</｜DSML｜invoke>\n</｜DSML｜{block}>'
        for form, block in ((Form.DSML, "function_calls"), (Form.DSML_4, "tool_calls"))
    },
    Form.MINIMAX: '<minimax:tool_call>\n<invoke name="look">\n<parameter name="place">hall</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="wait">\n</invoke>\n</minimax:tool_call>',
    Form.HARMONY: f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ARGUMENTS}",
    Form.GRANITE: f'<|tool_call|>[{{"name": "look", "arguments": {ARGUMENTS}}}, {{"name": "wait", "arguments": {{}}}}]',
    Form.LLAMA: f'{{"name": "look", "parameters": {ARGUMENTS}}}',
    Form.JSON: f'{{"name": "look", "arguments": {ARGUMENTS}}}\n{{"name": "wait", "arguments": {{}}}}',
}


PLAIN = Marks({})
"""No mark is a special token."""


def grammar_of(form: Form, reasoning: ReasoningFormat, choice: ToolChoice, marks: Marks = PLAIN) -> str:
    calls = grammar_of_calls(form, reasoning, TOOLS, choice, marks)
    assert calls is not None
    checked = check(Constraint(call_grammar=calls))
    assert not checked.problem
    return checked.lark


def accepts(guidance: GuidanceVocab, grammar: str, text: str, is_whole: bool = True) -> bool:
    """Whether the text is allowed, and where it is whole, that it may end there."""
    found, vocab = guidance.matcher(grammar), guidance.vocab
    tokens = vocab.tokenize_pieces([(text, True)])
    tokens = tokens[1:] if "".join(vocab.piece(token).decode() for token in tokens[:1]) == "" else tokens
    fits = all(found.accept(token) for token in tokens)
    fits = fits and (not is_whole or bool(found.allowed(vocab.end_tokens)[0]))
    found.close()
    return fits


def read(form: Form, text: str) -> WholeAnswer:
    return whole_answer(AnswerFormat(reasoning=reasoning_format("", ""), form=form, tools=TOOLS), "", [Token(0, text)])


@pytest.mark.parametrize("form", list(Form))
def test_calls_as_models_write_them(guidance: GuidanceVocab, form: Form) -> None:
    plain, thinks, text = reasoning_format("", ""), reasoning_format("<think>", ""), TEXTS[form]
    must = grammar_of(form, plain, ToolChoice(must_call=True))
    assert accepts(guidance, must, text)
    assert [call.name for call in read(form, text).calls] == (
        ["look"] if CALL_SYNTAXES[form].between is None else ["look", "wait"]
    )
    assert not accepts(guidance, must, "Once", is_whole=False)
    assert not accepts(guidance, must, text.replace("hall", "moor"), is_whole=False)
    assert not accepts(guidance, must, f"<think>hm</think>\n\n{text}", is_whole=False)
    thoughtful = grammar_of(form, thinks, ToolChoice(must_call=True))
    assert accepts(guidance, thoughtful, f"<think>hm</think>\n\n{text}")
    is_open = grammar_of(form, reasoning_format("", "<think>\n"), ToolChoice(must_call=True))
    assert accepts(guidance, is_open, f"hm </t</think>{text}")
    assert not accepts(guidance, is_open, "hm")


@pytest.mark.parametrize("form", [form for form in Form if form not in (Form.LLAMA, Form.JSON)])
def test_texts_are_free_until_a_call_begins(guidance: GuidanceVocab, form: Form) -> None:
    free = grammar_of(form, reasoning_format("<think>", ""), ToolChoice(parallel=False))
    for text in ("", "Once upon a time", "<", "<<tool_ca", "[TOOL_[TOOL", "<think>hm</think> Yes."):
        assert accepts(guidance, free, text)
    several = grammar_of(form, reasoning_format("", ""), ToolChoice())
    assert accepts(guidance, several, f"Yes, <tool\n\n{TEXTS[form]}")
    if form is not Form.HARMONY:
        assert not accepts(guidance, free, f"Yes.\n\n{TEXTS[form]}", is_whole=False)  # two calls
    assert not accepts(guidance, free, TEXTS[form].replace("look", "leap"), is_whole=False)


class WithMarks:
    """A vocabulary with special tokens after the bytes."""

    def __init__(self, special: Sequence[str]) -> None:
        self.special_tokens = {"<end>": 256} | {text: 257 + n for n, text in enumerate(special)}
        self.end_tokens, self.n_tokens = (256,), 257 + len(special)

    def text(self, token: int) -> str:
        return {token: text for text, token in self.special_tokens.items()}.get(token, "")

    def pieces(self) -> list[bytes]:
        return [bytes((byte,)) for byte in range(256)] + [b""] * len(self.special_tokens)

    def tokens(self, text: str) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, self.special_tokens)) + ")", text)
        ids = ([self.special_tokens[part]] if part in self.special_tokens else part.encode() for part in parts)
        return [token for own in ids for token in own]


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("thinks", [False, True])
def test_marks_that_are_special_tokens(form: Form, thinks: bool) -> None:
    vocab = WithMarks(
        (
            "<tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<think>", "</think>", "<other>", "<arg_key>",
            "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "｜DSML｜",
            "<minimax:tool_call>", "</minimax:tool_call>", "<|channel|>", "<|message|>", "<|constrain|>",
        )
    )  # fmt: skip
    guidance = GuidanceVocab(cast("Vocab", vocab))
    marks = Marks(vocab.special_tokens, vocab.end_tokens)
    reasoning = reasoning_format("<think>" if thinks else "", "")
    before = "<think>hm <other> [TOOL</think>\n\n" if thinks else ""
    for choice in (ToolChoice(), ToolChoice(must_call=True)):
        mark = CALL_SYNTAXES[form].mark
        if not choice.must_call and (not mark or marks.spelled(mark).count(" ")):
            continue  # there is no mark, or only a part of it is a special token: all is free
        first = guidance.matcher(grammar_of(form, reasoning, choice, marks))

        def fits(text: str, is_whole: bool = True, first: GuidedGrammar = first) -> bool:
            return first.fit(vocab.tokens(text) + [256] * is_whole)

        assert fits(before + TEXTS[form])
        assert fits(TEXTS[form])
        assert not fits(before + TEXTS[form].replace("look", "leap"), is_whole=False)
        assert not fits(before + TEXTS[form].replace("hall", "<other>"), is_whole=False)
        if not choice.must_call:
            assert fits(before + f"Yes <other> and <tool_ca\n{TEXTS[form]}")
            assert all(fits(before + text) for text in ("", "<other>", "Yes, <other>", "a<other>b"))
        else:
            assert not fits(before + "Yes", is_whole=False)
        first.close()
    guidance.close()


@pytest.mark.parametrize("form", list(Form))
def test_what_is_let_through_is_read(guidance: GuidanceVocab, form: Form) -> None:
    """Any text that a grammar allows, here drawn at random."""
    random_ = random.Random(form.value)
    for choice in (ToolChoice(must_call=True, parallel=False), ToolChoice(must_call=True, name="wait", parallel=False)):
        grammar, vocab = guidance.matcher(grammar_of(form, reasoning_format("", ""), choice)), guidance.vocab
        text, logits = b"", np.zeros(vocab.n_tokens, np.float32)
        for _ in range(400):
            if grammar.allowed(vocab.end_tokens)[0]:
                break
            fits = grammar.best(logits, vocab.n_tokens)
            pieces = [vocab.piece(int(token)) for token in fits]
            closers = [i for i, piece in enumerate(pieces) if piece[:1] in (b'"', b"}", b"<", b"\n")]
            at = random_.choice(closers if closers and len(text) > 60 else range(len(fits)))
            assert grammar.accept(int(fits[at]))
            text += pieces[at]
        grammar.close()
        answer = read(form, text.decode())
        assert (answer.text, len(answer.calls)) == ("", 1), text
        if choice.name is not None:
            assert answer.calls[0].name == choice.name


@pytest.mark.parametrize("form", list(Form))
def test_calls_are_drafted_as_far_as_they_are_forced(form: Form, vocab: Vocab) -> None:
    """All but the values, and which tool is called; what is forced is what models write."""
    byte_vocab = ByteVocab(vocab)
    n_forced, n_right = 0, 0
    for _ in range(2):  # the second one in the layout of the first
        forced = byte_vocab.text(grammar_of(form, reasoning_format("", ""), ToolChoice(must_call=True)))
        assert forced is not None
        n_forced, n_right, _ = followed(forced, vocab.inner_tokens(TEXTS[form]))
        forced.close()
    assert n_right >= 0.7 * n_forced
    assert n_right >= 0.3 * len(vocab.inner_tokens(TEXTS[form]))
    byte_vocab.close()
