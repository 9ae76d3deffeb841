"""Which requests are served at the same time, and how many KV cells each of them is promised.

Next is the user of whom the fewest requests are being served; among such users they take turns, and a user's own
requests come in their order. Prefixes that are to be saved or restored wait with the requests of the user without a
name. A request is admitted when the cells are there that its text may take up; until then it
waits, and so do those after it. Cells that are promised to no request hold cached prefixes and draft tokens.
"""

from __future__ import annotations

import collections
from collections.abc import Container, Iterator

from ggpipe.core.drafters.request_drafters import RequestDrafters
from ggpipe.core.events import Arrived
from ggpipe.core.kv.prefix_cache import PrefixCache
from ggpipe.core.prefixes import PrefixDone, RestorePrefix, SavePrefix
from ggpipe.core.request import Counters, Limits, Request
from ggpipe.core.request_state import PrefixState, RequestState, SequenceState

Waiting = Arrived | SavePrefix | RestorePrefix

_MORE_CELLS = 32  # that a request without a limit is given at a time


class Admission:
    """See the module's text."""

    def __init__(self, limits: Limits, prefixes: PrefixCache, at_once: Container[int] = ()) -> None:
        """`at_once`: ids of the drafters that need no model."""
        self.states: dict[int, SequenceState] = {}
        """Requests and prefixes that are served, by their ids; the scheduler removes those that have ended."""
        self._limits = limits
        self._prefixes = prefixes
        self._at_once = at_once
        self._waiting: dict[str, dict[int, Waiting]] = {}
        """By user, in the order of their turns, then by id; none is empty."""

    def wait(self, one: Waiting) -> None:
        """A request or a prefix waits until it is admitted."""
        user, number = (one.request.spec.user, one.request.id) if isinstance(one, Arrived) else ("", one.id)
        self._waiting.setdefault(user, {})[number] = one

    def withdraw(self, number: int) -> Waiting | None:
        """A request or a prefix does not wait any more. Returns it; None: it did not wait."""
        for user, waiting in self._waiting.items():
            if (one := waiting.pop(number, None)) is not None:
                if not waiting:
                    del self._waiting[user]
                return one
        return None

    def admit(self) -> Iterator[SequenceState]:
        """Admit as many of those that wait as there is room for, one after the other."""
        while self._waiting and len(self.states) < self._limits.n_requests:
            n_served = collections.Counter(state.user for state in self.states.values())
            user = min(self._waiting, key=lambda user: n_served[user])
            if (state := self._admitted(next(iter(self._waiting[user].values())))) is None:
                return
            others = self._waiting.pop(user)
            del others[state.id]
            if others:
                self._waiting[user] = others  # after the other users
            self.states[state.id] = state
            yield state

    def _admitted(self, one: Waiting) -> SequenceState | None:
        """The state of what was admitted; None where there is no room for it."""
        match one:
            case Arrived(request):
                prompt, reuse, reserve = request.prompt, request.spec.cache_prompt, self._reserve(request)
                n_last = len(prompt) - request.wanted.start
            case SavePrefix(tokens=prompt) | RestorePrefix(tokens=prompt):
                reuse, reserve, n_last = isinstance(one, SavePrefix), len(prompt), 0
        if not self._prefixes.fits(prompt, reuse, reserve, self._n_promised, n_last):
            return None
        prefix = self._prefixes.open(prompt, reuse, n_last)
        n_past = prefix.n_tokens
        if not isinstance(one, Arrived):
            return PrefixState(
                id=one.id, user="", prompt=prompt, prefix=prefix, reserve=reserve, n_past=n_past,
                counters=Counters(cached_tokens=n_past), order=one, done=PrefixDone(one.id),
            )  # fmt: skip
        request = one.request
        one.counters.cached_tokens = n_past
        return RequestState(
            id=request.id,
            user=request.spec.user,
            prompt=prompt,
            request=request,
            logits_request=one.logits_request,
            keeps=one.logits_request.keeps,
            counters=one.counters,
            draft_check=one.draft_check,
            prefix=prefix,
            reserve=reserve,
            n_past=n_past,
            drafters=RequestDrafters(request.drafters if request.drafts else (), prefix.tree, self._at_once),
        )

    def _reserve(self, request: Request) -> int:
        """Cells that a request is promised. One without a limit gets its share, and more as long as there are any."""
        n_ctx, n_prompt = self._limits.n_ctx, len(request.prompt)
        if request.n_predict >= 0:
            return min(n_ctx, n_prompt + request.n_predict)
        share = n_ctx // self._limits.n_requests
        return min(n_ctx, max(share, n_prompt + max(share // 2, 1)))

    def extended(self, state: RequestState) -> int:
        """The cells that it is promised; more than before where it nears them, has no limit, and there are any."""
        if state.n_predict < 0 and state.tree.root.pos + _MORE_CELLS > state.reserve:
            state.reserve += min(self.spare_cells + state.n_cells - state.n_reserved, _MORE_CELLS)
        return state.reserve

    def make_room(self) -> None:
        """Requests take the cells of kept prefixes when they need them."""
        if len(self._prefixes):
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
