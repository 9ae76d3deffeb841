"""The head's work for a token, and a guest's share of busy cores."""

from __future__ import annotations

import time

from ggpipe.profiling.guest import Guest
from ggpipe.profiling.overheads import HeadWork


def test_the_head_goes_on_from_token_to_token() -> None:
    head = HeadWork()
    assert all(head.token_s() > 0 for _ in range(50))


def test_a_guest_has_a_share_of_its_speed() -> None:
    guest = Guest(1e-4, 1e9)
    with guest:
        until = time.monotonic() + 60
        while guest.share is None and time.monotonic() < until:
            time.sleep(1e-3)
    assert guest.share is not None
    assert 0 < guest.share <= 1
