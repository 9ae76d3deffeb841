"""JSON schemas as grammars for llguidance, so that the output always matches the schema.

llguidance reads schemas of drafts 4 to 2020-12. Properties come in the order of `properties`, whitespace between two
parts is at most a line break and 20 spaces, and `oneOf` counts as `anyOf`. What llguidance cannot follow is refused by
name. Keywords that the standard does not define are ignored, as it demands, with a warning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ggpipe.errors import SettingError

MOST_BYTES = 4_000_000
OPTIONS: Mapping[str, Any] = {
    "whitespace_pattern": r"\x20|\n{1,2}[\x20\t]{0,20}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": True,
    "lenient": False,
}
"""llguidance's options for JSON. They override those in a schema."""
NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""Has llguidance allow all tokens that fit, instead of only those into which a tokenizer splits the text."""
_COMPACT: Mapping[str, Any] = {
    **{name: value for name, value in OPTIONS.items() if name != "whitespace_pattern"},
    "whitespace_flexible": False,
}
_MOST_NAMED = 5
_DRAFTS = tuple(f"http://json-schema.org/draft-{draft}/schema" for draft in ("04", "06", "07")) + tuple(
    f"https://json-schema.org/draft/{draft}/schema" for draft in ("2019-09", "2020-12")
)
_IN_OBJECTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ALONE = (
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains",
    "propertyNames", "not", "if", "then", "else", "contentSchema",
)  # fmt: skip
_KNOWN = frozenset((
    *_IN_OBJECTS, *_IN_LISTS, *_ALONE,
    "$schema", "$id", "id", "$ref", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor",
    "$vocabulary", "$comment", "type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum",
    "exclusiveMinimum", "maxLength", "minLength", "pattern", "format", "maxItems", "minItems", "uniqueItems",
    "maxContains", "minContains", "maxProperties", "minProperties", "required", "dependentRequired", "dependencies",
    "title", "description", "default", "deprecated", "readOnly", "writeOnly", "examples", "contentEncoding",
    "contentMediaType",
))  # fmt: skip


def parse_schema(text: str) -> Any:
    """A schema as a JSON value. Raises SettingError if it is none, or is too large."""
    if len(text) > MOST_BYTES:
        raise _wrong(f"has more than {MOST_BYTES} characters")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as e:
        raise _wrong("is too deep") from e
    except ValueError as e:
        raise _wrong(f"is not JSON: {e}") from e


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def guidance_schema(schema: Any) -> tuple[str, list[str]]:
    """A schema in JSON as llguidance is to read it, and warnings, one line each. Raises SettingError."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _wrong("is false, which no value matches" if schema is False else "must be an object")
    unknown, warnings = dict[str, None](), []
    for own in schemas_in(schema):
        _check(own, str(schema.get("$schema", "")))
        unknown.update(dict.fromkeys(keyword for keyword in own if keyword not in _KNOWN))
    unknown.pop("x-guidance", None)
    if unknown:
        names = ", ".join(f"'{name[:40]}'" for name in list(unknown)[:_MOST_NAMED])
        warnings.append(
            f"ignores keywords that the standard does not define: {names}"
            + (", ..." if len(unknown) > _MOST_NAMED else "")
        )
    if "$schema" in schema and str(schema["$schema"]).rstrip("#") not in _DRAFTS:
        warnings.append(f"is read as draft 2020-12: {schema['$schema']!r:.80} is unknown")
        schema = {keyword: value for keyword, value in schema.items() if keyword != "$schema"}
    try:
        return json.dumps({**schema, "x-guidance": OPTIONS}, allow_nan=False), warnings
    except RecursionError as e:
        raise _wrong("is too deep") from e
    except ValueError as e:
        raise _wrong("has a number that is out of range") from e


def without_whitespace(lark: str) -> str:
    """Change a grammar, as `check` returns it: JSON has no whitespace between its parts, and llguidance may force
    text."""
    return lark.removeprefix(NO_FORCING).replace(json.dumps(OPTIONS), json.dumps(_COMPACT))


def schemas_in(schema: Any) -> Iterator[Mapping[str, Any]]:
    """All schemas that are objects, in a schema and in itself."""
    waiting = [schema]
    while waiting:
        own = waiting.pop()
        if not isinstance(own, dict):
            continue
        yield own
        for keyword in _IN_OBJECTS:
            if isinstance(inside := own.get(keyword), dict):
                waiting += inside.values()
        for keyword in _IN_LISTS:
            if isinstance(inside := own.get(keyword), list):
                waiting += inside
        waiting += [own[keyword] for keyword in _ALONE if keyword in own]


def _check(schema: Mapping[str, Any], draft: str) -> None:
    """Refuse what llguidance would not refuse, and would not follow. `draft`: the root's `$schema`. Raises
    SettingError."""
    if "/draft-03/" in draft:
        raise _wrong("is of draft 3, which is not supported: use a later one")
    if "$ref" in schema and "$id" in schema and "/draft/20" not in draft:  # earlier drafts ignore the id
        raise _wrong("has '$id' next to '$ref', which is not supported")


def one_line(message: str) -> str:
    """A message of llguidance as one line, without the backtrace that follows where it panics."""
    return " ".join(message.partition("<backtrace>")[0].split())


def problem_of(message: str) -> str:
    """What llguidance says of a schema, as the rest of a sentence whose subject is the schema."""
    message = one_line(message)[:300]
    if message.startswith("Unimplemented keys: "):
        names = message.removeprefix("Unimplemented keys: ").strip("[]").replace('"', "'")
        return f"has {names}, which {'are' if ',' in names else 'is'} not supported"
    if message.startswith("Unknown format: "):
        return f"has the format '{message.removeprefix('Unknown format: ')}', which is not supported"
    if message.startswith("Unsatisfiable schema: "):
        return f"matches no value: {message.removeprefix('Unsatisfiable schema: ')}"
    if "recursion limit" in message:
        return "is too deep"
    if "too big" in message or "limit" in message:
        return f"is too large: {message}"
    return f"cannot be followed: {message}"


def _wrong(problem: str) -> SettingError:
    return SettingError("json_schema", problem)
