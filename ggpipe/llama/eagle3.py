"""EAGLE-3 heads: a layer that drafts from hidden states of the target (Li et al., 2025), as a stage of its own.

    position P reads     the text's token at P + 1, and a state: of the target at P, or of its own at P - 1
    the state            three of the target's layers' inputs, made one by an encoder; or the head's own last state
    it gives             logits of the token at P + 2, and a state for drafting on

The states of the target come from the ranks that compute them (`TargetStates`). Rows name the state that they read
(`core.messages.StateRef`). A row whose state did not come, as that of a prefix that was not computed anew, reads zeros.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.drafters.base import HeadNeeds
from ggpipe.core.drafters.eagle import HORIZON
from ggpipe.core.messages import Row, RowLogits, Run, StateRef
from ggpipe.errors import ModelError, RunError, Setting
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.layer_inputs import ARCHITECTURES, WITH_OUTPUT, LastStates
from ggpipe.llama.layers import OnProgress
from ggpipe.llama.libllama import last_error, lib
from ggpipe.llama.stage import BoundaryTensors, Outcome, Stage

ARCHITECTURE = "eagle3"
_MOST_INCOMPLETE = 256
"""Runs of the target of which some states have not come yet: cancelled ones, and those that pause."""
_KEPT_RUNS = 64
"""The head's own states of this many runs are kept."""

States = NDArray[np.float32]


def needs_of(model_file: ModelFile) -> HeadNeeds | None:
    """What this model reads of a target; None where it is no EAGLE-3 head. Raises ModelError for a damaged one."""
    if model_file.architecture != ARCHITECTURE:
        return None
    layers = model_file.metadata.get(f"{ARCHITECTURE}.target_layers")
    width = model_file.metadata.get(f"{ARCHITECTURE}.target_hidden_size")
    if not isinstance(layers, tuple) or len(layers) != 3 or not isinstance(width, int):
        raise ModelError(f"{model_file.paths[0]} does not say which of its target's states it reads; convert it again")
    return HeadNeeds(layers=tuple(map(int, layers)), width=width, horizon=HORIZON)


def head_misfit(needs: HeadNeeds, target: ModelFile) -> str:
    """Why a head does not fit a target; empty if it fits."""
    architecture = target.architecture
    width = target.metadata.get(f"{architecture}.embedding_length")
    if architecture not in ARCHITECTURES:
        return (
            f"libllama does not hand out the hidden states of '{architecture}' models: take a draft model of the same "
            "family instead"
        )
    if needs.width != width:
        return f"it is a head for models of width {needs.width}, and this one's is {width}: take a head made for it"
    if not all(0 <= layer < target.n_layer + (architecture in WITH_OUTPUT) for layer in needs.layers):
        layers = ", ".join(map(str, needs.layers))
        return f"it reads the inputs of layers {layers}, and the model has {target.n_layer} layers"
    return ""


