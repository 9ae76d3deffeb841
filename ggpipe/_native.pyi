"""
ggml devices that hold a part of a model, the wire between them, and rows of logits. Needs llama_cpp first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def ggml_version() -> str:
    """The loaded ggml's version."""

def top(logits: int, n_vocab: int, k: int, banned: Sequence[int], sums: bool = True, temperature: float = 0) -> tuple[list[int], list[float], float, list[float]]:
    """
    The k best of a row of f32 logits at this address: ids and logits, best first, equal ones by id; with sums the
    row's log-sum-exp (not a number for k = 1); and with a temperature above 0 the share of the probability that ids
    smaller than each have, at this temperature, as the log-sum-exp. Banned tokens count as minus infinity.
    """

def draw(logits: int, n_vocab: int, banned: Sequence[int], temperature: float, number: float) -> int:
    """
    The token that llama.cpp draws from a row of f32 logits at this address with a random number from 0 to 1.
    """

def likely(logits: int, n_vocab: int, banned: Sequence[int], min_p: float) -> tuple[list[int], list[float]]:
    """
    Ids and logits of all tokens at least min_p times as probable as the best one of a row at this address, by id.
    """

def multiply(*, type: int, shape: tuple[int, int], weights: bytes, activations: Sequence[float], n_matrices: int = 0, experts: Sequence[int] = (), n_threads: int = 1, repack: bool = True, fast: bool = True) -> list[float]:
    """
    One product alone, as a stage computes it, for tests and measurements: weights (rows, columns) of a ggml type, as in a
    file, and activations (tokens, columns). With n_matrices, that many of them: experts, with the same number of them per
    token, or heads' own, each for its share of the tokens. Returns (tokens, rows), or (tokens, experts of each, rows).
    fast: with kernels of our own. Raises RuntimeError.
    """

def kernel_names(type: int, is_repacked: bool, features: Sequence[str]) -> tuple[str, str]:
    """
    Of our own kernels on a CPU with these features (avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16): for products with weights
    of a ggml type, and for attention. Empty: ggml's own. Raises RuntimeError.
    """

def attend(*, queries: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], types: tuple[int, int], mask: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)], sinks: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, max_bias: float = 0, softcap: float = 0, n_threads: int = 1, fast: bool = True) -> list[float]:
    """
    One flash attention alone, as a stage computes it, for tests: f32 queries (rows, heads, width), keys and values (cells,
    KV heads, bytes) of ggml types, a mask (rows, cells) as the bits of f16 numbers, an f32 sink of each head, and ALiBi's
    bias and the cap of scores (0: none). Returns (rows, heads, width). fast: with our own kernel. Raises RuntimeError.
    """

def index_cells(*, queries: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], key_type: int, weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], mask: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)], n_selected: int, n_threads: int = 1, fast: bool = True) -> tuple[list[float], list[int]]:
    """
    One indexer of sparse attention alone, as a stage computes it, for tests: f32 queries (rows, heads, width), keys (cells,
    bytes) of a ggml type, weights of the heads (rows, heads), and a mask (rows, cells) as the bits of f16 numbers. Returns
    scores (rows, cells), and the cells of the highest ones (rows, n_selected). fast: with our own kernels. Raises
    RuntimeError.
    """

def sum_experts(*, experts: Sequence[float], weights: Sequence[float], n_used: int, n_threads: int = 1, fast: bool = True) -> list[float]:
    """
    Results of experts (tokens, experts, columns), weighted by (tokens, experts) and added up as a stage does it (fast: with our
    own kernel). For tests.
    """

def read_pages(address: int, size: int) -> int:
    """
    Read a part of a mapped file into memory. Returns an error number, or 0.
    """

def join(*, type: int, shape: Sequence[int], data: bytes, shape2: Sequence[int], data2: bytes, dim: int, n_threads: int = 1) -> bytes:
    """
    Two tensors one after another along a dimension, as a stage joins them with our own kernel. Shapes have four dimensions, the
    first of which is along rows. For tests. Raises RuntimeError.
    """

def normalize(*, rows: Sequence[float], width: int, stride: int, weights: Sequence[float] = [], is_l2: bool = False, n_threads: int = 1, fast: bool = True) -> list[float]:
    """
    Root mean square norms, or L2 norms, of the first `width` of each `stride` numbers, times weights (width) if there are any, as
    a stage computes them (fast: with our own kernel). For tests. Raises RuntimeError.
    """

def time_attention(*, width: int, n_heads: tuple[int, int], n_rows: int, n_cells: int, type: int, n_threads: int, n_rounds: int) -> list[tuple[float, float]]:
    """
    Seconds of one flash attention in each round, with ggml's kernel and with our own. n_heads: of queries, and of keys and
    values, which have a ggml type. Raises RuntimeError.
    """

