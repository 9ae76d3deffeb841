"""Where checkpoints are wanted in a prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggpipe.core.kv.checkpoints import Checkpoint, checkpoints_of


@pytest.mark.parametrize(
    ("n_prompt", "n_cached", "n_shared", "expected"),
    [
        (100, 0, 0, (96,)),  # some tokens before the end
        (35, 0, 0, ()),  # too few tokens for a run more
        (600, 500, 520, (596,)),  # what is shared is hardly more than what is cached
        (600, 500, 540, (540, 596)),
        (600, 0, 598, (596,)),  # the same prompt as before, but for its last token
        (600, 0, 4, (596,)),  # all chats begin like that
        (4096, 0, 0, (-1024, -2048, -3072, 4092)),
        (4096, 100, 0, (-1124, -2148, -3172, 4092)),  # borders of the runs after what is cached
        (4096, 0, 1500, (-1024, 1500, -2048, -3072, 4092)),
        (2048, 0, 300, (300, 2044)),
    ],
)
def test_positions(n_prompt: int, n_cached: int, n_shared: int, expected: tuple[int, ...]) -> None:
    """Negative: spare ones."""
    found = checkpoints_of(n_prompt, n_cached, n_shared, 512)
    assert found == tuple(Checkpoint(abs(position), position < 0) for position in expected)


@given(st.integers(1, 9000), st.data(), st.integers(1, 600))
def test_few_and_within_what_is_computed(n_prompt: int, data: st.DataObject, n_rows: int) -> None:
    n_cached = data.draw(st.integers(0, n_prompt - 1))
    n_shared = data.draw(st.integers(n_cached, n_prompt - 1))
    found = [checkpoint.position for checkpoint in checkpoints_of(n_prompt, n_cached, n_shared, n_rows)]
    assert len(found) <= 5
    assert found == sorted(set(found))
    assert all(n_cached < position < n_prompt for position in found)
