"""Writes ggpipe/api/keywords.py, the types of all keyword arguments, from the table in ggpipe/options/table.py."""

from __future__ import annotations

import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

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
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    literals = [part for part in (typing.get_args(hint) if is_union else (hint,)) if typing.get_origin(part) is Literal]
    if literals and row.parse is None:
        choices = dict.fromkeys(value for part in literals for value in typing.get_args(part))
        return f"Literal[{', '.join(json.dumps(value) for value in choices)}]"
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


def _in_python(text: str) -> str:
    """Help with keywords in the place of flags."""
    flags = {flag: name for name, row in ROWS.items() for text in row.flags for flag in re.split("[ /]", text) if flag}
    return re.sub(r"(?<![\w/`-])--?[a-z][a-z-]*", lambda m: f"`{flags[m[0]]}`" if m[0] in flags else m[0], text)


def _docstring(text: str) -> Iterator[str]:
    text = text.replace("\\\\", "\\")
    quote = 'r"""' if "\\" in text else '"""'
    wrapped = textwrap.wrap(f'{quote}{text}"""', _WIDTH, break_long_words=False, break_on_hyphens=False)
    yield from (f"    {line}" for line in wrapped)


if __name__ == "__main__":
    MODULE.write_text(module())
