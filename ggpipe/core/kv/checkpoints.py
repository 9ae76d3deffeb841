"""Where a prompt's recurrent state is kept while the prompt is computed.

A recurrent layer keeps all it has read in one state, which cannot go back: a sequence can be continued from where it
stands, and from nowhere else. So the state is copied at a few run borders of a prompt, which are checkpoints:

    where what it shares with an earlier text ends   others may begin like that too (Marconi, arXiv 2411.19379)
    some tokens before its end                       for the next question of a chat, as llama.cpp's server does
    at each quarter of a long prompt                 for a prompt that was changed on the way

The end of a text needs none: an ended request's sequence is kept as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

_BEFORE_END = 4
"""Tokens. The next prompt of a chat may have others for the answer's header, and for a "think" mark."""
_N_PARTS = 4
"""Of a long prompt; one checkpoint is between two."""
_LEAST_GAIN = 16
"""A checkpoint must save this part of a full run: it costs a border, that is, a run more."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A position in a prompt at which a run must begin, and the state is kept."""

    position: int
    is_spare: bool = False
    """It only takes a free place. Until it has been used, it is dropped before others."""


def checkpoints_of(n_prompt: int, n_cached: int, n_shared: int, n_rows: int) -> tuple[Checkpoint, ...]:
    """A prompt's checkpoints, in order.

    `n_cached`: its tokens that are not computed again. `n_shared`: those that some sequence in the prefix cache begins
    with as well. `n_rows`: of a full run.
    """
    last = n_prompt - _BEFORE_END
    wanted = {n_shared, last}
    if n_prompt - n_cached > _N_PARTS * n_rows:
        part = -(-(n_prompt - n_cached) // (_N_PARTS * n_rows)) * n_rows  # at borders that are there anyway
        wanted.update(range(n_cached + part, last, part))
    found: list[Checkpoint] = []
    for position in sorted(wanted):
        gain = position - (found[-1].position if found else n_cached)
        if position <= last and gain >= max(n_rows // _LEAST_GAIN, 1):
            found.append(Checkpoint(position, is_spare=position not in (n_shared, last)))
    return tuple(found)
