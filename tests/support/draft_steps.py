"""A drafter whose model says what the test says, to be driven step by step."""

from __future__ import annotations

import math
from typing import Any

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import Accepted, Adjustments, BeginDrafting, Drawing, MicroBatch, Vocabularies
from ggpipe.core.drafters.base import DraftEvent, DraftPipeline, ToHead
from ggpipe.core.drafters.draft_model import DraftModel
from ggpipe.core.events import CancelRuns, RunEnded, SubmitRun
from ggpipe.core.messages import RowLogits, Run, RunResult
from ggpipe.core.request import Limits

END = 0
PROMPT = (101, 102, 103)
Candidates = dict[int, float]


class Draft:
    """A drafter whose model thinks what the test says."""

    def __init__(self, vocabularies: Vocabularies | None = None, window: int = 0, **limits: int) -> None:
        known: dict[str, Any] = {"n_ctx": 99, "n_batch": 8, "n_ubatch": 8, "n_in_flight": 2, "n_seq": 4} | limits
        self.drafter = DraftModel(0, DraftPipeline(limits=Limits(**known), vocabularies=vocabularies, window=window))
        self.runs: list[Run] = []
        self.sent: list[MicroBatch] = []
        self.cancelled: list[int] = []
        self.now = 0.0

    def say(self, event: DraftEvent) -> None:
        for action in self.drafter.handle(event, self.now):
            match action:
                case SubmitRun(run):
                    self.runs.append(run)
                case CancelRuns(runs):
                    self.cancelled += runs
                case ToHead(batch):
                    self.sent.append(batch)

    def begin(
        self,
        request: int = 1,
        look_ahead: int = 9,
        n_left: int = 50,
        prompt: tuple[int, ...] = PROMPT,
        cache_prompt: bool = True,
        drawing: Drawing | None = None,
        adjustments: Adjustments | None = None,
        **settings: Any,
    ) -> None:
        speculation = SpeculationConfig(**{"policy": "thresholds", **settings})
        self.look_ahead = look_ahead
        self.say(
            BeginDrafting(
                request=request,
                prompt=prompt,
                n_left=n_left,
                look_ahead=look_ahead,
                ends=frozenset({END}),
                banned=(7,),
                speculation=speculation,
                cache_prompt=cache_prompt,
                drawing=drawing,
                adjustments=adjustments,
            )
        )

    def accept(self, epoch: int, *tokens: int, n_drawn: int | None = None) -> None:
        self.say(Accepted(1, epoch, tokens, self.look_ahead, n_drawn=epoch if n_drawn is None else n_drawn))

    def answer(self, *rows: Candidates) -> None:
        """The oldest run comes back: what follows each row that asked."""
        run = self.runs.pop(0)
        asked = [i for i, row in enumerate(run.rows) if row.logits_request >= 0]
        assert len(asked) == len(rows)
        answers = [
            RowLogits(i, tuple(row), tuple(5 + math.log(prob) for prob in row.values()), 5.0)
            for i, row in zip(asked, rows, strict=True)
        ]
        self.say(RunEnded(RunResult(run.id, tuple(answers))))

    def decoding(self) -> list[list[tuple[int, int]]]:
        """(token, position) of all that is in flight."""
        return [[(row.token, row.pos) for row in run.rows] for run in self.runs if run.id not in self.cancelled]

    def take_draft_tokens(self) -> list[tuple[int, int, int]]:
        """(parent, number, token) of what was sent since."""
        expansions = [expansion for batch in self.sent for expansion in batch.expansions]
        self.sent.clear()
        return [(e.parent, e.first + i, token) for e in expansions for i, (token, _) in enumerate(e.candidates[: e.n])]
