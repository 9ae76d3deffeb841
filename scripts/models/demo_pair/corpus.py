"""From a text to what a model is trained on: tales, requests for tales, and passages to repeat or to edit.

Nothing here needs torch. A tale is one line of the text, without a title. All draws come from the caller's
random.Random, so that a step's batch is the same in a run that was interrupted.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.models.demo_pair.workspace import InputError

BOUNDARY = "<|endoftext|>"  # token 0: begins and ends every document
TURN, TURN_END = "<|im_start|>", "<|im_end|>"  # tokens 1 and 2, ChatML's
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REPLY_CHARACTERS = 1400  # of a tale in a reply: about 380 tokens, a window of 512 holds it
PASSAGE_CHARACTERS = (60, 760)  # to repeat or to edit: it is in the window twice


def _words(text: str) -> list[str]:
    return text.split()


_TELL = ("Tell me a tale of {}.", "Tell me a tale about {}.", "Please tell me a tale of {}.", "Tell me a story of {}.")
_TELL_ANY = ("Tell me a tale.", "Tell me a fairy tale.", "Please tell me a story.")
_REPEAT = ("Repeat this tale: ", "Repeat this text: ", "Repeat this: ", "Say this again, word for word: ")
_EDIT = ("Replace the {} by {} in this text: ", "Replace the {} by {} in this tale: ")
_SYSTEM = ("You tell tales.", "You are a friendly assistant. You keep to what you are asked.")
# to replace in passages
_NOUNS = _words(
    """king queen prince princess wolf fox bear lion cat dog bird horse goose hen raven mouse fish frog donkey goat stag
    hare tailor miller shoemaker soldier hunter huntsman peasant merchant smith shepherd fisherman innkeeper giant
    dwarf witch wizard devil robber thief beggar servant maiden girl boy brother sister father mother son daughter
    castle palace house forest mountain garden tree flower apple ring sword crown"""
)
_SENTENCE_END = re.compile(r"""(?<=[.!?])["']?\s+(?:-\s+)?(?=["'A-Z])""")
_PHRASE = re.compile(
    r"\b(?:[Aa]n?|two|three|four|seven|twelve) (?:(?!(?:in|of|to|and|on|at|was|who) )[a-z]+ ){0,3}?[A-Za-z]+"
    r"(?=,|\.| (?:once|who|whose|that|which|named|called|had|has|was|were|lived)\b)"
)
_TIMES = re.compile(r"\b(?:(?:up)?on a time|at a time|in a time|a long time|a time)\b")
_THE_NOUN = re.compile(
    r"\bthe ([a-z]{3,})(?=[,.;:!?]| (?:and|as|at|came|had|in|is|of|on|said|so|that|to|was|went|who)\b)"
)
_NO_SUBJECTS = frozenset(
    _words(
        """same other others one two three four first second third last next whole old young little great good poor rich
        best most very world time way day night morning evening end midst door hand hands eyes head more rest middle
        ground table window road"""
    )
)


@dataclass(frozen=True)
class Tale:
    """A tale, its sentences, and what it is about, most telling first; `subjects` may be empty."""

    text: str
    sentences: tuple[str, ...]
    subjects: tuple[str, ...]


def split_sentences(text: str) -> list[str]:
    """The sentences of a text; joined by spaces they give it back, but for spaces and dashes between speeches."""
    sentences, begin = [], 0
    for match in _SENTENCE_END.finditer(text):
        quote = 1 if match.group()[0] in "\"'" else 0
        sentences.append(text[begin : match.start() + quote])
        begin = match.start() + quote
    sentences.append(text[begin:])
    return [sentence.strip() for sentence in sentences if sentence.strip()]


def find_subjects(text: str) -> list[str]:
    """What a tale is about: the first "a ..." of its first sentence, and the nouns it names most."""
    opening = _TIMES.sub("", split_sentences(text)[0])
    phrase = _PHRASE.search(opening)
    found = [phrase.group()[0].lower() + phrase.group()[1:]] if phrase else []
    nouns = Counter(noun for noun in _THE_NOUN.findall(text) if noun not in _NO_SUBJECTS)
    return found + [f"the {noun}" for noun, times in nouns.most_common(3) if times >= 3]


def read_tales(path: Path) -> list[Tale]:
    """The tales of a text, one a line. Raises UnicodeError, OSError, and InputError for an empty text."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    tales = [Tale(line, tuple(split_sentences(line)), tuple(find_subjects(line))) for line in lines if line]
    if not tales:
        raise InputError(f"{path} is empty")
    return tales


def keep_back(tales: Sequence[Tale], share: int = 20) -> tuple[list[Tale], list[Tale]]:
    """Tales to train on, and the last ones, at least one character in `share`, to validate with."""
    if len(tales) < 2:
        raise InputError(f"the text has {len(tales)} documents; at least 2 are needed, one a line")
    kept, wanted = 1, sum(len(tale.text) for tale in tales) // share
    while kept < len(tales) - 1 and sum(len(tale.text) for tale in tales[-kept:]) < wanted:
        kept += 1
    return list(tales[:-kept]), list(tales[-kept:])


def request(content: str, system: str = "") -> str:
    """A user's message in ChatML, up to where the assistant's reply begins."""
    head = f"{TURN}system\n{system}{TURN_END}\n" if system else ""
    return f"{BOUNDARY}{head}{TURN}user\n{content}{TURN_END}\n{TURN}assistant\n"


class Tasks:
    """Requests and their replies, made of tales, as many as are drawn.

    Each draw is (prompt, reply): the prompt begins with BOUNDARY and ends where the reply begins, which ends with
    TURN_END and a new line.
    """

    def __init__(self, tales: Sequence[Tale]) -> None:
        self._tales = list(tales)

    def tell(self, dice: random.Random) -> tuple[str, str]:
        """A tale that is asked for: a short one whole, of a long one the beginning and the end."""
        tale = dice.choice(self._tales)
        if tale.subjects and dice.random() < 0.85:
            wanted = dice.choice(_TELL).format(_joined(dice, tale.subjects))
        else:
            wanted = dice.choice(_TELL_ANY)
        return request(wanted, _system(dice)), f"{_shortened(dice, tale)}{TURN_END}\n"

    def repeat(self, dice: random.Random) -> tuple[str, str]:
        """A passage that comes back as it was."""
        passage = self._passage(dice)
        return request(dice.choice(_REPEAT) + passage, _system(dice)), f"{passage}{TURN_END}\n"

    def edit(self, dice: random.Random) -> tuple[str, str]:
        """A passage that comes back with one noun replaced; where it has none of the nouns, one to repeat."""
        passage = self._passage(dice)
        words = set(re.findall(r"[a-z]+", passage.lower()))
        old = [noun for noun in _NOUNS if noun in words]
        if not old:
            return request(dice.choice(_REPEAT) + passage, _system(dice)), f"{passage}{TURN_END}\n"
        noun = dice.choice(old)
        new = dice.choice([n for n in _NOUNS if n != noun and _article(n) == _article(noun)])
        wanted = dice.choice(_EDIT).format(noun, f"{_article(new)} {new}")
        return request(wanted + passage, _system(dice)), f"{replace_noun(passage, noun, new)}{TURN_END}\n"

    def draw(self, dice: random.Random, kind: str) -> tuple[str, str]:
        """One example of a kind: "tell", or "copy", which is to repeat or to edit."""
        if kind == "tell":
            return self.tell(dice)
        return self.repeat(dice) if dice.random() < 1 / 2 else self.edit(dice)

    def _passage(self, dice: random.Random) -> str:
        """Sentences of one tale in order, or (harder to know by heart) of several tales, or words in any order."""
        least, most = PASSAGE_CHARACTERS
        length = int(least * (most / least) ** dice.random())  # as many short ones as long ones
        kind = dice.random()
        if kind < 0.4:
            sentences = dice.choice(self._tales).sentences
            begin = dice.randrange(len(sentences))
            chosen = list(sentences[begin:])
        else:
            tales = [dice.choice(self._tales) for _ in range(12)]
            chosen = [dice.choice(tale.sentences) for tale in tales]
        passage = _take(chosen, length)
        if kind > 0.75:
            words = passage.split()
            dice.shuffle(words)
            passage = " ".join(words)
        return passage


def replace_noun(text: str, old: str, new: str) -> str:
    """The text with each whole word `old` replaced, capitalized where the old one was."""

    def swap(match: re.Match[str]) -> str:
        return new.capitalize() if match.group()[0].isupper() else new

    return re.sub(rf"\b{old}\b", swap, text, flags=re.IGNORECASE)


def _take(sentences: Sequence[str], characters: int) -> str:
    """Sentences from the first on, within `characters`; a first one that is too long is cut between words."""
    taken = sentences[0]
    if len(taken) > characters:
        return taken[:characters].rsplit(" ", 1)[0]
    for sentence in sentences[1:]:
        if len(taken) + 1 + len(sentence) > characters:
            break
        taken += f" {sentence}"
    return taken


def _shortened(dice: random.Random, tale: Tale) -> str:
    if len(tale.text) <= REPLY_CHARACTERS:
        return tale.text
    ending = tale.sentences[-1]
    for sentence in reversed(tale.sentences[:-1]):
        if len(ending) + len(sentence) > REPLY_CHARACTERS // 4:
            break
        ending = f"{sentence} {ending}"
    ending = ending[-REPLY_CHARACTERS // 2 :]
    opening = _take(tale.sentences, dice.randrange(REPLY_CHARACTERS // 3, REPLY_CHARACTERS - len(ending)))
    return f"{opening} {ending}"


def _joined(dice: random.Random, subjects: Sequence[str]) -> str:
    return " and ".join(subjects[1:3]) if len(subjects) > 2 and dice.random() < 0.3 else dice.choice(subjects)


def _system(dice: random.Random) -> str:
    return dice.choice(_SYSTEM) if dice.random() < 0.15 else ""


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"
