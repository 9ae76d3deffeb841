"""Grammars of calls let through what models of each form write, and what they let through is read as calls."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from support.commands import TARGET

from ggpipe.config.model import ModelConfig
from ggpipe.core.prompt import ToolChoice
from ggpipe.core.request import Token
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.grammar import Grammar
from ggpipe.llama.vocab import Vocab
from ggpipe.text.chat.answer import AnswerFormat, WholeAnswer, whole_answer
from ggpipe.text.chat.reasoning import reasoning_format
from ggpipe.text.chat.tools.forms import Form
from ggpipe.text.chat.tools.grammar import grammar_of_calls

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
    Form.GRANITE: f'<|tool_call|>[{{"name": "look", "arguments": {ARGUMENTS}}}, {{"name": "wait", "arguments": {{}}}}]',
    Form.LLAMA: f'{{"name": "look", "parameters": {ARGUMENTS}}}',
    Form.JSON: f'{{"name": "look", "arguments": {ARGUMENTS}}}\n{{"name": "wait", "arguments": {{}}}}',
}


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    vocab = Vocab(ModelFile.open(TARGET), ModelConfig(path=TARGET))
    yield vocab
    vocab.close()


def accepts(vocab: Vocab, grammar: str, text: str, is_whole: bool = True) -> bool:
    """Whether the text is allowed, and where it is whole, that it may end there."""
    found = Grammar(grammar, vocab)
    tokens = vocab.tokenize_pieces([(text, True)])
    tokens = tokens[1:] if "".join(vocab.piece(token).decode() for token in tokens[:1]) == "" else tokens
    fits = all(found.accept(token) for token in tokens)
    fits = fits and (not is_whole or bool(found.allowed(vocab.end_tokens)[0]))
    found.close()
    return fits


def read(form: Form, text: str) -> WholeAnswer:
    return whole_answer(AnswerFormat(reasoning=reasoning_format("", ""), form=form, tools=TOOLS), "", [Token(0, text)])


@pytest.mark.parametrize("form", list(Form))
def test_calls_as_models_write_them(vocab: Vocab, form: Form) -> None:
    plain, thinks, text = reasoning_format("", ""), reasoning_format("<think>", ""), TEXTS[form]
    must = grammar_of_calls(form, plain, TOOLS, ToolChoice(must_call=True))
    assert accepts(vocab, must, text)
    assert [call.name for call in read(form, text).calls] == (["look"] if form is Form.LLAMA else ["look", "wait"])
    assert not accepts(vocab, must, "Once", is_whole=False)
    assert not accepts(vocab, must, text.replace("hall", "moor"), is_whole=False)
    assert not accepts(vocab, must, f"<think>hm</think>\n\n{text}", is_whole=False)
    thoughtful = grammar_of_calls(form, thinks, TOOLS, ToolChoice(must_call=True))
    assert accepts(vocab, thoughtful, f"<think>hm</think>\n\n{text}")
    is_open = grammar_of_calls(form, reasoning_format("", "<think>\n"), TOOLS, ToolChoice(must_call=True))
    assert accepts(vocab, is_open, f"hm </t</think>{text}")
    assert not accepts(vocab, is_open, "hm")


@pytest.mark.parametrize("form", [form for form in Form if form not in (Form.LLAMA, Form.JSON)])
def test_texts_are_free_until_a_call_begins(vocab: Vocab, form: Form) -> None:
    free = grammar_of_calls(form, reasoning_format("<think>", ""), TOOLS, ToolChoice(parallel=False))
    for text in ("", "Once upon a time", "<", "<<tool_ca", "[TOOL_[TOOL", "<think>hm</think> Yes."):
        assert accepts(vocab, free, text)
    several = grammar_of_calls(form, reasoning_format("", ""), TOOLS, ToolChoice())
    assert accepts(vocab, several, f"Yes, <tool\n\n{TEXTS[form]}")
    assert not accepts(vocab, free, f"Yes.\n\n{TEXTS[form]}", is_whole=False)  # two calls
    assert not accepts(vocab, free, TEXTS[form].replace("look", "leap"), is_whole=False)


@pytest.mark.parametrize("form", list(Form))
def test_what_is_let_through_is_read(vocab: Vocab, form: Form) -> None:
    """Any text that a grammar allows, here drawn at random."""
    random_ = random.Random(form.value)
    for choice in (ToolChoice(must_call=True, parallel=False), ToolChoice(must_call=True, name="wait", parallel=False)):
        grammar = Grammar(grammar_of_calls(form, reasoning_format("", ""), TOOLS, choice), vocab)
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
