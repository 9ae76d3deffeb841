"""Settings of `ggpipe doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DoctorSettings:
    """What to print instead of a line for each finding."""

    json: bool = False
    """Everything, as JSON."""
    report: bool = False
    """Everything, as text."""
