"""Grammars that hold a model's answer to valid tool calls, in llguidance's form of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ggpipe.config.sampling import CallGrammar, ToolSchema
from ggpipe.core.prompt import ToolChoice
from ggpipe.text.chat.reasoning import ReasoningFormat
from ggpipe.text.chat.tools.forms import CALL_SYNTAXES, CallSyntax, Form, Tags
from ggpipe.text.grammar.json_schema import NO_FORCING
from ggpipe.text.grammar.lark import Marks, string, written

_ANY_OBJECT = '%json {"type": "object"}'
_NAMES, _NUMBERS = "/[a-zA-Z0-9_.-]+/", "/[0-9]+/"


def grammar_of_calls(
    form: Form,
    reasoning: ReasoningFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    marks: Marks,
) -> CallGrammar | None:
    """A grammar for an answer whose calls match the schemas of their tools; None if there is no constraint.

    Unless a call is required, the text is unconstrained until the mark of a call. If the format has no mark, there is
    no grammar. `marks`: spells the model's special tokens.
    """
    layout = CALL_SYNTAXES[form]
    if not tools or not (choice.must_call or layout.mark):
        return None
    rules: dict[str, str] = {"start": ""}
    schemas: list[ToolSchema] = []
    ways = []
    for i, tool in enumerate(tools):
        if choice.name in (None, tool["function"]["name"]):
            rules[f"call-{i}"] = _call(i, tool["function"], form, marks, rules, schemas)
            ways.append(f"call-{i}")
    rules["call"] = " | ".join(ways)
    mark = marks.spelled(layout.mark) if layout.mark else ""
    calls = f"{marks.spelled(layout.begin)} call"
    if layout.between is not None and choice.parallel:
        each = mark if layout.has_each_mark else ""
        calls += f" ( {marks.spelled(layout.between)} {each} call )*"
    rules["calls"] = f"{calls} {marks.spelled(layout.end)}"
    begin = reasoning.begins[0] if reasoning.is_usual and not reasoning.is_open else ""
    if choice.must_call:
        lead = f"( {marks.spelled(layout.lead)} )? " if layout.lead else ""
        rules["answer"] = f"{lead}{mark} calls"
    else:
        not_first = begin if begin and not marks.is_token(begin) else ""
        rules["answer"] = "answer-free | answer-until calls"
        rules |= marks.until("answer-until", layout.mark, not_first)
        rules |= marks.free("answer-free", (layout.mark,), not_first)
    rules["start"] = _with_reasoning(reasoning, rules, marks)
    return CallGrammar(lark=NO_FORCING + written(rules), schemas=tuple(schemas))


def _with_reasoning(own: ReasoningFormat, rules: dict[str, str], marks: Marks) -> str:
    """The start rule: the answer, with the reasoning that may come before it."""
    if not (own.is_open or own.is_usual):
        return "answer"
    answers = " | ".join(marks.spelled(mark) for mark in own.answers)
    rules["thought"] = f"thought-until /[ \\t\\r\\n]*/ {f'( {answers} )? ' if answers else ''}answer"
    rules |= marks.until("thought-until", own.ends[0])
    return "thought" if own.is_open else f"{marks.spelled(own.begins[0])} thought | answer"


def _call(
    i: int, function: Mapping[str, Any], form: Form, marks: Marks, rules: dict[str, str], schemas: list[ToolSchema]
) -> str:
    """The rule of a call of a tool, without its mark. Adds the rules and schemas that it refers to."""
    layout, name = CALL_SYNTAXES[form], function["name"]
    before, after = (_filled(text, marks, NAME=name) for text in (layout.before, layout.after))
    schema = {"type": "object", **function["parameters"]}
    if "additionalProperties" not in schema and "patternProperties" not in schema and "properties" in schema:
        schema["additionalProperties"] = False
    at, is_strict = f"tools[{i}].function.parameters", bool(function.get("strict"))
    if layout.tags is not None:
        arguments = _tags(layout.tags, schema, at, is_strict, marks, rules, schemas)
    else:
        arguments = _schema(schema, at, is_strict, _ANY_OBJECT, schemas)
    return f"{before} {arguments} {_identity(layout)} {after}"


def _identity(layout: CallSyntax) -> str:
    """Mistral's models may write an id after the arguments."""
    if not (layout.id_length and layout.end):
        return ""
    return f'( ", \\"id\\": \\"" /[a-zA-Z0-9]{{{layout.id_length}}}/ "\\"" )?'


def _schema(schema: Any, at: str, is_strict: bool, fallback: str, schemas: list[ToolSchema]) -> str:
    """The name of the rule for a value that matches a schema."""
    text = json.dumps(schema)
    schemas.append(ToolSchema(schema=text, at=at, is_strict=is_strict, fallback=fallback))
    return ToolSchema.rule(len(schemas) - 1)


def _filled(text: str, marks: Marks, **values: str) -> str:
    """A text of a CallSyntax as a part of a rule. `values`: what its placeholders stand for; the others: anything."""
    usual = {"KEY": _NAMES, "INDEX": _NUMBERS, "STRING": '( "true" | "false" )'}
    parts = re.split("(NAME|KEY|INDEX|STRING)", text)
    found = (
        part and (marks.spelled(values.get(part, part)) if i % 2 == 0 or part in values else usual[part])
        for i, part in enumerate(parts)
    )
    return " ".join(filter(None, found)) or '""'


def _tags(
    tags: Tags,
    schema: Mapping[str, Any],
    at: str,
    is_strict: bool,
    marks: Marks,
    rules: dict[str, str],
    schemas: list[ToolSchema],
) -> str:
    """Arguments as tags, in the order of the properties."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    after = marks.spelled(tags.after)
    if "any-value" not in rules:
        rules |= marks.until("any-value", tags.after)
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return f"( {_filled(tags.before, marks)} any-value )*"
    definitions = {keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema}
    parts = []
    for key, own in properties.items():
        values = own.get("enum") if isinstance(own, Mapping) else None
        is_string = True
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            value = f"( {' | '.join(map(string, values))} ) {after}"
        elif isinstance(own, Mapping) and own.get("type") == "string":
            value = "any-value"
        else:
            is_string = False
            whole = {**own, **definitions} if isinstance(own, Mapping) else own
            # a fallback is any JSON
            value = f"{_schema(whole, at, is_strict, '%json {}', schemas)} {after}"
        part = f"{_filled(tags.before, marks, KEY=key, STRING=str(is_string).lower())} {value}"
        parts.append(part if key in required else f"( {part} )?")
    return " ".join(parts) or '""'
