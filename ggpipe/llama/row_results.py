"""What the rows of a run request, selected from the logits and hidden states that a stage computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ggpipe.core.messages import LogitsKind, LogitsRequest, RowLogits, Run
from ggpipe.llama.group import Group, together
from ggpipe.llama.libllama import native
from ggpipe.llama.params import hidden_states, row_of, whole_row

_OF_WHOLE_ROWS = (LogitsKind.LIKELY, LogitsKind.DRAWN)  # which parts of a group cannot select by themselves

Logits = Callable[[int], NDArray[np.float32]]
"""The logits of a row of the last batch, of shape (n_vocab,)."""


class RowResults:
    """Of the last stage. In a group, each part selects among its columns, and part 0 gets the result."""

    def __init__(
        self, native_stage: native.Stage, group: Group | None, width: int, n_vocab: int, check: Callable[[], None]
    ) -> None:
        """`width`: of a hidden state. `check` raises RunError where a group could not compute."""
        self._native = native_stage
        self._group = group
        self._width = width
        self._n_vocab = n_vocab
        self._check = check
        self._gathered: dict[int, RowLogits] = {}
        """Whole rows of the last run that the group assembled, by place in the batch."""

    def of(self, run: Run, logits_of: Logits) -> tuple[RowLogits, ...]:
        """What the rows of the last run request. Raises RunError."""
        group = self._group
        columns = self._native.columns if group else [self._n_vocab]
        first = sum(columns[: group.part]) if group else 0
        n_own = columns[group.part] if group else self._n_vocab
        found: list[RowLogits] = []
        logits_requests: list[LogitsRequest] = []
        asking = [
            (i, run.logits_requests[row.logits_request]) for i, row in enumerate(run.rows) if row.logits_request >= 0
        ]
        hidden = hidden_states(self._native.hidden, asking, self._width)
        for i, logits_request in asking:
            if logits_request.kind is LogitsKind.HIDDEN:
                continue
            if group and (logits_request.keeps or logits_request.also or logits_request.kind in _OF_WHOLE_ROWS):
                logits_request = structs.replace(logits_request, kind=LogitsKind.FULL)
            logits_requests.append(logits_request)
            own = structs.replace(
                logits_request, banned=tuple(id - first for id in logits_request.banned if first <= id < first + n_own)
            )
            found.append(row_of(i, logits_of(i)[first : first + n_own], own, first))
        if group and logits_requests:
            found = together(group, columns, logits_requests, found)
            self._check()
            self._gathered = {row.row: row for row in found if row.ids is None}
            asked = [run.logits_requests[run.rows[row.row].logits_request] for row in found]
            found = [
                row_of(row.row, row.logits, logits_request)
                if row.ids is None and logits_request.kind is not LogitsKind.FULL
                else row
                for row, logits_request in zip(found, asked, strict=True)
            ]
        if group and group.part > 0:
            return ()
        return tuple(sorted([*found, *hidden], key=lambda row: row.row) if hidden else found)

    def kept(self, run: Run, numbers: Sequence[int], logits_of: Logits) -> dict[int, RowLogits]:
        """The whole rows of the last run that are to be kept, by number of the row. `numbers`: of the rows that were
        computed."""
        found = {}
        for place, number in enumerate(numbers):
            index = run.rows[number].logits_request
            if index < 0 or not (logits_request := run.logits_requests[index]).keeps:
                continue
            whole = self._gathered[place] if self._group else whole_row(place, logits_of(place), logits_request)
            found[number] = structs.replace(whole, row=number)
        return found
