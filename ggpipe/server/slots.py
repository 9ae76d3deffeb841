"""Slots as in llama-server: the running requests, and the last request of each free slot.

All requests share the KV cache, so a slot only records which conversation used it last. A request gets the free slot
whose conversation it continues, or else the one that was used longest ago.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ggpipe.api.feed import Feed
from ggpipe.apis.llama_server import settings
from ggpipe.core.kv.radix_tree import agreeing
from ggpipe.core.request_spec import RequestSpec

Tokens = tuple[int, ...]

_CONTINUED = 0.5
"""A prompt continues a slot's conversation if it begins with more than this share of the slot's tokens."""


@dataclass(frozen=True, kw_only=True)
class SlotRequest:
    """A request in a slot."""

    feed: Feed
    """Has ended without tokens if the prompt was restored from disk."""
    spec: RequestSpec
    wanted: int = -1
    """The slot to use if it is free; -1: any."""
    number: int = field(default_factory=itertools.count(1).__next__)


class Slot:
    """One slot."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.use: SlotRequest | None = None
        """The running request of the slot, or else its last one."""

    @property
    def is_processing(self) -> bool:
        """A request is running in it."""
        return self.use is not None and not self.use.feed.has_ended

    @property
    def tokens(self) -> Tokens:
        """The prompt and the output so far."""
        return (*self.use.feed.prompt, *(token.id for token in self.use.feed.tokens)) if self.use is not None else ()

    def figures(self, n_ctx: int) -> dict[str, Any]:
        """An entry of llama-server's `/slots`."""
        found = {"id": self.id, "n_ctx": n_ctx, "speculative": False, "is_processing": self.is_processing}
        if (use := self.use) is None:
            return found
        stats, tokens = use.feed.stats, list(use.feed.tokens)
        n_cached, n_decoded = stats.counters.cached_tokens, len(tokens)
        is_limited = self.is_processing and use.spec.n_predict >= 0
        n_new = len(use.feed.prompt) - n_cached
        if not tokens and self.is_processing:
            n_new = min(sum(run.n_rows for run in list(stats.runs) if not run.cancelled), n_new)
        return found | {
            "speculative": stats.speculation.mode != "iterative",
            "id_task": use.number,
            "n_prompt_tokens": len(use.feed.prompt) + n_decoded,
            "n_prompt_tokens_processed": n_new,
            "n_prompt_tokens_cache": n_cached,
            "params": settings(use.spec.sampling, use.spec.n_predict),
            "next_token": [
                {
                    "has_next_token": self.is_processing,
                    "has_new_line": any("\n" in token.text for token in tokens),
                    "n_remain": max(use.spec.n_predict - n_decoded, 0) if is_limited else -1,
                    "n_decoded": n_decoded if self.is_processing else 0,
                }
            ],
        }


class Slots:
    """All slots. Used only in the event loop."""

    def __init__(self, n: int) -> None:
        self._slots = [Slot(id) for id in range(n)]
        self._waiting: collections.deque[SlotRequest] = collections.deque()

    def begin(self, request: SlotRequest) -> None:
        """Add a request. It gets the slot that it wants if that is free, or else the best free one, now or later."""
        self._waiting.append(request)
        self._settle()

    def restored(self, slot: Slot, prompt: Tokens) -> None:
        """Put restored tokens into a slot."""
        feed = Feed()
        feed.accept(prompt, None)
        feed.end()
        slot.use = SlotRequest(feed=feed, spec=RequestSpec(prompt=prompt, n_predict=0))

    def all(self) -> Sequence[Slot]:
        """All slots in order."""
        self._settle()
        return self._slots

    def slot_of(self, key: str) -> int:
        """The slot that the output with this key uses or used last; -1: it has none."""
        return next((slot.id for slot in self.all() if slot.use is not None and slot.use.feed.key == key), -1)

    def _settle(self) -> None:
        """Move waiting requests to free slots, in the order in which the engine serves them."""
        while self._waiting:
            use = self._waiting[0]
            if not (use.feed.has_ended and not use.feed.tokens):  # otherwise it was never served
                free = [slot for slot in self._slots if not slot.is_processing]
                if not free:
                    return
                wanted = next((slot for slot in free if slot.id == use.wanted), None)
                slot = wanted or self._best(free, use.feed.prompt)
                slot.use = use
            self._waiting.popleft()

    @staticmethod
    def _best(free: Sequence[Slot], prompt: Tokens) -> Slot:
        shared = {slot: agreeing(slot.tokens, prompt) for slot in free}
        most = max(free, key=lambda slot: shared[slot])
        if shared[most] > _CONTINUED * len(most.tokens):
            return most
        return min(free, key=lambda slot: slot.use.number if slot.use is not None else 0)
