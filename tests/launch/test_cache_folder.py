"""Files of the cache: where they are, and that each is whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ggpipe.errors import UsageError
from ggpipe.launch.cache_folder import cache_folder, remove_abandoned, remove_others, whole_file


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert cache_folder("models") == tmp_path / "other" / "ggpipe" / "models"
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder("models") == tmp_path / ".cache" / "ggpipe" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("models") == tmp_path / ".cache" / "ggpipe" / "models"


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(UsageError, match="set XDG_CACHE_HOME to an absolute path"):
        cache_folder("models")


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    with whole_file(path) as unfinished:
        unfinished.write_text("first")
        assert not path.exists()
    assert path.read_text() == "first"
    with whole_file(path) as unfinished:
        unfinished.write_text("second")
        assert path.read_text() == "first"
    assert path.read_text() == "second"
    assert list(path.parent.iterdir()) == [path]


def test_what_a_killed_process_left_is_removed_later(tmp_path: Path) -> None:
    path = tmp_path / "file[1]"
    old, young, other = (
        tmp_path / name for name in (".file[1].a.unfinished", ".file[1].b.unfinished", ".file1.c.unfinished")
    )
    for left in (old, young, other):
        left.touch()
    for left in (old, other):
        os.utime(left, (0, 0))
    finished = tmp_path / ".file[1].d.unfinished"
    finished.symlink_to("renamed")  # by another process, between listing it and looking at it
    remove_abandoned(path)
    assert set(tmp_path.iterdir()) == {young, other, finished}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), ValueError()])
def test_nothing_is_left_of_a_failure(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail() -> None:
        with whole_file(path) as unfinished:
            unfinished.write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_shows_only_at_the_end_that_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), whole_file(tmp_path / "file") as unfinished:
        unfinished.write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_writers_of_the_same_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with whole_file(path) as one:
        with whole_file(path) as two:
            one.write_text("one")
            two.write_text("two")
        assert path.read_text() == "two"
    assert path.read_text() == "one"


def test_others_are_removed(tmp_path: Path) -> None:
    kept, old = tmp_path / "kept", tmp_path / "old"
    for path in (kept, old):
        path.write_text("x")
    with whole_file(tmp_path / "new") as being_written:
        remove_others(tmp_path, (kept,))
        assert set(tmp_path.iterdir()) == {kept, being_written}
        os.utime(being_written, (0, 0))  # by a process that was killed long ago
        remove_others(tmp_path, (kept,))
        assert set(tmp_path.iterdir()) == {kept}
        being_written.write_text("x")
