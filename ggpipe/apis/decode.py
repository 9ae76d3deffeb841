"""Request bodies as typed structs. Errors name the field that is wrong."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from ggpipe.errors import BodyError

_MOST_NESTING = 64
_CONTAINERS = (dict, list)
_GOT_FLOAT = "got `float`"
_MOST_EXACT = 2**53  # up to which all integers are floats, too

B = TypeVar("B", bound=msgspec.Struct)


def decode(kind: type[B], data: bytes) -> B:
    """A body from JSON. Raises BodyError."""
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError) as e:  # msgspec's errors are ValueErrors
        raise BodyError(f"the body is not valid JSON: {_lower(str(e))}") from None
    return convert(kind, value)


def convert(kind: type[B], value: object) -> B:
    """A body from Python's form of JSON. Raises BodyError."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        if _is_nested(inner, _MOST_NESTING):
            raise BodyError(f"`{name}` is nested more than {_MOST_NESTING} times", name)
    try:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as e:
            if _GOT_FLOAT not in str(e):
                raise
            return msgspec.convert(_with_integers(value), kind)
    except msgspec.ValidationError as e:
        what, _, path = str(e).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
        if missing is not None:
            param = f"{param}.{missing[1]}" if param else missing[1]
            raise BodyError(f"`{param}` is missing", param) from None
        raise BodyError(f"`{param}`: {_lower(what)}" if param else _lower(what), param) from None


def _with_integers(value: Any) -> Any:
    """With 40 for 40.0, since some clients have no integers."""
    match value:
        case float() if value.is_integer() and abs(value) <= _MOST_EXACT:
            return int(value)
        case dict():
            return {name: _with_integers(inner) for name, inner in value.items()}
        case list():
            return [_with_integers(inner) for inner in value]
    return value


def _lower(text: str) -> str:
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _is_nested(value: object, most: int) -> bool:
    """Whether lists and objects are nested more than `most` times."""
    if not isinstance(value, _CONTAINERS):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return most == 0 or any(isinstance(one, _CONTAINERS) and _is_nested(one, most - 1) for one in inner)
