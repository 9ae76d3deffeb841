"""The tokenizer, byte-level BPE that cuts words as GPT-2 does (llama.cpp's "gpt-2"), and batches of tokens."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from scripts.models.demo_pair.corpus import BOUNDARY, TURN, TURN_END, Tale, Tasks
from scripts.models.demo_pair.workspace import InputError

with contextlib.suppress(ImportError):  # the tests of what needs neither, and --help, work without
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_TOKENS = 2048  # at most; a very small text yields fewer
SPECIAL = (BOUNDARY, TURN, TURN_END)

Encode = Callable[[str], list[int]]


def train_tokenizer(tales: Sequence[Tale]) -> Tokenizer:
    """Learn the vocabulary from the tales."""
    tokenizer = _empty(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes: any text can be tokenized
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_TOKENS, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([tale.text for tale in tales], trainer)
    return tokenizer


def rebuild_tokenizer(tokens: Sequence[str], merges: Sequence[str], special: Sequence[str]) -> Tokenizer:
    """The tokenizer that a GGUF file describes."""
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = _empty(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def _empty(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def stream_of(encode: Encode, tales: Sequence[Tale], window: int) -> NDArray[np.int64]:
    """All tales as one stream of tokens, boundaries between. Raises InputError where it is shorter than a window."""
    stream = [0]
    for tale in tales:
        stream += [*encode(tale.text), 0]
    if len(stream) <= window:
        raise InputError(
            f"{len(tales)} tales are {len(stream)} tokens; more than {window} are needed, or a smaller --window"
        )
    return np.array(stream, np.int64)


def even_windows(stream: NDArray[np.int64], window: int, most: int) -> NDArray[np.int64]:
    """Up to `most` windows of window + 1 tokens, evenly spaced over the stream: (windows, window + 1)."""
    last = len(stream) - window - 1
    starts = np.unique(np.linspace(0, last, min(most, last // 64 + 1)).astype(int))
    return np.stack([stream[start : start + window + 1] for start in starts])


class Batches:
    """Windows of window + 1 tokens for each step, the same for a step however often it is asked for.

    `mixture` gives the windows a batch takes of each kind: "text" from random places of the stream, "tell" and
    "copy" packed examples of Tasks, each of which begins a window or follows another, and "echo" passages of
    unrelated tokens, each twice: nothing but copying predicts the second half, so the model learns to copy early.
    """

    def __init__(
        self, stream: NDArray[np.int64], tasks: Tasks, encode: Encode, window: int, mixture: dict[str, int], seed: int
    ) -> None:
        self._stream, self._tasks, self._encode = stream, tasks, encode
        self._window, self._mixture, self._seed = window, mixture, seed

    def __call__(self, step: int) -> NDArray[np.int64]:
        """The batch of a step: (windows, window + 1)."""
        dice = random.Random(f"{self._seed} {step}")
        rows = [self._draw(dice, kind) for kind, number in self._mixture.items() for _ in range(number)]
        return np.array(rows, np.int64)

    def _draw(self, dice: random.Random, kind: str) -> list[int]:
        length = self._window + 1
        if kind == "text":
            start = dice.randrange(len(self._stream) - length + 1)
            return [int(token) for token in self._stream[start : start + length]]
        row: list[int] = []
        while len(row) < length and kind == "echo":
            passage = [int(dice.choice(self._stream)) for _ in range(int(8 * (self._window / 16) ** dice.random()))]
            row += 2 * passage
        while len(row) < length:
            row += self._encode("".join(self._tasks.draw(dice, kind)))
        return row[:length]
