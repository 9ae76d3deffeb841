"""The sequence ids of a pipeline's KV cache, which all requests share."""

from __future__ import annotations

import heapq


class SequenceIds:
    """The ids that all requests share."""

    def __init__(self, n: int, n_reserved: int) -> None:
        """`n` ids, of which each request to come is left one, and each prefix that may be kept."""
        self._free = list(range(n))
        self.reserved = n_reserved
        """Free ids for these: branches do not take them."""

    def __len__(self) -> int:
        return len(self._free)

    @property
    def free(self) -> frozenset[int]:
        """The ids that no tree has, and no kept prefix."""
        return frozenset(self._free)

    def take(self) -> int:
        """The lowest free id. There must be one."""
        return heapq.heappop(self._free)

    def give_back(self, seq: int) -> None:
        """Free an id for the next branch. Its RM must have been queued before."""
        heapq.heappush(self._free, seq)
