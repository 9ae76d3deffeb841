"""TOML tables, read key by key, so that what is wrong with a file can be said in one line."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ggpipe.errors import UsageError

_MOST = 1e15


class Table:
    """A table of a file. Its functions raise UsageError with the file, the table and the key."""

    def __init__(self, file: Path, name: str, content: Any) -> None:
        """`name`: as it stands in the file, `[network]`; empty for the file itself."""
        self._file = file
        self._name = name
        self._known: list[str] = []
        if not isinstance(content, dict):
            raise UsageError(f"{file}: {name} is a table, written as {name} on a line of its own")
        self._content: dict[str, Any] = content

    @classmethod
    def read(cls, file: Path) -> Table:
        """A whole file. Raises UsageError when it cannot be read, or is no TOML."""
        try:
            return cls(file, "", tomllib.loads(file.read_text(encoding="utf-8")))
        except OSError as e:
            raise UsageError(f"cannot read {file}: {e.strerror}") from e
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
            raise UsageError(f"{file} is no TOML file: {e}") from e

    def __contains__(self, key: str) -> bool:
        self._know(key)
        return key in self._content

    def number(self, key: str, default: float | None = None, *, zero: bool = False, most: float = _MOST) -> float:
        """A number above 0 (`zero`: or 0), at most `most`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(key, f"is a number, not {_shown(value)}")
        if not 0 <= value <= most or (value == 0 and not zero):
            bounds = f"{'0 or more' if zero else 'above 0'}{'' if most == _MOST else f', and at most {most:g}'}"
            raise self.wrong(key, f"is {bounds}; {_shown(value)} is not")
        return float(value)

    def whole(self, key: str, default: int | None = None, *, zero: bool = False, most: float = _MOST) -> int:
        """A whole number from 1 (`zero`: 0) to `most`."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(key, f"is a whole number, not {_shown(value)}")
        return int(self.number(key, default, zero=zero, most=most))

    def truth(self, key: str) -> bool:
        """true or false; false where it is missing."""
        value = self._value(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, f"is true or false, not {_shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        value = self._value(key, default)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, f"is a text in quotes, not {_shown(value)}")
        return value

    def texts(self, key: str, default: Sequence[str] | None = None) -> Sequence[str]:
        """A list of texts."""
        value = self._value(key, default)
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, f'is a list of texts, as in ["a", "b"], not {_shown(value)}')
        return value

    def wholes(self, key: str) -> Sequence[int]:
        """A list of whole numbers from 1 up; empty where it is missing."""
        value = self._value(key, ())
        whole = isinstance(value, list | tuple) and all(type(n) is int and 1 <= n <= _MOST for n in value)
        if not whole:
            raise self.wrong(key, f"is a list of whole numbers from 1 up, as in [8, 8, 4], not {_shown(value)}")
        return list(value)

    def table(self, key: str) -> Table | None:
        """A table in it; None where it is missing."""
        return Table(self._file, f"[{key}]", self._content[key]) if key in self else None

    def tables(self, key: str) -> list[Table]:
        """A list of tables; empty where it is missing."""
        value = self._value(key, [])
        if not isinstance(value, list):
            raise self.wrong(key, f"is a list of tables: write each as [[{key}]]")
        return [Table(self._file, f"[[{key}]] {i}", item) for i, item in enumerate(value, 1)]

    def close(self) -> None:
        """All was read: whatever else is there is a mistake."""
        if unknown := [key for key in self._content if key not in self._known]:
            raise self.wrong(unknown[0], f"is not known here; known are {', '.join(self._known)}")

    def wrong(self, key: str, what: str) -> UsageError:
        """Says what is wrong with a key."""
        return UsageError(f"{self._file}: {f'{self._name} ' if self._name else ''}{key} {what}")

    def _value(self, key: str, default: Any) -> Any:
        self._know(key)
        value = self._content.get(key, default)
        if value is None:
            raise self.wrong(key, "is missing")
        return value

    def _know(self, key: str) -> None:
        if key not in self._known:
            self._known.append(key)


def _shown(value: Any) -> str:
    """As it stands in the file, more or less, and short."""
    if isinstance(value, dict):
        return "a table"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
