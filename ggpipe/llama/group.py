"""A tensor-parallel group: several ranks that compute one stage together, each with a part of every weight."""

from __future__ import annotations

from dataclasses import dataclass

from ggpipe.llama.libllama import native


@dataclass(frozen=True, kw_only=True)
class Group:
    """This rank's place in its group. All parts decode the same runs with the same bytes from the stage before.

    What the parts give back is the same on all of them, but the logits: only part 0 has them.
    """

    part: int
    """From 0; part 0 speaks for the group."""
    n_parts: int
    shares: tuple[float, ...]
    """Each part's share of the weights, at any scale."""
    sum: native.GroupSum
    """Adds up the parts' results."""
