"""The engine: several requests at a time on one pipeline, cancelled, waiting, and one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.commands import TARGET
from support.pipeline import local_ranks
from support.requests import asked

from ggpipe.channel.client import ClientRequest
from ggpipe.channel.events import RequestEnded, TokenReady
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.core.request import Finish
from ggpipe.engine.session import Session
from ggpipe.errors import SettingError, UsageError

DRAFT = TARGET.with_name("tales-draft.gguf")
GREEDY = SamplingConfig(temp=0)
PROMPTS = ("Once upon a time", "The wolf said to the", "There was a king who had")


@contextmanager
def engine(n_ranks: int, n_draft_ranks: int = 0, n_requests: int = 3) -> Iterator[Session]:
    context = ContextConfig(n_ctx=512, n_ubatch=16, n_seq=n_requests + 1, exact=True)
    draft = DraftConfig(
        model=ModelConfig(path=DRAFT),
        context=ContextConfig(n_ctx=512, n_seq=n_requests + 1),
        layer_split=LayerSplit((1.0,) * n_draft_ranks) if n_draft_ranks else None,
    )
    config = EngineConfig(
        model=ModelConfig(path=TARGET),
        context=context,
        pipeline=PipelineConfig(threads=(1,)),
        drafts=(draft,),
        n_requests=n_requests,
    )
    with local_ranks(config, n_ranks + n_draft_ranks) as head:
        own = Session.load(head)
        yield own


def serve(own: Session, requests: list[ClientRequest]) -> dict[int, list[int]]:
    """All tokens of each, by its id. Every token comes before the end of its request."""
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    ended: list[int] = []
    while any(request.is_active for request in requests) or len(ended) < len(requests):
        for event in own.step():
            match event:
                case TokenReady(request, token):
                    assert request not in ended
                    tokens[request].append(token.id)
                case RequestEnded(request=request):
                    ended.append(request)
    return tokens


def submit(own: Session, text: str, n: int, mode: Mode) -> ClientRequest:
    return own.submit(asked(own.vocab.tokenize(text), GREEDY, n, SpeculationConfig(mode=mode)))


@pytest.mark.parametrize(("n_ranks", "n_draft_ranks", "mode"), [(1, 0, "async"), (2, 1, "async"), (2, 1, "iterative")])
def test_several_requests_at_a_time(n_ranks: int, n_draft_ranks: int, mode: Mode) -> None:
    """Each writes what it writes alone, and they take turns; a fourth waits until there is room."""
    with engine(n_ranks, n_draft_ranks) as own:
        alone = [serve(own, [submit(own, text, 24, mode)]).popitem()[1] for text in PROMPTS]
        together = [submit(own, text, 24, mode) for text in (*PROMPTS, PROMPTS[0])]
        first_s = [stats.token_times for stats in (request.stats for request in together)]
        tokens = serve(own, together)
        assert [tokens[request.id] for request in together] == [*alone, alone[0]]
        assert all(request.stats.finish is Finish.LENGTH for request in together)
        assert max(times[0] for times in first_s[:3]) < min(times[-1] for times in first_s[:3]), "one after the other"
        assert first_s[3][0] > min(times[-1] for times in first_s[:3]), "more at a time than asked for"
        queued_s = [request.stats.queue_s for request in together]
        assert all(s is not None for s in queued_s)
        assert queued_s[3] == max(queued_s, key=lambda s: s or 0.0)
        for request in together:
            assert sum(run.n_rows for run in request.stats.runs) >= request.stats.n_prompt
            assert {run.request for run in (*request.stats.runs, *request.stats.draft_runs)} <= {request.id}


def test_a_cancelled_request_leaves_the_others_alone() -> None:
    with engine(2) as own:
        expected = serve(own, [submit(own, PROMPTS[1], 30, "async")]).popitem()[1]
        first, second, third = (submit(own, text, 30, "async") for text in PROMPTS)
        own.cancel(first)
        tokens: list[int] = []
        while second.is_active:
            for event in own.step():
                if isinstance(event, TokenReady) and event.request == second.id:
                    tokens.append(event.token.id)
                    own.cancel(third)
        assert tokens == expected
        assert first.stats.finish is third.stats.finish is Finish.STOPPED
        own.cancel(second)  # over: nothing happens


def test_what_is_refused() -> None:
    with engine(1, n_requests=2) as own:
        with pytest.raises(UsageError, match="the prompt is empty"):
            own.begin(asked((), GREEDY))
        with pytest.raises(UsageError, match="the context only 512"):
            own.begin(asked((5,) * 512, GREEDY))
        assert len(serve(own, [submit(own, PROMPTS[0], 4, "async")]).popitem()[1]) == 4
    with pytest.raises(SettingError, match="n_requests"):
        EngineConfig(model=ModelConfig(path=TARGET), n_requests=2)
