"""The random numbers that select tokens."""

from __future__ import annotations

import array

_WORDS = 624
"""Of the state of `std::mt19937`."""


class RandomNumbers:
    """The numbers from 0 to 1 that libllama draws with a seed, in order: two values of `std::mt19937` each."""

    def __init__(self, seed: int) -> None:
        self._state = [seed]
        self._known = array.array("d")

    def __getitem__(self, place: int) -> float:
        while len(self._known) <= place:
            words = self._next_words()
            self._known.extend((high * 2.0**32 + low) / 2.0**64 for low, high in zip(*[iter(words)] * 2, strict=True))
        return self._known[place]

    def _next_words(self) -> list[int]:
        state = self._state
        for i in range(len(state), _WORDS):  # at first, there is only the seed
            last = state[-1]
            state.append((1812433253 * (last ^ (last >> 30)) + i) & 0xFFFFFFFF)
        for i in range(_WORDS):
            mixed = (state[i] & 0x80000000) | (state[(i + 1) % _WORDS] & 0x7FFFFFFF)
            state[i] = state[(i + 397) % _WORDS] ^ (mixed >> 1) ^ (0x9908B0DF if mixed & 1 else 0)
        return [_tempered(word) for word in state]


def _tempered(word: int) -> int:
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    return word ^ (word >> 18)
