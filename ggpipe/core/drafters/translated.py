"""A draft model with another vocabulary: its tokens become the target's by their text.

The draft model works in its own tokens, as if the target had them as well. It reads the accepted text in its tokens,
and its draft tokens become those that the target would write:

    target's tokens   | The| cat| translat|ed|
    draft's tokens    | The| cat| trans|lated|
                              ▲    ▲
                              │    └ the target writes a longer token, as the draft's next one shows
                              └ a token of both

`translated_text` says how. Draws are foreseen (`foresight`) where candidates are sorted by their probabilities, as if
each draft token of the draft model took one random number. Penalties are not known, and draft tokens of other drafters
are not continued.
"""

from __future__ import annotations

import dataclasses

from msgspec import structs

from ggpipe.core.draft_messages import Accepted, BeginDrafting, EndDrafting, MicroBatch, Shared
from ggpipe.core.drafters.base import DraftAction, Drafter, DraftEvent, ToHead
from ggpipe.core.drafters.translated_text import TranslatedText, Translator


class TranslatedModel:
    """The drafter (see the module's docstring), for any number of requests."""

    def __init__(self, model: Drafter, drafter: int, translator: Translator) -> None:
        """`model`: what drafts in the draft model's vocabulary. `drafter`: id of this drafter."""
        self._model = model
        self._drafter = drafter
        self._translator = translator
        self._requests: dict[int, TranslatedText] = {}

    @property
    def wake_at(self) -> float | None:
        """When to send `Tick`; None when only other events matter."""
        return self._model.wake_at

    def handle(self, event: DraftEvent, now: float) -> list[DraftAction]:
        """Take in one event that happened at `now`, as `DraftModel.handle`."""
        actions: list[DraftAction] = []
        match event:
            case BeginDrafting():
                event = self._begin(event)
            case Accepted() if event.request in self._requests:
                event = self._accepted(event, actions)
            case EndDrafting(request):
                self._requests.pop(request, None)
            case Shared():
                return []
        for action in self._model.handle(event, now):
            if isinstance(action, ToHead):
                self._draft(action.micro_batch, actions)
            else:
                actions.append(action)
        return actions

    def _begin(self, begin: BeginDrafting) -> BeginDrafting:
        text = self._requests[begin.request] = TranslatedText(self._translator, begin)
        speculation = begin.speculation
        if speculation.n_draft is not None:
            speculation = dataclasses.replace(speculation, n_draft=max(text.n_draft(speculation.n_draft), 1))
        return structs.replace(
            begin,
            speculation=speculation,
            prompt=text.prompt,
            n_left=2 * text.n_draft(begin.n_left),
            look_ahead=text.n_draft(begin.look_ahead),
            ends=self._translator.draft_ends,
            banned=self._translator.draft_banned(begin.banned),
            drawing=begin.drawing if begin.drawing is not None and begin.drawing.is_sorted else None,
            adjustments=None,
        )

    def _accepted(self, accepted: Accepted, actions: list[DraftAction]) -> Accepted:
        text = self._requests[accepted.request]
        tokens = text.accept(accepted.tokens)
        assert text.epoch == accepted.epoch
        self._send(accepted.request, text, False, actions)
        look_ahead = text.n_draft(accepted.look_ahead)
        return structs.replace(accepted, tokens=tokens, epoch=text.n_told, look_ahead=look_ahead, rows=())

    def _draft(self, micro_batch: MicroBatch, actions: list[DraftAction]) -> None:
        text = self._requests.get(micro_batch.request)
        if text is None:
            return
        text.add(micro_batch.expansions, micro_batch.epoch == text.n_told)
        self._send(micro_batch.request, text, micro_batch.complete, actions)

    def _send(self, request: int, text: TranslatedText, complete: bool, actions: list[DraftAction]) -> None:
        new = text.take_new()
        if new or complete:
            micro_batch = MicroBatch(
                request=request, epoch=text.epoch, expansions=new, complete=complete, drafter=self._drafter
            )
            actions.append(ToHead(micro_batch))

    def validate(self) -> None:
        """Check what must hold between events. Raises AssertionError."""
        for text in self._requests.values():
            text.validate()
