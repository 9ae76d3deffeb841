"""JSON schemas that no grammar can follow are refused by name. What the others give is checked in tests/llama."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.grammars import SCHEMAS

from ggpipe.errors import UsageError
from ggpipe.text.grammar.gbnf import check
from ggpipe.text.grammar.json_schema import grammar_of


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_become_grammars(name: str) -> None:
    check(grammar_of(json.dumps(SCHEMAS[name])))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is too deep"),
        (False, "is false"),
        (5, "must be an object"),
        ({"type": "text"}, "has the type 'text'"),
        ({"type": []}, "has an empty list of types"),
        ({"not": {}}, "has 'not', which is not supported"),
        ({"properties": {"a": {"if": True}}}, "/properties/a has 'if', which is not supported"),
        ({"type": "array", "uniqueItems": True}, "has 'uniqueItems'"),
        ({"type": "number", "minimum": 3}, "has 'minimum', which is not supported for numbers"),
        ({"type": "string", "items": {}}, "has 'items', which does not apply to its type"),
        ({"items": {}, "maxLength": 5}, "has keywords of several types"),
        ({"type": "string", "format": "email"}, "has the format 'email', which is none of date"),
        ({"type": "string", "pattern": "^a$", "maxLength": 5}, "has 'maxLength' together with 'pattern'"),
        ({"type": "string", "pattern": "(?=a)"}, "begins a lookaround"),
        ({"type": "string", "pattern": "(a)\\1"}, "has no meaning here"),
        ({"type": "string", "pattern": "(a"}, "is in a group that is not closed"),
        ({"type": "string", "pattern": "[b-a]"}, "follows an invalid range"),
        ({"type": "string", "pattern": 5}, "must be a string"),
        ({"type": "string", "maxLength": 5000}, "must be a number from 0 to 2000"),
        ({"type": "string", "minLength": 5, "maxLength": 4}, "has a 'maxLength' below its 'minLength'"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "allows no integer"),
        ({"type": "integer", "minimum": "5"}, "must be a number"),
        ({"$ref": "https://example.org/a"}, "only parts of the same schema"),
        ({"$ref": "#/$defs/a"}, "refers to #/$defs/a, which does not exist"),
        ({"allOf": [{"$ref": f"#/allOf/{'9' * 5000}"}]}, "which does not exist"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "type": "string"}, "has 'type' together with '$ref'"),
        ({"anyOf": []}, "must be a list that is not empty"),
        ({"enum": ["a"], "type": "integer"}, "has no value of its type"),
        ({"type": "object", "properties": []}, "must be an object"),
        ({"type": "object", "required": "a"}, "must be a list of names"),
        ({"required": ["a"], "additionalProperties": False}, "requires the property 'a', which it forbids"),
        ({"allOf": [{"type": "object", "additionalProperties": False}]}, "next to or inside 'allOf'"),
        ({"allOf": [{"type": "string"}, {"type": "object"}]}, "/allOf/1 has another 'type'"),
        ({"allOf": [{"$ref": "#"}]}, "schemas deep"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(schema: Any, why: str) -> None:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(UsageError) as caught:
        grammar_of(text)
    assert str(caught.value).startswith("`json_schema`")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def _optional(n: int) -> str:
    return json.dumps({"properties": {f"property_{i}": {"type": "string"} for i in range(n)}})


def test_thousands_of_optional_properties() -> None:
    check(grammar_of(_optional(3000)))  # in a part of a second, since all streams wait for it
    with pytest.raises(UsageError, match="`json_schema` has 5000 optional properties, of which 4000 are supported"):
        grammar_of(_optional(5000))


def test_a_schema_that_is_only_itself_is_refused() -> None:
    with pytest.raises(UsageError, match="begins with itself"):
        check(grammar_of('{"$ref": "#"}'))
