"""What a grammar has to offer to the sampler, whoever follows it: libllama (`gbnf_grammar`) or llguidance
(`guided_grammar`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ggpipe.core import request


class Grammar(Protocol):
    """The state of a grammar after a part of the output."""

    @property
    def forces(self) -> bool:
        """Whether its `draft_check` knows in which tokens there is no choice."""

    def clone(self) -> Self:
        """Another one that stands where this one does."""

    def fits(self, token: int) -> bool:
        """Whether it may be the next one."""

    def allowed(self, tokens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of these may be the next one."""

    def best(self, logits: NDArray[np.float32], n: int) -> NDArray[np.int32]:
        """All that may be next of a whole row, or at least the `n` most probable ones of them; without tokens whose
        logits are minus infinity."""

    def all(self, most: int) -> NDArray[np.int32] | None:
        """All tokens that may be the next one; None when there are more than `most`, or may be."""

    def accept(self, token: int) -> bool:
        """Advance by a token. Returns False, and changes nothing, if it is not allowed. Tokens that end the output
        do not change the state."""

    def go_on(self, token: int) -> None:
        """As `accept`, for a token that fits for certain; it may take place in `settle`, or when it matters."""

    def settle(self) -> None:
        """Do now what `go_on` has left for later."""

    def draft_check(self) -> DraftCheck:
        """Says which draft tokens fit after this state, as it is then."""

    def close(self) -> None:
        """Free it. A second call does nothing."""


class DraftCheck(request.DraftCheck, Protocol):
    """Which draft tokens fit a grammar. Draft tokens that do not fit are not added to the tree."""

    def accept(self, token: int) -> None:
        """The grammar has advanced by this token."""

    def close(self) -> None:
        """Free what belongs to it."""