class GrammarGuard:
    """
    Whether libllama can follow a grammar within a limit of steps; see native/grammar_guard.cpp.
    """

    def __init__(self, pieces: Sequence[bytes], rules: int, stacks: int) -> None:
        """
        Spelling of each token; addresses of llama_grammar_get_rules and llama_grammar_get_stacks.
        """

    def can_try(self, sampler: int, ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], steps: int) -> bool:
        """
        Whether it can be asked which of these tokens fit. sampler: its address.
        """

    def can_accept(self, sampler: int, id: int, steps: int) -> bool:
        """Whether it can advance by this token."""

class GroupSum:
    """Adds up tensors over the parts of a group; see native/group_sum.h."""

    def sum(self, data: int, n: int, stop: bool) -> bool:
        """
        Add up n floats at this address over all parts, in place. True: a part wants to stop, or is lost.
        """

    def take_times(self) -> list[tuple[int, float]]:
        """
        How many floats each sum since the last call had, and its seconds. The first call begins to measure.
        """

    def send(self, data: int, bytes: int) -> None:
        """Send bytes at this address to part 0."""

    def receive(self, part: int, data: int, bytes: int) -> None:
        """On part 0: what a part sends, to this address."""

    def abandon(self) -> None:
        """Have each call return at once, from now on. From any thread."""

    @property
    def lost(self) -> bool:
        """A part is lost, or the others were abandoned."""

def shared_sum(fd: int, part: int, n_parts: int) -> GroupSum:
    """
    Over parts on one machine, which share this empty file in memory; it may be closed afterwards. Raises RuntimeError.
    """

def mpi_sum(library: str, comm: int, byte: int, part: int, n_parts: int, *, halves: bool) -> GroupSum:
    """
    Over MPI: mpi4py's file, handles of a communicator of the parts, for this alone, and of MPI_BYTE. `halves`: values
    travel as 16-bit floats. Raises RuntimeError.
    """

def replace_memory(context: int, own: int, shared: int) -> bool:
    """
    Give a llama_context another's memory, or take it back, by their addresses. False if the pointer to `own` was not found.
    """

