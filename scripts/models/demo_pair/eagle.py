"""An EAGLE-3 head: one layer that drafts from the target's own hidden states (Li et al., arXiv:2503.01840).

At position p it reads the embedding of token p + 1 and the target's states of token p (the inputs of three of its
layers, merged), and names token p + 2. It is trained as it is used: the second and third token are named from the
head's own states of the step before (training-time test).
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scripts.models.demo_pair import induction
from scripts.models.demo_pair.distillation import targets_of, token_losses
from scripts.models.demo_pair.llama import NORM_EPSILON, Model, Shape, rotate, rotation, states
from scripts.models.demo_pair.outputs import Lessons

with contextlib.suppress(ImportError):  # --help works without
    import torch
    import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

DEPTHS = 3  # tokens in a row that training names
DEPTH_WEIGHTS = (1.0, 0.8, 0.64)
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Head:
    """A head for a target of the same width: its shape, the target's layers it reads, its parameters by GGUF name."""

    shape: Shape
    taps: tuple[int, ...]
    weights: dict[str, Tensor]

    @classmethod
    def new(cls, target: Model) -> Head:
        """A head that begins with the target's last norm and output layer, with the deepest of the states, and with
        attention that copies."""
        layers, width = target.shape.layers, target.shape.width
        shape = replace(target.shape, layers=1)
        taps = (layers // 4, layers // 2, layers * 3 // 4)
        weights = {"fc.weight": 0.02 * torch.randn(width, len(taps) * width)}
        weights["fc.weight"][:, -width:] += torch.eye(width)
        for name, (outputs, inputs) in shape.matrices().items():
            if name.startswith("blk."):  # attention reads the token's embedding and the state, one after the other
                joined = 2 if name.endswith(("attn_q", "attn_k", "attn_v")) else 1
                weights[f"{name}.weight"] = 0.02 * torch.randn(outputs, joined * inputs)
        for name in ("attn_norm", "attn_norm_2", "ffn_norm"):
            weights[f"blk.0.{name}.weight"] = torch.ones(width)
        for name in ("output_norm.weight", "output.weight"):
            weights[name] = target.weights[name].clone()
        induction.install_in_head(shape, weights, target.weights["token_embd.weight"])
        return cls(shape, taps, {name: tensor.requires_grad_() for name, tensor in weights.items()})

    def drafts(self, target: Model, tokens: Tensor) -> list[Tensor]:
        """Logits of DEPTHS tokens in a row, (batch, n, vocabulary) each, n = tokens.shape[1] - DEPTHS.

        Those of depth k at index p are for what follows token p + 1 + k, from the target's states up to token p and
        the tokens up to p + 1 + k.
        """
        weights, width = self.weights, self.shape.width
        with torch.no_grad():
            tapped = states(target, tokens, taps=self.taps)[1]
        n = tokens.shape[1] - DEPTHS
        state = F.linear(torch.cat(tapped, -1), weights["fc.weight"])[:, :n]
        causal = torch.full((n, n), -torch.inf).triu(1)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []

        def norm(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, (width,), weights[f"{name}.weight"], NORM_EPSILON)

        def linear(x: Tensor, name: str) -> Tensor:
            return F.linear(x, weights[f"{name}.weight"])

        def heads(x: Tensor, name: str) -> Tensor:
            return linear(x, f"blk.0.{name}").unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2)

        for depth in range(DEPTHS):
            embedded = F.embedding(tokens[:, 1 + depth : 1 + depth + n], target.weights["token_embd.weight"])
            x = torch.cat((norm(embedded, "blk.0.attn_norm"), norm(state, "blk.0.attn_norm_2")), -1)
            turn = rotation(self.shape, depth, n)
            query, key, value = rotate(heads(x, "attn_q"), turn), rotate(heads(x, "attn_k"), turn), heads(x, "attn_v")
            group = query.shape[1] // key.shape[1]
            keys.append(key.repeat_interleave(group, 1))
            values.append(value.repeat_interleave(group, 1))
            # what the target has confirmed, and after that the head's own steps, one key each
            near = query @ keys[0].transpose(-1, -2) / math.sqrt(self.shape.head_width) + causal
            own = [(query * key).sum(-1, keepdim=True) / math.sqrt(self.shape.head_width) for key in keys[1:]]
            attention = torch.cat((near, *own), -1).softmax(-1)
            y = attention[..., :n] @ values[0]
            for step, value in enumerate(values[1:]):
                y = y + attention[..., n + step : n + step + 1] * value
            x = linear(y.transpose(1, 2).flatten(-2), "blk.0.attn_output") + state
            y = norm(x, "blk.0.ffn_norm")
            y = F.silu(linear(y, "blk.0.ffn_gate")) * linear(y, "blk.0.ffn_up")
            state = linear(y, "blk.0.ffn_down") + x
            found.append(linear(norm(state, "output_norm"), "output"))
        return found

    def losses(
        self, target: Model, own: Lessons, text: Lessons, held: Lessons, seed: int
    ) -> tuple[Callable[[int], Tensor], Callable[[], float]]:
        """A step's loss, on 3/4 the target's own text and 1/4 TEXT, and the validation loss, on `held`."""
        rows = max(4, BATCH_TOKENS // own.windows.shape[1])

        def mean(lessons: Lessons) -> Tensor:
            drafted = self.drafts(target, torch.from_numpy(lessons.windows.astype("int64")))
            candidates, wanted = targets_of(lessons)
            n = lessons.windows.shape[1] - DEPTHS
            each = []
            for depth, scores in enumerate(drafted):
                there = slice(1 + depth, 1 + depth + n)
                each.append(DEPTH_WEIGHTS[depth] * token_losses(scores, candidates[:, there], wanted[:, there]).mean())
            return torch.stack(each).sum() / sum(DEPTH_WEIGHTS)

        def loss(step: int) -> Tensor:
            dice = random.Random(f"head {seed} {step}")
            drawn = [(own, rows - rows // 4), (text, rows // 4)]
            picks = [(part, [dice.randrange(len(part.windows)) for _ in range(number)]) for part, number in drawn]
            return mean(Lessons.join([part.rows(some) for part, some in picks]))

        def validate() -> float:
            return float(mean(held.rows(range(min(16, len(held.windows))))))

        return loss, validate