class TargetStates:
    """States of the target's rows that have come from its ranks. `take` and `forget` belong to one thread, `rows` to
    another one."""

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers`: those whose inputs the head reads, in its order."""
        self._layers = tuple(layers)
        self._runs: dict[int, States] = {}
        """States of each complete run, of shape (rows, numbers)."""
        self._parts: dict[int, dict[int, States]] = {}
        """Parts of incomplete runs, by layer."""

    def take(self, run: int, parts: Mapping[int, States]) -> bool:
        """A rank sent these layers' inputs in a run's rows, each (rows, width). Whether that completes the run."""
        known = self._parts.setdefault(run, {})
        known.update(parts)
        if any(layer not in known for layer in self._layers):
            if len(self._parts) > _MOST_INCOMPLETE:
                del self._parts[min(self._parts)]  # it was cancelled, or its request drafts without true states
            return False
        self._runs[run] = np.hstack([known[layer] for layer in self._layers])
        del self._parts[run]
        return True

    def forget(self, before: int) -> None:
        """States of earlier runs than this one are not read any more."""
        for run in [run for run in self._runs if run < before]:
            del self._runs[run]

    def row(self, run: int, row: int) -> States | None:
        """The state of a row; None where it is not there."""
        rows = self._runs.get(run)
        return None if rows is None or row >= len(rows) else rows[row]


class HeadStage(Stage):
    """An EAGLE-3 head. It is a stage whose rows read states beside their tokens."""

    _is_head = True
    _needs_of = staticmethod(needs_of)
    _n_dimensions = 1
    """Of the positions of rows without tokens."""

    def __init__(
        self,
        model_file: ModelFile,
        model: ModelConfig,
        context: ContextConfig,
        threads: tuple[int, int],
        target_states: TargetStates,
        progress: OnProgress | None = None,
        n_prefixes: int = 0,
        warmup: bool = False,
    ) -> None:
        """As `Stage`. `target_states`: what rows read whose states are the target's."""
        needs = self._needs_of(model_file)
        assert needs is not None
        self._target_states = target_states
        self._own_states: collections.OrderedDict[int, States] = collections.OrderedDict()
        self._n_inputs = len(needs.layers) * needs.width
        super().__init__(
            model_file, self._layers_of(model_file), model, context, threads, progress, n_prefixes, warmup=warmup
        )

    @staticmethod
    def _layers_of(model_file: ModelFile) -> tuple[int, int]:
        """First layer, and one past the last."""
        return 0, model_file.n_layer

    def _dry_run(self) -> BoundaryTensors:
        self._last_states = LastStates(self._context, of_all_rows=True)  # whether or not they give logits
        self._encode(np.zeros((1, self._n_inputs), np.float32))
        self._compute((Row(token=0, pos=0, seqs=(0,), request=0),), self._no_states(1), 0)
        self.forget_all()
        return BoundaryTensors(collections.Counter(), collections.Counter())

    def decode(
        self,
        run: Run,
        incoming: bytes | bytearray | memoryview | None,
        headroom: int = 0,
        dead: frozenset[int] = frozenset(),
    ) -> Outcome:
        """As `Stage.decode`; rows read the states that they name, and none is dropped."""
        self.apply(run.ops)
        if run.cancelled or not run.rows:
            return Outcome(bytearray(headroom), (), 0.0, run.cancelled)
        run_id = run.id if self._may_abort(run) else 0
        status, compute_s, found = self._answer(run, run_id)
        if status == 2:
            self._memory.forget(run)
        return Outcome(bytearray(headroom), found, compute_s, status == 2)

    def _answer(self, run: Run, run_id: int) -> tuple[int, float, tuple[RowLogits, ...]]:
        """Compute the rows of a run: libllama's status, seconds, and what they asked for."""
        status, compute_s = self._compute(run.rows, self._states_of(run.rows), run_id)
        if status == 2:
            return status, compute_s, ()
        self._own_states[run.id] = self._computed_states(len(run.rows))
        if len(self._own_states) > _KEPT_RUNS:
            self._own_states.popitem(last=False)
        return status, compute_s, self._extract(run)

    def _states_of(self, rows: Sequence[Row]) -> States:
        """(rows, width): the states that rows read, those of the target encoded."""
        states = self._no_states(len(rows))
        found: list[States] = []
        at: list[int] = []
        for i, row in enumerate(rows):
            match row.state:
                case StateRef(run, index, is_target=True):
                    if (state := self._target_states.row(run, index)) is not None:
                        found.append(state)
                        at.append(i)
                case StateRef(run, index) if run in self._own_states:
                    states[i] = self._own_states[run][index]
        if found:
            states[at] = self._encode(np.stack(found))
        return states

    def _encode(self, states: States) -> States:
        """States of the target, (rows, numbers), as the head's layer reads them: (rows, width)."""
        n = len(states)
        # libllama checks positions, which the encoder does not use.
        first = self._memory.end_of(0) + 1
        rows = [Row(token=0, pos=first + i, seqs=(0,), request=0) for i in range(n)]
        self._batch.fill(rows, outputs=True)
        self._native.want_hidden(0, skips_logits=False)
        status, _ = self._call(lib.llama_encode, states, 0, has_tokens=False)
        if status != 0:
            raise RunError(f"libllama cannot encode {n} states (status {status}): {last_error()}")
        return self._computed_states(n)

    def _compute(self, rows: Sequence[Row], states: States, run_id: int) -> tuple[int, float]:
        """Status and seconds of decoding rows that read these states."""
        self._batch.fill(rows, outputs=True)
        gives_logits = any(row.logits_request >= 0 for row in rows)
        self._batch.flag_all(gives_logits)  # the head's graph has no choice of rows
        self._native.want_hidden(0 if gives_logits else self._n_embd, skips_logits=not gives_logits)
        return self._decode_rows(states, run_id, has_tokens=True)

    def _decode_rows(self, states: States | None, run_id: int, has_tokens: bool) -> tuple[int, float]:
        """Status and seconds of decoding the batch's rows. Raises RunError if libllama refuses them."""
        status, compute_s = self._call(lib.llama_decode, states, run_id, has_tokens)
        if status == 1:
            n = self._batch.struct.n_tokens
            raise RunError(f"no free KV cells for {n} tokens of the draft head; raise ", Setting("n_ctx"))
        if status not in (0, 2):
            raise RunError(f"libllama cannot decode with this draft head (status {status}): {last_error()}")
        return status, compute_s

    def _call(self, function: Any, states: States | None, run_id: int, has_tokens: bool) -> tuple[int, float]:
        if states is None:
            self._batch.read_tokens()
        else:
            self._batch.read_states(states, has_tokens, self._n_dimensions)
        self._native.n_threads = self._threads[self._batch.struct.n_tokens > 1]
        self._native.begin_run(run_id, None, 0)
        start_s = time.perf_counter()
        status = int(function(self._context, self._batch.struct))
        seconds = time.perf_counter() - start_s
        self._native.end_run()
        return status, seconds

    def _computed_states(self, n_rows: int) -> States:
        """The states of the last call's rows: a copy, (n_rows, width)."""
        return self._last_states.of_run(n_rows, self._state_width)

    @property
    def _state_width(self) -> int:
        """Numbers of a state that its rows read."""
        return self._n_embd

    def _no_states(self, n_rows: int) -> States:
        """Zeros: (n_rows, width)."""
        return np.zeros((n_rows, self._state_width), np.float32)
