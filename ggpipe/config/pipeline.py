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
    """How work is spread over ranks. Raises SettingError for an invalid setting."""

    layer_split: LayerSplit | None = None
    """How the target's layers are divided, from the head on; None: evenly over all ranks."""
    threads: tuple[int, ...] = (-1,)
    """One value for all ranks, or one per rank; -1: the rank's share of its machine's cores."""
    threads_batch: tuple[int, ...] = (-1,)
    """Threads for runs of more than one token, given like `threads`; -1: the value of `threads`."""
    auto: bool = False
    """After the ranks have started, measure them and plan the split, and whether the last rank drafts."""
    rank_timeout_s: float = 30.0
    """End the job if a rank sends nothing for this many seconds; 0: never."""
    launch_timeout_s: float = 10.0
    """Name machines that have not answered after this many seconds when ranks are started. Ranks may take 60 times as
    long to start on machines that have."""
    check_memory: bool = False
    """Load nothing if a machine has less memory available than its ranks need."""
    send_weights: bool = False
    """Machines without a model's file get their weights of it from the head's machine, and keep them."""
    tensor_split: tuple[float, ...] = ()
    """Proportions in which the ranks of a group divide each tensor. They apply to groups with that many ranks, the
    draft's included. Other groups divide tensors evenly."""
    tensor_wire: TensorWire = "f32"
    """The type in which a group's machines exchange their sums: f16 takes half the bytes, and rounds."""

    def __post_init__(self) -> None:
        if self.rank_timeout_s != 0 and not 1 <= self.rank_timeout_s <= _MOST_TIMEOUT_S:
            raise SettingError(
                "rank_timeout_s",
                f"must be 0 (never) or a number of seconds from 1 to {_MOST_TIMEOUT_S}, got {self.rank_timeout_s:g}",
            )
        if not 1 <= self.launch_timeout_s <= _MOST_TIMEOUT_S:
            raise SettingError(
                "launch_timeout_s",
                f"must be a number of seconds from 1 to {_MOST_TIMEOUT_S}, got {self.launch_timeout_s:g}",
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
        """Number of ranks in the split; None: the split fits any number."""
        return self.layer_split.n_ranks if self.layer_split is not None else None

    def threads_of(self, rank: int, own_cores: int) -> tuple[int, int]:
        """Threads of a rank for single tokens, and for batches. `own_cores`: the rank's share of the cores."""
        single = self.threads[rank if len(self.threads) > 1 else 0]
        batch = self.threads_batch[rank if len(self.threads_batch) > 1 else 0]
        single = own_cores if single == -1 else single
        return single, single if batch == -1 else batch


def check_threads(name: str, value: int, meaning: Wording) -> None:
    """Raises SettingError unless `value` is a number of threads, or -1, whose meaning the message states."""
    check_range(name, value, 1, MAX_THREADS, special=Wording("-1 (", meaning, ")"))
