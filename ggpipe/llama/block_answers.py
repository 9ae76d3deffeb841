"""What the kinds of DFlash heads say of a block's positions.

    DFlash       logits of each position, whatever token comes just before it
    DSpark       a Markov head adds a bias for the token just before, the most probable one in libllama's graph. Its
                 confidence head is not used, since probabilities are calibrated by how often they were right
    DFlash 2     for each position the best candidates, and a score of each after each candidate of the position before

Where the token just before counts, answers say it for all candidates of the position before (`RowLogits.after`), so
that branches of the tree have probabilities of their own. llama.cpp follows one path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
"""Candidates of the most probable path after which those of the next position are told, at most. Those of branches are
as many at most, the best `_BEST_OF_BRANCHES` of each."""
_BEST_OF_BRANCHES = 2
_CONSIDERED = 256
"""Candidates of a position whose biases are computed after each of these. With 32, and without those of branches, trees
of 32 draft tokens had 3 % fewer accepted ones, with a head for the bundled target."""
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
        ids = [np.array(row.ids or (), np.int64) for row in considered]
        outputs = np.split(self._next.of(self._row_of[np.concatenate(ids)]), np.cumsum(list(map(len, ids)))[:-1])
        chosen, befores = -1, list[int]()
        for at, (row, output) in enumerate(zip(considered, outputs, strict=True)):
            after: list[tuple[int, RowLogits]] = []
            if befores and len(output):
                usual, *others = self._before.of([chosen, *befores])
                biases = (np.array(others) - usual) @ output.T * self._scale
                after = list(zip(befores, _with_biases(row, biases, request.n), strict=True))
                found[at] = structs.replace(found[at], after=tuple(after))
            named = dict.fromkeys((found[at].ids or ())[:_MOST_BEFORE])
            named |= dict.fromkeys(token for _, other in after for token in (other.ids or ())[:_BEST_OF_BRANCHES])
            chosen = int(logits_of(own[at]).argmax())
            befores = [token for token in named if token != chosen][: 2 * _MOST_BEFORE]
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


def _with_biases(row: RowLogits, biases: Floats, n: int) -> Iterator[RowLogits]:
    """The `n` best tokens of a row, of which more are known, for each of several rows of biases, (rows, tokens). Those
    that are not known are as likely as before."""
    ids, before = np.array(row.ids), np.array(row.logits)
    logits = before + biases
    unknown = max(1 - float(np.exp(before - row.log_sum_exp).sum()), 0.0)
    totals = unknown + np.exp(logits - row.log_sum_exp).sum(1)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :n]
    for own, best, total in zip(logits, order, totals.tolist(), strict=True):
        log_sum_exp = row.log_sum_exp + math.log(max(total, _LEAST))
        yield RowLogits(row.row, tuple(ids[best].tolist()), tuple(own[best].tolist()), log_sum_exp)


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
        except (KeyError, RuntimeError) as e:
            raise ModelError(
                f"{model_file.paths[0]} has {name} in {self._type}, which ggpipe does not read; use f16 for it"
            ) from e

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
