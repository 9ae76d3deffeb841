"""An engine over a socket: the head in a thread, the front end in the test."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from support.channel import CONFIG, CONTEXT, Connected, served
from support.commands import TARGET
from support.pipeline import local_session
from support.requests import asked

from ggpipe.channel import link, messages
from ggpipe.channel.client import EngineClient
from ggpipe.channel.events import ChannelMessage
from ggpipe.channel.front_end import FrontEnd
from ggpipe.channel.remote import RemoteEngine, RemoteRanks
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.prompt import Conversation, ToolChoice
from ggpipe.core.request import Finish
from ggpipe.core.request_spec import RequestSpec
from ggpipe.engine.served import _Server
from ggpipe.engine.session import Session
from ggpipe.errors import (
    BodyError,
    GgpipeError,
    PromptTooLong,
    RunError,
    SettingError,
    UsageError,
)
from ggpipe.stats.records import RequestStats

GREEDY = SamplingConfig(temp=0, ignore_eos=True)
EXACT = replace(CONFIG, context=replace(CONTEXT, exact=True))
DRAFT = DraftConfig(model=ModelConfig(path=TARGET.with_name("tales-draft.gguf")), context=CONTEXT)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
DRAFTING = EngineConfig(CONFIG.model, CONTEXT, CONFIG.pipeline, (DRAFT,), n_requests=4)


def test_questions_are_answered_before_a_wait() -> None:
    """Otherwise, every prompt of an idle engine would wait for a whole step."""
    done: list[object] = []
    front_end = SimpleNamespace(take=lambda: [messages.Tokenize(b"a")], send=lambda *sent: done.extend(map(type, sent)))

    def step() -> list[object]:
        done.append("step")
        return []

    session = SimpleNamespace(tokenize=lambda text: (1,), engine=SimpleNamespace(step=step))
    _Server(cast(FrontEnd, front_end), cast(Session, session)).step()
    assert done == [messages.Tokenized, "step"]


def text(engine: EngineClient, prompt: str, n: int, stats: RequestStats | None = None) -> str:
    return "".join(token.text for token in engine.stream(asked(engine.tokenize(prompt), GREEDY, n), stats))


def expected(prompt: str, n: int) -> str:
    with local_session(CONFIG, 1) as session:
        return text(session, prompt, n)


def test_a_request_and_what_is_measured_of_it(connected: Connected) -> None:
    stats = RequestStats()
    with served(connected, DRAFTING) as ranks:
        engine = ranks.load()
        assert (engine.n_ctx, engine.can_speculate) == (4096, True)
        synchronous = SpeculationConfig(mode="speculative")
        tokens = list(engine.stream(asked(engine.tokenize("The wolf"), GREEDY, 30, synchronous), stats))
        engine.measure()
        engine.align_clocks()
        assert [rank.draft for rank in engine.ranks] == [False, True]
        assert all(rank.resident_bytes > 0 and rank.runs > 0 for rank in engine.ranks[:1])
    assert "".join(token.text for token in tokens) == expected("The wolf", 30)
    assert [token.drafted for token in tokens] == stats.drafted
    assert stats.finish is Finish.LENGTH
    assert stats.n_generated == len(stats.drafted) == 30
    assert stats.ended is not None
    assert stats.arrived <= stats.token_times[0] <= stats.token_times[-1] <= stats.ended
    assert stats.token_times == sorted(stats.token_times)
    assert stats.n_prompt > 0
    assert [run.id for run in stats.runs] == sorted({run.id for run in stats.runs})
    assert sum(run.n_rows for run in stats.runs) >= stats.n_prompt + 29 - stats.counters.accepted_tokens
    assert stats.draft_runs
    assert stats.counters.by_lead
    assert stats.ranks[0].runs == len(stats.runs)


def test_several_requests_at_a_time(connected: Connected) -> None:
    prompts = ("The wolf", "Once upon a time", "A king had a daughter")
    with served(connected) as ranks:
        engine = ranks.load()
        requests = [engine.submit(asked(engine.tokenize(prompt), GREEDY, 20)) for prompt in prompts]
        while any(request.is_active for request in requests):
            engine.step()
        told = ["".join(token.text for token in request.tokens) for request in requests]
    assert [request.error for request in requests] == [None] * 3
    assert [request.stats.n_generated for request in requests] == [20] * 3
    with local_session(CONFIG, 1) as session:
        assert told == [text(session, prompt, 20) for prompt in prompts]


SAID = Conversation(messages=({"role": "user", "content": "Tell me of the wolf"},))


def test_a_conversation_takes_one_trip(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    """The acceptance has the tokens and the format of the answer, from which other ranks can continue."""
    sent: list[object] = []
    send = RemoteRanks.send

    def noted(own: RemoteRanks, *all_messages: ChannelMessage) -> None:
        sent.extend(type(message) for message in all_messages)
        send(own, *all_messages)

    with served(connected) as ranks:
        engine = ranks.load()
        monkeypatch.setattr(RemoteRanks, "send", noted)
        request = engine.begin(asked(SAID, GREEDY, 12))
        found = [token.id for token in engine.tokens(request)]
        assert sent == [messages.SubmitRequest]
        read = engine.tokenize_chat(SAID)
    assert (request.prompt, request.answer_format) == (read.tokens, read.answer)
    assert request.stats.n_prompt == len(read.tokens)
    assert request.continued.prompt == read.tokens
    with local_session(CONFIG, 1) as session:
        assert found == [token.id for token in session.stream(asked(read.tokens, GREEDY, 12))]


def test_a_prompt_of_texts_and_tokens(connected: Connected) -> None:
    with served(connected) as ranks:
        engine = ranks.load()
        begun, wolf = engine.tokenize("The"), engine.tokenize(" wolf")
        request = engine.begin(asked((b"The", 5, b" wolf"), GREEDY, 2))
        assert len(list(engine.tokens(request))) == 2
        assert request.prompt == (*begun, 5, *wolf[len(engine.tokenize("")) :])
        assert engine.begin(asked(b"caf\xe9", GREEDY, 1)).prompt == engine.tokenize("caf\udce9")


@pytest.mark.parametrize(
    ("spec", "kind", "fields"),
    [
        (asked((5,) * 5000), PromptTooLong, {"n_prompt": 5000, "n_ctx": 4096}),
        (asked((10**6,)), UsageError, {}),
        (asked(b"a", SamplingConfig(grammar="root ::= x")), SettingError, {"field": "grammar"}),
        (
            asked(
                replace(SAID, tools=(TOOL,), choice=ToolChoice(must_call=True)), SamplingConfig(grammar='root ::= "a"')
            ),
            BodyError,
            {"param": "tool_choice"},
        ),
    ],
)
def test_refusals_are_typed(
    spec: RequestSpec, kind: type[GgpipeError], fields: dict[str, object], connected: Connected
) -> None:
    with served(connected) as ranks:
        request = (engine := ranks.load()).submit(spec)
        while request.is_active:
            engine.step()
        assert type(request.error) is kind
        assert {name: getattr(request.error, name) for name in fields} == fields
        assert request.accepted is None
        assert text(engine, "The wolf", 3)


def test_a_request_goes_on_with_other_ranks(connected: Connected, others: Connected) -> None:
    sampling = SamplingConfig(temp=0.8, repeat_penalty=1.1, ignore_eos=True)  # the ranks choose a seed
    stats = RequestStats()
    with served(connected, EXACT) as ranks:
        engine = ranks.load()
        request = engine.submit(asked(engine.tokenize("The wolf"), sampling, 30), stats)
        while len(request.tokens) < 10:
            engine.step()
    seed, ttft_s, n_before = stats.seed, stats.ttft_s, len(request.tokens)
    with served(others, EXACT) as ranks:
        engine = ranks.load()
        engine.resume(request)
        while request.is_active:
            engine.step()
    assert (stats.seed, stats.ttft_s, stats.n_generated, stats.finish) == (seed, ttft_s, 30, Finish.LENGTH)
    assert [token.drafted for token in request.tokens] == stats.drafted
    assert sum(run.n_rows for run in stats.runs) == stats.n_prompt + 29
    assert stats.ranks[0].runs == len(stats.runs) == 30 - n_before
    with local_session(EXACT, 1) as session:
        again = session.submit(asked(request.prompt, replace(sampling, seed=seed), 30, resumed=request.token_ids[:5]))
        while again.is_active:
            session.step()
    assert again.token_ids == request.token_ids


def test_a_prompt_that_is_refused(connected: Connected) -> None:
    with served(connected) as ranks:
        engine = ranks.load()
        with pytest.raises(UsageError, match="the prompt is empty"):
            list(engine.stream(asked((), GREEDY)))
        with pytest.raises(UsageError, match="has 5000 tokens, but the context only 4096"):
            list(engine.stream(asked((5,) * 5000, GREEDY)))
        assert text(engine, "The wolf", 3) == expected("The wolf", 3)


def test_what_no_message_can_hold_is_refused(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the ranks serve the next request."""
    with served(connected) as ranks:
        engine = ranks.load()
        for value in (10**30, "\ud800", object()):
            said = Conversation(messages=({"role": "user", "content": "a"},), further={"x": value})
            with pytest.raises(UsageError, match="a value cannot be sent to the ranks"):
                engine.tokenize_chat(said)
        monkeypatch.setattr(link, "MAX_FRAME_BYTES", 20_000)
        for text_of in ("a" * 30_000, "é" * 8000):  # the question, and the answer
            with pytest.raises(UsageError, match="the maximum is 20000"):
                engine.tokenize(text_of)
        with pytest.raises(UsageError, match="the maximum is 20000"):
            list(engine.stream(asked((300,) * 10_000, GREEDY)))
        monkeypatch.undo()
        assert text(engine, "The wolf", 3) == expected("The wolf", 3)


