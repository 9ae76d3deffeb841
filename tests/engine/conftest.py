"""Drafts of ranks that are threads of this process."""

from __future__ import annotations

import pytest


@pytest.fixture
def eager_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that step back behind whatever else runs on this machine might draft nothing at all."""
    monkeypatch.setattr("ggpipe.llama.machine.yield_to_others", lambda: None)
