"""A session inside one process: head and workers as threads, real stages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from commands import TARGET

from ggpipe.config import ContextConfig, EngineConfig, LoadMode, ModelConfig, PipelineConfig, SamplingConfig
from ggpipe.engine.model_file import ModelFile
from ggpipe.engine.stage import Stage
from ggpipe.errors import RunError
from ggpipe.runtime.session import Session
from ggpipe.runtime.stats import RequestStats
from ggpipe.runtime.worker import Worker
from ggpipe.transport.local import LocalWorld

GREEDY = SamplingConfig(temp=0, ignore_eos=True)


@contextmanager
def session(n_ranks: int) -> Iterator[Session]:
    config = EngineConfig(ModelConfig(TARGET), ContextConfig(512, n_ubatch=8), PipelineConfig(threads=(1,)))
    transports = LocalWorld(n_ranks).transports
    workers = [threading.Thread(target=Worker(t, config).serve, daemon=True) for t in transports[1:]]
    for worker in workers:
        worker.start()
    try:
        with Session(transports[0], config) as head:
            yield head
    finally:
        for worker in workers:
            worker.join(10)
            assert not worker.is_alive()


def text(head: Session, prompt: str, n: int, stats: RequestStats | None = None) -> str:
    return "".join(token.text for token in head.generate(head.vocab.tokenize(prompt), GREEDY, n, stats))


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_serves_several_requests(n_ranks: int) -> None:
    with session(n_ranks) as head:
        head.load()
        stats = RequestStats()
        first = text(head, "Once upon a time there was a king who had three sons", 30, stats)
        assert text(head, "The wolf", 30) != first
        assert text(head, "Once upon a time there was a king who had three sons", 30) == first
        assert stats.n_generated == 30
        assert stats.finish == "length"
        assert len(stats.runs) > 30  # the prompt took several
        assert all(rank.runs == len(stats.runs) for rank in stats.ranks)


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_an_abandoned_request_is_out_of_the_way(n_ranks: int) -> None:
    with session(n_ranks) as head:
        head.load()
        tokens = head.generate(head.vocab.tokenize("The wolf"), GREEDY, 100)
        next(tokens)
        tokens.close()
        assert text(head, "The wolf", 20) == text(head, "The wolf", 20)


@pytest.mark.parametrize("mode", ["mmap", "none"])
def test_loading_can_be_stopped(mode: LoadMode) -> None:
    config = ModelConfig(TARGET, load_mode=mode)
    with pytest.raises(RunError, match="stopped"):
        Stage(ModelFile.open(TARGET), (0, 8), config, ContextConfig(256), (1, 1), lambda _done, _all: False)


def test_a_stop_while_loading_ends_the_session() -> None:
    with session(2) as head:
        head.stop()
        with pytest.raises(RunError, match="while loading"):
            head.load()
