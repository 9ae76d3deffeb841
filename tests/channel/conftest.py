"""Channels for tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.channel import Connected, channel


@pytest.fixture
def connected() -> Iterator[Connected]:
    with channel() as ends:
        yield ends


@pytest.fixture
def others() -> Iterator[Connected]:
    with channel() as ends:
        yield ends
