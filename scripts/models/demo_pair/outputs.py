"""What a target writes of its own, and what it thinks of each next token: the data that drafts and heads learn from."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scripts.models.demo_pair.corpus import Tasks
from scripts.models.demo_pair.llama import Cache, Model, logits
from scripts.models.demo_pair.tokens import Encode, even_windows
from scripts.models.demo_pair.workspace import Stop, StoppedError, Workspace, replacing

with contextlib.suppress(ImportError):  # --help works without
    import torch

if TYPE_CHECKING:
    from torch import Tensor

CANDIDATES = 32  # of the target's next tokens that are kept for distillation
ROUND_WINDOWS = 64  # computed at a time, and saved
TEMPERATURES = (0.0, 0.0, 0.6, 0.9)
TOP_K = 40
ENDS = (0, 2)  # the boundary, and the end of a turn

Prompt = Callable[[random.Random], list[int]]


@dataclass(frozen=True)
class Lessons:
    """Windows of tokens, and the target's best candidates for what follows each of their tokens.

    `windows` (n, window), `candidates` and `scores` (n, window, CANDIDATES): token ids, best first, and their
    log-probabilities at temperature 1.
    """

    windows: NDArray[np.int16]
    candidates: NDArray[np.int16]
    scores: NDArray[np.float16]

    @classmethod
    def join(cls, parts: Sequence[Lessons]) -> Lessons:
        """All of them in one."""
        return cls(
            np.concatenate([part.windows for part in parts]),
            np.concatenate([part.candidates for part in parts]),
            np.concatenate([part.scores for part in parts]),
        )

    def rows(self, rows: Sequence[int]) -> Lessons:
        """Some of the windows, and what goes with them."""
        picked = list(rows)
        return Lessons(self.windows[picked], self.candidates[picked], self.scores[picked])


def prompts_for(stream: NDArray[np.int64], tasks: Tasks | None, encode: Encode) -> Prompt:
    """Beginnings to write from: a few tokens of the text, or (one time in three, with tasks) a request."""

    def draw(dice: random.Random) -> list[int]:
        if tasks is not None and dice.random() < 1 / 3:
            return encode(tasks.draw(dice, dice.choice(("tell", "copy")))[0])
        length = dice.choice((4, 8, 16, 24))
        start = dice.randrange(len(stream) - length)
        return [0, *(int(token) for token in stream[start : start + length])]

    return draw


def write_windows(target: Model, draw: Prompt, window: int, rows: int, seed: int) -> NDArray[np.int16]:
    """Text that the target writes, greedily and sampled: (rows, window). All rows advance by one token at a time.

    A row begins with a prompt, whose tokens are fed as they are; where the target ends its text, another prompt
    follows in the same row.
    """
    dice = random.Random(f"own {seed}")
    noise = torch.Generator().manual_seed(seed)
    cache = Cache(target.shape, rows, window)
    windows = np.zeros((rows, window), np.int16)
    waiting = [draw(dice) for _ in range(rows)]  # what each row is still to be fed
    heat = torch.tensor([dice.choice(TEMPERATURES) for _ in range(rows)])
    chosen: list[int] = [0] * rows
    for position in range(window):
        for row in range(rows):
            if not waiting[row] and position and int(windows[row, position - 1]) in ENDS:
                waiting[row], heat[row] = draw(dice), dice.choice(TEMPERATURES)
            windows[row, position] = waiting[row].pop(0) if waiting[row] else chosen[row]
        fed = torch.from_numpy(windows[:, position].astype(np.int64))
        chosen = choose(logits(target, fed[:, None], cache=cache)[:, 0], heat, noise).tolist()
    return windows


def choose(scores: Tensor, heat: Tensor, noise: torch.Generator) -> Tensor:
    """Sample one token a row of `scores` (rows, vocabulary) at its temperature; 0 is greedy."""
    best, ids = scores.topk(min(TOP_K, scores.shape[1]))
    gumbel = -torch.empty_like(best).exponential_(generator=noise).log()
    noisy = best + heat[:, None] * gumbel
    return ids.gather(1, noisy.argmax(1, keepdim=True))[:, 0]


def teach(target: Model, windows: NDArray[np.int16]) -> Lessons:
    """The target's candidates after each token of the windows."""
    candidates, scores = [], []
    for batch in torch.from_numpy(windows.astype(np.int64)).split(8):
        best, ids = logits(target, batch).log_softmax(-1).topk(CANDIDATES)
        candidates.append(ids.numpy().astype(np.int16))
        scores.append(best.numpy().astype(np.float16))
    return Lessons(windows, np.concatenate(candidates), np.concatenate(scores))


def collect(
    target: Model,
    stream: NDArray[np.int64],
    draw: Prompt,
    window: int,
    samples: int,
    seed: int,
    work: Workspace,
    stop: Stop,
) -> None:
    """Make the lessons and keep them in `work`, a file a round: the target's own text, then a third as much of TEXT.

    Raises StoppedError after a round, so that each start makes at least one.
    """
    own = range(0, samples, ROUND_WINDOWS)
    text = even_windows(stream, window, max(1, samples // 3))[:, :-1].astype(np.int16)
    for start in (*own, *range(samples, samples + len(text), ROUND_WINDOWS)):
        path = _path(work, start, samples)
        if path.exists():
            continue
        with torch.no_grad():
            if start < samples:
                rows = min(ROUND_WINDOWS, samples - start)
                windows = write_windows(target, draw, window, rows, 1000 * seed + start)
            else:
                windows = text[start - samples : start - samples + ROUND_WINDOWS]
            lessons = teach(target, windows)
        with replacing(path) as part, part.open("wb") as file:
            np.savez(file, windows=lessons.windows, candidates=lessons.candidates, scores=lessons.scores)
        print(f"outputs: {start + len(windows)} of {samples + len(text)} windows", flush=True)
        if stop.requested:
            raise StoppedError(f"outputs after {start + len(windows)} of {samples + len(text)} windows")


def load(work: Workspace) -> tuple[Lessons, Lessons, Lessons]:
    """What `collect` made: the target's own text, that of TEXT, and a round of its own that was held back."""
    own = [_read(path) for path in sorted(work.folder.glob("outputs-own-*.npz"))]
    text = [_read(path) for path in sorted(work.folder.glob("outputs-text-*.npz"))]
    return Lessons.join(own[1:] or own), Lessons.join(text), own[0]


def _path(work: Workspace, start: int, samples: int) -> Path:
    kind = "own" if start < samples else "text"
    return work.path(f"outputs-{kind}-{start:06d}.npz")


def _read(path: Path) -> Lessons:
    with np.load(path) as arrays:
        return Lessons(arrays["windows"], arrays["candidates"], arrays["scores"])
