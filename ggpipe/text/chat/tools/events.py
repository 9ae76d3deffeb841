"""The events into which an answer is parsed while the model generates it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model begins to call a tool. The arguments follow."""

    index: int
    """Number of the call in the answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the current call's arguments, in JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call's arguments are complete, unless the output was cut off."""

    index: int


AnswerEvent = Text | Reasoning | CallBegun | Arguments | CallEnded


def joined(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """The events with adjacent ones of the same kind joined, and without empty ones."""
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
