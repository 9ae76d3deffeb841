"""Grammars, in GBNF, that hold a model's answer to valid tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ggpipe.core.prompt import ToolChoice
from ggpipe.errors import BodyError, SettingError
from ggpipe.text.chat.reasoning import ReasoningFormat, begun
from ggpipe.text.chat.tools.forms import CALL_SYNTAXES, CallSyntax, Form
from ggpipe.text.grammar.gbnf import ROOT
from ggpipe.text.grammar.json_schema import rules_of
from ggpipe.text.grammar.json_text import class_character, quoted


def grammar_of_calls(
    form: Form, reasoning: ReasoningFormat, tools: Sequence[Mapping[str, Any]], choice: ToolChoice
) -> str:
    """A grammar for an answer whose calls match the schemas of their tools; empty if there is no constraint.

    Unless a call is required, the text is unconstrained until the mark of a call. If the format has no mark, there is
    no grammar. A schema with unsupported keywords counts as any object.

    Raises BodyError if the function of such a schema is `strict`.
    """
    layout = CALL_SYNTAXES[form]
    if not tools or not (choice.must_call or layout.mark):
        return ""
    rules: dict[str, str] = {}
    ways = []
    for i, tool in enumerate(tools):
        function = tool["function"]
        if choice.name in (None, function["name"]):
            ways.append(_call(i, function, form, rules))
    rules["call"] = " | ".join(ways)
    mark = quoted(layout.mark) if layout.mark else ""
    each = mark if layout.has_each_mark else ""
    calls = f"{quoted(layout.begin)} call"
    if layout.between is not None and choice.parallel:
        calls += f" ( {quoted(layout.between)} {each} call )*"
    rules["calls"] = f"{calls} {quoted(layout.end)}"
    if choice.must_call:
        rules["answer"] = f"{mark} calls"
    else:
        rules |= _until(layout.mark, "answer", "calls", may_end=True)
    root = _with_reasoning(reasoning, rules)
    return "\n".join((f"{ROOT} ::= {root}", *(f"{name} ::= {rule}" for name, rule in rules.items()), ""))


def _with_reasoning(marks: ReasoningFormat, rules: dict[str, str]) -> str:
    """The root rule: the answer, with the reasoning that may come before it."""
    if not (marks.is_open or marks.is_usual):
        return "answer"
    answers = " | ".join(quoted(mark) for mark in marks.answers)
    rules["gap"] = f"[ \\t\\r\\n]* {f'( {answers} )? ' if answers else ''}answer"
    rules |= _until(marks.ends[0], "thought", "gap", may_end=False)
    return "thought" if marks.is_open else f"{quoted(marks.begins[0])} thought | answer"


def _call(i: int, function: Mapping[str, Any], form: Form, rules: dict[str, str]) -> str:
    """Add a rule for a call of a tool, without its mark. Returns the rule's name."""
    layout, name = CALL_SYNTAXES[form], function["name"]
    before, after = (quoted(text.replace("NAME", name)) for text in (layout.before, layout.after))
    schema = {"type": "object", **function["parameters"]}
    if schema.get("properties") == {}:
        schema = {"additionalProperties": False, **schema}
    try:
        arguments = _tags(schema, f"t{i}-", rules) if form is Form.QWEN_XML else _json(schema, f"t{i}-", schema, rules)
    except SettingError as e:
        if function.get("strict"):
            at = f"tools[{i}].function.parameters"
            raise BodyError(f"`{at}` {e.problem}", at) from e
        arguments = _any_object(form, rules)
    rules[f"call{i}"] = f"{before} {arguments} {_identity(layout)} {after}"
    return f"call{i}"


def _identity(layout: CallSyntax) -> str:
    """Mistral's models may write an id after the arguments."""
    return rf'( ", \"id\": \"" [a-zA-Z0-9]{{{layout.id_length}}} "\"" )?' if layout.id_length and layout.end else ""


def _any_object(form: Form, rules: dict[str, str]) -> str:
    if form is Form.QWEN_XML:
        rules |= _until("\n</parameter>\n", "free", '""', may_end=False)
        return '( "<parameter=" [a-zA-Z0-9_.-]+ ">\\n" free )*'
    return _json({"type": "object"}, "any-", {}, rules)


def _json(schema: Any, prefix: str, document: Any, rules: dict[str, str]) -> str:
    root, found = rules_of(schema, document, prefix)
    rules.setdefault(f"{prefix}value", root)
    rules |= found
    return f"{prefix}value"


def _tags(schema: Mapping[str, Any], prefix: str, rules: dict[str, str]) -> str:
    """Arguments as tags, the required ones first."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise SettingError("json_schema", "must have an object as properties, and a list as required")
    parts = []
    for j, (key, own) in enumerate(sorted(properties.items(), key=lambda item: item[0] not in required)):
        end = f"{prefix}p{j}"
        values = own.get("enum") if isinstance(own, Mapping) else None
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            rules[end] = f'( {" | ".join(map(quoted, values))} ) "\\n</parameter>\\n"'
        elif isinstance(own, Mapping) and own.get("type") == "string":
            rules |= _until("\n</parameter>\n", end, '""', may_end=False)
        else:
            rules[end] = f'{_json(own, f"{end}-", schema, rules)} "\\n</parameter>\\n"'
        part = f"{quoted(f'<parameter={key}>' + chr(10))} {end}"
        parts.append(part if key in required else f"( {part} )?")
    return " ".join(parts) or '""'


def _until(mark: str, name: str, then: str, may_end: bool) -> dict[str, str]:
    """Rules for any text up to and including the first `mark`, followed by `then`. `name`: of the first rule.
    `may_end`: the text may also end without a mark.

    They are the Knuth-Morris-Pratt automaton: one rule per number of the mark's characters that the text ends with.
    """
    rules = {}
    for n in range(len(mark)):
        ways: dict[int, str] = {}
        for character in dict.fromkeys(mark):
            text = mark[:n] + character
            n_next = len(mark) if text == mark else begun(mark, text)
            if n_next:
                ways[n_next] = ways.get(n_next, "") + character
        others = "".join(class_character(character) for character in "".join(ways.values()))
        rule = [f"[^{others}] {name}"] if others else [f". {name}"]
        for n_next, characters in ways.items():
            after = then if n_next == len(mark) else f"{name}-{n_next}"
            rule += [f"{quoted(character)} {after}" for character in characters]
        rules[f"{name}-{n}" if n else name] = " | ".join(rule) + (' | ""' if may_end else "")
    return rules
