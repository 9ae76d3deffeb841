"""Pipelines inside this process: stages called one after the other, or all the ranks of a session as threads."""

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ggpipe.config.context import ContextConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.messages import Run
from ggpipe.engine.handshake import check_cuts
from ggpipe.engine.head import Head
from ggpipe.engine.session import Session
from ggpipe.engine.worker import Worker
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.partial_model import weights_of
from ggpipe.llama.stage import Outcome, Stage
from ggpipe.transport.local import LocalWorld
from support.commands import HANG_S
from support.groups import Parts
from support.reference import Logits

HEADROOM = 24


class Pipeline:
    """As many stages as there are cuts, and one more."""

    def __init__(
        self,
        path: Path,
        cuts: Sequence[int] = (),
        context: ContextConfig | None = None,
        model: ModelConfig | None = None,
        threads: int = 1,
        n_prefixes: int = 0,
        saves_states: bool = False,
        shares: Sequence[Sequence[float]] = (),
    ) -> None:
        """`cuts`: the layers that a further stage begins with. Raises ModelError where the model cannot be cut so.
        `shares`: of each stage's parts; a stage with several is a group.

        Without `context`, attention is ggml's: libllama's bits.
        """
        file = ModelFile.open(path)
        edges = (0, *cuts, file.n_layer)
        self.stages: list[Stage] = []
        """Of a group, its part 0."""
        self.groups: list[Parts | None] = []
        """For each stage."""
        model, context = model or ModelConfig(path=path), context or ContextConfig(n_ctx=256, fast_kernels=False)
        try:
            for i, layers in enumerate(itertools.pairwise(edges)):
                if i < len(shares) and len(shares[i]) > 1:
                    group = Parts(file, layers, model, context, shares[i], saves_states, threads)
                    self.groups.append(group)
                    self.stages.append(group.stages[0])
                    for part in group.stages:
                        check_weights(file, layers, part)
                    continue
                stage = Stage(
                    file,
                    layers,
                    model,
                    context,
                    (threads, threads),
                    n_prefixes=n_prefixes,
                    saves_states=saves_states,
                )
                self.groups.append(None)
                self.stages.append(stage)
                check_weights(file, layers, stage)
            check_cuts([stage.cut for stage in self.stages], file.architecture)
        except BaseException:
            self.close()
            raise

    def decode(self, run: Run) -> Logits:
        """A run through all stages: logits of the wanted rows, (rows, vocabulary)."""
        outcome = self.outcome(run)
        assert not outcome.cancelled
        assert tuple(row.row for row in outcome.rows) == tuple(
            i for i, r in enumerate(run.rows) if r.logits_request >= 0
        )
        return np.array([row.logits for row in outcome.rows])

    def outcome(self, run: Run) -> Outcome:
        """What the last stage makes of a run."""
        incoming = None
        for stage, group in zip(self.stages, self.groups, strict=True):
            outcome = (group or stage).decode(run, incoming, HEADROOM)
            assert not any(outcome.outgoing[:HEADROOM])
            incoming = outcome.outgoing[HEADROOM:]
            assert stage.is_last == (not incoming) or outcome.cancelled or not run.rows
        return outcome

    def close(self) -> None:
        """Free all stages."""
        for stage, group in zip(self.stages, self.groups, strict=True):
            (group or stage).close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_weights(file: ModelFile, layers: tuple[int, int], stage: Stage) -> None:
    """A stage reads no weights but those that a machine gets for it."""
    assert set(stage._native.weights) <= set(weights_of(file, layers)), file.architecture


@contextlib.contextmanager
def local_ranks(config: EngineConfig, n_ranks: int) -> Iterator[Head]:
    """The head of ranks that are threads, with nothing loaded yet."""
    world = LocalWorld(n_ranks)
    workers = [threading.Thread(target=Worker(rank, config).serve, daemon=True) for rank in world.transports[1:]]
    for worker in workers:
        worker.start()
    with Head(world.transports[0], config) as head:
        yield head
    for worker in workers:
        worker.join(HANG_S)
        assert not worker.is_alive()


@contextlib.contextmanager
def local_session(config: EngineConfig, n_ranks: int) -> Iterator[Session]:
    """A loaded session; its workers are threads."""
    with local_ranks(config, n_ranks) as head:
        yield Session.load(head)


def even_cuts(n_layer: int, n_stages: int) -> tuple[int, ...]:
    """Cuts into ranges of about the same length."""
    return tuple(n_layer * i // n_stages for i in range(1, n_stages))


def random_cuts(n_layer: int, n_stages: int, seed: int) -> tuple[int, ...]:
    """Cuts anywhere, a layer or more for each stage."""
    chosen = np.random.default_rng(seed).choice(np.arange(1, n_layer), n_stages - 1, replace=False)
    return tuple(sorted(chosen.tolist()))
