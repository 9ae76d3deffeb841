"""Settings that constrain the output."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ggpipe.errors import Setting, SettingError, UsageError
from ggpipe.options.text_file import read_text


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A grammar or a JSON schema, as text or in a file."""

    grammar: str | None = None
    grammar_file: Path | None = None
    json_schema: str | None = None
    json_schema_file: Path | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of SamplingConfig. Raises UsageError if there are several constraints, or for one that is empty or
        cannot be read."""
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) > 1:
            raise UsageError("give either ", Setting(given[0]), " or ", Setting(given[1]), ", not both")
        grammar, schema = self.grammar, self.json_schema
        if self.grammar_file is not None:
            grammar = read_text("grammar_file", self.grammar_file)
        if self.json_schema_file is not None:
            schema = read_text("json_schema_file", self.json_schema_file)
        if given and not (grammar or schema):
            raise SettingError(given[0], "is empty, and would constrain nothing", "omit it, or say what is allowed")
        return {"grammar": grammar or "", "json_schema": schema or ""}
