"""Whether the files that a command writes are others than those that it reads."""

from __future__ import annotations

from pathlib import Path

from ggpipe.errors import Setting, SettingError, Wording
from ggpipe.options.option import Options


def check_outputs(options: Options) -> None:
    """Raises SettingError for an output file that is also an input, which would be lost."""
    files = options.files
    inputs = [(row.name, path) for row, path in files if not row.writes]
    for row, output in files:
        for name, path in inputs if row.writes else ():
            if _is_same_file(output, path):
                problem = Wording(f"{output} is the file of ", Setting(name), ", which would be overwritten")
                raise SettingError(row.name, problem, "name another file")


def _is_same_file(one: Path, other: Path) -> bool:
    """Whether both are the same regular file, under whatever name."""
    try:
        return one.is_file() and one.samefile(other)
    except (OSError, ValueError):  # there is no such file, or there can be none of this name
        return False
