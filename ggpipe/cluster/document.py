"""ggpipe's own JSON files, such as profiles and receipts: each says what it is, and in which version of its format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ggpipe.cluster.decode import decode
from ggpipe.errors import GgpipeError, UsageError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DocumentKind:
    """A kind of file."""

    name: str
    version: int
    command: str
    """The command that writes one."""
    renewal: str
    """What to do with a file in another version."""

    @property
    def tag(self) -> dict[str, str | int]:
        """The first fields of each file."""
        return {"format": f"ggpipe {self.name}", "version": self.version}

    def read(self, path: Path, record: type[T]) -> T:
        """The record in a file. Raises UsageError, with the reason, for a file that has none."""
        try:
            content = msgspec.json.decode(path.read_bytes())
        except OSError as e:
            raise UsageError(f"cannot read the {self.name} {path}: {e.strerror}") from e
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            content = None
        if not isinstance(content, dict) or content.get("format") != self.tag["format"]:
            raise UsageError(f"{path} is not a {self.name}; write one with `{self.command}`")
        if content.get("version") != self.version:
            raise UsageError(
                f"{path} is a {self.name} in format {content.get('version')!r}, but this ggpipe reads {self.version}: "
                f"{self.renewal}"
            )
        try:
            return decode(content, record)
        except (ValueError, GgpipeError) as e:
            raise UsageError(f"{path} is a damaged {self.name} ({e}); write it again with `{self.command}`") from e
