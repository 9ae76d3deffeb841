"""What ranks compare before anything is loaded: the memory and the cores of their machines."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from support import in_process
from support.commands import SPLITS, TARGET

from ggpipe.cli.messages import in_flags
from ggpipe.cluster.memory import USABLE, memory_by_rank
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.core.layout import lay_out
from ggpipe.engine.handshake import check_memory, compare, hello, needs_by_rank, stream_memory
from ggpipe.engine.head import Head
from ggpipe.engine.session import Session
from ggpipe.errors import MemoryNeededError
from ggpipe.llama import machine
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_shape import shape_of
from ggpipe.transport.local import LocalWorld

CONFIG = EngineConfig(ModelConfig(path=TARGET), ContextConfig(n_ctx=1024))
FILE = ModelFile.open(TARGET)
LAYOUT = lay_out(FILE.n_layer, 2, None)
HELLO = hello(LocalWorld(1).transports[0], CONFIG, FILE, model=0)
MEMORY = [memory.total for memory in memory_by_rank(shape_of(FILE), LAYOUT, [], 1024, CONFIG.context.n_ubatch).values()]


def check(*machines: tuple[str, float], config: EngineConfig = CONFIG) -> None:
    """Each rank's machine and its bytes: two of the target, then one for each draft model."""
    drafts = [lay_out(FILE.n_layer, 1, LayerSplit((1.0,)), rank) for rank in range(2, len(machines))]
    hellos = [msgspec.structs.replace(HELLO, host=host, memory_bytes=int(size)) for host, size in machines]
    check_memory(hellos, config, FILE, LAYOUT, drafts)


def test_machines_have_the_memory_that_they_need() -> None:
    assert HELLO.memory_bytes > 0
    check(("a", MEMORY[0] * 1.1), ("b", MEMORY[1] * 1.1))
    check(("a", sum(MEMORY) * 1.1), ("a", sum(MEMORY) * 1.2))


def test_a_machine_lacks_memory() -> None:
    with pytest.raises(MemoryNeededError, match=r"^b needs 0\.\d GB for its ranks and has 0.0 GB available: "):
        check(("a", 1e9), ("b", 1e6))
    with pytest.raises(MemoryNeededError, match=r"^a needs "):
        check(("a", max(MEMORY) * 1.1), ("a", max(MEMORY) * 1.1))


def test_a_draft_inside_the_head_counts() -> None:
    draft = DraftConfig(model=CONFIG.model, layer_split=LayerSplit((1.0,)))
    enough = (("a", MEMORY[0] * 1.1), ("b", MEMORY[1] * 1.1), ("a", MEMORY[0] * 1.1))
    with pytest.raises(MemoryNeededError, match=r"^a needs "):
        check(*enough, config=replace(CONFIG, drafts=(draft,)))
    elsewhere = replace(draft, model=ModelConfig(path=TARGET / "missing"))
    check(*enough, config=replace(CONFIG, drafts=(elsewhere,)))


def test_memory_is_checked_on_request() -> None:
    text = ("generate", "-m", TARGET, "-p", "Once", "-n", 4, "-c", 256, "-t", 1, "--temp", 0)
    assert in_process.ggpipe_on_threads(*text, *SPLITS[2], "--check-memory").returncode == 0
    much = in_process.ggpipe_on_threads(*text, *SPLITS[2], "--check-memory", "-c", 2_000_000_000)
    assert much.returncode == 2
    assert "GB available: add machines or memory, or lower -c/--ctx-size or -ub/--ubatch-size" in much.stderr


def test_a_context_that_cannot_fit_is_refused() -> None:
    text = ("generate", "-m", TARGET, "-p", "Once", "-n", 4, "-t", 1, "--temp", 0)
    much = in_process.ggpipe_on_threads(*text, *SPLITS[2], "-c", 2_000_000_000)
    assert much.returncode == 2
    assert "GB available: add machines or memory, or lower -c/--ctx-size or -ub/--ubatch-size" in much.stderr


def test_a_model_that_does_not_fit_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 10**6)
    with Head(LocalWorld(1).transports[0], replace(CONFIG, context=ContextConfig())) as head:
        (warning,) = map(str, Session.load(head).warnings)
    assert warning.startswith("memory may run out later: ")


