"""Calls of tools are found wherever the text is cut, in the forms of all families; what does not parse stays text."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from support import llama_cpp_source

from ggpipe.config.sampling import CallGrammar, SamplingConfig
from ggpipe.core.prompt import ToolChoice
from ggpipe.errors import BodyError
from ggpipe.text.chat.answer import AnswerFormat, AnswerParser, WholeAnswer, answer_format
from ggpipe.text.chat.conversation import ChatPrompt
from ggpipe.text.chat.reasoning import reasoning_format
from ggpipe.text.chat.template import ChatTemplate
from ggpipe.text.chat.tools.choice import tool_choice
from ggpipe.text.chat.tools.events import AnswerEvent, Arguments, CallBegun, CallEnded, joined
from ggpipe.text.chat.tools.forms import Form, form_of
from ggpipe.text.chat.tools.grammar import grammar_of_calls
from ggpipe.text.grammar.check import Constraint, check
from ggpipe.text.grammar.lark import Marks

TEMPLATES = Path(__file__).with_name("templates")
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["days"],
        },
    },
}
WAIT = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}
TOOLS = (LOOK, WAIT)
HALL = {"place": 'the "hall"\n{é}', "days": 3}
IN_JSON = json.dumps(HALL, ensure_ascii=False)


def parsed(form: Form, *parts: str, tools: tuple[dict[str, Any], ...] = TOOLS) -> list[AnswerEvent]:
    parser = AnswerParser(AnswerFormat(reasoning=reasoning_format("", ""), form=form, tools=tools), "key")
    events: list[AnswerEvent] = []
    for part in parts:
        events += parser.feed(part)
    return joined([*events, *parser.finish()])


def summary(events: list[AnswerEvent]) -> tuple[str, list[tuple[str, str]]]:
    answer = WholeAnswer(events)
    return answer.text, [(call.name, call.arguments) for call in answer.calls]


XML = "<tool_call>\n<function=look>\n<parameter=place>\nthe \"hall\"\n{é}\n</parameter>\n<parameter=days>\n3\n" \
    "</parameter>\n</function>\n</tool_call>"  # fmt: skip
CALLED = ("look", IN_JSON)
DEEP = f'<tool_call>{{"name": "look", "arguments": "{"[" * 2000}"}}</tool_call>'
CASES: list[tuple[Form, str, str, list[tuple[str, str]]]] = [
    (Form.HERMES, f'<tool_call>\n{{"name": "look", "arguments": {IN_JSON}}}\n</tool_call>', "", [CALLED]),
    (Form.HERMES, f'Yes.\n\n<tool_call>{{"arguments":{IN_JSON},"name":"look"}}</tool_call>\n\n', "Yes.", [CALLED]),
    (Form.HERMES, '<tool_call>{"name": "wait", "arguments": {}}</tool_call> <tool_call>\n{"name": "wait"}</tool_call>',
     "", [("wait", "{}")] * 2),
    (Form.HERMES, '<tool_call>{"name": "look", "arguments": "{\\"days\\": 1}"}</tool_call>', "",
     [("look", '{"days": 1}')]),
    (Form.HERMES, DEEP, DEEP, []),
    (Form.HERMES, '<tool_call>{"name": "look", "arguments": {"place": "a\nb"}}', "", [("look", '{"place": "a\\nb"}')]),
    (Form.HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call>', "", [("other", "{}")]),
    (Form.HERMES, "I would write <tool_call> but not now", "I would write <tool_call> but not now", []),
    (Form.HERMES, '<tool_call>{"name": 1}</tool_call> ', '<tool_call>{"name": 1}</tool_call> ', []),
    (Form.HERMES, "<tool_call>x <tool_call>" '{"name": "wait"}', "<tool_call>x", [("wait", "{}")]),
    (Form.HERMES, '<tool_call>{"name": "look", "arguments": {"days": 1', "", [("look", '{"days": ')]),
    (Form.HERMES, '{"name": "look", "arguments": {"days": 1}}', '{"name": "look", "arguments": {"days": 1}}', []),
    (Form.QWEN_XML, XML, "", [CALLED]),
    (Form.QWEN_XML, "Now.\n<function=wait>\n</function>", "Now.", [("wait", "{}")]),
    (Form.QWEN_XML, '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>', "", [("wait", "{}")]),
    (Form.MISTRAL, f'[TOOL_CALLS] [{{"name": "look", "arguments": {IN_JSON}, "id": "abcdefghi"}}]', "", [CALLED]),
    (Form.MISTRAL, '[TOOL_CALLS][{"name": "wait", "arguments": {}}, {"name": "wait", "arguments": null}]', "",
     [("wait", "{}")] * 2),
    (Form.MISTRAL, '[TOOL_CALLS][{"name": "wait"}, {"nam', ', {"nam', [("wait", "{}")]),
    (Form.MISTRAL_ARGS, f"Yes.[TOOL_CALLS]look[ARGS]{IN_JSON}[TOOL_CALLS]wait[CALL_ID]abcdefghi[ARGS]{{}}", "Yes.",
     [CALLED, ("wait", "{}")]),
    (Form.GRANITE, '<|tool_call|>[{"arguments":{},"name":"wait"}]', "", [("wait", "{}")]),
    (Form.GLM, "Now.\n<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>the \"hall\"\n{é}</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>wait\n</tool_call>", "Now.",
     [CALLED, ("wait", "{}")]),
    (Form.GLM_INLINE, "<tool_call>look<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>wait"
     "</tool_call>", "", [("look", '{"days": 3}'), ("wait", "{}")]),
    (Form.KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
     f"{IN_JSON}<|tool_call_end|><|tool_call_begin|>functions.wait:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
     "<|tool_calls_section_end|>", "", [CALLED, ("wait", "{}")]),
    (Form.DEEPSEEK, "Now.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
     f"{IN_JSON}<｜tool▁call▁end｜>"
     "<｜tool▁call▁begin｜>wait<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "Now.",
     [CALLED, ("wait", "{}")]),
    (Form.DEEPSEEK_BLOCK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
     f"```json\n{IN_JSON}\n```"
     "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>wait\n```json\n{}\n```<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>", "", [CALLED, ("wait", "{}")]),
    (Form.DSML, 'Now.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="place" '
     'string="true">the "hall"\n{é}</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3'
     '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="wait">\n</｜DSML｜invoke>\n'
     '</｜DSML｜function_calls>', "Now.",
     [CALLED, ("wait", "{}")]),
    (Form.DSML_4, '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="go">\n<｜DSML｜parameter name="to" string="true">3'
     '</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', "", [("go", '{"to": "3"}')]),
    (Form.MINIMAX, '<minimax:tool_call>\n<invoke name="look">\n<parameter name="place">the "hall"\n{é}</parameter>\n'
     '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="wait">\n</invoke>\n</minimax:tool_call>', "",
     [CALLED, ("wait", "{}")]),
    (Form.HARMONY, f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{IN_JSON}<|call|>", "",
     [CALLED]),
    (Form.HARMONY, f"<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{IN_JSON}", "", [CALLED]),
    (Form.HARMONY, "I will.<|end|><|start|>assistant<|channel|>commentary to=functions.wait <|constrain|>json"
     "<|message|>{}", "I will.", [("wait", "{}")]),
    (Form.KIMI, "<|tool_calls_section_begin|> none", "<|tool_calls_section_begin|> none", []),
    (Form.LLAMA, f'{{"name": "look", "parameters": {IN_JSON}}}', "", [CALLED]),
    (Form.LLAMA, '<|python_tag|>{"name": "look", "parameters": {}}; {"name": "wait", "parameters": {}}', "",
     [("look", "{}"), ("wait", "{}")]),
    (Form.LLAMA, '{"name": "king", "parameters": {}}', '{"name": "king", "parameters": {}}', []),
    (Form.LLAMA, '{"name": "look"}', '{"name": "look"}', []),
    (Form.LLAMA, "  The answer is {}", "  The answer is {}", []),
    (Form.JSON, f'{{"name": "look", "arguments": {IN_JSON}}}\n{{"name": "wait", "arguments": {{}}}}', "",
     [CALLED, ("wait", "{}")]),
    (Form.JSON, '[{"name": "wait", "arguments": {}}] ', "", [("wait", "{}")]),
    (Form.JSON, '{"seen": ["a king"]}', '{"seen": ["a king"]}', []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES, ids=range(len(CASES)))
def test_calls_and_text(form: Form, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert summary(parsed(form, text)) == (content, calls)
    assert parsed(form, *text) == parsed(form, text)
    thought = "<think>hm <tool_call></think>\n\n"
    answer = WholeAnswer(parsed(form, thought + text))
    assert (answer.reasoning, len(answer.calls)) == ("hm <tool_call>", len(calls))
    assert summary(parsed(form, text, tools=())) == (text, [])


WORDS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|python_tag|>", "<function=look>",
     "</function>", "<parameter=days>", "</parameter>", '{"name": "look", ', '"arguments": ', '"parameters": ', IN_JSON,
     '"name": "wait"', "{", "}", "[", "]", ",", ";", '"', "\\", "\\u00e9", "look", "wait", " ", "\n", "<", "</tool",
     "a b", "3.5e", "null", "<think>", "</think>", '{"name": "wait", "arguments": {}}']
)  # fmt: skip


@given(
    st.sampled_from(list(Form)),
    st.lists(WORDS | st.sampled_from([text for _, text, _, _ in CASES]), max_size=12).map("".join),
    st.lists(st.integers(0, 500), max_size=8),
)
def test_where_the_text_is_cut_changes_nothing(form: Form, text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    events = parsed(form, text)
    assert parsed(form, *(text[a:b] for a, b in pairwise(places))) == events
    begun = [event.index for event in events if isinstance(event, CallBegun)]
    assert begun == [event.index for event in events if isinstance(event, CallEnded)] == list(range(len(begun)))
    ids = [event.id for event in events if isinstance(event, CallBegun)]
    assert len(set(ids)) == len(ids)


@given(st.sampled_from(list(Form)), st.text())
def test_texts_without_calls_stay(form: Form, text: str) -> None:
    if not text.lstrip().startswith("<think>"):
        assert summary(parsed(form, text)) == (text, [])


def test_arguments_come_in_parts() -> None:
    parser = AnswerParser(AnswerFormat(reasoning=reasoning_format("", ""), form=Form.HERMES, tools=TOOLS), "key")
    assert parser.feed('<tool_call>{"name": "look", "argu') == []
    begun, opened = parser.feed('ments": {')
    assert isinstance(begun, CallBegun)
    assert [opened, *parser.feed('"place": "the ')] == [Arguments(0, "{"), Arguments(0, '"place": "the ')]


@pytest.mark.parametrize(
    ("name", "form"),
    [("qwen3", Form.HERMES), ("qwen3coder", Form.QWEN_XML), ("mistral", Form.MISTRAL),
     ("mistral-args", Form.MISTRAL_ARGS), ("granite", Form.GRANITE), ("llama3", Form.LLAMA), ("chatml", Form.JSON),
     ("gptoss", Form.HARMONY),
     ("gemma", Form.JSON)],
)  # fmt: skip
def test_the_forms_of_templates(name: str, form: Form) -> None:
    assert form_of((TEMPLATES / f"{name}.jinja").read_text()) is form


def test_ids_that_a_model_writes_are_kept() -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.wait:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    )
    begun, *_ = parsed(Form.KIMI, text)
    assert begun == CallBegun(0, "functions.wait:3", "wait")
    ids = [event.id for event in parsed(Form.KIMI, text, text) if isinstance(event, CallBegun)]
    assert ids[0] == "functions.wait:3" != ids[1]


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("<|channel|>analysis<|message|>I must look.<|end|><|start|>assistant<|channel|>commentary "
         f"to=functions.look <|constrain|>json<|message|>{IN_JSON}<|call|>", "I must look."),
        (f"<|start|>assistant<|channel|>commentary to=functions.look json<|message|>{IN_JSON}", ""),
    ],
)  # fmt: skip
def test_reasoning_before_calls_of_gpt_oss(text: str, reasoning: str) -> None:
    source = (TEMPLATES / "gptoss.jinja").read_text()
    for pieces in ([text], text):
        parser, answer = AnswerParser(answer_format(source, "", {}, TOOLS), "key"), WholeAnswer()
        for piece in pieces:
            answer.add(parser.feed(piece))
        answer.add(parser.finish())
        assert (answer.reasoning, answer.text) == (reasoning, "")
        assert [(call.name, call.arguments) for call in answer.calls] == [CALLED]


OF_LLAMA_CPP = {
    "GLM-4.6": Form.GLM, "GLM-4.7-Flash": Form.GLM_INLINE, "Kimi-K2-Instruct": Form.KIMI, "Kimi-K2-Thinking": Form.KIMI,
    "deepseek-ai-DeepSeek-V3.1": Form.DEEPSEEK, "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": Form.DEEPSEEK_BLOCK,
    "deepseek-ai-DeepSeek-V3.2": Form.DSML, "deepseek-ai-DeepSeek-V4": Form.DSML_4, "MiniMax-M2": Form.MINIMAX,
    "openai-gpt-oss-120b": Form.HARMONY, "Qwen3-Coder": Form.QWEN_XML, "Qwen3.5-4B": Form.QWEN_XML,
}  # fmt: skip


@pytest.mark.parametrize(("name", "form"), OF_LLAMA_CPP.items())
def test_what_templates_write_is_read(name: str, form: Form) -> None:
    """The model's turn, as the template writes it into the next prompt."""
    try:
        source = (llama_cpp_source.source() / "models" / "templates" / f"{name}.jinja").read_text()
    except OSError as e:
        pytest.skip(f"llama.cpp's templates cannot be had: {e}")
    assert form_of(source) is form
    identity = "functions.look:0" if form is Form.KIMI else "call00001"
    call = {"id": identity, "type": "function", "function": {"name": "look", "arguments": IN_JSON}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    template = ChatTemplate(source, "<s>", "</s>")
    before, _ = template.conversation(messages[:1], list(TOOLS), False)
    text, _ = template.conversation(messages, list(TOOLS), False)
    assert text.startswith(before)
    answer = answer_format(source, "", {}, TOOLS)
    found = WholeAnswer(AnswerParser(answer, "key").feed(text[len(before) :]))
    assert [(one.name, json.loads(one.arguments)) for one in found.calls] == [("look", HALL)]


def test_special_tokens_that_are_marks_have_a_text() -> None:
    special = {"[TOOL_CALLS]": 5, "[ARGS]": 6, "[INST]": 7}
    found = answer_format("[TOOL_CALLS][ARGS]", "", special, TOOLS)
    assert found.token_texts == {5: "[TOOL_CALLS]", 6: "[ARGS]"}
    assert answer_format("[TOOL_CALLS][ARGS]", "", special).token_texts == {}


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("choice", [ToolChoice(), ToolChoice(must_call=True), ToolChoice(must_call=True, name="wait")])
@pytest.mark.parametrize("special", [{}, {"<tool_call>": 5, "</think>": 7, "[TOOL_CALLS]": 9, "[ARGS]": 10}])
def test_grammars_are_whole(form: Form, choice: ToolChoice, special: dict[str, int]) -> None:
    marks = Marks(special | {f"<{n}>": n for n in range(20, 30)}, ends=(2,))
    for reasoning in (reasoning_format("", ""), reasoning_format("<think>", ""), reasoning_format("", "<think>\n")):
        grammar = grammar_of_calls(form, reasoning, TOOLS, choice, marks)
        assert (grammar is not None) is (choice.must_call or form not in (Form.LLAMA, Form.JSON))
        if grammar is not None:
            checked = check(Constraint(call_grammar=grammar))
            assert not checked.problem
            assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(checked.lark)) == ""


