"""What comes of a model's answer, bit by bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A part of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool. Its arguments follow."""

    index: int
    """Of the answer's calls, from 0 on."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of the arguments of the call that was begun last, in JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """All arguments have come, unless the text was cut off in them."""

    index: int


AnswerEvent = Text | Reasoning | CallBegun | Arguments | CallEnded


def joined(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """Neighbours of a kind as one, and none that is empty."""
    found: list[AnswerEvent] = []
    for event in events:
        last = found[-1] if found else None
        match last, event:
            case _, Text("") | Reasoning("") | Arguments(_, ""):
                continue
            case Text(before), Text(text):
                found[-1] = Text(before + text)
            case Reasoning(before), Reasoning(text):
                found[-1] = Reasoning(before + text)
            case Arguments(index, before), Arguments(_, text):
                found[-1] = Arguments(index, before + text)
            case _:
                found.append(event)
    return found
