"""The memory of a context's sequences: KV cells, and recurrent or compressed states."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from ggpipe.core.messages import KvKind, KvOp, Run
from ggpipe.errors import RunError
from ggpipe.llama.libllama import lib, native

COMPRESSED = ("deepseek4",)
"""Architectures whose sequences have cells of their own, most of which hold several tokens each."""
_CELLS = 256  # libllama rounds the cells of a window up to a multiple of this
_RAW = "_ZNK19llama_kv_cache_dsv47get_rawEv"  # llama_kv_cache_dsv4::get_raw
_REMOVE = "_ZN19llama_kv_cache_iswa6seq_rmEiii"  # llama_kv_cache_iswa::seq_rm


class SequenceMemory:
    """Memory that does all that libllama's functions ask of it."""

    def __init__(self, context: Any, architecture: str, pins: int) -> None:
        """`architecture`: for messages. `pins`: from an id to its pin; 0: there are no pins."""
        self._memory = lib.llama_get_memory(context)
        self._architecture = architecture
        self._pins = pins

    @property
    def most_taken_back(self) -> int | None:
        """As `Limits.most_taken_back`."""
        return None

    def ids(self, seq: int) -> tuple[int, ...]:
        """A sequence's ids in libllama: its own, and its pin.

        Where a sliding window hides a cell from its only sequence, libllama gives the cell to another sequence, and a
        rollback would miss it. So each cell of such a model has a second id, its pin: it is free when it is removed.
        """
        return (seq, seq + self._pins) if self._pins else (seq,)

    def end_of(self, seq: int) -> int:
        """The position of a sequence's last token; -1 without one."""
        return int(lib.llama_memory_seq_pos_max(self._memory, seq))

    def clear(self) -> None:
        """Empty all sequences."""
        lib.llama_memory_clear(self._memory, True)

    def apply(self, ops: Iterable[KvOp]) -> None:
        """Apply operations, in order. Raises RunError if the memory cannot forget a part of a sequence."""
        for op in ops:
            match op.kind:
                case KvKind.RM:
                    if not all([self._remove(seq, op.p0, op.p1) for seq in self.ids(op.seq)]):
                        raise RunError(f"'{self._architecture}' models cannot forget part of a sequence")
                case KvKind.CP:
                    for seq, dst in zip(self.ids(op.seq), self.ids(op.dst), strict=True):
                        self._copy(seq, dst, op.p0, op.p1)

    def forget(self, run: Run) -> None:
        """Free the cells of a stopped run. libllama frees them only for the first sequence id of each row."""
        first: dict[int, int] = {}
        for row in run.rows:
            for seq in row.seqs:
                first[seq] = min(first.get(seq, row.pos), row.pos)
        for seq, pos in first.items():
            for own in self.ids(seq):
                self._remove(own, pos, -1)

    def _remove(self, seq: int, p0: int, p1: int) -> bool:
        return bool(lib.llama_memory_seq_rm(self._memory, seq, p0, p1))

    def _copy(self, seq: int, dst: int, p0: int, p1: int) -> None:
        lib.llama_memory_seq_cp(self._memory, seq, dst, p0, p1)


class CompressedMemory(SequenceMemory):
    """DeepSeek-V4's memory, of which libllama removes whole sequences only.

    It has three parts. Cells of a sliding window are removed by its own function. Cells that hold several tokens each
    are not read before all of these are there, and then written again. States in which the tokens of a cell are
    collected are overwritten by later tokens: a copy of them, which is a CP without positions, is the way back.
    """

    def __init__(self, native_stage: native.Stage, context: Any, architecture: str) -> None:
        super().__init__(context, architecture, 0)
        self._n_swa = int(lib.llama_model_n_swa(lib.llama_get_model(context)))
        most = min(int(lib.llama_n_ctx(context)), self._n_swa + int(lib.llama_n_ubatch(context)))
        self._n_cells = most + -most % _CELLS  # of the window, for each sequence
        self._native = native_stage
        self._window = _function(_RAW, ctypes.c_void_p, ctypes.c_void_p)(self._memory)
        self._remove_from = _function(_REMOVE, ctypes.c_bool, ctypes.c_void_p, *[ctypes.c_int] * 3)
        self._copies: set[int] = set()
        """Ids that have the copy of a state, and no tokens."""

    @staticmethod
    def is_known() -> bool:
        """Whether this libllama has the functions."""
        return all(hasattr(lib._lib, name) for name in (_RAW, _REMOVE))

    @property
    def most_taken_back(self) -> int | None:
        return (self._n_cells - self._n_swa) // 2  # cells that are free may be left out for a while

    def clear(self) -> None:
        super().clear()
        self._copies.clear()

    def _remove(self, seq: int, p0: int, p1: int) -> bool:
        if seq in self._copies:
            self._copies.remove(seq)
            return True
        if p0 > 0 and p1 < 0:
            return bool(self._remove_from(self._window, seq, p0, p1))
        return super()._remove(seq, p0, p1)

    def _copy(self, seq: int, dst: int, p0: int, p1: int) -> None:
        if p0 == p1 == 0:
            self._native.copy_state(seq, dst)
            if seq not in self._copies:
                self._copies.add(dst)
        else:
            super()._copy(seq, dst, p0, p1)


def memory_of(
    native_stage: native.Stage, context: Any, architecture: str, pins: int, is_compressed: bool
) -> SequenceMemory:
    """The memory of a context. `is_compressed`: its sequences have cells of their own; see `COMPRESSED`."""
    if is_compressed and CompressedMemory.is_known():
        return CompressedMemory(native_stage, context, architecture)
    return SequenceMemory(context, architecture, pins)


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(lib._lib, name)
    function.restype, function.argtypes = result, arguments
    return function
