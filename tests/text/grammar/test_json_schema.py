"""JSON schemas that llguidance cannot follow are refused by name. What the others give is checked in tests/llama."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.grammars import SCHEMAS

from ggpipe.errors import UsageError
from ggpipe.text.grammar.check import Checked, Constraint, GrammarChecker, check


def of(schema: Any) -> Checked:
    return check(Constraint(json_schema=schema if isinstance(schema, str) else json.dumps(schema)))


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_become_grammars(name: str) -> None:
    assert (of(SCHEMAS[name]).problem, of(SCHEMAS[name]).warnings) == ("", ())


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is too deep"),
        ('{"properties": {"a": ' * 90 + "{}" + "}}" * 90, "is too deep"),
        ('{"minimum": NaN}', "is not JSON: NaN is no number"),
        ('{"minimum": 1e999}', "has a number that is out of range"),
        ('"' + "x" * 5_000_000 + '"', "has more than 4000000 characters"),
        (False, "is false, which no value matches"),
        (5, "must be an object"),
        ({"type": "text"}, "Invalid type: text"),
        ({"type": []}, "matches no value"),
        ({"not": {}}, "has 'not', which is not supported"),
        ({"properties": {"a": {"if": True}}}, "has 'if', which is not supported"),
        ({"if": True, "then": True}, "has 'if', 'then', which are not supported"),
        ({"type": "array", "uniqueItems": True}, "has 'uniqueItems'"),
        ({"type": "string", "format": "idn-email"}, "has the format 'idn-email', which is not supported"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "pattern": "(a)\\1"}, "backreferences"),
        ({"type": "string", "pattern": "(a"}, "unclosed group"),
        ({"type": "string", "pattern": 5}, "pattern"),
        ({"type": "string", "minLength": 5, "maxLength": 4}, "matches no value"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "matches no value: minimum (5) is greater"),
        ({"type": "integer", "minimum": "5"}, "'minimum'"),
        ({"$ref": "https://example.org/a"}, "https://example.org/a"),
        ({"$ref": "#/$defs/a"}, "Pointer '/$defs/a' does not exist"),
        ({"anyOf": []}, "matches no value"),
        ({"enum": ["a"], "type": "integer"}, "matches no value"),
        ({"type": "object", "properties": []}, "properties"),
        ({"type": "object", "required": "a"}, "required"),
        ({"allOf": [{"type": "string"}, {"type": "object"}]}, "matches no value"),
        ({"$schema": "http://json-schema.org/draft-03/schema#", "disallow": "any"}, "is of draft 3"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/a", "$id": "b", "a": {}}, "next to '$ref'"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "has 'not'"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(schema: Any, why: str) -> None:
    problem = of(schema).problem
    assert why in problem
    assert "\n" not in problem
    with pytest.raises(UsageError, match=r"^`json_schema` "):
        of(schema).raise_problem(Constraint(json_schema="{}"))


def test_unknown_keywords_are_ignored_with_a_warning() -> None:
    schema = {"type": "object", "nullable": True, "properties": {"a": {"type": "string", "x-order": 1}, "x-b": {}}}
    assert of(schema).warnings == ("ignores keywords that the standard does not define: 'nullable', 'x-order'",)
    assert of({"enum": [{"nullable": 1}], "default": {"nullable": 1}}).warnings == ()
    many = of({f"k{n}": n for n in range(9)})
    assert many.warnings[0].endswith("'k0', 'k1', 'k2', 'k3', 'k4', ...")
    assert of({"$schema": "http://example.org/s", "type": "null"}).warnings == (
        "is read as draft 2020-12: 'http://example.org/s' is unknown",
    )


def hostile(n: int) -> dict[str, Any]:
    """Merging all of it would take 2^n steps."""
    deeper = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(n)}
    return {"$ref": "#/$defs/a0", "$defs": {**deeper, f"a{n}": {"properties": {"x": {"type": "string"}}}}}


def slow() -> str:
    return json.dumps({"allOf": [{"required": [f"p{i}_{n}" for i in range(9000)]} for n in range(9)]})


def test_hostile_schemas_delay_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker()
    assert checker.check(Constraint(json_schema='{"type": "null"}')).lark
    outcome = checker.check(Constraint(json_schema=slow()))
    assert re.match("takes more than (5 s to read|2 GiB of memory)", outcome.problem)  # a fast machine fills it first
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(600)}
    refs = {"$ref": "#/$defs/a0", "$defs": {**chain, "a600": {"type": "string"}}}
    for schema in (hostile(30), refs, {"properties": {"n" * 700: {"type": "null"}}}):
        assert checker.check(Constraint(json_schema=json.dumps(schema))).problem == ""
    checker.close()
    assert checker.check(Constraint(grammar='root ::= "a"')).problem == "is not checked any more: the engine ends"
