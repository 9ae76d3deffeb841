"""Weights that copy: a pair of attention heads to begin with, which training keeps and refines.

They find what followed the last token when it occurred before, and are known as induction heads (Olsson et al.,
arXiv:2209.11895). Large models learn them in their first billions of tokens. A small one that sees a few tales learns
them very late: after 700 steps of 4,096 tokens, a tenth of which only copying predicts, it copied eight tokens and no
more. So it starts with them.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from scripts.models.demo_pair.llama import Model, Shape, frequencies

with contextlib.suppress(ImportError):  # --help works without
    import torch

if TYPE_CHECKING:
    from torch import Tensor

CODE = 32  # numbers of an embedding by which the heads know a token
CONSTANTS = 8  # numbers that all embeddings share, for a head that looks at positions alone
SPREAD = 0.1  # of embeddings: five times as wide as usual, since random layers would drown the codes
CONSTANT = 4 * SPREAD
NEAREST = 0.05  # radians a token: frequencies that tell the last token from the one before it
# scores of attention: by how much the wanted key leads its neighbours, or unrelated tokens
POSITION_LEAD, MATCH_LEAD = 12.0, 20.0
FOUND, OUTPUT = 3.0, 2.0  # how strongly the token that was found is written, and read by the output layer
FOUND_IN_HEAD = 6.0  # the deepest of the states that it is added to is wider than embeddings


def install(model: Model) -> None:
    """Make the first head of the first layer, the first head of the third one and the output layer copy.

    The first numbers of the residual stream are CONSTANTS and a token's code. The last ones are zero in embeddings: the
    code of the token that was found, and that of the token before this one.
    """
    shape, weights = model.shape, model.weights
    code = slice(CONSTANTS, CONSTANTS + CODE)
    before, found = slice(shape.width - CODE, shape.width), slice(shape.width - 2 * CODE, shape.width - CODE)
    free = shape.width - CONSTANTS - 2 * CODE
    size = math.sqrt((CONSTANTS * CONSTANT**2 + free * SPREAD**2) / shape.width)  # what the norms divide by
    with torch.no_grad():
        embeddings = weights["token_embd.weight"]
        embeddings *= SPREAD / embeddings.std()
        embeddings[:, :CONSTANTS] = CONSTANT
        embeddings[:, before] = embeddings[:, found] = 0
        _look_back(shape, _Head(shape, weights, 0), CONSTANT / size)
        _Head(shape, weights, 0).carry(code, before, size)
        scale = math.sqrt(MATCH_LEAD * math.sqrt(shape.head_width) / CODE) * size / SPREAD
        _Head(shape, weights, 2).match(code, before, scale)
        _Head(shape, weights, 2).carry(code, found, FOUND * size)
        weights["output.weight"][:, found] = OUTPUT * embeddings[:, code]


def install_in_head(shape: Shape, weights: dict[str, Tensor], embeddings: Tensor) -> None:
    """Make the first head of an EAGLE-3 head copy, for a target that began with `install` and has these embeddings.

    Its keys have a token's embedding and the target's states of the token before that one: so it looks for its last
    token in the states, and writes the token embedded there where the target's output layer reads what was found.
    """
    code = slice(CONSTANTS, CONSTANTS + CODE)
    in_state = slice(shape.width + CONSTANTS, shape.width + CONSTANTS + CODE)
    found = slice(shape.width - 2 * CODE, shape.width - CODE)
    size = float(embeddings.pow(2).mean().sqrt())
    with torch.no_grad():
        merged = weights["fc.weight"]
        merged[code] = 0
        merged[code, code] = torch.eye(CODE)  # of the first of the states, which has the code at its purest
        head = _Head(shape, weights, 0)
        # a state is about twice as wide as an embedding
        head.match(code, in_state, math.sqrt(2 * MATCH_LEAD * math.sqrt(shape.head_width) / CODE))
        head.carry(code, found, FOUND_IN_HEAD * size)


class _Head:
    """The first head of a layer: views of its weights. Each method clears those that it sets."""

    def __init__(self, shape: Shape, named: dict[str, Tensor], layer: int) -> None:
        width = shape.head_width
        names = ("attn_q", "attn_k", "attn_v")
        self.query, self.key, self.value = (named[f"blk.{layer}.{name}.weight"][:width] for name in names)
        self.output = named[f"blk.{layer}.attn_output.weight"][:, :width]

    def match(self, query: slice, key: slice, scale: float) -> None:
        """Compare numbers of two tokens by the lowest frequencies, whatever lies between them."""
        self.query.zero_()[-CODE:, query] = scale * torch.eye(CODE)
        self.key.zero_()[-CODE:, key] = scale * torch.eye(CODE)

    def carry(self, read: slice, write: slice, scale: float) -> None:
        """Copy numbers of the token that is attended to."""
        self.value.zero_()[:CODE, read] = torch.eye(CODE)
        self.output.zero_()[write, :CODE] = scale * torch.eye(CODE)


def _look_back(shape: Shape, head: _Head, constant: float) -> None:
    """Attend to the token before this one: a query that is turned back by one position fits its key best."""
    angles = frequencies(shape)
    near = torch.where(angles > NEAREST, 1.0, 0.0)
    lead = (near * (1 - angles.cos())).sum()
    scale = torch.sqrt(POSITION_LEAD * math.sqrt(shape.head_width) / lead) / (CONSTANTS * constant)

    def fill(weights: Tensor, real: Tensor, imaginary: Tensor) -> None:
        pairs = torch.stack((real, imaginary), -1).flatten()
        weights.zero_()[:, :CONSTANTS] = scale * pairs[:, None]

    fill(head.query, near * angles.cos(), -near * angles.sin())
    fill(head.key, near, torch.zeros_like(near))
