"""How much of a prompt is processed, before its output begins: llama-server's `prompt_progress`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from ggpipe.server.backend import Generation
from ggpipe.stats.records import RequestStats

Progress = dict[str, int]
"""`total`: tokens of the prompt. `cache`: those that the prefix cache had. `processed`: those that are in the KV cache,
with `cache`. `time_ms`: since the request was taken. The names are llama-server's."""

_POLL_S = 0.2
"""How often figures are read; the ranks send them about as often."""


async def prefill(generation: Generation) -> AsyncGenerator[Progress, None]:
    """Until the first token, or the end: each time that more of the prompt is processed."""
    began, n_shown = time.monotonic(), -1
    first = asyncio.ensure_future(generation.feed.wait_async(0))
    try:
        while True:
            progress = progress_of(generation.stats, time.monotonic() - began)
            if progress["processed"] > n_shown:
                n_shown = progress["processed"]
                yield progress
            if (await asyncio.wait((first,), timeout=_POLL_S))[0]:
                return
    finally:
        first.cancel()


def progress_of(stats: RequestStats, elapsed_s: float) -> Progress:
    """Of a request without a token yet: its runs are those of its prompt."""
    n_cached, n_prompt = stats.counters.cached_tokens, stats.n_prompt
    n_rows = sum(record.n_rows for record in list(stats.runs) if not record.cancelled)
    n_processed = min(n_cached + n_rows, n_prompt)
    return {"total": n_prompt, "cache": n_cached, "processed": n_processed, "time_ms": round(elapsed_s * 1e3)}
