"""Writes ggpipe/api/keywords.py, the types of all keyword arguments, from the table in ggpipe/options/table.py."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

from ggpipe.api.arguments import REQUEST_ROWS, ROWS
from ggpipe.options.option import Option

MODULE = Path(__file__).parents[1] / "ggpipe" / "api" / "keywords.py"

_HEAD = '''"""The keyword arguments of `Engine` and of its requests.

`scripts/flag_reference` makes this file; do not edit it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

File = str | os.PathLike[str]
'''
_WIDTH = 116


def module() -> str:
    """The whole module."""
    engine = {name: row for name, row in ROWS.items() if name not in REQUEST_ROWS and name != "model"}
    requests = [*_class("RequestOptions(TypedDict, total=False)", "Options of a request.", REQUEST_ROWS)]
    engines = [*_class("EngineOptions(RequestOptions, total=False)", "Options of an engine.", engine)]
    return "\n".join([_HEAD, "", *requests, "", "", *engines]) + "\n"


def _class(head: str, docstring: str, rows: typing.Mapping[str, Option]) -> Iterator[str]:
    yield from (f"class {head}:", f'    """{docstring}"""', "")
    for name, row in rows.items():
        yield f"    {name}: {_type(row)}"
        default = "" if row.default_text is None else f" Default: {row.default_text!r}."
        yield from _docstring(_in_python(row.help) + default)


def _type(row: Option) -> str:
    hint = typing.get_type_hints(row.record)[row.field]
    choices = [value for part in _parts(hint) if typing.get_origin(part) is typing.Literal for value in _values(part)]
    if choices and row.parse is None:
        return f"Literal[{', '.join(map(_quoted, dict.fromkeys(choices)))}]"
    if row.many:
        return "File | Sequence[File]" if Path in typing.get_args(row.reads) else "str | Sequence[str]"
    if row.name == "json_schema":
        return "str | Mapping[str, Any]"
    if row.parse is None:
        return {bool: "bool", int: "int", float: "float", Path: "File"}.get(row.reads, "str")
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0].__name__
        return "str | Sequence[str]" if kind == "str" else f"str | {kind} | Sequence[{kind}]"
    return "str"


def _parts(hint: object) -> Iterable[object]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _values(hint: object) -> Iterable[object]:
    return typing.get_args(hint)


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _in_python(text: str) -> str:
    """Help with keywords in the place of flags."""
    flags = {flag: name for name, row in ROWS.items() for text in row.flags for flag in re.split("[ /]", text) if flag}
    return re.sub(r"(?<![\w/`-])--?[a-z][a-z-]*", lambda m: f"`{flags[m[0]]}`" if m[0] in flags else m[0], text)


def _docstring(text: str) -> Iterator[str]:
    text = text.replace("\\\\", "\\")
    lines: list[str] = []
    line = ""
    for word in text.split():
        if len(line) + len(word) > _WIDTH - 7:
            lines, line = [*lines, line], ""
        line += (" " if line else "") + word
    lines.append(line + '"""')
    start = 'r"""' if "\\" in text else '"""'
    yield from (f"    {start}{lines[0]}", *(f"    {line}" for line in lines[1:]))


if __name__ == "__main__":
    MODULE.write_text(module())