def test_a_stop_ends_the_active_requests(connected: Connected) -> None:
    with served(connected) as ranks:
        engine = ranks.load()
        requests = [engine.submit(asked(engine.tokenize("The wolf"), GREEDY, 2000)) for _ in range(2)]
        while not all(request.tokens for request in requests):
            engine.step()
        engine.stop()
        while any(request.is_active for request in requests):
            engine.step()
        assert {request.stats.finish for request in requests} == {Finish.STOPPED}
        assert not ranks.is_ending()
        assert text(engine, "The wolf", 3)


def test_an_abandoned_request_is_out_of_the_way(connected: Connected) -> None:
    with served(connected) as ranks:
        engine = ranks.load()
        tokens = engine.stream(asked(engine.tokenize("The wolf"), GREEDY, 900))
        next(tokens)
        with pytest.raises(UsageError, match="one request at a time"):
            next(engine.stream(asked((5, 6), GREEDY, 5)))
        tokens.close()
        assert text(engine, "The wolf", 5) == expected("The wolf", 5)


def test_the_head_keeps_nothing_of_long_requests(connected: Connected) -> None:
    with served(connected) as ranks:
        engine = ranks.load()
        assert isinstance(engine, RemoteEngine)
        stats = RequestStats()
        text(engine, "The wolf", 900, stats)
        assert len(stats.runs) >= 900


def test_loading_is_stopped(connected: Connected) -> None:
    with served(connected) as ranks:
        ranks.stop()
        with contextlib.suppress(RunError):
            engine = ranks.load()
            stats = RequestStats()  # it was too late
            text(engine, "The wolf", 900, stats)
            assert stats.finish is Finish.STOPPED