def test_schemas_that_no_grammar_follows() -> None:
    odd = {"name": "odd", "parameters": {"type": "object", "properties": {"a": {"type": "array", "contains": {}}}}}
    must, plain = ToolChoice(must_call=True), reasoning_format("", "")
    for form in Form:
        grammar = grammar_of_calls(form, plain, [{"type": "function", "function": odd}], must, Marks({}))
        checked = check(Constraint(call_grammar=grammar))
        assert (checked.problem, "contains" in checked.lark) == ("", False)
        assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(checked.lark)) == ""
    strict = {"type": "function", "function": {**odd, "strict": True}}
    constraint = Constraint(call_grammar=grammar_of_calls(Form.HERMES, plain, [strict], must, Marks({})))
    with pytest.raises(BodyError, match=r"`tools\[0\]\.function\.parameters` has 'contains', which is not supported"):
        check(constraint).raise_problem(constraint)


def test_what_may_be_chosen() -> None:
    assert tool_choice(TOOLS, "none") == ((), ToolChoice())
    assert tool_choice(TOOLS, "auto", False)[1] == ToolChoice(parallel=False)
    named = {"type": "function", "function": {"name": "wait"}}
    assert tool_choice(TOOLS, named)[1] == ToolChoice(must_call=True, name="wait", parallel=False)
    assert tool_choice(TOOLS, tool_choice(TOOLS, named)[1].to_openai())[1].name == "wait"
    for allowed in (
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "wait"}]},  # responses'
    ):
        left, wanted = tool_choice(TOOLS, allowed)
        assert ([tool["function"]["name"] for tool in left], wanted) == (["wait"], ToolChoice(must_call=True))
    for tools, choice, field in (
        (TOOLS, {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "go"}]}, "tool_choice"),
        (TOOLS, {"type": "allowed_tools", "mode": "any", "tools": [named]}, "tool_choice"),
        (TOOLS, "any", "tool_choice"), (TOOLS, {"type": "function", "function": {"name": "go"}}, "tool_choice"),
        ((), "required", "tool_choice"), ([{"type": "f"}], None, r"tools\[0\]"),
        ([{"type": "function", "function": {"name": "a b"}}], None, r"tools\[0\]\.function\.name"),
    ):  # fmt: skip
        with pytest.raises(BodyError, match=f"`{field}`"):
            tool_choice(tools, choice)


def test_a_call_that_is_required_takes_precedence_over_a_schema() -> None:
    grammar = CallGrammar(lark='start: "a"', schemas=())
    prompt = ChatPrompt((1,), answer_format("", ""), grammar=grammar, must_call=True)
    held = prompt.held(SamplingConfig(json_schema="{}"))
    assert (held.json_schema, held.call_grammar) == ("", grammar)
    with pytest.raises(BodyError, match="`tool_choice` demands a call, which `grammar` forbids"):
        prompt.held(SamplingConfig(grammar='root ::= "a"'))
    free = replace(prompt, must_call=False).held(SamplingConfig(json_schema="{}"))
    assert (free.json_schema, free.call_grammar) == ("{}", None)
