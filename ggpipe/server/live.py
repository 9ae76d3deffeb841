"""`/live`: what the pipeline does now, as a stream of events, with the figures of the terminal's panel.

One sample serves all who watch. It has counts and no texts: users do not see what others write.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ggpipe.server.backend import Backend, Status
from ggpipe.server.errors import ApiError
from ggpipe.server.json import dumps
from ggpipe.server.keys import user_of
from ggpipe.server.replies.stream import EventStream
from ggpipe.stats.activity import layer_texts
from ggpipe.stats.occupancy import Occupancy
from ggpipe.stats.records import percentile

_PERIOD_S = 0.25
_UNCHANGED_S = 5.0
"""A sample is sent so often where it says nothing new."""
_RATE_S = 2.0
"""Tokens a second are those of so long a time."""
_ITL_TOKENS = 32
MOST_WATCHERS, MOST_OF_ONE = 64, 8
"""Streams at a time, and those of one user."""


class Live:
    """Belongs to the event loop."""

    def __init__(self, backend: Backend, model: str) -> None:
        self._backend = backend
        self._model = model
        self._watchers: collections.Counter[str] = collections.Counter()
        self._occupancy = Occupancy()
        self._counts: collections.deque[tuple[float, int]] = collections.deque()
        """Generated tokens at times of the last seconds."""
        self._ttft_s: float | None = None
        self._itl_s: float | None = None
        self._sampled_s = 0.0
        self._sample = b""

    async def watch(self, request: Request) -> Response:
        """The endpoint. Raises ApiError where too many watch."""
        user = user_of(request)
        if self._watchers.total() >= MOST_WATCHERS or self._watchers[user] >= MOST_OF_ONE:
            raise ApiError(503, "too many watch already: close other pages of this server, or try again later")
        if request.method == "HEAD":
            return Response(media_type=EventStream.media_type)
        return EventStream(self._events(user))

    async def _events(self, user: str) -> AsyncGenerator[bytes, None]:
        self._watchers[user] += 1
        sent, sent_s = b"", 0.0
        try:
            while True:
                now, sample = time.monotonic(), self.sample()
                if sample != sent or now - sent_s >= _UNCHANGED_S:
                    sent, sent_s = sample, now
                    yield b"data: " + sample + b"\n\n"
                if self._backend.status is Status.STOPPING and not self._backend.n_active:
                    return
                await asyncio.sleep(_PERIOD_S)
        finally:
            self._watchers[user] -= 1
            self._watchers += collections.Counter()  # forgets users with none

    def sample(self) -> bytes:
        """What is known now, in JSON."""
        now = time.monotonic()
        if not self._sample or now - self._sampled_s >= _PERIOD_S / 2:
            self._sample, self._sampled_s = dumps(self._measure(now)), now
        return self._sample

    def _measure(self, now: float) -> dict[str, Any]:
        backend, totals = self._backend, self._backend.totals
        running = [generation.stats for generation in backend.open if not generation.feed.has_ended]
        counters = [stats.counters for stats in running]
        generated = totals.predicted_tokens + sum(stats.n_generated for stats in running)
        n_active = backend.n_active
        n_waiting = max(n_active - backend.n_slots, 0)
        status = backend.status
        return {
            "status": status.value,
            "progress": backend.progress if status in (Status.LOADING, Status.RESTARTING) else 1.0,
            "model": self._model,
            "n_ctx": backend.n_ctx,
            "ranks": self._ranks(now, is_busy=status in (Status.OK, Status.STOPPING) and n_active > 0),
            "requests": {
                "running": n_active - n_waiting, "waiting": n_waiting, "slots": backend.n_slots,
                "ended": totals.n_requests,
            },
            "tokens": {
                "generated": generated,
                "drafted": totals.accepted_tokens + sum(one.accepted_tokens for one in counters),
                "prompt": totals.prompt_tokens + totals.cached_tokens
                + sum(stats.n_prompt for stats in running if stats.token_times),
                "cached": totals.cached_tokens + sum(one.cached_tokens for one in counters),
            },
            "draft_tokens": {
                "submitted": totals.draft_tokens + sum(one.submitted_tokens for one in counters),
                "accepted": totals.accepted_tokens + sum(one.accepted_tokens for one in counters),
            },
            "tokens_per_s": self._rate(now, generated),
            **self._latencies(),
            "restarts": backend.n_restarts,
        }  # fmt: skip

    def _ranks(self, now: float, is_busy: bool) -> list[dict[str, Any]]:
        ranks = list(self._backend.ranks)
        if not is_busy:
            self._occupancy = Occupancy()
        shares = self._occupancy.sample(ranks, now)
        return [
            {
                "rank": rank.rank, "draft": rank.draft, "host": rank.host, "layers": layers,
                "threads": rank.threads[0], "busy": round(share, 3), "loaded": rank.loaded if not rank.load_s else 1.0,
                "resident_bytes": rank.resident_bytes,
            }
            for rank, layers, share in zip(ranks, layer_texts(ranks), shares, strict=True)
        ]  # fmt: skip

    def _rate(self, now: float, generated: int) -> float | None:
        """Tokens a second, of all texts; None: it is not known yet."""
        counts = self._counts
        counts.append((now, generated))
        while len(counts) > 2 and now - counts[1][0] >= _RATE_S:
            counts.popleft()
        then_s, before = counts[0]
        elapsed_s = now - then_s
        return round(max(generated - before, 0) / elapsed_s, 2) if 0 < elapsed_s < 2 * _RATE_S else None

    def _latencies(self) -> dict[str, float | None]:
        """The last ones that were known."""
        open_ = [generation.stats for generation in self._backend.open]
        begun = max((stats for stats in open_ if stats.token_times), key=lambda s: s.token_times[0], default=None)
        if begun is not None:
            self._ttft_s = begun.ttft_s
        recent = [list(stats.token_times[-_ITL_TOKENS - 1 :]) for stats in open_]
        waits_s = [after - before for times in recent for before, after in itertools.pairwise(times)]
        self._itl_s = percentile(waits_s, 0.5) or self._itl_s
        return {"ttft_s": self._ttft_s, "itl_s": self._itl_s}
