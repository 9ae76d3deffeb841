"""Conversations that grow, are taken back, and are kept in files."""

from __future__ import annotations

import pytest

from ggpipe.errors import UsageError
from ggpipe.text.chat.transcript import Transcript


def talk() -> Transcript:
    own = Transcript("Be brief.")
    own.ask("One?")
    own.answered("Yes.", "hm")
    own.ask("Two?")
    own.answered("No.")
    return own


def test_a_conversation_is_taken_back() -> None:
    own = talk()
    own.take_back_answer()
    assert [message["content"] for message in own.messages] == ["Be brief.", "One?", "Yes.", "Two?"]
    own.take_back_question()
    assert (own.question, own.n_questions) == ("One?", 1)
    assert own.messages[-1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    own.clear()
    assert (own.messages, own.question) == ([{"role": "system", "content": "Be brief."}], None)
    own.take_back_answer()
    own.system = None
    assert (own.messages, own.system) == ([], None)


def test_a_file_has_all_of_it() -> None:
    own, other = talk(), Transcript("other")
    other.load_json(own.to_json())
    assert other.messages == own.messages
    other.load_json('[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]')
    assert (other.question, other.system) == ("ab", None)


def test_half_a_character_is_kept() -> None:
    own, other = Transcript(), Transcript()
    own.load_json(r'[{"role": "user", "content": "\ud83d é"}]')
    other.load_json(own.to_json().encode().decode())
    assert other.messages == own.messages


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is not JSON"),
        ("[" * 100000, "it is not JSON"),
        ("3", "it has no list of messages"),
        ('{"messages": 3}', "it has no list of messages"),
        ("[3]", "message 1 must be an object whose role is one of system"),
        ('[{"role": "user", "content": "a"}, {"role": "king", "content": "a"}]', "message 2 must be an object"),
        ('[{"role": "user"}]', "message 1 must have a text"),
        ('[{"role": "user", "content": [3]}]', "message 1 must have a text"),
    ],
)
def test_files_that_hold_none(text: str, why: str) -> None:
    own = talk()
    before = list(own.messages)
    with pytest.raises(UsageError, match=why):
        own.load_json(text)
    assert own.messages == before
