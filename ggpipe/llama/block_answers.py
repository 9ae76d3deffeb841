"""What the kinds of DFlash heads say of a block's positions.

    DFlash       logits of each position, whatever token comes just before it
    DSpark       a Markov head adds a bias for the token just before, the most probable one in libllama's graph; how
                 confident another head is of that one is not used: each drafter's probabilities are calibrated anyway
    DFlash 2     for each position the best candidates, and a score of each after each candidate of the position before

Where the token just before counts, answers say it for all candidates of the position before (`RowLogits.after`), so
that branches of the tree have probabilities of their own. llama.cpp follows one path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ggpipe.core.messages import LogitsRequest, RowLogits
from ggpipe.errors import ModelError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.layer_inputs import LastStates
from ggpipe.llama.params import best_of

_MARKOV, _MARKOV_OUTPUT = "markov_w1.weight", "markov_w2.weight"
_MARKOV_SCALE, _SELECTOR, _DRAFTED = "markov_w2.scale", "selector_hidden.weight", "d2t"
_MOST_BEFORE = 8
"""Candidates of a position after which those of the next one are known, at most."""
_CONSIDERED = 32
"""Candidates of a position whose biases are computed after each of these."""
_LEAST = 1e-30

Floats = NDArray[np.float32]
LogitsOf = Callable[[int], Floats]
"""Logits of a row of the block that was just computed, (n_vocab,)."""


class BlockAnswers(Protocol):
    """Of one kind of head."""

    from_anchor: bool
    """The first row of a block, the last accepted token, drafts as well; else only masks do."""
    outputs: bool
    """A block's rows give logits."""

    def of_block(self, number: int, n_rows: int, logits_of: LogitsOf, request: LogitsRequest) -> list[RowLogits]:
        """Of each position that the block drafts. `number`: of the row that asked for it; `n_rows`: of the block."""
        ...


def answers_of(model_file: ModelFile, context: int, width: int) -> BlockAnswers:
    """Those of a head. `context`: libllama's, of the head; `width`: of its states, in numbers."""
    if is_dspark(model_file):
        return _Markov(model_file, samples_from_anchor(model_file))
    n_candidates = model_file.metadata.get("dflash.selector_top_k")
    if _SELECTOR in model_file.tensors and isinstance(n_candidates, int):
        return _Selector(n_candidates, LastStates(context, of_all_rows=True), width)
    return _Independent()


def is_dspark(model_file: ModelFile) -> bool:
    """Whether a DFlash head has a Markov head."""
    return _MARKOV in model_file.tensors


def samples_from_anchor(model_file: ModelFile) -> bool:
    """Whether a block drafts as many tokens as it has rows, as those of most DSpark heads do."""
    return is_dspark(model_file) and model_file.metadata.get("dflash.sample_from_anchor") is not False


class _Independent:
    from_anchor, outputs = False, True

    def of_block(self, number: int, n_rows: int, logits_of: LogitsOf, request: LogitsRequest) -> list[RowLogits]:
        return [best_of(number, logits_of(i), request) for i in range(1, n_rows)]


class _Markov:
    """libllama's graph adds the biases of the most probable path. Others' are added here."""

    outputs = True

    def __init__(self, model_file: ModelFile, from_anchor: bool) -> None:
        self.from_anchor = from_anchor
        n_tokens = model_file.array_lengths["tokenizer.ggml.tokens"]
        self._row_of, n_drafted = np.arange(n_tokens), n_tokens
        """By token: its row in the Markov head's output, where it is one that the head drafts."""
        if _DRAFTED in model_file.tensors:
            drafted = _numbers(model_file, _DRAFTED, np.int64)
            n_drafted = len(drafted)
            self._row_of = np.zeros(n_tokens, np.int64)
            self._row_of[drafted] = np.arange(n_drafted)
        self._before = _Rows(model_file, _MARKOV, n_tokens)
        self._next = _Rows(model_file, _MARKOV_OUTPUT, n_drafted)
        scaled = _MARKOV_SCALE in model_file.tensors
        self._scale = float(_numbers(model_file, _MARKOV_SCALE, np.float32)[0]) if scaled else 1.0

    def of_block(self, number: int, n_rows: int, logits_of: LogitsOf, request: LogitsRequest) -> list[RowLogits]:
        own = range(0 if self.from_anchor else 1, n_rows)
        wide = structs.replace(request, n=max(request.n, _CONSIDERED), sums=True, also=(), temp=0.0)
        considered = [best_of(number, logits_of(i), wide) for i in own]
        if request.temp or request.also:
            found = [best_of(number, logits_of(i), request) for i in own]
        else:
            found = [_first(row, request.n) for row in considered]
        chosen = [int(logits_of(i).argmax()) for i in own[:-1]]
        befores = [
            [token for token in row.ids[:_MOST_BEFORE] if token != best] if row.ids else []
            for row, best in zip(found, chosen, strict=False)
        ]
        biases = self._biases(chosen, befores, [row.ids or () for row in considered[1:]])
        for i, (row, before, after) in enumerate(zip(considered[1:], befores, biases, strict=True), 1):
            rows = [_with_biases(row, bias, request.n) for bias in after]
            found[i] = structs.replace(found[i], after=tuple(zip(before, rows, strict=True)))
        return found

    def _biases(
        self, chosen: Sequence[int], befores: Sequence[Sequence[int]], nexts: Sequence[Sequence[int]]
    ) -> list[Floats]:
        """For each position, (tokens before, next tokens): what is added after each of the tokens before, instead of
        what is after the chosen one. All positions' weights are read at once."""
        if not chosen:
            return []
        all_before = [token for best, before in zip(chosen, befores, strict=True) for token in (best, *before)]
        before_rows = self._before.of(all_before)
        all_next = np.array([token for tokens in nexts for token in tokens], np.int64)
        next_rows = self._next.of(self._row_of[all_next])
        found: list[Floats] = []
        at = at_next = 0
        for before, tokens in zip(befores, nexts, strict=True):
            own = before_rows[at : at + 1 + len(before)] @ next_rows[at_next : at_next + len(tokens)].T * self._scale
            found.append(own[1:] - own[0])
            at, at_next = at + 1 + len(before), at_next + len(tokens)
        return found


