"""A draft model that sees only the latest tokens of a text.

Whole interleavings are in test_scheduler_requests.py."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from support.draft_steps import Draft

from ggpipe.config.draft import draft_cells, window_in
from ggpipe.core.draft_messages import EndDrafting
from ggpipe.core.messages import KvKind, KvOp

WINDOW = 16
LIMITS = {"n_prefixes": 2, "n_seq": 6, "n_ubatch": 99, "n_batch": 99}
LONG = tuple(range(100, 140))


def windowed() -> Draft:
    return Draft(None, WINDOW, **LIMITS)


def write(draft: Draft, first: int, n: int) -> None:
    """The draft model says tokens from `first` on, and all of them are accepted."""
    for token in range(first, first + n):
        draft.answer({token: 0.99})
        draft.accept(token - first + 1, token)


def test_of_a_long_prompt_the_end_is_read() -> None:
    draft = windowed()
    draft.begin(prompt=LONG)
    assert draft.decoding() == [[(token, i) for i, token in enumerate(LONG[-8:])]]


def test_a_text_that_fits_is_read_from_its_start() -> None:
    draft = windowed()
    draft.begin(prompt=LONG[:11], n_left=5)
    assert draft.decoding() == [[(token, i) for i, token in enumerate(LONG[:11])]]


def test_recurrent_models_see_all() -> None:
    draft = Draft(None, WINDOW, **LIMITS, rolls_back=False)
    draft.begin(prompt=LONG)
    assert len(draft.runs[0].rows) == len(LONG)


def test_the_next_message_finds_what_was_read() -> None:
    draft = windowed()
    draft.begin(prompt=LONG)
    draft.answer({1: 0.9})
    draft.say(EndDrafting(1))
    draft.runs.clear()
    draft.begin(2, prompt=(*LONG[:39], 7))
    assert draft.decoding() == [[(7, 7)]]


def test_older_output_is_hidden() -> None:
    """The prompt stays; of the output that is seen, the older half goes."""
    draft = windowed()
    draft.begin(prompt=LONG[:4], n_left=60)
    ops: list[KvOp] = []
    for token in range(1, 40):
        ops += draft.runs[0].ops
        draft.answer({token: 0.99})
        draft.accept(token, token)
        state = draft.drafter._requests[1]
        assert state.n_decoded - state.n_hidden <= WINDOW
        draft.drafter.validate()
    assert ops == [KvOp(KvKind.RM, 0, p0=first, p1=first + 6) for first in (4, 10, 16, 22, 28)]
    draft.say(EndDrafting(1))
    assert draft.drafter._prefixes.kept == {0: LONG[:4]}, "others can continue what is before the gap"


@given(st.integers(1, 100), st.integers(1, 300), st.integers(64, 300))
def test_a_prompt_is_read_from_where_the_next_ones_are(n_prompt: int, n_left: int, window: int) -> None:
    """A window has room for the output, and where its start moves, it moves by many tokens."""
    draft = Draft(None, window, n_ctx=999)
    starts = []
    for n in range(n_prompt, n_prompt + 3 * window):
        draft.begin(n, prompt=(1,) * n, n_left=n_left)
        first = n - len(draft.drafter._requests[n].begin.prompt)
        assert 0 <= first < n
        assert n - first + n_left <= window or n - first <= window // 2
        starts.append(first)
        draft.say(EndDrafting(n))
    moves = [after - before for before, after in itertools.pairwise(starts) if after != before]
    assert all(move >= window // 4 for move in moves)


@given(st.integers(256, 200_000), st.integers(64, 100_000), st.integers(1, 8))
def test_a_context_has_room_for_the_window_of_each_request(n_ctx: int, window: int, n_requests: int) -> None:
    n_cells = draft_cells(n_ctx, window, n_requests)
    assert n_cells <= n_ctx
    assert window_in(n_cells, n_ctx, window, n_requests) == window
    assert n_requests * (window_in(n_cells // 2, n_ctx, window, n_requests) + 256) <= max(
        n_cells // 2, n_requests * 256
    )
    assert draft_cells(n_ctx, 0, n_requests) == n_ctx
    assert window_in(n_ctx, n_ctx, 0, n_requests) == 0
