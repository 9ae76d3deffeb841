"""Files in the user's cache folder. A file is either complete or does not exist."""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from ggpipe.errors import UsageError

_UNFINISHED = ".unfinished"
_ABANDONED_AFTER_S = 3600.0


def cache_folder(kind: str) -> Path:
    """The folder for one kind of files, below XDG_CACHE_HOME or ~/.cache. It may not exist yet.

    Raises UsageError if there is neither XDG_CACHE_HOME nor a home folder.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # the XDG specification: ignore relative paths
        try:
            root = str(Path.home() / ".cache")
        except RuntimeError as e:
            raise UsageError(
                "there is no home folder for ggpipe's cache: set XDG_CACHE_HOME to an absolute path"
            ) from e
    return Path(root) / "ggpipe" / kind


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A new file next to `path`, which replaces `path` at the end of the block, or is removed if the block raises.

    Creates missing folders. Each process that writes to `path` gets its own file, and the last one stays. Raises
    OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(_UNFINISHED, f".{path.name}.", path.parent)
    os.close(handle)
    unfinished = Path(name)
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())  # reveals a full disk, and prevents holes if the machine crashes after the rename
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def remove_abandoned(path: Path) -> None:
    """Remove unfinished versions of `path` that killed processes have left. Raises OSError."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{_UNFINISHED}"):
        with contextlib.suppress(FileNotFoundError):  # another process has finished it
            if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_S:
                left.unlink()


def remove_others(folder: Path, keep: Collection[Path]) -> None:
    """Remove all files of a cache folder except those in `keep` and those that a process may still be writing."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process is removing it, too
            age_s = time.time() - path.stat().st_mtime
            if path not in keep and (path.suffix != _UNFINISHED or age_s > _ABANDONED_AFTER_S):
                path.unlink()
