"""Plans are compared on shorter outputs without --full, where they are made in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import planning


@pytest.fixture(scope="module", autouse=True)
def shorter_outputs(full: bool) -> Iterator[None]:
    with planning.shorter_outputs(full):
        yield
