"""How work is spread over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ggpipe.config.checks import check_choice, check_range
from ggpipe.config.layer_split import LayerSplit
from ggpipe.errors import Setting, SettingError, Wording

TensorWire = Literal["f32", "f16"]
MAX_THREADS = 512
"""Threads that ggml has room for."""
_MOST_TIMEOUT_S = 86400


@dataclass(frozen=True)
class PipelineConfig:
    """How the work is spread over ranks."""

    layer_split: LayerSplit | None = None
    """How the layers are divided, head first; None spreads them evenly over all ranks."""
    threads: tuple[int, ...] = (-1,)
    """One value for all ranks, or one for each; -1 is this rank's part of its machine's cores."""
    threads_batch: tuple[int, ...] = (-1,)
    """Threads for runs of more than one token, as `threads`; -1 takes the value of `threads`."""
    auto: bool = False
    """The split, and whether the last rank drafts, are measured and planned when the ranks have started."""
    rank_timeout_s: float = 30.0
    """A rank that sends nothing for so many seconds ends the job; 0: never."""
    check_memory: bool = False
    """Nothing is loaded when a machine's available memory is less than its ranks need."""
    tensor_split: tuple[float, ...] = ()
    """In which proportions the ranks of a group divide each tensor, in every group of as many ranks; others divide
    evenly. Groups of the draft count as well."""
    tensor_wire: TensorWire = "f32"
    """What a group's machines send each other of their sums: f16 takes half the bytes, and rounds."""

    def __post_init__(self) -> None:
        if self.rank_timeout_s != 0 and not 1 <= self.rank_timeout_s <= _MOST_TIMEOUT_S:
            raise SettingError(
                "rank_timeout_s",
                f"must be 0 (never) or a number of seconds from 1 to {_MOST_TIMEOUT_S}, got {self.rank_timeout_s:g}",
            )
        for value in self.threads:
            check_threads("threads", value, Wording("the machine's cores"))
        for value in self.threads_batch:
            check_threads("threads_batch", value, Wording("as ", Setting("threads")))
        check_choice("tensor_wire", self.tensor_wire, get_args(TensorWire))
        for weight in self.tensor_split:
            if not 0 < weight < math.inf:
                raise SettingError("tensor_split", f"must be numbers above 0, as in 3,1, got {weight:g}")

    @property
    def n_ranks(self) -> int | None:
        """Ranks that the split is for; None: as many as there are."""
        return self.layer_split.n_ranks if self.layer_split is not None else None

    def threads_of(self, rank: int, own_cores: int) -> tuple[int, int]:
        """Threads of a rank for single tokens and for batches; `own_cores` stands in for -1."""
        single = self.threads[rank if len(self.threads) > 1 else 0]
        batch = self.threads_batch[rank if len(self.threads_batch) > 1 else 0]
        single = own_cores if single == -1 else single
        return single, single if batch == -1 else batch


def check_threads(name: str, value: int, meaning: Wording) -> None:
    """Raises SettingError unless `value` is a number of threads, or -1, whose meaning the message states."""
    check_range(name, value, 1, MAX_THREADS, special=Wording("-1 (", meaning, ")"))
