"""What a model thinks before it answers, told apart from the answer while both are written.

Models put marks around it, `<think>` and `</think>` mostly. A template may write the first mark itself. The families of
marks are those that llama.cpp knows.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How a model marks its reasoning."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    answers: tuple[str, ...] = ()
    """What may stand in front of the answer, and is no part of it."""
    is_open: bool = False
    """The prompt ends inside the reasoning: its template wrote the first mark."""
    is_usual: bool = False
    """The template knows the marks, and the prompt does not end behind the reasoning."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        return (*self.begins, *self.ends, *self.answers)

    def begun(self, reasoning: str, text: str) -> tuple[list[tuple[str, bool]], ReasoningFormat]:
        """An answer to be gone on with: its pieces as the model would have written them, as `ChatTemplate.pieces`, and
        how the rest of it is marked."""
        pieces = [] if self.is_open or not reasoning else [(self.begins[0] + "\n", False)]
        if reasoning:
            pieces.append((reasoning, True))
        has_reasoning = self.is_open or bool(reasoning)
        if not text:
            return pieces, replace(self, is_open=has_reasoning)
        mark = "".join(self.answers[1:2] or self.answers[:1]) if has_reasoning else "".join(self.answers[:1])
        before = ("\n" + self.ends[0] + (mark or "\n\n")) if has_reasoning else mark
        pieces += [(before, False), (text, True)] if before else [(text, True)]
        return pieces, replace(self, is_open=False, begins=(), answers=())


_THINK = ReasoningFormat(begins=("<think>",), ends=("</think>",))
_FAMILIES = (
    ReasoningFormat(begins=("[THINK]",), ends=("[/THINK]",)),
    ReasoningFormat(begins=("<seed:think>",), ends=("</seed:think>",)),
    ReasoningFormat(begins=("<mm:think>",), ends=("</mm:think>",)),
    ReasoningFormat(begins=("<|START_THINKING|>",), ends=("<|END_THINKING|>",), answers=("<|START_RESPONSE|>",)),
    ReasoningFormat(begins=("<|inner_prefix|>",), ends=("<|inner_suffix|>",)),
    ReasoningFormat(begins=("<|channel>thought",), ends=("<channel|>",)),  # before the one that has <|think|>
    ReasoningFormat(
        begins=("<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>analysis<|message|>"),
        ends=("<|end|>",),
        answers=(
            "<|channel|>final<|message|>", "<|start|>assistant<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>", "<|start|>assistant<|channel|>commentary<|message|>",
        ),
    ),
    ReasoningFormat(
        begins=("<|think|>",), ends=("<|end|>",), answers=("<|content|>", "<|begin|>assistant<|content|>")
    ),
)  # fmt: skip
"""The first one whose mark is in a template is the model's."""


def reasoning_format(template: str, generation_prompt: str) -> ReasoningFormat:
    """The marks that a model was trained with.

    `template`: its source. `generation_prompt`: what it writes behind the last message, for the model to go on. Models
    whose template has no mark may have been trained with `<think>` all the same.
    """
    found = next((family for family in _FAMILIES if family.begins[0] in template), _THINK)
    is_open = generation_prompt.rstrip().endswith(found.begins)
    is_over = any(mark in generation_prompt for mark in found.ends) and not is_open
    return replace(found, is_open=is_open, is_usual=found.begins[0] in template and not is_over)


class Piece(NamedTuple):
    """A part of what a model writes."""

    text: str
    is_reasoning: bool


class _At(enum.Enum):
    """Where the text is."""

    GAP = "in front of reasoning or of the answer"
    REASONING = "in the reasoning"
    ANSWER = "in the answer"


class ReasoningParser:
    """Takes what a model writes bit by bit, wherever it is cut. The marks, and blanks around the reasoning, are left
    out."""

    def __init__(self, marks: ReasoningFormat) -> None:
        self._marks = marks
        self._at = _At.REASONING if marks.is_open else _At.GAP
        self._held = ""
        """Text that may be the beginning of a mark, or the blanks before one."""
        self._has_marks = marks.is_open
        """There was a mark."""
        self._is_first = True
        """Nothing of this reasoning has come yet."""

    def feed(self, text: str) -> list[Piece]:
        """What is known now of all text so far and was not returned before."""
        return self._parse(text, is_end=False)

    def finish(self) -> list[Piece]:
        """The rest; nothing follows."""
        return self._parse("", is_end=True)

    def _parse(self, text: str, is_end: bool) -> list[Piece]:
        self._held += text
        pieces, before = [], None
        while self._at is not before:
            before = self._at
            match self._at:
                case _At.GAP:
                    self._gap(is_end)
                case _At.REASONING:
                    pieces.append(Piece(self._reasoning(is_end), True))
                case _At.ANSWER:
                    pieces.append(Piece(self._held, False))
                    self._held = ""
        return [piece for piece in pieces if piece.text]

    def _gap(self, is_end: bool) -> None:
        text, marks = self._held.lstrip(), (*self._marks.begins, *self._marks.answers)
        mark = next((mark for mark in marks if text.startswith(mark)), None)
        if mark is not None:
            self._held, self._has_marks, self._is_first = text[len(mark) :].lstrip(), True, True
            self._at = _At.REASONING if mark in self._marks.begins else _At.ANSWER
        elif is_end or not any(mark.startswith(text) for mark in marks):
            if self._has_marks:
                self._held = text
            self._at = _At.ANSWER

    def _reasoning(self, is_end: bool) -> str:
        text = self._held.lstrip() if self._is_first else self._held
        found = [(text.find(mark), mark) for mark in self._marks.ends if mark in text]
        if found:
            at, mark = min(found)
            self._held, self._at = text[at + len(mark) :], _At.GAP
            return text[:at].rstrip()
        n_mark = 0 if is_end else max((begun(mark, text) for mark in self._marks.ends), default=0)
        known = text[: len(text) - n_mark].rstrip()
        self._held = "" if is_end else text[len(known) :]
        self._is_first = self._is_first and not known
        return known


def begun(mark: str, text: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
