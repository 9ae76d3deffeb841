"""Bodies as typed structs. What is wrong in one is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from ggpipe.errors import BodyError

_MOST_NESTING = 64
_GOT_FLOAT = "got `float`"
_MOST_EXACT = 2**53  # of floats that are whole numbers

B = TypeVar("B", bound=msgspec.Struct)


def decode(kind: type[B], data: bytes) -> B:
    """A body from JSON. Raises BodyError."""
    return _read(kind, lambda: msgspec.json.decode(data, type=kind), lambda: msgspec.json.decode(data))


def convert(kind: type[B], value: object) -> B:
    """A body from what JSON became in Python. Raises BodyError."""
    return _read(kind, lambda: msgspec.convert(value, kind), lambda: value)


def _in_whole_numbers(value: Any) -> Any:
    """With 40 for 40.0: some clients have no other numbers."""
    match value:
        case float() if value.is_integer() and abs(value) <= _MOST_EXACT:
            return int(value)
        case dict():
            return {name: _in_whole_numbers(inner) for name, inner in value.items()}
        case list():
            return [_in_whole_numbers(inner) for inner in value]
    return value


def _read(kind: type[B], strictly: Callable[[], B], untyped: Callable[[], object]) -> B:
    try:
        try:
            body = strictly()
        except msgspec.ValidationError as e:
            if _GOT_FLOAT not in str(e):
                raise
            body = msgspec.convert(_in_whole_numbers(untyped()), kind)
    except msgspec.ValidationError as e:
        what, _, path = str(e).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
        if missing is not None:
            param = f"{param}.{missing[1]}" if param else missing[1]
            raise BodyError(f"`{param}` is missing", param) from None
        raise BodyError(f"`{param}`: {_lower(what)}" if param else _lower(what), param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as e:
        raise BodyError(f"the body is no JSON that can be read: {_lower(str(e))}") from None
    for name in body.__struct_fields__:
        if _is_deep(getattr(body, name)):
            raise BodyError(f"`{name}` is nested more than {_MOST_NESTING} times", name)
    return body


def _lower(text: str) -> str:
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MOST_NESTING):
        level = [inner for one in level for inner in _inner(one)]
        if not level:
            return False
    return True


def _inner(value: object) -> Iterable[object]:
    match value:
        case dict():
            return value.values()
        case list():
            return value
        case msgspec.Struct():
            return msgspec.structs.asdict(value).values()
    return ()
