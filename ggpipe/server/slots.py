"""Slots, as llama-server has them: the requests that are served at the same time, and the last one of each place.

All requests share the KV cache and what it keeps, so a slot is an account only: which conversation was last in it. A
request goes to the free slot whose conversation it continues, else to the one that was used longest ago.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ggpipe.api.feed import Feed
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.kv.radix_tree import agreeing
from ggpipe.core.request_spec import RequestSpec

Tokens = tuple[int, ...]

_CONTINUED = 0.5
"""Share of a slot's tokens that a prompt begins with, at least, when it continues the slot's conversation."""
_NOT_SHOWN = ("temp", "logit_bias", "grammar", "stop")


@dataclass(frozen=True, kw_only=True)
class SlotRequest:
    """A text of a slot."""

    number: int
    prompt: Tokens
    spec: RequestSpec
    wanted: int = -1
    """The slot that it is for, where that is free; -1: any."""
    feed: Feed
    """Ended, without tokens: the prompt was restored from disk."""


class Slot:
    """One of the places."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.use: SlotRequest | None = None
        """The text that is written in it, or the last one."""

    @property
    def is_processing(self) -> bool:
        """A text is written in it."""
        return self.use is not None and not self.use.feed.has_ended

    @property
    def tokens(self) -> Tokens:
        """The prompt and the text so far."""
        return (*self.use.prompt, *(token.id for token in self.use.feed.tokens)) if self.use is not None else ()

    def figures(self, n_ctx: int) -> dict[str, Any]:
        """As llama-server's `/slots` has them."""
        found = {"id": self.id, "n_ctx": n_ctx, "speculative": False, "is_processing": self.is_processing}
        if (use := self.use) is None:
            return found
        stats, tokens = use.feed.stats, list(use.feed.tokens)
        n_cached, n_decoded = stats.counters.cached_tokens, len(tokens)
        n_new = len(use.prompt) - n_cached
        if not tokens and self.is_processing:
            n_new = min(sum(run.n_rows for run in list(stats.runs) if not run.cancelled), n_new)
        return found | {
            "speculative": stats.speculation.mode != "iterative",
            "id_task": use.number,
            "n_prompt_tokens": len(use.prompt) + n_decoded,
            "n_prompt_tokens_processed": n_new,
            "n_prompt_tokens_cache": n_cached,
            "params": settings(use.spec.sampling, use.spec.n_predict),
            "next_token": [
                {
                    "has_next_token": self.is_processing,
                    "has_new_line": any("\n" in token.text for token in tokens),
                    "n_remain": max(use.spec.n_predict - n_decoded, 0) if use.spec.n_predict >= 0 else -1,
                    "n_decoded": n_decoded,
                }
            ],
        }


class Slots:
    """All slots. Belongs to the event loop."""

    def __init__(self, n: int) -> None:
        self._slots = [Slot(id) for id in range(n)]
        self._n_uses = 0
        self._waiting: collections.deque[SlotRequest] = collections.deque()

    def begin(self, prompt: Tokens, spec: RequestSpec, feed: Feed, wanted: int = -1) -> None:
        """A request came in. It gets a slot when there is a free one: the one of number `wanted`, if that is free."""
        self._waiting.append(self._use(prompt, spec, feed, wanted))
        self._settle()

    def restored(self, slot: Slot, prompt: Tokens) -> None:
        """A slot has these tokens again."""
        feed = Feed()
        feed.end()
        slot.use = self._use(prompt, RequestSpec(prompt=prompt, n_predict=0), feed)

    def all(self) -> Sequence[Slot]:
        """In order."""
        self._settle()
        return self._slots

    def slot_of(self, feed: Feed) -> int:
        """The number of the slot in which a text is written, or was; -1: it waits, or another one was since."""
        return next((slot.id for slot in self.all() if slot.use is not None and slot.use.feed is feed), -1)

    def _use(self, prompt: Tokens, spec: RequestSpec, feed: Feed, wanted: int = -1) -> SlotRequest:
        self._n_uses += 1
        return SlotRequest(number=self._n_uses, prompt=prompt, spec=spec, feed=feed, wanted=wanted)

    def _settle(self) -> None:
        """Requests that wait go to slots that have become free, in the order in which the engine serves them."""
        while self._waiting:
            use = self._waiting[0]
            if not (use.feed.has_ended and not use.feed.tokens):  # else nothing was done for it
                free = [slot for slot in self._slots if not slot.is_processing]
                if not free:
                    return
                wanted = next((slot for slot in free if slot.id == use.wanted), None)
                slot = wanted or self._best(free, use.prompt)
                slot.use = use
            self._waiting.popleft()

    @staticmethod
    def _best(free: Sequence[Slot], prompt: Tokens) -> Slot:
        shared = {slot: agreeing(slot.tokens, prompt) for slot in free}
        most = max(free, key=lambda slot: shared[slot])
        if shared[most] > _CONTINUED * len(most.tokens):
            return most
        return min(free, key=lambda slot: slot.use.number if slot.use is not None else 0)


def settings(sampling: SamplingConfig, n_predict: int) -> dict[str, Any]:
    """How a text is drawn, without what may say something of the text."""
    shown = {name: value for name, value in vars(sampling).items() if name not in _NOT_SHOWN}
    return {**shown, "temperature": sampling.temp, "n_predict": n_predict, "max_tokens": n_predict}
