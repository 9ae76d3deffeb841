"""Separates a model's reasoning from its answer while the model generates both.

Models put marks around their reasoning, usually `<think>` and `</think>`. A template may write the first mark itself.
The families of marks are llama.cpp's.
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
    """Marks that may come before the answer, and are not part of it."""
    is_open: bool = False
    """The prompt ends inside the reasoning: its template wrote the first mark."""
    is_usual: bool = False
    """The template contains the marks, and the prompt does not end after the reasoning."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        return (*self.begins, *self.ends, *self.answers)

    def begun(self, reasoning: str, text: str) -> tuple[list[tuple[str, bool]], ReasoningFormat]:
        """The beginning of an answer that the model is to continue: its pieces as the model would have generated them,
        in the format of `ChatTemplate.pieces`; and the marks in the rest of the answer."""
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
"""A model's family is the first one with a mark in the template."""


def reasoning_format(template: str, generation_prompt: str) -> ReasoningFormat:
    """The marks that a model was trained with.

    `template`: source of the chat template. `generation_prompt`: the end of its output, which prompts the model to
    answer. The default is `<think>`, which models may use even if their template does not contain it.
    """
    found = next((family for family in _FAMILIES if family.begins[0] in template), _THINK)
    is_open = generation_prompt.rstrip().endswith(found.begins)
    is_over = any(mark in generation_prompt for mark in found.ends) and not is_open
    return replace(found, is_open=is_open, is_usual=found.begins[0] in template and not is_over)


class Piece(NamedTuple):
    """A piece of the output."""

    text: str
    is_reasoning: bool


class _At(enum.Enum):
    """What the parser has reached."""

    GAP = "the beginning of reasoning or of the answer"
    REASONING = "reasoning"
    ANSWER = "the answer"


class ReasoningParser:
    """Parses output in pieces of any length. Marks, and whitespace around the reasoning, are dropped."""

    def __init__(self, marks: ReasoningFormat) -> None:
        self._marks = marks
        self._at = _At.REASONING if marks.is_open else _At.GAP
        self._held = ""
        """A possible beginning of a mark, or whitespace before one."""
        self._has_marks = marks.is_open
        """A mark has been found."""
        self._is_first = True
        """No text of the current reasoning has been found yet."""

    def feed(self, text: str) -> list[Piece]:
        """Parse more of the output. Returns the pieces that are certain by now."""
        return self._parse(text, is_end=False)

    def finish(self) -> list[Piece]:
        """Return the remaining pieces of an output that has ended."""
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
    """How many characters at the end of `text` may be the beginning of `mark`, excluding a whole mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
