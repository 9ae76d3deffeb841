"""What a draft model keeps in its KV cache of texts that ended."""

from __future__ import annotations

from support.draft_steps import PROMPT, Draft

from ggpipe.core.draft_messages import EndDrafting
from ggpipe.core.messages import KvKind, KvOp


def a_text_of_five_is_kept(**limits: int) -> Draft:
    """Two tokens behind the prompt are accepted, a third one was decoded."""
    draft = Draft(None, n_prefixes=2, n_seq=3, **limits)
    draft.begin()
    for token in (5, 6, 8):
        draft.answer({token: 0.9})
    draft.accept(2, 5, 6)
    draft.say(EndDrafting(1))
    draft.runs.clear()
    return draft


def test_what_was_decoded_of_an_ended_text_is_not_decoded_again() -> None:
    draft = a_text_of_five_is_kept()
    draft.begin(2, prompt=(*PROMPT, 5, 6, 20, 21))
    assert draft.decoding() == [[(20, 5), (21, 6)]]
    assert draft.runs[0].rows[0].seqs == (0,)


def test_a_common_part_of_an_ended_text_is_copied() -> None:
    draft = a_text_of_five_is_kept()
    draft.begin(2, prompt=(*PROMPT, 5, 20))
    assert draft.decoding() == [[(20, 4)]]
    assert draft.runs[0].ops == (KvOp(KvKind.CP, 0, 1, 0, 4),)


def test_draft_tokens_behind_an_ended_text_are_cut_off() -> None:
    draft = Draft(n_prefixes=2, n_seq=3)
    draft.begin()
    for token in (5, 6, 8):
        draft.answer({token: 0.9})
    draft.accept(1, 5)
    draft.say(EndDrafting(1))
    assert draft.runs[-1].ops == (KvOp(KvKind.RM, 0, p0=4),)
    draft.begin(2, prompt=(*PROMPT, 5, 6, 8))
    assert draft.decoding()[-1] == [(6, 4), (8, 5)]


def test_text_in_flight_is_not_kept() -> None:
    draft = Draft(n_prefixes=2, n_seq=3, n_ubatch=1, n_in_flight=2)
    draft.begin()
    draft.answer()
    draft.say(EndDrafting(1))
    assert draft.drafter._prefixes.kept == {0: PROMPT[:1]}


def test_kept_texts_make_room() -> None:
    draft = a_text_of_five_is_kept(n_ctx=9)
    draft.begin(2, prompt=(1, 2, 3), n_left=5)
    ops = [draft.runs[0].ops]
    for token in (4, 5):
        draft.answer({token: 0.9})
        ops.append(draft.runs[0].ops)
    assert draft.decoding() == [[(5, 4)]]
    assert ops == [(), (), (KvOp(KvKind.RM, 0),)], "a tenth cell is needed"


def test_a_request_without_the_cache_neither_takes_nor_keeps() -> None:
    draft = a_text_of_five_is_kept()
    draft.begin(2, prompt=(*PROMPT, 5, 6, 20), cache_prompt=False)
    assert len(draft.runs[0].rows) == 6
    draft.answer({7: 0.9})
    draft.say(EndDrafting(2))
    assert draft.drafter._prefixes.kept == {0: (*PROMPT, 5, 6)}
