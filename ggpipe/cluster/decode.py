"""Decodes the content of a file into typed records, with one-line errors in terms of the file.

msgspec validates types and bounds, but its messages use Python's types and JSON paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")
Steps = Sequence[str | int]

_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)
_MOST_SHOWN = 40


def dotted(path: Steps) -> str:
    """The path as text: `ranks[0].threads`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def decode(content: object, kind: type[T], name: Callable[[Steps], str] = dotted) -> T:
    """Convert `content` (dicts, lists, numbers and strings, from TOML or JSON) to a record of type `kind`.

    Raises ValueError with the value's name, which `name` makes of its path, what it must be, and what it is.
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as e:
        match = _MESSAGE.fullmatch(str(e))
        assert match is not None
        path = [int(index) if index else key for key, index in _STEP.findall(match["path"] or "")]
        raise ValueError(_line(match["what"], path, content, kind, name)) from e


def _line(what: str, path: Steps, content: Any, kind: type, name: Callable[[Steps], str]) -> str:
    value, wanted = content, _unwrapped(inspect.type_info(kind))
    for step in path:
        value, wanted = value[step], _unwrapped(_inside(wanted, step))
    if field := _FIELD.fullmatch(what):
        own = name([*path, field[2]])
        if field[1] == "missing required":
            return f"{own} is missing"
        assert isinstance(wanted, inspect.StructType)
        return f"{own} is not known here; known are {', '.join(known.encode_name for known in wanted.fields)}"
    if isinstance(wanted, inspect.LiteralType):
        return f"{name(path)} must be {' or '.join(map(str, wanted.values))}, got {shown(value)}"
    if not what.startswith("Expected "):  # raised by the record itself
        return f"{named}: {what}" if (named := name(path).strip()) else what
    return f"{name(path) or 'it'} must be {_described(wanted)}, got {shown(value)}"


def _unwrapped(kind: inspect.Type) -> inspect.Type:
    """The type without `| None`."""
    if isinstance(kind, inspect.UnionType):
        return next(own for own in kind.types if not isinstance(own, inspect.NoneType))
    return kind


def _inside(kind: inspect.Type, step: str | int) -> inspect.Type:
    """The type of a field or an item."""
    match kind:
        case inspect.StructType(fields=fields) | inspect.DataclassType(fields=fields):
            return next(field.type for field in fields if field.encode_name == step)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return item
        case inspect.TupleType(item_types=items):
            return items[int(step)]
    raise AssertionError(f"{kind} has no {step}")


def _described(kind: inspect.Type, many: bool = False) -> str:
    match kind:
        case inspect.IntType():
            return f"{'whole numbers' if many else 'a whole number'}{_bounds(kind)}"
        case inspect.FloatType():
            return f"{'numbers' if many else 'a number'}{_bounds(kind)}"
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType(min_length=least):
            full = "non-empty " if least else ""
            return f"{full}strings in quotes" if many else f"a {full}string in quotes"
        case inspect.ListType() | inspect.VarTupleType():
            full = " that is not empty" if kind.min_length else ""
            return f"{'lists' if many else 'a list'} of {_described(_unwrapped(kind.item_type), True)}{full}"
        case inspect.TupleType(item_types=items):
            return f"{'lists' if many else 'a list'} of {len(items)}"
    return "tables" if many else "a table"


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None:
        return f" of {kind.ge:g} or more" if kind.le is None else f" from {kind.ge:g} to {kind.le:g}"
    above = "" if kind.gt is None else f" above {kind.gt:g}"
    return above if kind.le is None else f"{above} and at most {kind.le:g}"


def shown(value: object) -> str:
    """A value as it is in the file, shortened."""
    if isinstance(value, dict):
        return "a table"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"
