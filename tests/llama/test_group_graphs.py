"""Graphs of groups that come again: ggml's meta device divides a graph once, and later runs use what it made."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from support.groups import Parts
from support.pipeline import Pipeline
from support.reference import Logits, run_of
from support.zoo import make

from ggpipe.config.context import ContextConfig

CONTEXT = ContextConfig(n_ctx=1024, n_seq=4)
SIZES = (5, 1, 2, 1, 3, 2, 1, 5, 3)


def decoded(pipeline: Pipeline, sizes: Sequence[int]) -> list[Logits]:
    """All logits of a text whose runs have these numbers of rows."""
    for group, stage in zip(pipeline.groups, pipeline.stages, strict=True):
        for each in group.stages if group else (stage,):
            each.forget_all()
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        pipeline.decode(run_of(i + 1, [5 + (pos + j) % 100 for j in range(n)], pos))
        for i, (pos, n) in enumerate(zip(starts, sizes, strict=True))
    ]


def group_of(pipeline: Pipeline) -> Parts:
    (group,) = [group for group in pipeline.groups if group]
    return group


def new_graphs(pipeline: Pipeline) -> list[int]:
    """Of each part, so far."""
    return [stage._native.new_graphs for stage in group_of(pipeline).stages]


@pytest.mark.parametrize("shares", [(1, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3moe", "phi3", "deepseek2", "qwen2-tied"])
def test_the_same_bits(name: str, shares: tuple[float, ...], tmp_path: Path) -> None:
    path = make(name, tmp_path / "model.gguf", n_ff=512)
    with Pipeline(path, context=CONTEXT, shares=[shares]) as pipeline:
        first = decoded(pipeline, sorted(set(SIZES)))
        made = new_graphs(pipeline)
        again = decoded(pipeline, sorted(set(SIZES)))
        mixed = decoded(pipeline, SIZES)
        assert new_graphs(pipeline) == made
    with Pipeline(path, context=CONTEXT, shares=[shares]) as pipeline:
        fresh = decoded(pipeline, SIZES)
    for logits, expected in zip((*again, *mixed), (*first, *fresh), strict=True):
        np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("name", ["jamba", "mamba2"])
def test_states(name: str, tmp_path: Path) -> None:
    """A recurrent layer's graph differs by where states lie, too."""
    path = make(name, tmp_path / "model.gguf", n_ff=512)
    with Pipeline(path, context=CONTEXT, shares=[(1, 1)]) as pipeline:
        runs = [decoded(pipeline, SIZES) for _ in range(3)]
        assert new_graphs(pipeline)[0] < 2 * len(SIZES)
    for again in runs[1:]:
        np.testing.assert_array_equal(np.concatenate(again), np.concatenate(runs[0]))


def test_in_the_middle_of_a_pipeline(tmp_path: Path) -> None:
    path = make("llama", tmp_path / "model.gguf", n_ff=512)
    with Pipeline(path, (1, 2), CONTEXT, shares=[(1,), (1, 2), (1,)]) as pipeline:
        first, again = decoded(pipeline, SIZES), decoded(pipeline, SIZES)
    np.testing.assert_array_equal(np.concatenate(first), np.concatenate(again))


def test_more_sizes_than_graphs_are_kept(tmp_path: Path) -> None:
    path = make("llama", tmp_path / "model.gguf", n_ff=512)
    sizes = [*range(1, 31), 30, 29, 28, 1]
    with Pipeline(path, context=CONTEXT, shares=[(1, 1)]) as pipeline:
        decoded(pipeline, [1])
        (before, *_) = new_graphs(pipeline)
        first = decoded(pipeline, sizes)
        (after, *_) = new_graphs(pipeline)
        assert after > before + 29
        again = decoded(pipeline, sizes)
    np.testing.assert_array_equal(np.concatenate(first), np.concatenate(again))


@pytest.mark.parametrize("between", [(), (1,), (3, 1)], ids=str)
def test_after_a_cancel(between: tuple[int, ...], tmp_path: Path) -> None:
    """A graph that was not computed to its end is no known one, whether it comes again at once or later."""
    path, tokens = make("llama", tmp_path / "model.gguf", n_ff=512), range(5, 105)
    first, long = run_of(1, range(5, 8), 0), run_of(2, [*tokens] * 4, 3)

    def after(pipeline: Pipeline) -> Logits:
        logits = [pipeline.decode(run_of(10 + n, range(20, 20 + n), 3, (n,))) for n in between]
        return np.concatenate([*logits, pipeline.decode(structs.replace(long, id=20))])

    def after_a_cancel() -> Logits | None:
        with Pipeline(path, context=CONTEXT, shares=[(1, 1)]) as pipeline:
            pipeline.decode(first)
            group, done = group_of(pipeline), threading.Event()

            def cancel() -> None:
                while not done.wait(1e-4):
                    group.stages[1].cancel(long.id)

            thread = threading.Thread(target=cancel)
            thread.start()
            outcome = pipeline.outcome(long)
            done.set()
            thread.join()
            return after(pipeline) if outcome.cancelled else None

    found = (after_a_cancel() for _ in range(20))  # on a busy machine it may come too late
    logits = next(each for each in found if each is not None)
    with Pipeline(path, context=CONTEXT, shares=[(1, 1)]) as pipeline:
        pipeline.decode(first)
        np.testing.assert_array_equal(logits, after(pipeline))
