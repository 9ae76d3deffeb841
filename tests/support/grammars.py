"""Twenty grammars, and JSON schemas, with which texts are checked in other ways than by grammars."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from ggpipe.llama.forced_text import ForcedText
from ggpipe.llama.guided_grammar import GuidanceVocab, GuidedGrammar
from ggpipe.text.grammar.check import Constraint, check


@dataclass(frozen=True)
class Case:
    """A grammar, and whether a whole text is right."""

    grammar: str
    is_right: Callable[[str], bool]


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text, re.DOTALL) is not None


def _is_json(text: str) -> bool:
    json.loads(text)
    return True


def _is_balanced(text: str) -> bool:
    while text != (text := re.sub(r"\(\)|\[\]|<>", "", text)):
        pass
    return text == ""


def _is_arithmetic(text: str) -> bool:
    ast.parse(text, mode="eval")
    return re.fullmatch(r"[-+*0-9() ]+", text) is not None


def _is_palindrome(text: str) -> bool:
    return text == text[::-1] and len(text) % 2 == 1


def _nests_alike(text: str) -> bool:
    found = re.fullmatch("(a*)x(b*)", text)
    return found is not None and len(found[1]) == len(found[2])


_ANIMALS = [
    f"{first}{last}{n}" for first in ("fox", "Öl", "emu", "ぞう") for last in ("-a", "-bé", "-x") for n in range(100)
]
_LISP = r"""
root ::= list
list ::= "(" item (" " item){0,3} ")"
item ::= [a-z]{1,4} | [0-9] | list
"""
_JSON = r"""
root   ::= value
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ( string ": " value ( ", " string ": " value ){0,3} )? "}"
array  ::= "[" ( value ( ", " value ){0,3} )? "]"
string ::= "\"" [^"\\\x00-\x1F\x7F]{0,20} "\""
number ::= "-"? ( "0" | [1-9] [0-9]{0,5} ) ( "." [0-9]{1,4} )?
"""


def _is_lisp(text: str) -> bool:
    while text != (text := re.sub(r"\((?:[a-z]{1,4}|[0-9]|L)(?: (?:[a-z]{1,4}|[0-9]|L)){0,3}\)", "L", text)):
        pass
    return text == "L"


GRAMMARS: Mapping[str, Case] = {
    "yes-no": Case('root ::= "yes" | "no"', _matches("yes|no")),
    "digits": Case("root ::= [0-9]{3,7}", _matches("[0-9]{3,7}")),
    "words": Case(
        'root ::= [A-Z] [a-z]{1,9} (" " [a-z]{1,9}){2,8} "."', _matches(r"[A-Z][a-z]{1,9}( [a-z]{1,9}){2,8}\.")
    ),
    "lines": Case('root ::= line{2,5}\nline ::= "- " [^\\n]{1,30} "\\n"', _matches(r"(- [^\n]{1,30}\n){2,5}")),
    "comments": Case('# one\nroot ::= a # two\na ::=\n  [xyz] |\n  a2\n\na2 ::= "w"+ "!"', _matches("[xyz]|w+!")),
    "escapes": Case(
        r'root ::= "\"\\" [\x41-\x43]+ "\t\u00e9" [\U0001F600-\U0001F602] [\]\-\[]',
        _matches('"\\\\[ABC]+\té[😀-😂][][-]'),
    ),
    "georgian": Case('root ::= [ა-ჰ]{2,6} (" " [ა-ჰ]{2,6}){0,2}', _matches("[ა-ჰ]{2,6}( [ა-ჰ]{2,6}){0,2}")),
    "japanese": Case('root ::= "日本" [ぁ-ん]{1,4} "。"', _matches("日本[ぁ-ん]{1,4}。")),
    "emoji": Case('root ::= ("🙂" | "🙃" | "🙁"){3}', _matches("[🙂🙃🙁]{3}")),
    "negated": Case("root ::= [^a-zA-Z ]{4} .", _matches("[^a-zA-Z ]{4}.")),
    "enum": Case(
        "root ::= " + " | ".join(json.dumps(name, ensure_ascii=False) for name in _ANIMALS),
        lambda text: text in _ANIMALS,
    ),
    "enums": Case(
        'root ::= one (", " one){1,3}\none ::= ' + " | ".join(json.dumps(f"id{n * 7919 % 10007}") for n in range(800)),
        lambda text: all(part in {f"id{n * 7919 % 10007}" for n in range(800)} for part in text.split(", ")),
    ),
    "balanced": Case('root ::= b{1,4}\nb ::= "()" | "(" b ")" | "[" b "]" | "<>"', _is_balanced),
    "equal": Case('root ::= "x" | "a" root "b"', _nests_alike),
    "palindrome": Case('root ::= [ab] | "a" root "a" | "b" root "b" | "cxc"', _is_palindrome),
    "arithmetic": Case('root ::= term ([-+*] term){0,3}\nterm ::= [1-9] [0-9]{0,2} | "(" root ")"', _is_arithmetic),
    "lisp": Case(_LISP, _is_lisp),
    "json": Case(_JSON, _is_json),
    "optional": Case('root ::= "a"? "b"? ("c" "d"?)* "e"', _matches("a?b?(cd?)*e")),
    "alternatives": Case(
        'root ::= ("the " (adj " "){0,2} noun | name) " " verb\nadj ::= "big" | "bad" | "bright"\n'
        'noun ::= "bird" | "bid" | "bride"\nname ::= "Thea" | "Bee"\nverb ::= "sang" | "sank"',
        _matches(r"(the ((big|bad|bright) ){0,2}(bird|bid|bride)|Thea|Bee) (sang|sank)"),
    ),
}
"""By name."""


SCHEMAS: Mapping[str, Any] = {
    "any object": {},
    "object": {"type": "object"},
    "person": {
        "type": "object",
        "title": "A person",
        "properties": {
            "name": {"type": "string", "minLength": 2, "maxLength": 10},
            "age": {"type": "integer", "minimum": 3, "maximum": 120},
            "email": {"type": "string", "pattern": r"^[a-z]{1,8}@[a-z]{2,8}\.(com|org)$"},
            "tags": {"type": "array", "items": {"enum": ['a"b', "c\\d", "é", 5, None, [1]]}, "maxItems": 3},
        },
        "required": ["age", "name"],
        "additionalProperties": False,
    },
    "all optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"const": "x\ny"}},
    },
    "more": {
        "type": "object",
        "properties": {"ab": {"type": "integer"}, "a": {"type": "integer"}, "^]-": {"type": "null"}},
        "required": ["z"],
        "additionalProperties": {"type": "string", "maxLength": 3},
    },
    "list": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    "few": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
    "none": {"type": "array", "maxItems": 0, "items": {"type": "boolean"}},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer", "exclusiveMinimum": -5}, {"type": "string", "maxLength": 2}],
    },
    "open tuple": {
        "type": "array",
        "prefixItems": [{"type": "null"}, {"const": 1}],
        "items": {"const": 2},
        "minItems": 1,
        "maxItems": 5,
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "required": ["value"],
                "additionalProperties": False,
                "properties": {
                    "value": {"type": "integer", "maximum": 9, "minimum": 0},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
            }
        },
    },
    "union": {
        "oneOf": [
            {"type": "integer", "minimum": -120, "maximum": -7},
            {"type": "string", "format": "date"},
            {"enum": [True, "x"]},
        ]
    },
    "types": {"type": ["integer", "null", "boolean"]},
    "all of": {
        "allOf": [
            {"$ref": "#/$defs/a"},
            {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "$defs": {"a": {"type": "object", "properties": {"a": {"enum": ["p", "q"]}}, "required": ["a"]}},
    },
    "bounds": {
        "type": "array",
        "minItems": 3,
        "maxItems": 3,
        "items": {"type": "integer", "minimum": -1203, "exclusiveMaximum": 4051},
    },
    "high": {"type": "integer", "minimum": 987},
    "low": {"type": "integer", "maximum": -40},
    "formats": {
        "type": "object",
        "properties": {
            "d": {"type": "string", "format": "date-time"},
            "t": {"type": "string", "format": "time"},
            "u": {"type": "string", "format": "uuid"},
        },
        "required": ["d", "t", "u"],
    },
    "patterns": {
        "type": "array",
        "minItems": 3,
        "maxItems": 3,
        "items": {"type": "string", "pattern": r'^(?:\d{3}-?|[^\s"\\a-z]{2}|"\\|\u00e9+)$'},
    },
    "found": {"type": "string", "pattern": "[0-9]e?"},
    "deep": {
        "type": "object",
        "required": ["a"],
        "properties": {
            "a": {
                "type": "object",
                "required": ["b"],
                "properties": {
                    "b": {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": 2,
                        "items": {"type": "object", "required": ["c"], "properties": {"c": {"type": "number"}}},
                    }
                },
            }
        },
    },
    "ref": {
        "type": "object",
        "required": ["p", "q"],
        "properties": {"p": {"$ref": "#/properties/q"}, "q": {"type": "boolean"}},
    },
    "slashes": {"$ref": "#/$defs/a~1b~0", "$defs": {"a/b~": {"enum": [1.5, -2, {"k": [True]}]}}},
}
"""By name."""


def fits(text: str, schema: Any) -> bool:
    """A text is JSON, and fits a schema."""
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    return bool(checker.is_valid(json.loads(text, strict=True)))


def guided(schema: Any, guidance: GuidanceVocab) -> GuidedGrammar:
    """The grammar of a JSON schema."""
    checked = check(Constraint(json_schema=json.dumps(schema)))
    assert not checked.problem
    return guidance.matcher(checked.lark)


def followed(forced: ForcedText, tokens: Sequence[int]) -> tuple[int, int, int]:
    """Follow an output: how many tokens were forced, how many of these are right, and how many runs it takes."""
    n_forced, n_right, n_runs, at = 0, 0, 0, 0
    while at < len(tokens):
        named = [token for token, _ in forced.after(())]
        n = 0
        while n < min(len(named), len(tokens) - at) and named[n] == tokens[at + n]:
            n += 1
        n_forced, n_right, n_runs = n_forced + len(named), n_right + n, n_runs + 1
        for token in tokens[at : at + n + 1]:
            forced.accept(token)
        at += n + 1
    return n_forced, n_right, n_runs
