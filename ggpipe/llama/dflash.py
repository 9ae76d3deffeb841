"""DFlash heads: layers that draft a block of tokens at a time from hidden states of the target (Chen et al., 2026).

    a cell at position P     keys and values that the head's layers make of the target's states at P
    a block                  the last token and masks after it; all see each other, and all cells before them
    it gives                 at each mask, logits of the token at its position; of DSpark heads that of the next one, so
                             that the last token drafts as well (`block_answers` tells all kinds)

The rows of a run are those of an EAGLE-3 head (`eagle3`): a row at P names the target's state at P, and the token at
P + 1. The row of the last token asks for a block, which is computed from P + 1 on and then removed from the KV cache.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.drafters.base import HeadNeeds
from ggpipe.core.messages import KvKind, KvOp, LogitsKind, LogitsRequest, Row, RowLogits, Run
from ggpipe.errors import ModelError
from ggpipe.llama.block_answers import answers_of, samples_from_anchor
from ggpipe.llama.eagle3 import HeadStage
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.libllama import lib
from ggpipe.llama.stage import BoundaryTensors

ARCHITECTURE = "dflash"
_BLOCK_SIZE = 16  # of files that do not say, as in llama.cpp


def needs_of(model_file: ModelFile) -> HeadNeeds | None:
    """What this model reads of a target; None where it is no DFlash head. Raises ModelError for a damaged one."""
    if model_file.architecture != ARCHITECTURE:
        return None
    metadata, path = model_file.metadata, model_file.paths[0]
    layers, width = metadata.get(f"{ARCHITECTURE}.target_layers"), metadata.get(f"{ARCHITECTURE}.embedding_length")
    if not isinstance(layers, tuple) or not layers or not isinstance(width, int):
        raise ModelError(f"{path} does not say which of its target's states it reads; convert it again")
    if not isinstance(metadata.get("tokenizer.ggml.mask_token_id"), int):
        raise ModelError(f"{path} does not say which token is the mask of its blocks; convert it again")
    if (block_size := _block_size(model_file)) < 2:
        raise ModelError(
            f"{path} drafts blocks of {block_size} tokens, the last accepted one included; convert it again"
        )
    n_drafted = block_size if samples_from_anchor(model_file) else block_size - 1
    return HeadNeeds(layers=tuple(map(int, layers)), width=width, horizon=n_drafted)


def _block_size(model_file: ModelFile) -> int:
    """Tokens of a block, the last accepted one included."""
    size = model_file.metadata.get(f"{ARCHITECTURE}.block_size", _BLOCK_SIZE)
    return size if isinstance(size, int) else 0


class BlockStage(HeadStage):
    """A DFlash head."""

    _needs_of = staticmethod(needs_of)

    def _open_context(
        self, model: ModelConfig, config: ContextConfig, threads: tuple[int, int], n_prefixes: int, saves_states: bool
    ) -> None:
        """As `Stage._open_context`, with cells for a block besides those of the text."""
        n_block = _block_size(self._file)
        if config.n_ctx:
            config = replace(config, n_ctx=config.n_ctx + n_block)
        super()._open_context(model, config, threads, n_prefixes, saves_states)
        self.n_ctx -= n_block
        self._n_block = min(n_block, self.n_ubatch)
        mask = self._file.metadata["tokenizer.ggml.mask_token_id"]
        assert isinstance(mask, int)
        self._mask = mask
        is_causal = self._file.metadata.get(f"{ARCHITECTURE}.attention.causal") is True
        lib.llama_set_causal_attn(self._context, is_causal)
        self._answers = answers_of(self._file, self._context, self._n_embd)
        sections = self._file.metadata.get(f"{ARCHITECTURE}.rope.dimension_sections")
        self._n_dimensions = 4 if isinstance(sections, tuple) and any(sections) else 1

    def _dry_run(self) -> BoundaryTensors:
        row = Row(token=0, pos=0, seqs=(0,), request=0)
        self._read_text((row,), 0)
        self._draft(0, row, LogitsRequest(LogitsKind.TOP, n_positions=self._n_block), 0)
        self.forget_all()
        return BoundaryTensors(collections.Counter(), collections.Counter())

    def _answer(self, run: Run, run_id: int) -> tuple[int, float, tuple[RowLogits, ...]]:
        status, seconds = self._read_text(run.rows, run_id)
        found: list[RowLogits] = []
        for i, row in enumerate(run.rows):
            if status == 0 and row.logits_request >= 0:
                status, more_s, block = self._draft(i, row, run.logits_requests[row.logits_request], run_id)
                seconds += more_s
                found += block
        return status, seconds, tuple(found)

    def _read_text(self, rows: Sequence[Row], run_id: int) -> tuple[int, float]:
        """Status and seconds of putting the states that rows name into the KV cache."""
        states = np.zeros((len(rows), self._n_inputs), np.float32)
        for i, row in enumerate(rows):
            if row.state is not None and (state := self._target_states.row(row.state.run, row.state.row)) is not None:
                states[i] = state
        self._batch.fill(rows, outputs=False)
        return self._decode_rows(states, run_id, has_tokens=False)

    def _draft(
        self, number: int, last: Row, logits_request: LogitsRequest, run_id: int
    ) -> tuple[int, float, list[RowLogits]]:
        """Status and seconds of a block after the row `number` of a run, and what it says: one answer, which has those
        of later positions."""
        n = min(logits_request.n_positions + (not self._answers.from_anchor), self._n_block)
        rows = [
            Row(token=last.token if i == 0 else self._mask, pos=last.pos + 1 + i, seqs=last.seqs[:1],
                request=last.request, logits_request=0)
            for i in range(n)
        ]  # fmt: skip
        # Outputs of all rows: the head's graph has no choice. No pins: it divides rows among the ids that it finds.
        self._batch.fill(rows, self._answers.outputs, pinned=False)
        status, seconds = self._decode_rows(None, run_id, has_tokens=True)
        found: list[RowLogits] = []
        if status == 0:
            first, *later = self._answers.of_block(number, n, self._logits, logits_request)
            found = [structs.replace(first, later=tuple(later))]
        for seq in last.seqs:
            self._memory.apply([KvOp(KvKind.RM, seq, p0=last.pos + 1)])
        return status, seconds, found
