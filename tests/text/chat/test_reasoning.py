"""Reasoning and answer, told apart wherever the text is cut."""

from __future__ import annotations

from itertools import groupby, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggpipe.text.chat.answer import answer_format
from ggpipe.text.chat.reasoning import Piece, ReasoningFormat, ReasoningParser, reasoning_format

TEMPLATES = Path(__file__).with_name("templates")
THINK = reasoning_format("", "")
HARMONY = reasoning_format("<|channel|>analysis<|message|>", "")
OPEN = reasoning_format("<think>", "<|Assistant|><think>\n")


def parsed(marks: ReasoningFormat, *parts: str) -> list[tuple[bool, str]]:
    """Of what `parts` are together: reasoning and answers in turn."""
    parser = ReasoningParser(marks)
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.feed(part)
    pieces += parser.finish()
    return [(kind, "".join(piece.text for piece in run)) for kind, run in groupby(pieces, lambda p: p.is_reasoning)]


CASES = [
    (THINK, "<think>\nhm, so \n</think>\n\nYes.\n", [(True, "hm, so"), (False, "Yes.\n")]),
    (THINK, "<think>\n\n</think>\n\nYes.", [(False, "Yes.")]),
    (THINK, " \nYes. <think> is a mark", [(False, " \nYes. <think> is a mark")]),
    (THINK, "<thin ice", [(False, "<thin ice")]),
    (THINK, "<think>cut off </thi", [(True, "cut off </thi")]),
    (THINK, "<think>", []),
    (THINK, "  ", [(False, "  ")]),
    (THINK, "<think>a < b </ c</think> d", [(True, "a < b </ c"), (False, "d")]),
    (OPEN, "hm\n</think>\n\nYes", [(True, "hm"), (False, "Yes")]),
    (OPEN, "never ends", [(True, "never ends")]),
    (HARMONY, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
     [(True, "hm"), (False, "Yes")]),
    (HARMONY, "<|channel|>final<|message|>Yes", [(False, "Yes")]),
]  # fmt: skip


@pytest.mark.parametrize(("marks", "text", "expected"), CASES)
def test_reasoning_and_answer(marks: ReasoningFormat, text: str, expected: list[tuple[bool, str]]) -> None:
    assert parsed(marks, text) == expected
    assert parsed(marks, *text) == expected


WORDS = st.sampled_from(
    ["<think>", "</think>", "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final",
     "<|message|>", "<", "</", "think", "|", "a b", " ", "\n\n", "é", "<|", ">"]
)  # fmt: skip


@given(
    st.sampled_from([THINK, OPEN, HARMONY]),
    st.lists(WORDS, max_size=12).map("".join),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_where_the_text_is_cut_changes_nothing(marks: ReasoningFormat, text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [text[a:b] for a, b in pairwise(places)]
    assert parsed(marks, *parts) == parsed(marks, text)


@given(st.text(), st.text(min_size=1))
def test_nothing_else_is_lost(thought: str, answer: str) -> None:
    if "</think>" in thought or answer.lstrip()[:1] in ("", "<"):
        return
    got = dict(parsed(THINK, f"<think>{thought}</think>{answer}"))
    assert got.get(True, "") == thought.strip()
    assert got[False] == answer.lstrip()


@pytest.mark.parametrize(
    ("name", "prompt", "begins", "is_open"),
    [
        ("qwen3", "<|im_start|>assistant\n", "<think>", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<think>", False),
        ("deepseek", "<|Assistant|><think>\n", "<think>", True),
        ("chatml", "<|im_start|>assistant\n", "<think>", False),
        ("gptoss", "<|start|>assistant", "<|channel|>analysis<|message|>", False),
    ],
)
def test_the_marks_of_templates(name: str, prompt: str, begins: str, is_open: bool) -> None:
    found = reasoning_format((TEMPLATES / f"{name}.jinja").read_text(), prompt)
    assert (found.begins[0], found.is_open) == (begins, is_open)


def test_special_tokens_that_are_marks_have_a_text() -> None:
    found = answer_format("[THINK]", "", {"[THINK]": 5, "[/THINK]": 6, "[INST]": 7})
    assert found.token_texts == {5: "[THINK]", 6: "[/THINK]"}
    assert [found.text_of(5, ""), found.text_of(7, ""), found.text_of(8, "x")] == ["[THINK]", "", "x"]


@pytest.mark.parametrize("marks", [THINK, HARMONY, OPEN])
@pytest.mark.parametrize(("thought", "answer"), [("so", ""), ("so", "yes"), ("", "yes")])
def test_an_answer_that_has_begun_goes_on(marks: ReasoningFormat, thought: str, answer: str) -> None:
    pieces, rest = marks.begun(thought, answer)
    expected = [(kind, text) for kind, text in ((True, thought), (False, answer)) if text]
    assert parsed(marks, *(text for text, _ in pieces)) == expected
    assert [text for text, is_literal in pieces if is_literal] == [text for _, text in expected]
    assert parsed(rest, " and more") == [(not answer, "and more" if not answer else " and more")]
