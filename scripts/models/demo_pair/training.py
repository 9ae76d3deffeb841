"""The training loop: Muon and AdamW, a rate that climbs and falls, validation, early stop, checkpoints."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.models.demo_pair.workspace import Stop, StoppedError, replacing

with contextlib.suppress(ImportError):  # --help works without
    import torch

if TYPE_CHECKING:
    from torch import Tensor

WARM_UP_STEPS = 40
VALIDATE_STEPS = 50
WEIGHT_DECAY = 0.1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to train: at most `steps`, less where the validation loss has not fallen for `patience` steps.

    Without `patience` all steps are taken, and the last weights count.
    """

    name: str
    steps: int
    rate: float  # the highest learning rate
    patience: int | None
    seed: int


def learning_rate(plan: Plan, step: int) -> float:
    """Climbs at first, then falls along a cosine to a tenth."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / plan.steps))
    return plan.rate * min(1.0, (step + 1) / WARM_UP_STEPS) * (0.1 + 0.9 * cosine)


def gives_up(losses: Sequence[tuple[int, float]], patience: int | None) -> bool:
    """Whether the best of (step, validation loss) is `patience` steps old; None never gives up."""
    if patience is None:
        return False
    best = min(losses, key=lambda pair: pair[1])[0]
    return losses[-1][0] - best >= patience


def fit(
    plan: Plan,
    weights: dict[str, Tensor],
    loss: Callable[[int], Tensor],
    validate: Callable[[], float],
    checkpoint: Path,
    stop: Stop,
) -> list[tuple[int, float]]:
    """Train `weights` in place, and leave in them those that the plan counts; returns (step, loss) pairs.

    Continues from `checkpoint` where that exists, and keeps it up to date. Raises StoppedError once a requested
    stop has been saved.
    """
    optimizer = Optimizer(weights)
    step, losses, best = 0, [], {name: tensor.detach().clone() for name, tensor in weights.items()}
    if checkpoint.exists():
        had = torch.load(checkpoint)
        step, losses, best = had["step"], had["losses"], had["best"]
        _restore(weights, had["weights"])
        optimizer.load(had["optimizer"])
        print(f"{plan.name}: continues at step {step} of {plan.steps}", flush=True)
    began_s, began = time.monotonic(), step

    def save() -> None:
        with replacing(checkpoint) as part:
            state = {
                "step": step,
                "losses": losses,
                "best": best,
                "weights": {n: t.detach() for n, t in weights.items()},
            }
            torch.save({**state, "optimizer": optimizer.state()}, part)

    while step < plan.steps and not (losses and gives_up(losses, plan.patience)):
        now = loss(step)
        now.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step(learning_rate(plan, step))
        step += 1
        if step % VALIDATE_STEPS == 0 or step == plan.steps:
            with torch.no_grad():
                losses.append((step, validate()))
            if plan.patience is None or losses[-1][1] <= min(value for _, value in losses):
                best = {name: tensor.detach().clone() for name, tensor in weights.items()}
            each_s = (time.monotonic() - began_s) / (step - began)
            line = f"loss {now.item():.3f}, validation {losses[-1][1]:.3f}, {each_s:.2f} s a step"
            print(
                f"{plan.name} {step}/{plan.steps}: {line}, {each_s * (plan.steps - step) / 60:.0f} min left", flush=True
            )
        if stop.save_due():
            save()
            if stop.requested:
                raise StoppedError(f"{plan.name} at step {step} of {plan.steps}")
    save()
    _restore(weights, best)
    return losses


def _restore(weights: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(values[name])


class Optimizer:
    """Muon (Jordan 2024) for the layers' matrices, about twice as quick a learner a step; AdamW for all else.

    torch's own Muon computes in bfloat16, which CPUs without its instructions emulate at a twentieth of the speed.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        outer = ("token_embd.weight", "output.weight")
        self._inner = {name: t for name, t in weights.items() if t.ndim == 2 and name not in outer}
        self._momenta = {name: torch.zeros_like(tensor) for name, tensor in self._inner.items()}
        others = [tensor for name, tensor in weights.items() if name not in self._inner]
        self._adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)

    def step(self, rate: float) -> None:
        """Apply the gradients, and clear them."""
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()
        self._adam.zero_grad()
        with torch.no_grad():
            for name, tensor in self._inner.items():
                momentum = self._momenta[name].mul_(0.95).add_(tensor.grad)
                change = orthogonalized(tensor.grad + 0.95 * momentum)
                # the size of AdamW's steps, so that one rate does for both (Moonlight, arXiv:2502.16982)
                tensor.mul_(1 - rate * WEIGHT_DECAY).sub_(change, alpha=0.2 * rate * math.sqrt(max(tensor.shape)))
                tensor.grad = None

    def state(self) -> dict[str, Any]:
        """What `load` needs to continue."""
        return {"adam": self._adam.state_dict(), "momenta": self._momenta}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from another one's state."""
        self._adam.load_state_dict(state["adam"])
        self._momenta = state["momenta"]


def orthogonalized(x: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, roughly: Newton-Schulz iterations as in Muon."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[0] > x.shape[1]
    y = x.T if tall else x
    y = y / (y.norm() + 1e-7)
    for _ in range(5):
        square = y @ y.T
        y = torch.addmm(y, torch.addmm(square, square, square, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y
