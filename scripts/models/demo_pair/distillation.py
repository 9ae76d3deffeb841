"""Drafts: small models that learn what the target would write next; a second one learns what the first gets wrong."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scripts.models.demo_pair.llama import Model, logits
from scripts.models.demo_pair.outputs import Lessons

with contextlib.suppress(ImportError):  # --help works without
    import torch

if TYPE_CHECKING:
    from torch import Tensor

BATCH_TOKENS = 4096
HIT_WEIGHT = 0.15  # of tokens that the first draft gets right, where the second one learns; misses weigh 1
HARD_SHARE = 0.3  # of the loss: the target's best token; the rest is its distribution


@dataclass(frozen=True)
class Set:
    """Lessons, and how much each token of theirs weighs: (n, window)."""

    lessons: Lessons
    weights: NDArray[np.float32]

    @classmethod
    def even(cls, lessons: Lessons) -> Set:
        """All tokens weigh the same."""
        return cls(lessons, np.ones(lessons.windows.shape, np.float32))

    @classmethod
    def boosted(cls, lessons: Lessons, first: Model) -> Set:
        """Tokens that `first` gets right weigh less, as in SpecInfer's boost-tuning, which leaves them out."""
        weights = np.where(hits(first, lessons), HIT_WEIGHT, 1.0)
        return cls(lessons, weights.astype(np.float32))


def hits(draft: Model, lessons: Lessons) -> NDArray[np.bool_]:
    """Where the draft's best token is the target's: (n, window)."""
    found = []
    with torch.no_grad():
        for start in range(0, len(lessons.windows), 16):
            tokens = torch.from_numpy(lessons.windows[start : start + 16].astype(np.int64))
            found.append(logits(draft, tokens).argmax(-1).numpy() == lessons.candidates[start : start + 16, :, 0])
    return np.concatenate(found)


def distillation_loss(draft: Model, lessons: Lessons, weights: NDArray[np.float32]) -> Tensor:
    """Weighted mean of `token_losses` after each token of the lessons."""
    scores = logits(draft, torch.from_numpy(lessons.windows.astype(np.int64)))
    each = token_losses(scores, *targets_of(lessons))
    scale = torch.from_numpy(weights)
    return (each * scale).sum() / scale.sum()


def token_losses(scores: Tensor, candidates: Tensor, wanted: Tensor) -> Tensor:
    """For each token, the cross-entropy of its logits with the target's candidates, (…, CANDIDATES), and best one."""
    proposed = scores.log_softmax(-1).gather(-1, candidates)
    return HARD_SHARE * -proposed[..., 0] - (1 - HARD_SHARE) * (wanted * proposed).sum(-1)


def targets_of(lessons: Lessons) -> tuple[Tensor, Tensor]:
    """Ids and probabilities of the target's candidates: (n, window, CANDIDATES)."""
    ids = torch.from_numpy(lessons.candidates.astype(np.int64))
    return ids, torch.from_numpy(lessons.scores.astype(np.float32)).exp()


def losses(
    draft: Model, own: Set, text: Set, held: Set, seed: int
) -> tuple[Callable[[int], Tensor], Callable[[], float]]:
    """A step's loss, on 3/4 the target's own text and 1/4 TEXT, and the validation loss, on `held`."""
    rows = max(4, BATCH_TOKENS // own.lessons.windows.shape[1])

    def loss(step: int) -> Tensor:
        dice = random.Random(f"draft {seed} {step}")
        picks = [(own, rows - rows // 4), (text, rows // 4)]
        parts = [_pick(part, [dice.randrange(len(part.weights)) for _ in range(number)]) for part, number in picks]
        return distillation_loss(
            draft, Lessons.join([part.lessons for part in parts]), np.concatenate([part.weights for part in parts])
        )

    def validate() -> float:
        return float(distillation_loss(draft, held.lessons, held.weights))

    return loss, validate


def second_draft(first: Model) -> Model:
    """A model of one layer more that begins as the first draft: the added layer's outputs are zero."""
    model = Model.new(replace(first.shape, layers=first.shape.layers + 1))
    with torch.no_grad():
        for name, tensor in model.weights.items():
            if name in first.weights:
                tensor.copy_(first.weights[name])
            elif name.endswith(("attn_output.weight", "ffn_down.weight")):
                tensor.zero_()
    return model


def _pick(part: Set, rows: list[int]) -> Set:
    return Set(part.lessons.rows(rows), part.weights[rows])
