"""A drafter for outputs that a grammar constrains: it drafts the tokens in which the grammar leaves no choice.

Of JSON, that is all but the values: names, quotes, brackets and commas, as soon as the token before them is known.
Draft tokens of others count as known, so a draft model is given the names between the values that it drafts.

Based on what others do without drafting: compressed state machines (SGLang: Zheng et al., 2024) and llguidance's
fast-forward tokens. As draft tokens, they are verified: the model may spell the same text in other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ggpipe.core.draft_messages import (
    ROOT,
    Accepted,
    BeginDrafting,
    DrafterMessage,
    EndDrafting,
    Expansion,
    MicroBatch,
    Shared,
    SharedToken,
)
from ggpipe.core.request import DraftCheck

_LEAST_PATH = 0.1
"""Minimum path probability of a draft token below the root, as far as it is known here."""


class GrammarDrafter:
    """The drafter (see the module's docstring), for any number of requests."""

    joins = True

    def __init__(self, drafter: int = 0) -> None:
        """`drafter`: id of this drafter."""
        self._drafter = drafter
        self._requests: dict[int, _GrammarRequest] = {}

    def answer(self, message: DrafterMessage, draft_check: DraftCheck | None = None) -> list[MicroBatch]:
        """Process a message. Returns new draft tokens in one micro-batch, as far as there are any; after `Accepted` and
        `BeginDrafting`, it may be empty. `draft_check`: of the request."""
        match message:
            case EndDrafting(request):
                self._requests.pop(request, None)
                return []
            case BeginDrafting(request=request, look_ahead=look_ahead):
                state = self._requests[request] = _GrammarRequest(message)
                expansions = state.draft(draft_check, look_ahead)
            case Accepted(request, epoch, tokens, look_ahead):
                state = self._requests[request]
                state.accept(tokens, epoch)
                expansions = state.draft(draft_check, look_ahead)
            case Shared(request, epoch, shared):
                state = self._requests[request]
                expansions = state.draft_after(draft_check, shared) if epoch == state.epoch else []
                if not expansions:
                    return []
        micro_batch = MicroBatch(
            request=request,
            epoch=state.epoch,
            expansions=tuple(expansions),
            complete=True,
            drafter=self._drafter,
        )
        return [micro_batch]

    def validate(self) -> None:
        """Check what must hold between messages. Raises AssertionError."""
        for state in self._requests.values():
            state.validate()


class _GrammarRequest:
    """The draft tokens of one request."""

    def __init__(self, begin: BeginDrafting) -> None:
        self.epoch = 0
        """Accepted tokens."""
        self._begin = begin
        self._deepest = 0
        """How far below the root the deepest draft token may be."""
        self._next_number = ROOT + 1
        self._numbers: dict[tuple[int, ...], int] = {}
        """The draft tokens that were sent, by the path from the root to them."""

    def accept(self, tokens: tuple[int, ...], epoch: int) -> None:
        """Tokens were accepted. `epoch`: number of all of them."""
        n = len(tokens)
        live = ((path, number) for path, number in self._numbers.items() if len(path) > n and path[:n] == tokens)
        self._numbers = {path[n:]: number for path, number in live}
        self.epoch = epoch

    def draft(self, draft_check: DraftCheck | None, look_ahead: int) -> list[Expansion]:
        """Draft the tokens that are forced after the root and were not sent yet."""
        self._deepest = min(look_ahead, self._begin.n_left - self.epoch - 1)
        return list(self._chain(draft_check, (), ROOT))

    def draft_after(self, draft_check: DraftCheck | None, shared: Sequence[SharedToken]) -> list[Expansion]:
        """Draft the tokens that are forced after these draft tokens of others. Where others went on drafting, their
        tokens fit the grammar, so any forced ones are there already."""
        parents = {token.path[:-1] for token in shared}
        last = (token for token in shared if token.path not in parents)
        return [one for token in last for one in self._chain(draft_check, token.path, token.number)]

    def _chain(self, draft_check: DraftCheck | None, path: tuple[int, ...], parent: int) -> Iterator[Expansion]:
        """The tokens that are forced after a path and were not sent yet. `parent`: the number of the path's last
        token."""
        forced = draft_check.forced(path) if draft_check is not None and len(path) < self._deepest else ()
        probability = 1.0
        for token, prob in forced[: self._deepest - len(path)]:
            path = (*path, token)
            probability *= prob
            if token in self._begin.ends or token in self._begin.banned:
                return
            if prob < self._begin.speculation.p_accept or probability < _LEAST_PATH:
                return
            if (number := self._numbers.get(path)) is None:
                number = self._numbers[path] = self._next_number
                self._next_number += 1
                yield Expansion(parent, number, 1, ((token, prob),))
            parent = number

    def validate(self) -> None:
        """Check what must hold between messages. Raises AssertionError."""
        assert len(set(self._numbers.values())) == len(self._numbers)
        assert all(path and number < self._next_number for path, number in self._numbers.items())