class _Selector:
    """libllama's graph packs candidates and scores into the states that it hands out."""

    from_anchor, outputs = False, False

    def __init__(self, n: int, states: LastStates, width: int) -> None:
        self._n, self._states, self._width = n, states, width

    def of_block(self, number: int, n_rows: int, logits_of: LogitsOf, request: LogitsRequest) -> list[RowLogits]:
        n, found = self._n, list[RowLogits]()
        chosen, before = 0, list[int]()
        for packed in self._states.of_run(n_rows, self._width)[1:]:
            ids = packed[:n].astype(int).tolist()
            scores = packed[n : n + n * n].reshape(n, n)  # [before, next]
            rows = [_best_scores(number, ids, own, request) for own in scores]
            after = [(token, row) for i, (token, row) in enumerate(zip(before, rows, strict=False)) if i != chosen]
            found.append(structs.replace(rows[chosen], after=tuple(after)))
            chosen, before = int(scores[chosen].argmax()), ids
        return found


def _best_scores(number: int, ids: Sequence[int], scores: Floats, request: LogitsRequest) -> RowLogits:
    """The best of these tokens, as if there were no others."""
    found = sorted(zip(scores.tolist(), ids, strict=True), reverse=True)
    found = [(score, id) for score, id in found if id not in request.banned]
    best = [score for score, _ in found]
    return RowLogits(number, tuple(id for _, id in found[: request.n]), tuple(best[: request.n]), _log_sum_exp(best))


def _with_biases(row: RowLogits, biases: Floats, n: int) -> RowLogits:
    """The `n` best tokens of a row, of which more are known, with these added to the logits. The others' are as likely
    as before."""
    assert row.ids is not None
    logits = np.array(row.logits) + biases
    known = sum(math.exp(logit - row.log_sum_exp) for logit in row.logits)
    total = max(1 - known, 0.0) + float(np.exp(logits - row.log_sum_exp).sum())
    order = np.argsort(-logits, kind="stable")[:n].tolist()
    log_sum_exp = row.log_sum_exp + math.log(max(total, _LEAST))
    return RowLogits(row.row, tuple(row.ids[i] for i in order), tuple(logits[order].tolist()), log_sum_exp)


def _log_sum_exp(logits: Sequence[float]) -> float:
    most = max(logits, default=0.0)
    return most + math.log(max(sum(math.exp(logit - most) for logit in logits), _LEAST))


def _first(row: RowLogits, n: int) -> RowLogits:
    """With the first `n` tokens only."""
    return structs.replace(row, ids=row.ids and row.ids[:n], logits=row.logits[:n])


class _Rows:
    """Rows of a matrix of a model's file, as floats."""

    def __init__(self, model_file: ModelFile, name: str, n_rows: int) -> None:
        """Raises ModelError for a type that cannot be read."""
        tensor = model_file.tensors[name]
        self._type = tensor.type
        self._bytes = np.memmap(
            model_file.paths[tensor.file], np.uint8, "r", tensor.offset, (n_rows, tensor.size // n_rows)
        )
        try:
            self.of([0])
        except (KeyError, NotImplementedError) as e:
            raise ModelError(f"{model_file.paths[0]}: {name} cannot be read in {self._type}; use f16 for it") from e

    def of(self, rows: Sequence[int] | NDArray[np.int64]) -> Floats:
        """Some of the rows, (rows, width)."""
        from gguf import GGMLQuantizationType, quants  # only a few heads need it

        found: Floats = quants.dequantize(self._bytes[rows], GGMLQuantizationType[self._type.upper()])
        return found.astype(np.float32)


def _numbers(model_file: ModelFile, name: str, kind: type[np.generic]) -> NDArray[Any]:
    """A tensor of numbers that are not quantized."""
    tensor = model_file.tensors[name]
    return np.fromfile(
        model_file.paths[tensor.file], kind, tensor.size // np.dtype(kind).itemsize, offset=tensor.offset
    )
