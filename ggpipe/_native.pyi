"""
ggml devices that hold a part of a model, the wire between them, and rows of logits. Needs llama_cpp first.
"""

from collections.abc import Callable, Sequence


def ggml_version() -> str:
    """The loaded ggml's version."""

def cpu_features() -> list[str]:
    """Instruction sets that ggml's CPU backend uses, NAME or NAME=VALUE."""

def gguf_header(path: bytes) -> tuple[dict[str, int | float | str | bool | tuple[int, ...]], dict[str, int], list[tuple[str, int, int, str]], int] | None:
    """
    Metadata (scalars, and short arrays of whole numbers), lengths of array metadata, tensors (name, offset in the
    file, bytes, type), and where the tensors' data begin. None when the file cannot be read; ggml logs why.
    """

def type_sizes() -> dict[str, tuple[int, int]]:
    """
    Of each type that tensors may have: numbers in a block, and bytes of a block.
    """

def lock_memory() -> str | None:
    """Keep in RAM whatever this process touches. Returns why not, or None."""

def set_timer_slack(nanoseconds: int) -> None:
    """
    How late the kernel may end this thread's timed waits, and those of threads it starts.
    """

def top(logits: int, n_vocab: int, k: int, banned: Sequence[int]) -> tuple[list[int], list[float], float]:
    """
    The k best of a row of f32 logits at this address: ids and logits, best first, equal ones by id; and the row's
    log-sum-exp (not a number for k = 1). Banned tokens count as minus infinity.
    """

class MappedModel:
    """A model's files, mapped read-only."""

    def __init__(self, paths: Sequence[bytes]) -> None: ...

class GroupSum:
    """Adds up tensors over the parts of a group; see native/group_sum.h."""

    def sum(self, data: int, n: int, stop: bool) -> bool:
        """
        Add up n floats at this address over all parts, in place. True: a part wants to stop, or is lost.
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

class Stage:
    """The native half of ggpipe.llama.stage.Stage; see native/stage.h."""

    def __init__(self, *, first: bool, repack: bool, exact: bool, fast_attention: bool) -> None: ...

    def join(self, *, file: MappedModel, part: int, n_parts: int, sum: GroupSum, ask: int, model: int, split_attention: bool) -> None:
        """
        Before `devices`: this rank computes its layers with others. ask, model: addresses of libllama's function that
        splits weights, and of a model without weights, which `leave_model` gives back.
        """

    def leave_model(self) -> None:
        """Once there is a context: `model` is not asked again."""

    def devices(self) -> tuple[int, int, int]:
        """Addresses of the ggml devices UP, LOCAL and DOWN."""

    def begin_load(self, mapping: MappedModel | None) -> None:
        """Before libllama loads: hide what is not ours."""

    def end_load(self) -> None:
        """After libllama has loaded, or failed to."""

    def load_slices(self, progress: Callable[[int], bool]) -> None:
        """
        In a group, after end_load: get this rank's part of each weight; tells bytes done, and stops when the answer is
        False.
        """

    def populate(self, progress: Callable[[int, int], bool]) -> None:
        """
        Read the mapped weights into memory; tells bytes done and bytes in all, and stops when the answer is False.
        """

    def begin_run(self, run: int, incoming: bytes | bytearray | memoryview | None, headroom: int) -> None:
        """
        Before llama_decode: the bytes from the rank before this one, which must stay as they are until end_run, and
        how many bytes to leave free in front of those for the next.
        """

    def end_run(self) -> bytearray:
        """After llama_decode: the headroom, then the bytes for the next rank."""

    def cancel(self, run: int) -> None:
        """Stop this run if it is being computed. From any thread."""

    @property
    def n_threads(self) -> int:
        """In a group: how many threads the next run has."""

    @n_threads.setter
    def n_threads(self, arg: int, /) -> None: ...

    @property
    def lost(self) -> bool:
        """A part of the group is lost."""

    @property
    def unsummable(self) -> str:
        """In a group: a tensor whose parts cannot be added up."""

    @property
    def new_graphs(self) -> int:
        """
        In a group: graphs that ggml's meta device had to divide; others were known.
        """

    @property
    def undividable(self) -> str:
        """
        In a group, after loading: a weight that is to be divided, and whose rows are one block each.
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
    def hidden_bytes(self) -> int:
        """
        Bytes of weights that libllama's loader was not shown: other ranks', and mapped ones.
        """

    @property
    def mapped_bytes(self) -> int:
        """Bytes of weights that `populate` reads."""

    @property
    def slice_bytes(self) -> int:
        """Bytes of weights that `load_slices` copies."""
