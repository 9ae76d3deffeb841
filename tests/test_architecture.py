"""ARCHITECTURE.md: it is short, and the files and names in it exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
FLAGS = (ROOT / "docs" / "flags.md").read_text()
MOST_BYTES = 12 * 1024


def paragraphs(page: str) -> list[str]:
    """Paragraphs, list items and rows of tables."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.split(r"\n\n|\n(?=- |\d\. |\| )", text)


def found(span: str) -> Path | None:
    """The file or folder that a path of the page leads to; None: there is none."""
    return next((path for folder in ("ggpipe", "") if (path := ROOT / folder / span).exists()), None)


def members(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """What a module or a class defines, by name."""
    for node in body:
        match node:
            case ast.ClassDef(name) | ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                yield name, node
            case ast.AnnAssign(ast.Name(name)) | ast.Assign([ast.Name(name)]):
                yield name, node


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """`function`, `Class` and `Class.member` of a Python file."""
    names: set[str] = set()
    for name, node in members(ast.parse(path.read_text()).body):
        names.add(name)
        if isinstance(node, ast.ClassDef):
            names.update(f"{name}.{member}" for member, _ in members(node.body))
    return frozenset(names)


def defines(path: Path, name: str) -> bool:
    """A file has this name: a Python file defines it, one of another language has a function of that name."""
    if path.suffix == ".py":
        return name in names_in(path)
    return path.is_file() and re.search(rf"\b{re.escape(name)}\(", path.read_text()) is not None


def wrong(page: str) -> Iterator[str]:
    """What the page names and the code does not have. A name belongs to the path before it in its paragraph."""
    for paragraph in paragraphs(page):
        path: Path | None = None
        for span in re.findall(r"`([^`]+)`", paragraph):
            if span.startswith("-"):
                is_right = f"`{span}`" in FLAGS
            elif span.startswith("ggpipe "):
                is_right = found(f"cli/commands/{span.removeprefix('ggpipe ')}.py") is not None
            elif "/" in span:
                path = found(span)
                is_right = path is not None
            else:
                is_right = found(span) is not None if path is None else defines(path, span)
            if not is_right:
                yield span


def test_what_the_page_names_exists() -> None:
    assert list(wrong(PAGE)) == []


def test_it_says_where_forty_behaviours_are() -> None:
    table = PAGE.partition("## Where is")[2]
    rows = re.findall(r"^\| (?!behaviour|-)(.+?) \| (.+) \|$", table, re.MULTILINE)
    assert len(rows) >= 40
    assert [behaviour for behaviour, where in rows if "/" not in where] == []


def test_it_is_short() -> None:
    assert len(PAGE.encode()) <= MOST_BYTES


def test_wrong_names_are_found() -> None:
    right = (
        "`core/tree.py` (`Tree.add`, `Node.depth`)\n- `native/wire.cpp` (`put`)\n\n`core`: `--restart`, `ggpipe serve`"
    )
    assert list(wrong(right)) == []
    page = "`core/tree.py` (`Tree.fly`, `Node.fly`), `core/tre.py`\n\n`Tree`\n- `native/wire.cpp` (`fly`)\n| `--fly`"
    page += ", `ggpipe fly`"
    assert list(wrong(page)) == ["Tree.fly", "Node.fly", "core/tre.py", "Tree", "fly", "--fly", "ggpipe fly"]
