"""Plans are compared on shorter outputs without --full: what holds of any plan holds of those too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ggpipe.planning import evaluate


@pytest.fixture(scope="module", autouse=True)
def shorter_outputs(full: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not full:
            patch.setattr(evaluate, "_SHORT", evaluate._SHORT // 2)
            patch.setattr(evaluate, "_LONG", evaluate._LONG // 2)
        yield
