"""The rows of the options table (`options/table.py`), commands, and the options of a command line as records.

A row names the field of a frozen record that an option sets. The option's type and default are those of the field.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ggpipe.config.checks import check_choice
from ggpipe.errors import SettingError

R = TypeVar("R")

_SIMPLE_TYPES = (bool, int, float, Path)
"""Types of fields that the command line's parser converts to; other types are read as text."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A row of the table: an option, and the field of a record that it sets."""

    record: type
    field: str
    flags: tuple[str, ...]
    """`-c`, `--ctx-size`, `--mmap/--no-mmap`. Empty for a positional argument."""
    panel: str
    help: str
    metavar: str | None = None
    parse: Callable[[Any], Any] | None = None
    """Converts the text to the field's value. Raises SettingError, or ValueError that says what to write instead."""
    many: bool = False
    """The option can be repeated. `parse` gets a list of all values; without `parse`, the field is a tuple of them."""
    optional: bool = False
    """Without the option, the field has no value, so commands can tell. --help shows no default."""
    setting: str = ""
    """Name of the setting in the library's messages. Default: the field."""
    variable: str = ""
    """llama.cpp's environment variable for the option, if any."""
    writes: bool = False
    """The option names a file that the command writes."""
    instead_of: str = ""
    """Name of a required option that need not be given with this one."""

    @property
    def name(self) -> str:
        """Name of the setting in messages, see `GgpipeError`."""
        return self.setting or self.field

    @property
    def default(self) -> Any:
        """The field's default, or None."""
        own = next(f for f in dataclasses.fields(self.record) if f.name == self.field)
        return None if own.default is dataclasses.MISSING else own.default

    @property
    def default_text(self) -> Any:
        """The default as a command line would have it: a list's values are separated by commas."""
        if self.many or self.optional:
            return None
        return ",".join(map(str, self.default)) or None if isinstance(self.default, tuple) else self.default

    @property
    def spelling(self) -> str:
        """The option in messages: its first short and its first long flag, as in `-c/--ctx-size`."""
        if not self.flags:
            return self.metavar or self.name.upper()
        flags = [flag for text in self.flags for flag in text.strip().split("/")[:1] if flag]
        short = [flag for flag in flags if not flag.startswith("--")]
        return "/".join([*short[:1], *[flag for flag in flags if flag.startswith("--")][:1]])

    @property
    def reads(self) -> Any:
        """The type that the command line's parser reads."""
        hint = _hints(self.record)[self.field]
        found = [kind for kind in _SIMPLE_TYPES if kind is hint or kind in get_args(hint)]
        kind = found[0] if found and self.parse is None else str
        return list[kind] if self.many else kind  # type: ignore[valid-type]

    @property
    def choices(self) -> tuple[str, ...]:
        """The possible values, for a field of type `Literal`."""
        hint = _hints(self.record)[self.field]
        literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
        return tuple(dict.fromkeys(value for part in literals for value in get_args(part)))

    def value(self, given: Any) -> Any:
        """The field's value. Raises SettingError."""
        if given is None and not self.many:
            return None
        if self.parse is None and self.choices:
            check_choice(self.name, given, self.choices)
        if self.parse is None:
            return tuple(given or ()) if self.many else given
        try:
            return self.parse(list(given or ()) if self.many else given)
        except ValueError as e:
            text = " ".join(given) if self.many else given
            raise SettingError(self.name, f"{text}: {e}") from None


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its help, and its options."""

    name: str
    help: str
    records: tuple[type, ...] = ()
    """The command has the options that set fields of these records."""
    leave_out: frozenset[str] = frozenset()
    """Names of options that it lacks nevertheless."""
    required: frozenset[str] = frozenset()
    hidden: bool = False
    """Not meant for users, and not shown on any page."""
    reads_variables: bool = False
    """Environment variables set options that are not on the command line, as in llama.cpp's programs."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that differ from the fields', by option name."""

    def options(self, table: Iterable[Option]) -> list[Option]:
        """The rows of the table that this command has."""
        return [row for row in table if row.record in self.records and row.name not in self.leave_out]

    def default_of(self, row: Option) -> Any:
        """The default of an option of this command, as on a command line."""
        return self.defaults.get(row.name, row.default_text)


class Options:
    """The options of a command line, as the records whose fields they set."""

    def __init__(self, command: Command, given: Mapping[Option, Any]) -> None:
        """Raises SettingError for a value that a field cannot have."""
        self._command = command
        self._given = dict(given)
        self._values: dict[type, dict[str, Any]] = {}
        for row, value in given.items():
            values = self._values.setdefault(row.record, {})
            if (
                own := row.value(value)
            ) is not None or row.field not in values:  # of several rows for a field, the last one counts
                values[row.field] = own

    def fields(self, record: type) -> dict[str, Any]:
        """The fields of a record that have a value, and their values."""
        return {name: value for name, value in self._values.get(record, {}).items() if value is not None}

    def having(self, record: Any) -> Options:
        """The same options, with `record` in place of the one of its type."""
        options = Options(self._command, self._given)
        options._values = {**self._values, type(record): dict(vars(record))}
        return options

    def of(self, command: Command, table: Iterable[Option], names: Mapping[str, str]) -> Options:
        """The same settings as options of another command. `names`: the names in this command of settings that are
        called differently there. Settings without an option in this command get their defaults."""
        given = {row.name: value for row, value in self._given.items()}
        rows = command.options(table)
        return Options(
            command, {row: given.get(names.get(row.name, row.name), command.default_of(row)) for row in rows}
        )

    def with_values(self, values: Mapping[str, Any]) -> Options:
        """The same options with other values for some, by name, as a command line gives them."""
        return Options(self._command, {row: values.get(row.name, value) for row, value in self._given.items()})

    def is_given(self, name: str) -> bool:
        """Whether the option has a value other than the command's default."""
        return any(given != self._command.default_of(row) for row, given in self._given.items() if row.name == name)

    @property
    def given(self) -> list[str]:
        """Names of the options that have a value other than the command's default."""
        return [row.name for row, value in self._given.items() if value != self._command.default_of(row)]

    @property
    def files(self) -> list[tuple[Option, Path]]:
        """The files that options name, each with its option."""
        return [(row, path) for row, value in self._given.items() for path in _paths_in(row.value(value))]

    def __getitem__(self, record: type[R]) -> R:
        """A record, with defaults for fields without a value. Raises SettingError for values out of bounds."""
        return record(**self.fields(record))


def _paths_in(value: Any) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _paths_in(part)


@functools.cache
def _hints(record: type) -> dict[str, Any]:
    return get_type_hints(record)
