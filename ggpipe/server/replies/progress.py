"""How far a prompt is computed, while nothing of its text is there: llama-server's `prompt_progress`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from ggpipe.server.backend import Generation
from ggpipe.stats.records import RequestStats

_POLL_S = 0.2
"""How often figures are read; the ranks send them about as often."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a prompt is computed. Names are llama-server's."""

    total: int
    """Tokens of the prompt."""
    cache: int
    """Those that the prefix cache had."""
    processed: int
    """Those that are in the KV cache, with `cache`."""
    time_ms: int
    """Since the request was taken."""

    @staticmethod
    def of(stats: RequestStats, elapsed_s: float) -> Progress:
        """Of a request without a token yet: its runs are those of its prompt."""
        n_cached, n_prompt = stats.counters.cached_tokens, stats.n_prompt
        n_rows = sum(record.n_rows for record in list(stats.runs) if not record.cancelled)
        return Progress(
            total=n_prompt, cache=n_cached, processed=min(n_cached + n_rows, n_prompt), time_ms=round(elapsed_s * 1e3)
        )


async def prefill(generation: Generation) -> AsyncGenerator[Progress, None]:
    """Until the first token, or the end: each time that more of the prompt is computed."""
    began, n_shown = time.monotonic(), -1
    first = asyncio.ensure_future(generation.feed.wait_async(0))
    try:
        while True:
            progress = Progress.of(generation.stats, time.monotonic() - began)
            if progress.processed > n_shown:
                n_shown = progress.processed
                yield progress
            if (await asyncio.wait((first,), timeout=_POLL_S))[0]:
                return
    finally:
        first.cancel()