def test_draft_models_need_cells_for_what_they_see() -> None:
    def kv_bytes(window: int, n_ctx: int, n_requests: int = 1) -> float:
        context = ContextConfig(n_ctx=n_ctx, n_seq=n_requests)
        draft = DraftConfig(model=CONFIG.model, layer_split=LayerSplit((1.0,)), context=context, window=window)
        config = replace(CONFIG, context=context, drafts=(draft,), n_requests=n_requests)
        own = lay_out(FILE.n_layer, 1, LayerSplit((1.0,)), 2)
        return needs_by_rank(config, FILE, LAYOUT, [own])[2].kv

    cell = shape_of(FILE).cell_bytes((0, FILE.n_layer))
    assert kv_bytes(0, 65536) == 65536 * cell
    assert kv_bytes(8192, 65536) == (8192 + 256) * cell
    assert kv_bytes(8192, 65536, 4) == 4 * (8192 + 256) * cell
    assert kv_bytes(8192, 4096) == 4096 * cell


def streams(config: EngineConfig) -> bool:
    """Whether a single rank warns that it streams, rather than that memory may run out."""
    with Head(LocalWorld(1).transports[0], config) as head:
        (warning,) = map(str, Session.load(head).warnings)
    streams = warning.startswith("weights that do not fit into memory are read from the file when they are needed")
    assert streams or "memory may run out later: " in warning
    return streams


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_weights_that_do_not_fit_are_streamed(n_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share the memory that nothing else needs, in proportion to their weights."""
    layout = lay_out(FILE.n_layer, n_ranks, None)
    needs = needs_by_rank(CONFIG, FILE, layout, [])
    weights = sum(memory.weights for memory in needs.values())
    available = int((sum(memory.total for memory in needs.values()) - 0.25 * weights) / USABLE)
    hellos = [msgspec.structs.replace(HELLO, memory_bytes=10**9)] * n_ranks
    assert stream_memory(hellos, CONFIG, FILE, layout, []) == {}
    hellos = [msgspec.structs.replace(HELLO, memory_bytes=available)] * n_ranks
    shares = stream_memory(hellos, CONFIG, FILE, layout, [])
    assert shares == pytest.approx({rank: memory.weights * 0.75e-9 for rank, memory in needs.items()}, rel=0.01)

    given = replace(CONFIG, model=replace(CONFIG.model, stream_memory_gb=0.25))
    assert set(stream_memory(hellos, given, FILE, layout, []).values()) == {0.25}

    monkeypatch.setattr(machine, "available_bytes", lambda: available)
    if n_ranks == 1:
        exact = replace(CONFIG, context=ContextConfig(n_ctx=1024, exact=True))
        unpacked = replace(exact, model=replace(CONFIG.model, repack=False))
        assert [streams(config) for config in (CONFIG, exact, unpacked)] == [True, False, True]


def test_cells_take_their_memory_later_where_there_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    def warnings() -> tuple[str, ...]:
        config = replace(CONFIG, context=ContextConfig(), warmup=True)
        with Head(LocalWorld(1).transports[0], config) as head:
            return tuple(map(str, Session.load(head).warnings))

    assert not warnings()
    monkeypatch.setattr(machine, "available_bytes", lambda: 10**6)
    (warning,) = warnings()
    assert warning.startswith("`warmup` is left out, so that memory may run out later: ")
    assert "0.0 GB available" in warning


@pytest.mark.parametrize(
    ("ranks", "warning"),
    [
        ([("a", 2, 2)], ""),
        ([("a", 64, 2)], "a will be slow: its rank has 64 threads, and it has 2 cores: lower -t/--threads"),
        (
            [("a", 2, 2), ("a", 2, 2), ("b", 4, 8)],
            "a will be slow: its 2 ranks have 4 threads, and it has 2 cores: lower ",
        ),
        ([("a", 1, 2), ("a", 1, 2), ("a", 1, 2)], ""),
    ],
    ids=["fits", "one", "several", "more-ranks-than-cores"],
)
def test_more_threads_than_cores_are_warned_of(ranks: list[tuple[str, int, int]], warning: str) -> None:
    hellos = [msgspec.structs.replace(HELLO, host=host, n_threads=t, n_cores=c) for host, t, c in ranks]
    assert "".join(in_flags(line) for line in compare(hellos)).startswith(warning)
    assert bool(compare(hellos)) == bool(warning)
