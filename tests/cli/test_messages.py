"""Messages of the library name settings; the command line shows flags in their place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ggpipe
from ggpipe.cli.messages import in_flags, report, show, spellings, warn
from ggpipe.errors import Setting, SettingError, Wording

PACKAGE = Path(ggpipe.__file__).parent
LIBRARY = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in ("cli", "display", "openai", "server")  # two name fields of bodies
]
ONLY_IN_PYTHON = {"group_sizes", "n_queued", "prefill_slowdown"}  # of the Python API
FLAG = re.compile(r"(?<![\w`-])--?[a-z][\w-]*")


def texts_in(source: str) -> Iterator[str]:
    """All texts in the arguments of `raise` statements; what is filled in stands as {}. BodyErrors name fields of
    bodies."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Raise(ast.Call(func)) if not (isinstance(func, ast.Name) and func.id == "BodyError"):
                filled = [part for part in ast.walk(node) if isinstance(part, ast.JoinedStr)]
                pieces = [own for part in filled for own in part.values]
                for part in filled:
                    yield "".join(str(own.value) if isinstance(own, ast.Constant) else "{}" for own in part.values)
                for own in ast.walk(node):
                    if isinstance(own, ast.Constant) and isinstance(own.value, str) and own not in pieces:
                        yield own.value


def settings_in(source: str) -> Iterator[str]:
    """The settings that messages name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(ast.Name("Setting" | "SettingError"), [ast.Constant(str() as name), *_]):
                yield name


def mistakes_in(text: str) -> Iterator[str]:
    """Settings that are text, in backticks, and flags."""
    for name in re.findall(r"`([\w.]+)`", text):
        yield f"{name} in {text}"
    yield from (f"{flag} in {text}" for flag in FLAG.findall(re.sub(r"`[^`]*`|mpirun -n", "", text)))


def test_errors_of_the_library_name_settings_and_no_flags() -> None:
    texts = [(path, text) for path in LIBRARY for text in texts_in(path.read_text())]
    assert len(texts) > 100
    assert [(path, found) for path, text in texts for found in mistakes_in(text)] == []
    settings = [(path, name) for path in PACKAGE.rglob("*.py") for name in settings_in(path.read_text())]
    assert len(settings) > 100
    assert [(path, name) for path, name in settings if name not in spellings() and name not in ONLY_IN_PYTHON] == []


def test_errors_are_found() -> None:
    source = (
        'if x:\n    raise SettingError("n_ctx", f"{n}: raise it " "or -c", Wording("a", Setting("b")))\n'
        'raise KeyError("c")\nraise error\nsay("d")\nraise BodyError("e")'
    )
    assert set(texts_in(source)) == {"n_ctx", "{}: raise it or -c", "a", "b", "c"}
    assert list(settings_in(source)) == ["n_ctx", "b"]
    assert list(mistakes_in("raise -c, or leave out --mpi-layer-split")) == [
        f"{flag} in raise -c, or leave out --mpi-layer-split" for flag in ("-c", "--mpi-layer-split")
    ]
    assert list(mistakes_in("`n_ctx` or `pip install`")) == ["n_ctx in `n_ctx` or `pip install`"]


def test_settings_become_flags() -> None:
    wording = Wording("raise ", Setting("n_ctx"), ", or leave out ", Setting("draft.model"), ": run `pip install a`")
    assert in_flags(wording) == "raise -c/--ctx-size, or leave out -md/--model-draft: run `pip install a`"
    names = ("numa", "layer_split", "repack", "cancel", "group_sizes")
    assert [in_flags(Wording(Setting(name))) for name in names] == [
        "--numa", "--mpi-layer-split", "--repack", "--cancel", "`group_sizes`",
    ]  # fmt: skip


def test_what_users_write_stays_as_it_is() -> None:
    assert in_flags(SettingError("file", "`n_ctx`: cannot read it")) == "-f/--file `n_ctx`: cannot read it"
    assert in_flags("`n_ctx`") == "`n_ctx`"


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show(Wording("measured ", Setting("n_ctx")))
    warn(Wording(Setting("seed"), " is fixed"))
    error = SettingError("n_batch", "must be 1")
    report(error)
    report(error)
    assert capsys.readouterr().err == (
        "ggpipe: measured -c/--ctx-size\n"
        "ggpipe: warning: -s/--seed is fixed\n"
        "ggpipe: error: -b/--batch-size must be 1\n"
    )


def test_only_the_first_rank_reports(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    report(SettingError("n_batch", "must be 1"))
    assert capsys.readouterr().err == ""


def test_a_message_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show("cannot open a\nb\x1b[31m.gguf ü")
    assert capsys.readouterr().err == "ggpipe: cannot open a\\nb\\x1b[31m.gguf ü\n"
