"""A stage: layers [first, last) of a model, which one rank of a pipeline computes."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.dropped_rows import kept
from ggpipe.core.messages import KvOp, LogitsKind, Row, RowLogits, Run
from ggpipe.core.overtaking import SharedStates
from ggpipe.errors import IndivisibleModelError, RunError, Setting, UsageError
from ggpipe.llama.context_ids import TAKES_BACK, divide_ids
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group import Group, context_of_group, joined
from ggpipe.llama.layer_inputs import LayerInputs, own_layers
from ggpipe.llama.layers import Loras, OnProgress, load_layers
from ggpipe.llama.libllama import last_error, lib, logged_errors, native, start
from ggpipe.llama.noise import Noise
from ggpipe.llama.params import LlamaBatch, context_params
from ggpipe.llama.pauses import Pauses, open_pauses
from ggpipe.llama.row_filter import RowFilter, with_dropped
from ggpipe.llama.row_results import RowResults
from ggpipe.llama.sequence_memory import COMPRESSED, memory_of
from ggpipe.llama.sequence_states import SequenceStates

_NO_RUN = 0  # an id that no run has
_DIFFER_IN_COMPANY = ("qwen4exp", "minimax-01")
"""Architectures whose exact rows were found to depend on other sequences by more than the order of KV cells."""


@dataclass(frozen=True)
class BoundaryTensors:
    """Tensors that enter and leave a stage, as found by a dry run: names, with how often each occurs."""

    wanted: Counter[str]
    produced: Counter[str]


@dataclass(frozen=True)
class Outcome:
    """The result of a run: bytes for the next rank or, on the last one, the logits that its rows requested."""

    outgoing: bytearray
    """`headroom` bytes for the caller, then the tensors for the next rank."""
    rows: tuple[RowLogits, ...]
    compute_s: float
    """Time in `llama_decode`."""
    cancelled: bool
    layer_inputs: tuple[NDArray[np.float32], ...] = ()
    """Inputs of the layers of `Stage.tapped`, each of shape (rows, width), zeros for dropped rows; empty if the run was
    not computed."""
    dropped: frozenset[int] = frozenset()
    """Numbers of the rows that were not computed."""
    paused_s: float = 0.0
    """How long the run paused, beside `compute_s`."""


class Stage:
    """Layers [first, last) of a model with a context of their own.

    All methods but `cancel` belong to one thread at a time; native calls release the GIL.
    """

    _is_head = False
    _context_type = 0  # LLAMA_CONTEXT_TYPE_DEFAULT

    def __init__(
        self,
        model_file: ModelFile,
        layers: tuple[int, int],
        model: ModelConfig,
        context: ContextConfig,
        threads: tuple[int, int],
        progress: OnProgress | None = None,
        n_prefixes: int = 0,
        saves_states: bool = False,
        group: Group | None = None,
        warmup: bool = False,
        wanted_inputs: Sequence[int] = (),
        pauses: bool = False,
    ) -> None:
        """Load the layers. `threads`: for single tokens, for batches. `n_prefixes`: sequence ids for kept prefixes, at
        most, beside `context.n_seq`. `saves_states`: `states` will be used. `group`: where other ranks
        compute these layers together with this one; they load at the same time. `warmup`: KV cells get their memory
        now; else, and with a NUMA strategy, when they are used first. `wanted_inputs`: layers of the model whose inputs
        a draft head reads; those that this stage has come with each run. `pauses`: runs may pause for others, where
        the model can.

        Raises ModelError when libllama cannot load the model or the cut runs through a layer, and UsageError when
        the context cannot be made (too large for the memory, say).
        """
        start(model.numa)
        a, b = layers
        if not 0 <= a < b <= model_file.n_blocks:
            raise ValueError(f"layers {a} to {b} of {model_file.n_blocks}")
        self.layers, self._file = layers, model_file
        # MTP layers read tokens, and give logits.
        self.is_first, self.is_last = a in (0, model_file.n_layer), b >= model_file.n_layer
        self.group, self._threads = group, threads
        if group:
            context = context_of_group(model_file, context)
        self._keep: list[object] = []
        self._model: Any = None
        self._context: Any = None
        self.pauses: Pauses | None = None
        """Of runs with `Run.pauses`; None: they do not pause for others."""
        self._layer_inputs: LayerInputs | None = None
        self._kinds: Set[LogitsKind] = frozenset()  # the logits that rows of the last run requested
        self._wanted_bytes: Mapping[str, int] = {}
        """Bytes for each row of the tensors that enter the stage, by name; 0 where there is no such number."""
        self._shared_states = SharedStates()
        self.sharing: frozenset[int] | None = None
        """Other sequences whose recurrent states the last run reads; None: the model has none."""
        self._numbers: Sequence[int] = ()
        """Numbers of the rows of the last run that were computed."""
        # Where sequences have cells of their own, each has as many as all of them need together.
        touches = warmup and model.numa is None and model_file.architecture not in COMPRESSED
        self._native = native.Stage(
            first=self.is_first, repack=model.repacks, exact=context.exact,
            fast_kernels=context.uses_fast_kernels, touch_cells=touches,
        )  # fmt: skip
        self._native.last_layers = a - 1, -1 if self.is_last else b - 1
        try:
            with joined(self._native, group, model_file, model) if group else contextlib.nullcontext():
                self._model = load_layers(
                    self._native, model_file, layers, model, self._keep, progress, group is not None, self._is_head
                )
                self._open_context(model, context, threads, n_prefixes, saves_states)
                keeps_states = self.rolls_back or model_file.architecture in TAKES_BACK
                if pauses and keeps_states and not self._native.streamed_bytes:
                    first = self._model, self._context, self._context_config, self._loras
                    self.pauses = open_pauses(self._native, *first, threads, self._batch)
            own = own_layers(wanted_inputs, layers, model_file.n_layer)
            contexts = [self._context, self.pauses.context] if self.pauses else [self._context]
            widths = self._n_embd, self._width
            self._layer_inputs = LayerInputs(contexts, own, *widths, model_file.n_layer) if own else None
            self.cut = self._dry_run()
            if self.pauses is not None and not self._native.pause_places:
                self.pauses.close()
                self.pauses = None
            self._filter = self._row_filter(context)
            self.exact_in_company: bool = (
                self._native.orders_cells and model_file.architecture not in _DIFFER_IN_COMPANY
            )
            """With `exact`: rows have the same bits whatever other sequences are in the KV cache."""
        except BaseException:
            self.close()
            raise

    def _open_context(
        self,
        model: ModelConfig,
        config: ContextConfig,
        threads: tuple[int, int],
        n_prefixes: int,
        saves_states: bool,
    ) -> None:
        n_asked = config.n_ctx or int(lib.llama_model_n_ctx_train(self._model))
        n_swa = int(lib.llama_model_n_swa(self._model))
        ids = divide_ids(
            self._file,
            config,
            n_asked,
            n_prefixes,
            slides=n_swa > 0 and not self._is_compressed,
            rolls_back=self.rolls_back,
            saves_states=saves_states,
        )
        self.n_prefixes, self.n_branches = ids.n_prefixes, ids.n_branches
        """See `ContextIds`."""
        n_seq = ids.n_seq
        logged_errors()
        self._context_config = replace(config, n_seq=n_seq)
        params = context_params(self._context_config, *threads)
        params.ctx_type = self._context_type
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise UsageError(f"cannot make a context of {config.n_ctx or 'the full'} tokens: {last_error()}")
        self._loras = Loras(self._model, model)
        self._loras.apply(self._context)
        self._memory = memory_of(self._native, self._context, self._file.architecture, ids.pins, self._is_compressed)
        spare = ids.spare if self.partial_prefixes else None
        self.states = SequenceStates(self._context, n_swa, spare, self._memory.ids)
        self._width = int(lib.llama_model_n_embd_out(self._model))
        self._n_embd = int(lib.llama_model_n_embd(self._model))
        self._n_vocab = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        self.n_ctx = int(lib.llama_n_ctx(self._context))
        self.n_batch = min(config.n_batch, n_asked)  # libllama caps batches before it rounds the context up
        self.n_ubatch = int(lib.llama_n_ubatch(self._context))
        self._batch = LlamaBatch(self.n_ubatch, ids.n_own, ids.pins)
        self._results = RowResults(self._native, self.group, self._width, self._n_vocab, self._check_run)

    def _dry_run(self) -> BoundaryTensors:
        """Decode one token from zeros, to warm the stage up and to check the division into stages."""
        token = max(int(lib.llama_vocab_bos(lib.llama_model_get_vocab(self._model))), 0)
        self._batch.fill((Row(token=token, pos=0, seqs=(0,), request=0, logits_request=0),), self.is_last)
        self._native.n_threads = self._threads[0]
        self._native.pauses = self.pauses is not None
        self._native.begin_run(0, None, 0)
        status = lib.llama_decode(self._context, self._batch.struct)
        self._native.end_run()
        self._check_run()
        if status != 0:
            raise RunError(f"libllama cannot decode with this model (status {status}): {last_error()}")
        if self._native.misplaced or (self.is_first and self._native.missing):
            raise IndivisibleModelError(
                f"layers of '{self._file.architecture}' models depend on each other in a way that cannot be "
                "cut between ranks; run it on one rank (without ",
                Setting("layer_split"),
                ")",
            )
        self.forget_all()
        self._wanted_bytes = dict(zip(self._native.wanted, self._native.wanted_row_bytes, strict=True))
        return BoundaryTensors(Counter(self._native.wanted), Counter(self._native.produced))

    def _row_filter(self, context: ContextConfig) -> RowFilter:
        drops = self.rolls_back and not context.exact and all(self._wanted_bytes.values())
        tip = self._memory.end_of if self.group else None
        return RowFilter(self._wanted_bytes if drops else None, tip)

    def _check_run(self) -> None:
        """Raises RunError if the last run could not be computed."""
        problem = "another rank of this group is lost" if self._native.lost else self._native.stream_problem
        if unsummable := self._native.unsummable:
            problem = problem or f"{unsummable} of '{self._file.architecture}' models cannot be split in a group"
        if problem:
            raise RunError(problem)

    def apply(self, ops: tuple[KvOp, ...]) -> None:
        """Apply KV operations, in order. Raises RunError if the model's memory cannot roll back."""
        self._memory.apply(ops)

    def forget_all(self) -> None:
        """Empty all sequences."""
        self._memory.clear()

    def decode(
        self,
        run: Run,
        incoming: bytes | bytearray | memoryview | None,
        headroom: int = 0,
        dead: frozenset[int] = frozenset(),
    ) -> Outcome:
        """Apply the run's operations and decode its rows, but for those that were dropped.

        `incoming`: output of the stage before this one, without its headroom; on a later stage, None is for timing
        only, and computes on noise. `headroom`: bytes to leave free at the start of the output. `dead`: numbers of the
        rows that may be dropped as well. Raises RunError when libllama refuses the run.
        """
        self.apply(run.ops)
        self.sharing = None if self.rolls_back else self._shared_states.begin(run)
        if run.cancelled or not run.rows:
            return Outcome(bytearray(headroom), (), 0.0, run.cancelled)
        dropped = self._filter.dropped(run, dead)
        if incoming is not None and (filtered := self._filter.incoming(memoryview(incoming), run, dropped)) is None:
            dropped = run.dropped
        elif incoming is not None:
            incoming = filtered
        if len(dropped) == len(run.rows):
            return Outcome(bytearray(headroom), (), 0.0, True)
        self._numbers = kept(range(len(run.rows)), dropped)
        return self._decode(
            structs.replace(run, rows=kept(run.rows, dropped)) if dropped else run, incoming, headroom, dropped
        )

    def _decode(
        self, run: Run, incoming: bytes | bytearray | memoryview | None, headroom: int, dropped: frozenset[int]
    ) -> Outcome:
        """Decode the rows of a run, without those that are dropped."""
        self._batch.fill(run.rows, self.is_last)
        timing_only = incoming is None and not self.is_first
        received = self._noise.of_run(run) if timing_only else incoming  # a name of its own: read until end_run
        if self.is_last and (kinds := {logits_request.kind for logits_request in run.logits_requests}) != self._kinds:
            self._want_hidden(kinds)
        self._native.n_threads = self._threads[len(run.rows) > 1]
        self._native.pauses = run.pauses and self.pauses is not None and self._may_abort(run)
        self._native.begin_run(run.id if self._may_abort(run) else _NO_RUN, received, headroom)
        before_s = self.pauses.spent_s if self.pauses is not None else 0.0
        start_s = time.perf_counter()
        status = lib.llama_decode(self._context, self._batch.struct)
        paused_s = self.pauses.spent_s - before_s if self.pauses is not None else 0.0
        compute_s = time.perf_counter() - start_s - paused_s
        outgoing = self._native.end_run()
        self._check_run()
        if status == 2:
            self._memory.forget(run)
            return Outcome(outgoing[:headroom], (), compute_s, True, paused_s=paused_s)
        if status == 1:
            raise RunError(f"no free KV cells for {len(run.rows)} tokens; raise ", Setting("n_ctx"))
        if status != 0:
            raise RunError(f"libllama cannot decode run {run.id} (status {status}): {last_error()}")
        if self._native.misplaced or (self._native.missing and not timing_only):
            raise RunError(f"run {run.id} came without what layers {self.layers} need; the ranks are out of step")
        inputs = self._layer_inputs.of_run(self._context, len(run.rows)) if self._layer_inputs is not None else ()
        rows = self._extract(run) if self.is_last else ()
        if dropped:
            rows = tuple(structs.replace(row, row=self._numbers[row.row]) for row in rows)
            inputs = tuple(with_dropped(states, self._numbers, len(dropped)) for states in inputs)
        return Outcome(outgoing, rows, compute_s, False, inputs, dropped, paused_s)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """In a pause: runs that may overtake can be decoded. Their results must be taken before this ends."""
        assert self.pauses is not None
        before = self._context, self._batch, self._numbers, self._kinds, self.sharing
        with self.pauses.pause():
            self._context, self._batch = self.pauses.context, self.pauses.batch
            try:
                yield
            finally:
                self._context, self._batch, self._numbers, self._kinds, self.sharing = before

    @property
    def tapped(self) -> tuple[int, ...]:
        """The layers whose inputs come with each run."""
        return self._layer_inputs.layers if self._layer_inputs is not None else ()

    def _want_hidden(self, kinds: Set[LogitsKind]) -> None:
        """Keep the last hidden states of the next run if rows request them. If they request nothing else, the graph
        ends there."""
        self._kinds = kinds
        self._native.want_hidden(
            self._width if LogitsKind.HIDDEN in kinds else 0, skips_logits=kinds == {LogitsKind.HIDDEN}
        )

    @functools.cached_property
    def _noise(self) -> Noise:
        return Noise(self._n_embd, self.cut.wanted)

    @property
    def rolls_back(self) -> bool:
        """Whether the model's memory can remove the end of a sequence, unlike that of recurrent and hybrid models."""
        return not (lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(self._model))

    @property
    def _is_compressed(self) -> bool:
        return self._file.architecture in COMPRESSED and self._context_type == 0

    @property
    def most_taken_back(self) -> int | None:
        """As `Limits.most_taken_back`."""
        return self._memory.most_taken_back

    @property
    def partial_prefixes(self) -> bool:
        """Whether any prefix of a sequence can be copied and continued. Otherwise only a whole sequence can."""
        return self.rolls_back

    def cancel(self, run_id: int) -> None:
        """Stop the run with this id if it is being computed and can be stopped. Thread-safe."""
        self._native.cancel(run_id)

    def _may_abort(self, run: Run) -> bool:
        """Whether a run may be stopped. With several sequences in it, libllama moves states anywhere in the graph."""
        return self.rolls_back or len({row.seqs for row in run.rows}) == 1

    def _extract(self, run: Run) -> tuple[RowLogits, ...]:
        """What the run's rows request."""
        return self._results.of(run, self._logits)

    def kept(self, run: Run) -> dict[int, RowLogits]:
        """The whole rows of the last run that are to be kept, by number of the row."""
        return self._results.kept(run, self._numbers, self._logits)

    def _logits(self, row: int) -> NDArray[np.float32]:
        """The logits of a row of the last batch, of shape (n_vocab,). Valid until the next run is decoded."""
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, row), (self._n_vocab,))

    def close(self) -> None:
        """Free the context and the model. A second call does nothing."""
        if self.pauses is not None:
            self.pauses.close()
        if self._context:
            lib.llama_free(self._context)
        if self._model:
            lib.llama_model_free(self._model)
        self._context = self._model = self.pauses = None
