"""Settings that say what the text must be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ggpipe.errors import Setting, SettingError, UsageError
from ggpipe.text.grammar.gbnf import check
from ggpipe.text.grammar.json_schema import grammar_of


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A grammar, or a JSON schema, as a text or in a file."""

    grammar: str | None = None
    grammar_file: Path | None = None
    json_schema: str | None = None
    json_schema_file: Path | None = None

    def gbnf(self) -> str:
        """The grammar; empty: there is none. Raises UsageError for what no text can be held to."""
        given = [
            value is not None for value in (self.grammar, self.grammar_file, self.json_schema, self.json_schema_file)
        ]
        if sum(given) > 1:
            raise UsageError(
                "give one of ",
                Setting("grammar"),
                ", ",
                Setting("grammar_file"),
                ", ",
                Setting("json_schema"),
                " and ",
                Setting("json_schema_file"),
            )
        grammar, schema = self.grammar, self.json_schema
        if self.grammar_file is not None:
            grammar = _read("grammar_file", self.grammar_file)
        if self.json_schema_file is not None:
            schema = _read("json_schema_file", self.json_schema_file)
        if schema is not None:
            grammar = grammar_of(schema)
        if grammar is None:
            return ""
        check(grammar)
        return grammar


def _read(name: str, path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise SettingError(name, f"{path}: cannot read it: {why}") from e
