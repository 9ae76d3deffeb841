"""Which requests are served at the same time, and how many KV cells each of them is promised.

Next is the user of whom the fewest requests are being served; among such users they take turns, and a user's own
requests come in their order. A request is admitted when the cells are there that its text may take up; until then it
waits, and those behind it wait as well. What is promised to nobody holds kept prefixes and draft tokens.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from ggpipe.core.drafters.request_drafters import RequestDrafters
from ggpipe.core.events import Arrived
from ggpipe.core.prefix_cache import PrefixCache
from ggpipe.core.request import Limits, Request
from ggpipe.core.request_state import RequestState

_MORE_CELLS = 32  # that a request without a limit is given at a time


class Admission:
    """See the module's text."""

    def __init__(self, limits: Limits, prefixes: PrefixCache) -> None:
        self.states: dict[int, RequestState] = {}
        """Requests that are served, by their ids; the scheduler removes those that have ended."""
        self._limits = limits
        self._prefixes = prefixes
        self._waiting: dict[str, list[Arrived]] = {}
        """By user, in the order of their turns; no list is empty."""

    def wait(self, arrived: Arrived) -> None:
        """A request waits until it is admitted."""
        self._waiting.setdefault(arrived.request.spec.user, []).append(arrived)

    def withdraw(self, request_id: int) -> bool:
        """A request does not wait any more. Returns whether it did."""
        for user, waiting in self._waiting.items():
            kept = [arrived for arrived in waiting if arrived.request.id != request_id]
            if len(kept) < len(waiting):
                waiting[:] = kept
                if not kept:
                    del self._waiting[user]
                return True
        return False

    def admit(self) -> Iterator[RequestState]:
        """Admit as many of those that wait as there is room for, one after the other."""
        while self._waiting and len(self.states) < self._limits.n_requests:
            n_served = collections.Counter(state.request.spec.user for state in self.states.values())
            user = min(self._waiting, key=lambda user: n_served[user])
            arrived = self._waiting[user][0]
            request = arrived.request
            reserve = self._reserve(request)
            reuse, n_last = (
                request.spec.cache_prompt and not request.restores,
                len(request.prompt) - request.wanted.start,
            )
            if not self._prefixes.fits(request.prompt, reuse, reserve, self._n_promised, n_last):
                return
            if others := self._waiting.pop(user)[1:]:
                self._waiting[user] = others  # behind the other users
            prefix = self._prefixes.open(request.prompt, reuse, n_last)
            arrived.counters.cached_tokens = prefix.n_tokens
            state = RequestState(
                request=request,
                want=arrived.want,
                keeps=arrived.want.keeps,
                counters=arrived.counters,
                draft_check=arrived.draft_check,
                prefix=prefix,
                reserve=reserve,
                n_past=prefix.n_tokens,
                drafters=RequestDrafters(request.drafters if request.drafts else (), prefix.tree),
            )
            self.states[request.id] = state
            yield state

    def _reserve(self, request: Request) -> int:
        """Cells that a request is promised. One without a limit gets its share, and more as long as there are any."""
        n_ctx, n_prompt = self._limits.n_ctx, len(request.prompt)
        if request.n_predict >= 0:
            return min(n_ctx, n_prompt + request.n_predict)
        share = n_ctx // self._limits.n_requests
        return min(n_ctx, max(share, n_prompt + max(share // 2, 1)))

    def extended(self, state: RequestState) -> int:
        """The cells that it is promised; more than before where it nears them, has no limit, and there are any."""
        if state.request.n_predict < 0 and state.tree.root.pos + _MORE_CELLS > state.reserve:
            state.reserve += min(self.spare_cells + state.n_cells - state.n_reserved, _MORE_CELLS)
        return state.reserve

    def make_room(self) -> None:
        """Requests take the cells of kept prefixes when they need them."""
        self._prefixes.shrink(self._limits.n_ctx - self._n_used)

    @property
    def spare_cells(self) -> int:
        """Cells that no request holds or has reserved."""
        return self._limits.n_ctx - self._prefixes.n_held - self._n_promised

    @property
    def n_cells(self) -> int:
        """Cells in use: of requests, kept prefixes and draft tokens."""
        return self._prefixes.n_cells + self._n_used

    @property
    def _n_promised(self) -> int:
        """Cells outside the prefix cache that requests hold or have reserved."""
        return sum(state.n_cells for state in self.states.values() if state.is_open)

    @property
    def _n_used(self) -> int:
        """Cells outside the prefix cache that requests hold."""
        return sum(state.n_used for state in self.states.values() if state.is_open)

    def validate(self) -> None:
        """Check what must hold between events. Raises AssertionError."""
        assert self.n_cells <= self._limits.n_ctx
        assert self.spare_cells >= 0
        assert len(self.states) <= self._limits.n_requests