class Stage:
    """The native half of ggpipe.llama.stage.Stage; see native/stage.h."""

    def __init__(self, *, first: bool, repack: bool, exact: bool, fast_kernels: bool, touch_cells: bool = False) -> None: ...

    @property
    def last_layers(self) -> tuple[int, int]:
        """
        The last layer before this rank's, and the last of its own; -1 where no other rank's layer follows.
        """

    @last_layers.setter
    def last_layers(self, arg: tuple[int, int], /) -> None: ...

    def join(self, *, part: int, n_parts: int, sum: GroupSum, ask: int, model: int, split_attention: bool, cuts: Mapping[str, tuple[int, Sequence[int], Sequence[tuple[int, int]]]]) -> None:
        """
        Before `devices`: this rank computes its layers with others. ask, model: addresses of libllama's function that
        splits weights, and of a model without weights, which `leave_model` gives back. cuts: of weights for which it is
        not asked, as in ggpipe.llama.group_cuts.Cut.
        """

    def leave_model(self) -> None:
        """Once there is a context: `model` is not asked again."""

    def devices(self) -> tuple[int, int, int]:
        """Addresses of the ggml devices UP, LOCAL and DOWN."""

    def begin_load(self, file: Mapping[str, tuple[int, int]], *, use_in_place: bool) -> None:
        """
        Before libllama loads: hide what is not ours. file: each tensor's address and bytes in the mapped file, which
        stays mapped as long as the model is there.
        """

    def stream(self, *, paths: Sequence[str], places: Mapping[str, tuple[int, int, int]], memory: int, n_readers: int) -> None:
        """
        Before libllama loads: keep at most this many bytes of weights in memory, and read the others from these files when they
        are needed. places: number of the file, offset and bytes of each tensor. Raises RuntimeError.
        """

    def begin_streaming(self) -> tuple[int, int]:
        """
        After end_load: begin to read the weights that stay in memory. Returns the minimum memory and the memory given, in
        bytes; nothing is read if the latter is smaller.
        """

    def end_load(self, loaded: bool) -> None:
        """After libllama has loaded the model, or failed to."""

    def load_next(self) -> int | None:
        """
        After end_load: repack some weights; in a group, get this rank's part of the next one. After begin_streaming: wait for
        weights that stay in memory. Returns how many bytes were copied or read; None at the end. Raises RuntimeError.
        """

    def take_stream_times(self) -> tuple[int, float, int, int]:
        """
        Since the last call: bytes of weights that were read, seconds that computing waited for them, how many matrices of
        experts were prefetched by prediction, and how many of these were used.
        """

    @property
    def streamed_bytes(self) -> int:
        """Bytes of matrices that each run reads from files."""

    @property
    def stream_problem(self) -> str:
        """Why streamed weights could not be read."""

    def begin_run(self, run: int, incoming: bytes | bytearray | memoryview | None, headroom: int) -> None:
        """
        Before llama_decode: the bytes from the rank before this one, which must stay as they are until end_run, and
        how many bytes to leave free in front of those for the next.
        """

    def want_hidden(self, width: int, skips_logits: bool) -> None:
        """
        For runs from now on: keep the last hidden state of rows that are given out, which has so many numbers a row (0:
        do not). skips_logits: their logits are not wanted, and not computed.
        """

    @property
    def hidden(self) -> bytes:
        """
        The last hidden state of the last run's rows that are given out, as floats, row by row.
        """

    def end_run(self) -> bytearray:
        """After llama_decode: the headroom, then the bytes for the next rank."""

    @property
    def touch_cells(self) -> bool:
        """
        KV cells of contexts that are made from now on get their memory when they are made.
        """

    @touch_cells.setter
    def touch_cells(self, arg: bool, /) -> None: ...

    @property
    def pauses(self) -> bool:
        """The next run pauses between two of its layers where that is wanted."""

    @pauses.setter
    def pauses(self, arg: bool, /) -> None: ...

    @property
    def pause_places(self) -> int:
        """Places in the last graph at which it might have paused."""

    @property
    def at_pause(self) -> Callable[[], None]:
        """Called there. It must not raise."""

    @at_pause.setter
    def at_pause(self, value: Callable[[], None] | None) -> None: ...

    @property
    def continues(self) -> float:
        """Times a pause: so long a run continues at least before the next one."""

    @continues.setter
    def continues(self, arg: float, /) -> None: ...

    def want_pause(self) -> None:
        """Have the run that is computed pause, if it does so. From any thread."""

    def copy_state(self, seq: int, other: int) -> None:
        """Copy the states of a sequence's compressors to another id."""

    def pause(self) -> None:
        """In `at_pause`: other runs follow, in another context."""

    def resume(self) -> None:
        """After them."""

    def cancel(self, run: int) -> None:
        """Stop this run if it is being computed. From any thread."""

    @property
    def n_threads(self) -> int:
        """In a group: how many threads the next run has."""

    @n_threads.setter
    def n_threads(self, arg: int, /) -> None: ...

    @property
    def waits(self) -> tuple[int, int]:
        """
        With our own kernels: how often the threads waited for each other in the last run, and how many operations it had.
        """

    @property
    def lost(self) -> bool:
        """A part of the group is lost."""

    @property
    def unsummable(self) -> str:
        """In a group: a tensor whose parts cannot be added up."""

    @property
    def undividable(self) -> str:
        """
        In a group, after loading: a weight that is to be divided, and whose rows are one block each.
        """

    @property
    def new_graphs(self) -> int:
        """
        In a group: graphs that ggml's meta device had to divide; others were known.
        """

    @property
    def columns(self) -> list[int]:
        """
        In a group of the last stage: how many columns of the last run's logits each part has, in their order.
        """

    @property
    def wanted(self) -> list[str]:
        """Tensors that the last run took from UP."""

    @property
    def wanted_row_bytes(self) -> list[int]:
        """
        After a run of one token: the bytes of each of these; 0 where more tokens might not come one after another.
        """

    @property
    def produced(self) -> list[str]:
        """Tensors that the last run gave to DOWN."""

    @property
    def misplaced(self) -> int:
        """Reads from DOWN in the last run: the cut runs through a layer."""

    @property
    def missing(self) -> int:
        """Reads from UP in the last run that it did not bring."""

    @property
    def orders_cells(self) -> bool:
        """
        Attention reads KV cells in order, wherever they are: it depends on no other sequence.
        """

    @property
    def weights(self) -> list[str]:
        """
        Names of the weights that this rank reads, of whole tensors where it reads slices.
        """

    @property
    def hidden_bytes(self) -> int:
        """
        Bytes of weights that libllama's loader was not shown: other ranks', mapped ones, and those repacked from a map.
        """

    @property
    def mapped_bytes(self) -> int:
        """Bytes of weights that are used in the mapped file."""

    @property
    def mapped_ranges(self) -> list[tuple[int, int]]:
        """Where those are: addresses and bytes."""

    @property
    def slice_bytes(self) -> int:
        """Bytes of weights that `load_next` copies or reads."""
