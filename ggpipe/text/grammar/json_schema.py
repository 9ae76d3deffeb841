"""Converts JSON schemas to grammars, so that the output always matches the schema.

The conventions are those of llama.cpp's `json-schema-to-grammar`: required properties come first, whitespace is at most
a line break and 20 spaces, and `oneOf` counts as `anyOf`. Unlike there, unsupported keywords and contradictions are
errors, and `{}` as a whole schema is any object. llama-cpp-python's converter is older: it allows control characters in
strings and has no bounds for numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ggpipe.errors import SettingError
from ggpipe.text.grammar.gbnf import ROOT
from ggpipe.text.grammar.json_text import RULES, digits_between, literal, other_strings, rules_named_in, times
from ggpipe.text.grammar.pattern import PatternError, pattern_rule

_MOST_REPEATED = 2000
_MOST_DEPTH = 100
_MOST_OPTIONAL = 4000  # libllama follows a way for each of them
_MOST_DIGITS = 10
_FORMATS = ("date", "time", "date-time", "uuid")
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

_NO_CONSTRAINT = frozenset(
    "$schema $id $comment $defs definitions title description default examples deprecated readOnly writeOnly".split()  # noqa: SIM905
)
_OF_TYPE = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "string": frozenset(("pattern", "format", "minLength", "maxLength")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "number": frozenset[str](),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum")
_KNOWN = _NO_CONSTRAINT.union({"type"}, _COMBINING, *_OF_TYPE.values())


def grammar_of(text: str) -> str:
    """The grammar, in GBNF, of a JSON schema. `text`: the schema as a JSON document.

    Raises SettingError, in one line, for an invalid schema and for unsupported keywords.
    """
    try:
        schema = json.loads(text)
    except ValueError as e:
        raise SettingError("json_schema", f"is not JSON: {e}") from e
    except RecursionError as e:
        raise SettingError("json_schema", "is too deep") from e
    root, rules = rules_of({"type": "object"} if schema == {} else schema, schema)
    return "\n".join((f"{ROOT} ::= {root}", *(f"{name} ::= {rule}" for name, rule in rules.items()), ""))


def rules_of(schema: Any, document: Any, prefix: str = "") -> tuple[str, dict[str, str]]:
    """The rule of a schema, and the rules that it refers to, by name: some of `RULES`, and others whose names begin
    with `prefix`. `document`: what `$ref` refers to. Raises SettingError as `grammar_of` does."""
    converter = _Converter(document, prefix)
    return converter.visit(schema, ""), converter.rules


def _wrong(place: str, why: str) -> SettingError:
    return SettingError("json_schema", f"at {place} {why}" if place else why)


class _Converter:
    def __init__(self, document: Any, prefix: str) -> None:
        self._document = document
        self._prefix = prefix
        self.rules: dict[str, str] = {}
        self._of_refs: dict[str, str] = {}
        self._depth = 0

    def _use(self, name: str) -> str:
        """Include one of `RULES`, and the rules that it refers to. Returns its name."""
        if name not in self.rules:
            self.rules[name] = RULES[name]
            for other in rules_named_in(RULES[name]):
                self._use(other)
        return name

    def _add(self, place: str, rule: str) -> str:
        """Add a rule of this schema. Returns its name."""
        if re.fullmatch("[a-z0-9-]+", rule):
            return rule
        name = f"{self._prefix}r{len(self.rules)}-{re.sub('[^a-zA-Z0-9]+', '-', place)[-40:].strip('-')}".rstrip("-")
        self.rules[name] = rule
        return name

    def visit(self, schema: Any, place: str) -> str:
        """Convert a schema. `place`: where it is in the document (`/properties/a`). Returns the name of its rule."""
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise _wrong(place, f"is more than {_MOST_DEPTH} schemas deep")
        rule = self._add(place, self._rule(schema, place))
        self._depth -= 1
        return rule

    def _rule(self, schema: Any, place: str) -> str:
        if schema is True or schema == {}:
            return self._use("value")
        if not isinstance(schema, dict):
            raise _wrong(place, "must be an object" if schema is not False else "is false, which no value matches")
        for keyword in schema:
            if keyword not in _KNOWN:
                raise _wrong(place, f"has '{keyword}', which is not supported")
        if "allOf" in schema:
            schema = self._merged(schema, place)
        first = next((keyword for keyword in _COMBINING if keyword in schema), None)
        if first is not None:
            self._check_alone(schema, first, place)
        match first:
            case "$ref":
                return self._ref(schema["$ref"], place)
            case "anyOf" | "oneOf":
                schemas = self._list(schema, first, place)
                return " | ".join(self.visit(own, f"{place}/{first}/{i}") for i, own in enumerate(schemas))
            case "const":
                return self._values([schema["const"]], schema, place)
            case "enum":
                return self._values(self._list(schema, "enum", place), schema, place)
        return self._typed(schema, place)

    def _check_alone(self, schema: Mapping[str, Any], keyword: str, place: str) -> None:
        fine = _NO_CONSTRAINT | {keyword} | ({"type"} if keyword in ("const", "enum") else set())
        for other in schema:
            if other not in fine:
                raise _wrong(place, f"has '{other}' together with '{keyword}', which is not supported")

    def _list(self, schema: Mapping[str, Any], keyword: str, place: str) -> list[Any]:
        found = schema[keyword]
        if not isinstance(found, list) or not found:
            raise _wrong(f"{place}/{keyword}", "must be a list that is not empty")
        return found

    def _values(self, values: Sequence[Any], schema: Mapping[str, Any], place: str) -> str:
        types = self._types(schema, place)
        texts = [literal(value) for value in values if any(_is(value, kind) for kind in types)]
        if not texts:
            raise _wrong(place, "has no value of its type")
        return " | ".join(dict.fromkeys(texts))

    # References

    def _target(self, ref: Any, place: str) -> Any:
        if not isinstance(ref, str) or not re.fullmatch("#(/.*)?", ref, re.DOTALL):
            raise _wrong(place, f"refers to {ref!r}: only parts of the same schema are supported, as in #/$defs/name")
        found = self._document
        for part in ref.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and len(key) < _MOST_DIGITS and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                raise _wrong(place, f"refers to {ref}, which does not exist")
        return found

    def _ref(self, ref: Any, place: str) -> str:
        target = self._target(ref, place)
        if ref not in self._of_refs:
            self._of_refs[ref] = name = f"{self._prefix}ref{len(self._of_refs)}"
            self.rules[name] = ""  # it may refer to itself
            self.rules[name] = self._rule(target, ref[1:])
        return self._of_refs[ref]

    def _merged(self, schema: Mapping[str, Any], place: str) -> dict[str, Any]:
        """The schema with the keywords of its `allOf`. Only `required`, and `properties` of other names, may occur in
        several parts."""
        merged = {keyword: value for keyword, value in schema.items() if keyword != "allOf"}
        for i, found in enumerate(self._list(schema, "allOf", place)):
            part, depth = found, 0
            while isinstance(part, dict) and "$ref" in part and depth < _MOST_DEPTH:
                self._check_alone(part, "$ref", f"{place}/allOf/{i}")
                part, depth = self._target(part["$ref"], place), depth + 1
            if not isinstance(part, dict) or depth == _MOST_DEPTH:
                raise _wrong(f"{place}/allOf/{i}", "must be an object")
            if "allOf" in part:
                self._depth += 1
                if self._depth > _MOST_DEPTH:
                    raise _wrong(place, f"is more than {_MOST_DEPTH} schemas deep")
                part = self._merged(part, f"{place}/allOf/{i}")
                self._depth -= 1
            if (
                schema.get("additionalProperties", True) is not True
                or part.get("additionalProperties", True) is not True
            ):
                raise _wrong(place, "has 'additionalProperties' next to or inside 'allOf', which is not supported")
            for keyword, value in part.items():
                before = merged.get(keyword)
                if keyword in _NO_CONSTRAINT or before is None or before == value:
                    merged.setdefault(keyword, value)
                elif keyword == "required" and isinstance(value, list) and isinstance(before, list):
                    merged[keyword] = [*before, *value]
                elif keyword == "properties" and _is_object_of_other(before, value):
                    merged[keyword] = {**before, **value}
                else:
                    raise _wrong(f"{place}/allOf/{i}", f"has another '{keyword}', which is not supported")
        return merged

    # Types

    def _types(self, schema: Mapping[str, Any], place: str) -> Sequence[str]:
        found = schema.get("type", list(_TYPES))
        types = found if isinstance(found, list) else [found]
        for kind in types:
            if kind not in _TYPES:
                raise _wrong(place, f"has the type {kind!r}, which is none of {', '.join(_TYPES)}")
        if not types:
            raise _wrong(place, "has an empty list of types")
        return types

    def _typed(self, schema: Mapping[str, Any], place: str) -> str:
        types = self._types(schema, place)
        used = [keyword for keyword in schema if keyword not in _NO_CONSTRAINT | {"type"}]
        if "type" not in schema and used:  # the keywords imply the type
            types = [kind for kind in _TYPES if _OF_TYPE[kind].issuperset(used)]
        if not types:
            raise _wrong(place, "has keywords of several types: add 'type'")
        for keyword in used:
            if not any(keyword in _OF_TYPE[kind] for kind in types):
                is_bound = keyword in _OF_TYPE["integer"]
                what = "is not supported for numbers" if is_bound else "does not apply to its type"
                raise _wrong(place, f"has '{keyword}', which {what}")
        if "number" in types and "integer" in types and not used:
            types = [kind for kind in types if kind != "integer"]
        if len(types) == 1:
            return self._of_type(types[0], schema, place)
        return " | ".join(self._add(f"{place}-{kind}", self._of_type(kind, schema, place)) for kind in types)

    def _of_type(self, kind: str, schema: Mapping[str, Any], place: str) -> str:
        if _OF_TYPE[kind].isdisjoint(schema):
            return self._use(kind)
        match kind:
            case "object":
                return self._object(schema, place)
            case "array":
                return self._array(schema, place)
            case "string":
                return self._string(schema, place)
        return self._integer(schema, place)

    def _object(self, schema: Mapping[str, Any], place: str) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise _wrong(f"{place}/properties", "must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _wrong(f"{place}/required", "must be a list of names")
        space, more = self._use("space"), schema.get("additionalProperties", not properties)
        schemas = {**properties, **{name: more for name in required if name not in properties}}
        for name in required:
            if name not in properties and more is False and "additionalProperties" in schema:
                raise _wrong(place, f"requires the property {name!r}, which it forbids")
            if name not in properties:
                schemas[name] = True if more is False else more
        colon = f'{space} ":" {space}'
        pairs = {
            name: self._pair(name, value, place)
            for name, value in schemas.items()
            if name in required or value is not False
        }
        first = [pairs[name] for name in dict.fromkeys(required)]
        optional = [pair for name, pair in pairs.items() if name not in required]
        if len(optional) > _MOST_OPTIONAL:
            raise _wrong(place, f"has {len(optional)} optional properties, of which {_MOST_OPTIONAL} are supported")
        comma = f'"," {space}'
        tail = ""
        if more is not False:
            value = self.visit(more, f"{place}/additionalProperties")
            key = self._add(f"{place}-key", other_strings(schemas)) if schemas else self._use("string")
            self._use("plain")
            other = self._add(f"{place}-more", f"{key} {colon} {value}")
            tail = f"( {comma} {other} )*"
            starts = [f"{other} {tail}"]
        else:
            starts = []
        for pair in reversed(optional):
            starts.append(f"{pair} {tail}")
            tail = self._add(f"{place}-rest", f"( {comma} {pair} )? {tail}")
        if first:
            inside = f" {comma} ".join(first) + f" {tail}"
        else:
            inside = f"( {' | '.join(reversed(starts))} )?" if starts else ""
        return f'"{{" {space} {inside} {space} "}}"'

    def _pair(self, name: str, schema: Any, place: str) -> str:
        value, space = self.visit(schema, f"{place}/properties/{name}"), self._use("space")
        return self._add(f"{place}-{name}", f'{literal(name)} {space} ":" {space} {value}')

    def _array(self, schema: Mapping[str, Any], place: str) -> str:
        space, prefix, items = self._use("space"), schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(items, list):  # the former name of `prefixItems`, before 2020
            prefix, items = items, True
        if not isinstance(prefix, list):
            raise _wrong(f"{place}/prefixItems", "must be a list")
        least, most = self._bounds(schema, "minItems", "maxItems", place)
        firsts = [self.visit(item, f"{place}/prefixItems/{i}") for i, item in enumerate(prefix)]
        if firsts and "minItems" not in schema:
            least = len(firsts) if most is None else min(len(firsts), most)
        if firsts and "maxItems" not in schema and least <= len(firsts):
            most = len(firsts)  # as in llama.cpp, a tuple has no further items
        if items is False:
            most = len(firsts) if most is None else min(most, len(firsts))
        if most is not None and most < least:
            raise _wrong(place, f"requires {least} items and allows {most}")
        comma = f'"," {space}'
        rest = ""
        if most is None or most > len(firsts):
            item = self.visit(items, f"{place}/items")
            further = self._add(f"{place}-further", f"{comma} {item}")
            n_least, n_most = max(least - len(firsts), 0), None if most is None else most - len(firsts)
            if firsts:
                rest = f"{further}{times(n_least, n_most)}"
            else:
                others = "" if n_most == 1 else f"{further}{times(max(least - 1, 0), n_most and n_most - 1)}"
                rest = f"{item} {others}" if least else f"( {item} {others} )?"
        for i in range(len(firsts) - 1, -1, -1):
            if most is not None and i >= most:
                continue
            rest = f"{comma if i else ''} {firsts[i]} {rest}"
            if i >= least:
                rest = f"( {rest} )?"
        return f'"[" {space} {rest} {space} "]"'

    def _string(self, schema: Mapping[str, Any], place: str) -> str:
        used = [keyword for keyword in ("pattern", "format", "minLength", "maxLength") if keyword in schema]
        if len(used) > 1 and used != ["minLength", "maxLength"]:
            raise _wrong(place, f"has '{used[1]}' together with '{used[0]}', which is not supported")
        if "pattern" in schema:
            self._use("char")
            try:
                return pattern_rule(schema["pattern"])
            except PatternError as e:
                raise _wrong(f"{place}/pattern", str(e)) from e
        if "format" in schema:
            if schema["format"] not in _FORMATS:
                raise _wrong(place, f"has the format {schema['format']!r}, which is none of {', '.join(_FORMATS)}")
            return rf'"\"" {self._use(schema["format"])} "\""'
        least, most = self._bounds(schema, "minLength", "maxLength", place)
        return rf'"\"" {self._use("char")}{times(least, most)} "\""'

    def _bounds(self, schema: Mapping[str, Any], least: str, most: str, place: str) -> tuple[int, int | None]:
        found: list[int | None] = []
        for keyword in (least, most):
            n = schema.get(keyword)
            if n is not None and (not _is(n, "integer") or not 0 <= n <= _MOST_REPEATED):
                raise _wrong(f"{place}/{keyword}", f"must be a number from 0 to {_MOST_REPEATED}")
            found.append(None if n is None else int(n))
        n_least, n_most = found[0] or 0, found[1]
        if n_most is not None and n_most < n_least:
            raise _wrong(place, f"has a '{most}' below its '{least}'")
        return n_least, n_most

    def _integer(self, schema: Mapping[str, Any], place: str) -> str:
        bounds: dict[str, list[int]] = {"minimum": [], "maximum": []}
        for keyword, bound, step in (
            ("minimum", "minimum", 0), ("maximum", "maximum", 0),
            ("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1),
        ):  # fmt: skip
            if keyword not in schema:
                continue
            n = schema[keyword]
            if not _is(n, "number") or abs(n) >= 10**15:
                raise _wrong(f"{place}/{keyword}", "must be a number below 10^15")
            whole = int(n // 1) if bound == "maximum" else -int(-n // 1)
            bounds[bound].append(whole + step if whole == n else whole)
        least = max(bounds["minimum"], default=None)
        most = min(bounds["maximum"], default=None)
        if least is not None and most is not None and most < least:
            raise _wrong(place, "allows no integer")
        return digits_between(least, most)


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return not isinstance(value, bool) and (
                isinstance(value, int) or (isinstance(value, float) and value % 1 == 0)
            )
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_object_of_other(before: Any, value: Any) -> bool:
    both = isinstance(before, dict) and isinstance(value, dict)
    return both and all(before[name] == value[name] for name in before.keys() & value.keys())
