"""Steps of a head whose draft says what a test wants it to say (`support.heads.opened`)."""

from __future__ import annotations

from typing import Any

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import Expansion, MicroBatch
from ggpipe.core.events import Drafted
from ggpipe.core.request import Request
from support.fake_model import END
from support.heads import Head
from support.requests import core_request


def speculating(number: int = 1, **settings: Any) -> Request:
    return core_request(
        id=number,
        prompt=(number * 100, 2, 3),
        n_predict=8,
        speculation=SpeculationConfig(**settings),
        ends=frozenset({END}),
    )


def right(head: Head, n: int, request: int = 1) -> list[int]:
    """The next `n` tokens of the text."""
    seen = head.seen[request]
    return head.model.text(request, seen.tokens, n, 999)[0]


def draft_token(head: Head, parent: int, first: int, *tokens: int, prob: float = 0.9, complete: bool = False) -> None:
    """Draft tokens beside each other, named at the head's own epoch."""
    candidates = tuple((token, prob / (i + 1)) for i, token in enumerate(tokens))
    expansions = (Expansion(parent, first, len(tokens), candidates),) if tokens else ()
    head.handle(Drafted(MicroBatch(request=1, epoch=len(head.seen[1].text), expansions=expansions, complete=complete)))


def come_back(head: Head) -> None:
    """The oldest run comes back, and tokens are drawn from it as far as it goes."""
    run = next(iter(head.pipeline.in_flight))
    while run in head.pipeline.in_flight:
        _, move = head.pipeline.moves("", head._hear_result)[-1]
        move()
    while head.to_sample:
        head._sample()


def tokens_in_flight(head: Head) -> list[list[int]]:
    return [[row.token for row in run.rows] for run in head.pipeline.live]
