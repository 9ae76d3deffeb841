"""Files that ggpipe keeps in the user's cache folder; each of them is whole, or is not there."""

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
    """The folder of one kind of files, below XDG_CACHE_HOME or ~/.cache. It may not exist yet.

    Raises UsageError when the user has no home folder either.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # the XDG specification: ignore relative paths
        try:
            root = str(Path.home() / ".cache")
        except RuntimeError as e:
            raise UsageError("there is no home folder for ggpipe's cache: set XDG_CACHE_HOME to a folder") from e
    return Path(root) / "ggpipe" / kind


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A new file beside `path` to write to: becomes `path` when the block ends, is removed when the block raises.

    Makes folders that are missing. Processes that write the same `path` have a file each; the last one stays. Raises
    OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(_UNFINISHED, f".{path.name}.", path.parent)
    os.close(handle)
    unfinished = Path(name)
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())  # a full disk may show only now; and a crash after the rename must not leave holes
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def remove_abandoned(path: Path) -> None:
    """Remove what processes that were killed have left of `path` unfinished. Raises OSError."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{_UNFINISHED}"):
        with contextlib.suppress(FileNotFoundError):  # another process is done with it
            if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_S:
                left.unlink()


def remove_others(folder: Path, keep: Collection[Path]) -> None:
    """Remove all files of a folder of the cache but those to keep, and but those that a process may be writing now."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process removes it too
            age_s = time.time() - path.stat().st_mtime
            if path not in keep and (path.suffix != _UNFINISHED or age_s > _ABANDONED_AFTER_S):
                path.unlink()
