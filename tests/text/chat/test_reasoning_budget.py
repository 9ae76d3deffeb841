"""Where the end of a reasoning is written, over tokens that are bytes of a text."""

from __future__ import annotations

import pytest

from ggpipe.text.chat.reasoning_budget import ReasoningBudget


def text_with(budget: int, wanted: str, *, is_open: bool = False, message: str = "") -> str:
    """What becomes of the text that a model wants to write."""
    followed = ReasoningBudget(
        [b"<t>"], [b"</t>", b"</end>"], message.encode() + b"</t>", budget, is_open, lambda token: bytes([token])
    )
    written, left = bytearray(), list(wanted.encode())
    while left or followed.written:
        token = followed.written[0] if followed.written else left.pop(0)
        written.append(token)
        followed.accept(token)
    return written.decode()


@pytest.mark.parametrize(
    ("budget", "wanted", "expected"),
    [
        (9, "<t>why</t>so", "<t>why</t>so"),
        (3, "<t>why?</t>so", "<t>why</t>?</t>so"),
        (0, "<t>why</t>", "<t></t>why</t>"),
        (2, "no <t>why", "no <t>wh</t>y"),
        (5, "<t>a</t>b<t>cdefghi", "<t>a</t>b<t>cdefg</t>hi"),
        (7, "<t>a</end>bcdefghijk", "<t>a</end>bcdefghijk"),
        (2, "<t>aé!b", "<t>aé!</t>b"),
        (2, "no reasoning at all", "no reasoning at all"),
        (2, "<<t>abc", "<<t>ab</t>c"),
    ],
)
def test_the_end_is_written_behind_the_budget(budget: int, wanted: str, expected: str) -> None:
    assert text_with(budget, wanted) == expected


def test_a_text_may_begin_inside_a_reasoning() -> None:
    assert text_with(2, "abcd", is_open=True, message=" Enough.") == "ab Enough.</t>cd"
    assert text_with(0, "abcd", is_open=True) == "</t>abcd"


def test_a_token_in_its_place_ends_the_writing() -> None:
    """It was drawn where a grammar had no room for the end."""
    followed = ReasoningBudget([b"<t>"], [b"</t>"], b"</t>", 0, True, lambda token: bytes([token]))
    assert followed.written == tuple(b"</t>")
    followed.accept(ord("x"))
    assert not followed.written
