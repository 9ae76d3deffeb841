"""Sessions with draft heads: what all kinds of heads are held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import LoadMode, ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.errors import ModelError
from support import examples
from support.commands import TARGET
from support.draft_heads import all_at_once, chains_sent, modes_of
from support.pipeline import local_session
from support.requests import asked
from support.tale import DRAWN, GREEDY, N_CTX, N_TOKENS, generate, plain, prompt

Shares = tuple[float, ...]
PLACES: Mapping[str, tuple[Shares, bool]] = {
    "two ranks": ((0.5, 0.5), True),
    "three ranks": ((0.4, 0.3, 0.3), True),
    "in the head's process": ((0.6, 0.4), False),
    "one rank": ((1.0,), False),
}
"""Shares of the target's ranks, and whether the head has a rank of its own."""


def config_of(
    *shares: float,
    heads: Sequence[Path],
    own: bool = True,
    exact: bool = True,
    target: Path = TARGET,
    n_requests: int = 1,
    fast_kernels: bool = True,
    load_mode: LoadMode = "mmap",
) -> EngineConfig:
    """`own`: each head has a rank of its own; otherwise it is inside the first rank's process. `fast_kernels`,
    `load_mode`: of the heads."""
    context = ContextConfig(n_ctx=N_CTX, n_ubatch=32, n_seq=2 * n_requests, n_branches=16, fast_kernels=fast_kernels)
    drafts = tuple(
        DraftConfig(
            model=ModelConfig(path=head, load_mode=load_mode),
            context=context,
            layer_split=LayerSplit((1.0,)) if own else None,
        )
        for head in heads
    )
    target_context = ContextConfig(n_ctx=N_CTX, n_ubatch=32, n_seq=2 * n_requests, n_branches=16, exact=exact)
    pipeline = PipelineConfig(LayerSplit(shares), threads=(1,))
    return EngineConfig(ModelConfig(path=target), target_context, pipeline, drafts, n_requests=n_requests)


def check_text(head: Path, kind: str, place: str) -> tuple[int, int]:
    """The text stays libllama's. `place`: of PLACES. Returns how many greedy draft tokens were judged, and were right.

    Without `full`, each place has one mode in which tokens are drawn as well.
    """
    judged = right = 0
    modes, (shares, own) = modes_of(kind), PLACES[place]
    with local_session(config_of(*shares, heads=(head,), own=own), len(shares) + own) as session:
        assert [rank.drafter for rank in session.ranks] == [""] * len(shares) + [kind]
        for i, (name, speculation) in enumerate(modes.items()):
            tokens, stats = generate(session, GREEDY, speculation)
            assert tokens == plain(GREEDY, prompt()), name
            n, n_right = stats.counters.by_drafter.get(0, (0, 0))
            judged, right = judged + n, right + n_right
            if examples.full or list(PLACES)[i] == place:
                assert generate(session, DRAWN, speculation)[0] == plain(DRAWN, prompt()), name
        short = prompt()[:1]  # no state to draft from, until a token is accepted
        assert generate(session, GREEDY, modes["speculative"], short)[0] == plain(GREEDY, short)
    return judged, right


def check_default_numerics(head: Path, kind: str) -> int:
    """The same text as without draft tokens: a few near-ties aside, which this one does not have. Returns the number of
    accepted draft tokens."""
    modes = modes_of(kind)
    with local_session(config_of(0.5, 0.5, heads=(head,), exact=False), 3) as session:
        expected, _ = generate(session, GREEDY, SpeculationConfig(mode="iterative"))
        assert generate(session, GREEDY, modes["async"])[0] == expected
        tokens, stats = generate(session, GREEDY, modes["speculative"])  # where no drafter pauses
    assert tokens == expected
    return stats.counters.accepted_tokens


def check_several_requests(head: Path, kind: str) -> None:
    """Requests at a time have the text that each has alone."""
    prompts = [prompt(), prompt()[:20], (*prompt()[:40], *prompt()[10:30])]
    with local_session(config_of(0.5, 0.5, heads=(head,), n_requests=3), 3) as session:
        for mode in ("async", "speculative"):  # the second time, prefixes are cached
            speculation = modes_of(kind)[mode]
            found, _ = all_at_once(session, [asked(tokens, GREEDY, N_TOKENS, speculation) for tokens in prompts])
            assert found == [plain(GREEDY, tokens) for tokens in prompts]
        _, stats = generate(session, GREEDY, speculation)  # alone: its runs always wait for the head
    assert stats.counters.drafted_tokens > 0


DraftsOf = Callable[[Sequence[int], Sequence[int], Sequence[int], int], dict[int, list[int]]]
"""Prompt, output, numbers of accepted tokens, and how many tokens are drafted after each of them -> those."""


def check_drafts(
    head: Path,
    kind: str,
    drafts_of: DraftsOf,
    monkeypatch: pytest.MonkeyPatch,
    fast_kernels: bool = True,
    **settings: Any,
) -> int:
    """Draft tokens are `drafts_of`'s, drafted in turn with the target, along the same text. Returns the number of
    accepted ones. Without `fast_kernels`, the head has ggml's bits. `settings`: further ones of `config_of`."""
    sent = chains_sent(monkeypatch)
    config = config_of(0.4, 0.3, 0.3, heads=(head,), fast_kernels=fast_kernels, **settings)
    with local_session(config, 4) as session:
        tokens, stats = generate(session, GREEDY, modes_of(kind)["speculative"])
    sent.pop(0, None)  # before the first token is sampled, llama.cpp drafts nothing
    expected = drafts_of(prompt(), tokens, sorted(sent), 3)
    same = sum(drafted == expected[epoch][: len(drafted)] for epoch, drafted in sent.items())  # fewer at the end
    assert len(sent) >= N_TOKENS / 4
    least = 0.95 if fast_kernels else 1.0
    assert same >= least * len(sent), "fast kernels may decide a near-tie differently"
    return stats.counters.accepted_tokens


def check_refused(message: str, *shares: float, **settings: object) -> None:
    """`settings`: of `config_of`. Loading ends with this message."""
    config = config_of(*(shares or (1.0,)), own=False, **settings)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=message), local_session(config, max(len(shares), 1)):
        pass
