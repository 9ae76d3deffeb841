"""Reads files that options name."""

from __future__ import annotations

from pathlib import Path

from ggpipe.errors import SettingError


def read_text(setting: str, path: Path) -> str:
    """The contents of a UTF-8 file. Raises SettingError for the setting that names the file."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise SettingError(setting, f"{path}: cannot read it: {why}") from e
