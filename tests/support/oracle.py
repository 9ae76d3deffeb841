"""A drafter that knows what is to come, but for some tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

from ggpipe.core.draft_messages import (
    ROOT,
    Accepted,
    BeginDrafting,
    DrafterMessage,
    EndDrafting,
    Expansion,
    MicroBatch,
    Shared,
)
from ggpipe.core.drafters import registry
from ggpipe.core.request import DraftCheck

Tokens = tuple[int, ...]
_MOST = 7
_PROBABILITY = 0.9


class Oracle:
    """It stands in for the n-gram drafter. Each `wrong_each`th token of an output is wrong, in all that it drafts."""

    def __init__(self, outputs: Mapping[Tokens, Tokens], wrong_each: int) -> None:
        """`outputs`: by their prompts."""
        self._outputs = outputs
        self._wrong_each = wrong_each
        self._begun: dict[int, BeginDrafting] = {}
        self._next_number: dict[int, int] = {}
        self.id = 0

    joins = False

    def answer(self, message: DrafterMessage, _: DraftCheck | None = None) -> list[MicroBatch]:
        match message:
            case BeginDrafting(request=request):
                self._begun[request], self._next_number[request], epoch = message, ROOT + 1, 0
            case Accepted(request, epoch):
                pass
            case EndDrafting(request):
                del self._begun[request]
                return []
            case Shared():  # which only drafters with a model are sent
                return []
        begin, first = self._begun[request], self._next_number[request]
        n = max(min(message.look_ahead, begin.n_left - epoch - 1, _MOST), 0)
        named = self._named(self._outputs[begin.prompt])[epoch : epoch + n]
        self._next_number[request] += len(named)
        expansions = tuple(
            Expansion(ROOT if i == 0 else first + i - 1, first + i, 1, ((token, _PROBABILITY),))
            for i, token in enumerate(named)
        )
        return [MicroBatch(request=request, epoch=epoch, expansions=expansions, complete=True, drafter=self.id)]

    def _named(self, output: Tokens) -> Tokens:
        return tuple(token ^ (i % self._wrong_each == 0) for i, token in enumerate(output, 1))


@contextmanager
def drafting(oracle: Oracle) -> Iterator[None]:
    """Engines that are loaded meanwhile have it as their n-gram drafter."""

    def made(drafter: int) -> Oracle:
        oracle.id = drafter
        return oracle

    with patch.dict(registry.WITHOUT_MODEL, ngram=made):
        yield
