"""Options as rows of a table (`options/table.py`), and what was given for them as the records that they set.

A row names the field of a frozen record that an option sets. The field's type and default come from the record.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from ggpipe.errors import SettingError

R = TypeVar("R")

_TAKEN_AS_THEY_ARE = (bool, int, float, Path)
"""Types of fields that a command line's reader reads; it reads any other one as text."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A row of the table: an option of the command line, and the field of a record that it sets."""

    record: type
    field: str
    flags: tuple[str, ...]
    """As typer takes them: `-c`, `--ctx-size`, `--mmap/--no-mmap`. Empty: it is a positional argument."""
    panel: str
    help: str
    metavar: str | None = None
    parse: Callable[[Any], Any] | None = None
    """Turns the text into the field's value. Raises ValueError with what to write instead, or a SettingError."""
    many: bool = False
    """The option may be repeated. `parse` gets a list of all texts; without `parse` the field is a tuple of them."""
    optional: bool = False
    """A command tells apart whether it was given: if not, the field has no value, and --help shows no default."""
    setting: str = ""
    """How the library's messages name it. Default: the field."""
    variable: str = ""
    """The environment variable that llama.cpp has for it; empty: none."""

    @property
    def name(self) -> str:
        """How messages name it, see `GgpipeError`."""
        return self.setting or self.field

    @property
    def default(self) -> Any:
        """The field's default; None where it has none."""
        own = next(f for f in dataclasses.fields(self.record) if f.name == self.field)
        return None if own.default is dataclasses.MISSING else own.default

    @property
    def default_text(self) -> Any:
        """The default as typer gets it: of the type that it reads, a list's values separated by commas."""
        if self.many or self.optional:
            return None
        return ",".join(map(str, self.default)) or None if isinstance(self.default, tuple) else self.default

    @property
    def spelling(self) -> str:
        """The option in a message: its short and its first long flag, `-c/--ctx-size`."""
        if not self.flags:
            return self.metavar or self.name.upper()
        flags = [flag for text in self.flags for flag in text.strip().split("/")[:1] if flag]
        short = [flag for flag in flags if not flag.startswith("--")]
        return "/".join([*short[:1], *[flag for flag in flags if flag.startswith("--")][:1]])

    @property
    def reads(self) -> Any:
        """The type that typer reads."""
        hint = _hints(self.record)[self.field]
        found = [kind for kind in _TAKEN_AS_THEY_ARE if kind is hint or kind in get_args(hint)]
        kind = found[0] if found and self.parse is None else str
        return list[kind] if self.many else kind  # type: ignore[valid-type]

    def value(self, given: Any) -> Any:
        """The field's value. Raises SettingError."""
        if given is None and not self.many:
            return None
        if self.parse is None:
            return tuple(given or ()) if self.many else given
        try:
            return self.parse(list(given or ()) if self.many else given)
        except ValueError as e:
            text = " ".join(given) if self.many else given
            raise SettingError(self.name, f"{text}: {e}") from None


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its help, and the options that it takes."""

    name: str
    help: str
    records: tuple[type, ...] = ()
    """It takes the options that set fields of these records."""
    leave_out: frozenset[str] = frozenset()
    """It does not take the options of these names."""
    required: frozenset[str] = frozenset()
    hidden: bool = False
    """It is not for users, and no page shows it."""
    reads_variables: bool = False
    """What its command line does not have comes from environment variables, as in llama.cpp's programs."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Other defaults than the fields', by the options' names."""

    def options(self, table: Iterable[Option]) -> list[Option]:
        """Rows of a table that this command takes."""
        return [row for row in table if row.record in self.records and row.name not in self.leave_out]

    def default_of(self, row: Option) -> Any:
        """What typer gets as an option's default."""
        return self.defaults.get(row.name, row.default_text)


class Options:
    """The options of a command line, as the frozen records whose fields they set."""

    def __init__(self, command: Command, given: Mapping[Option, Any]) -> None:
        """Raises SettingError for a text that is no value of its field."""
        self._command = command
        self._given = dict(given)
        self._values: dict[type, dict[str, Any]] = {}
        for row, value in given.items():
            values = self._values.setdefault(row.record, {})
            if (own := row.value(value)) is not None or row.field not in values:  # a later row for it wins
                values[row.field] = own

    def fields(self, record: type) -> dict[str, Any]:
        """The fields of a record that have an option with a value, and their values."""
        return {name: value for name, value in self._values.get(record, {}).items() if value is not None}

    def having(self, record: Any) -> Options:
        """These settings with another record of its kind."""
        options = Options(self._command, self._given)
        options._values = {**self._values, type(record): dict(vars(record))}
        return options

    def of(self, command: Command, table: Iterable[Option], names: Mapping[str, str]) -> Options:
        """The same settings as options of another command. `names`: what settings of that command are called here,
        where they have other names; what there is no option for here has its default there."""
        given = {row.name: value for row, value in self._given.items()}
        rows = command.options(table)
        return Options(
            command, {row: given.get(names.get(row.name, row.name), command.default_of(row)) for row in rows}
        )

    def is_given(self, name: str) -> bool:
        """The option of this name has another value than this command's default."""
        return any(given != self._command.default_of(row) for row, given in self._given.items() if row.name == name)

    def __getitem__(self, record: type[R]) -> R:
        """A record; fields without a value have their default. Raises SettingError for values out of bounds."""
        return record(**self.fields(record))


@functools.cache
def _hints(record: type) -> dict[str, Any]:
    return get_type_hints(record)
