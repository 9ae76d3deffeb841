"""Profiles that are measured inside one process, and what holds for any."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ggpipe.cluster.profile import Profile, read
from ggpipe.config.context import ContextConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.errors import GgpipeError, RankError, UsageError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_shape import facts_of
from ggpipe.profiling.profile import profile_ranks
from ggpipe.transport.base import Transport
from ggpipe.transport.local import LocalWorld
from support.commands import HANG_S

BUDGET_S = 0.3


def measure(
    configs: list[EngineConfig],
    layers: tuple[int, int] | None = None,
    attend: Callable[[], None] = lambda: None,
    transports: list[Transport] | None = None,
    budget_s: float = BUDGET_S,
) -> tuple[Profile | None, list[GgpipeError]]:
    """A rank for each config, the first one in this thread; its profile, or what each rank raised."""
    transports = transports or list(LocalWorld(len(configs)).transports)
    raised: list[GgpipeError] = []

    def work(i: int) -> Profile | None:
        try:
            own = attend if i == 0 else lambda: None
            return profile_ranks(transports[i], configs[i], layers, budget_s, own)
        except GgpipeError as e:
            raised.append(e)
            return None

    others = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(1, len(configs))]
    for other in others:
        other.start()
    profile = work(0)
    for other in others:
        other.join(HANG_S)
        assert not other.is_alive()
    return profile, raised


def config_of(model: Path, n_ctx: int = 0, **context: object) -> EngineConfig:
    return EngineConfig(ModelConfig(path=model), ContextConfig(n_ctx=n_ctx, **context), PipelineConfig(threads=(1,)))  # type: ignore[arg-type]


def check(profile: Profile, model: Path, layers: tuple[int, int]) -> None:
    """What holds for any profile."""
    facts = facts_of(ModelFile.open(model))
    assert profile.model == facts
    for rank in profile.ranks:
        assert rank.layers == layers
        assert rank.weight_bytes == facts.weight_bytes(layers)
        assert (rank.threads, rank.threads_batch) == (1, 1)
        assert rank.cores >= 1
        assert rank.memory_bytes > 1 << 20
        assert rank.memory_bytes_per_s > 0
        assert rank.disk_bytes_per_s > 0
        assert rank.overheads.run_s > 0
        assert rank.overheads.event_s > 0
        assert rank.overheads.poll_s > 0
        assert rank.turns is None or (rank.turns >= 1 and len(profile.ranks) > 1)
        assert {1, 2, 4, 8} <= {point.rows for point in rank.alone}
        assert {point.rows for point in rank.together} == {1, 2, 4, 8}
        shortest = min(point.n_past for point in rank.alone)
        assert {point.n_past for point in rank.together} == {shortest}
        assert (rank.half is None) == (layers[1] - layers[0] == 1)
        if rank.half is not None:
            assert rank.half.layers == (layers[0], (layers[0] + layers[1]) // 2)
            assert rank.half.weight_bytes == facts.weight_bytes(rank.half.layers)
            assert 0 <= rank.fixed_s <= max(point.seconds for point in rank.half.alone)
    n = len(profile.ranks)
    assert {(link.source, link.target) for link in profile.links} == {
        (a, b) for a in range(n) for b in range(n) if a != b
    }
    assert all(link.latency_s > 0 for link in profile.links)


def refused(configs: list[EngineConfig], layers: tuple[int, int] | None = None) -> str:
    """What the first rank raises; all others end as well."""
    profile, raised = measure(configs, layers)
    assert profile is None
    assert len(raised) == len(configs)
    others = [error for error in raised if not isinstance(error, RankError) or "another rank" not in str(error)]
    assert len(others) == 1
    assert "\n" not in str(others[0])
    return str(others[0])


def refuse(content: object, why: str, path: Path) -> None:
    """Such a profile is damaged, and one line says why."""
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=why) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
