"""How long each file of tests takes, as recorded: `scripts/test` starts the slowest first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "durations.json"


def recorded() -> dict[str, float]:
    """Seconds of each file, by its path from the project's folder."""
    found: dict[str, float] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def record(measured_s: Mapping[str, float]) -> None:
    """Add what was measured to the record; files that are gone are left out."""
    seconds = {**recorded(), **{file: round(s, 1) for file, s in measured_s.items()}}
    kept = {file: seconds[file] for file in sorted(seconds) if (ROOT / file).exists()}
    RECORD.write_text(json.dumps(kept, indent=0) + "\n")
