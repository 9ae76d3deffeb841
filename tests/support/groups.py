"""A stage that is a tensor-parallel group, its parts being threads of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.messages import Run
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group import Group
from ggpipe.llama.libllama import native
from ggpipe.llama.stage import Outcome, Stage

T = TypeVar("T")
_WAIT_S = 120


class Parts:
    """All parts of a group; each call is made on all of them at once."""

    def __init__(
        self,
        file: ModelFile,
        layers: tuple[int, int],
        model: ModelConfig,
        context: ContextConfig,
        shares: Sequence[float],
        saves_states: bool = False,
        threads: int = 1,
        pauses: bool = False,
    ) -> None:
        """`shares`: one for each part. `threads`: of each. `pauses`: see Stage."""
        n = len(shares)
        memory = os.memfd_create("group")
        self.sums = [native.shared_sum(memory, part, n) for part in range(n)]
        os.close(memory)
        self._threads = [ThreadPoolExecutor(1) for _ in range(n)]
        self.stages: list[Stage] = []

        def load(part: int) -> Stage:
            group = Group(part=part, n_parts=n, shares=tuple(shares), sum=self.sums[part])
            return Stage(
                file,
                layers,
                model,
                context,
                (threads, threads),
                saves_states=saves_states,
                group=group,
                pauses=pauses,
            )

        self.stages = self.each(load)

    def each(self, call: Callable[[int], T]) -> list[T]:
        """What a call gives for each part, each in its own thread. When it fails for one, the others are let go."""

        def guarded(part: int) -> T:
            try:
                return call(part)
            except BaseException:
                for sum in self.sums:
                    sum.abandon()
                raise

        futures = [thread.submit(guarded, part) for part, thread in enumerate(self._threads)]
        return [future.result(_WAIT_S) for future in futures]

    def decode(
        self,
        run: Run,
        incoming: bytes | bytearray | memoryview | None,
        headroom: int = 0,
        dead: frozenset[int] = frozenset(),
    ) -> Outcome:
        """What part 0 makes of a run; the others must make the same of it, but the logits."""
        outcomes = self.each(lambda part: self.stages[part].decode(run, incoming, headroom, dead))
        first = outcomes[0]
        for other in outcomes[1:]:
            assert other.outgoing == first.outgoing
            assert (other.cancelled, other.dropped) == (first.cancelled, first.dropped)
            assert not other.rows
        return first

    def close(self) -> None:
        """Free all parts, and end their threads."""
        for stage in self.stages:
            stage.close()
        for thread in self._threads:
            thread.shutdown()
