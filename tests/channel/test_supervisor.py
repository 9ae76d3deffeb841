"""Ranks that die and are restarted, without processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.mortal_engines import GREEDY, FakeRanks, Rig
from support.requests import asked

from ggpipe.channel.client import EngineClient
from ggpipe.channel.events import RequestEnded, RequestEvent
from ggpipe.channel.messages import EngineLoaded, ModelInfo
from ggpipe.channel.supervisor import Budget
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prefixes import ErasePrefix, PrefixDone, RestorePrefix, SavePrefix
from ggpipe.core.prompt import Conversation
from ggpipe.core.request import Finish
from ggpipe.errors import (
    GgpipeError,
    ModelError,
    RankError,
    RunError,
    SilentRankError,
    StartError,
    Terminated,
    UsageError,
)


def step_until(engine: EngineClient, condition: Callable[[], bool]) -> None:
    while not condition():
        engine.step()


WHOLE = "0 1 2 3 4 5 "


def test_nothing_happens() -> None:
    rig = Rig(FakeRanks("first"))
    with rig.engine() as engine:
        assert rig.text(engine) == WHOLE
    assert (rig.lines, rig.started, rig.ended) == ([], ["first"], [None])


@pytest.mark.parametrize(
    "error",
    [RankError("it is gone"), SilentRankError("it is gone"), Terminated("it is gone")],
    ids=lambda e: type(e).__name__,
)
def test_a_text_goes_on_with_new_ranks(error: GgpipeError) -> None:
    rig = Rig(FakeRanks("first", dies_at=2, error=error), FakeRanks("second"))
    with rig.engine() as engine:
        assert rig.text(engine) == WHOLE
        assert [rank.host for rank in rig.supervisor.ranks] == ["second"]
        assert rig.text(engine) == WHOLE
    assert rig.lines[0] == "it is gone; starting the ranks again (1 of 1)"
    assert rig.ended == [error, None]
    assert error.is_reported
    assert not rig.supervisor.is_loading


def test_only_new_warnings_are_shown() -> None:
    rig = Rig(FakeRanks("first", dies_at=2), FakeRanks("second"))
    with rig.engine() as engine:
        rig.text(engine)
        assert tuple(map(str, engine.warnings)) == ("warning of first", "another one", "warning of second")
    assert rig.lines[1:] == ["warning: warning of second"]


def test_several_requests_go_on() -> None:
    rig = Rig(FakeRanks("first", dies_at=3), FakeRanks("second", dies_at=4), FakeRanks("third"), n_restarts=2)
    with rig.engine() as engine:
        requests = [engine.submit(asked((1,), SamplingConfig(), n)) for n in (2, 6, 9)]
        step_until(engine, lambda: not any(request.is_active for request in requests))
    assert [[token.id for token in request.tokens] for request in requests] == [list(range(n)) for n in (2, 6, 9)]
    assert [request.stats.finish for request in requests] == [Finish.LENGTH] * 3
    assert [request.continued.sampling.seed for request in requests] == [7, 7, 7], "the seed that was drawn"


def test_a_request_that_was_cancelled_is_not_served_again() -> None:
    rig = Rig(FakeRanks("first", dies_at=2), FakeRanks("second"))
    with rig.engine() as engine:
        one, other = engine.submit(asked((1,), GREEDY, 6)), engine.submit(asked((1,), GREEDY, 6))
        step_until(engine, lambda: len(other.tokens) == 2)
        assert rig.started == ["first"]
        engine.cancel(one)
        ended: list[int] = []
        while other.is_active:
            ended += [event.request for event in engine.step() if isinstance(event, RequestEnded)]
    assert ended == [one.id, other.id]
    assert (one.stats.finish, other.stats.finish) == (Finish.STOPPED, Finish.LENGTH)
    assert len(one.tokens) == 2


def test_orders_are_given_again_unless_they_were_cancelled() -> None:
    rig = Rig(first := FakeRanks("first"), FakeRanks("second"))
    with rig.engine() as engine:
        orders = (
            engine.order(lambda id: SavePrefix(id, (1, 2), "tale")),
            engine.order(lambda id: RestorePrefix(id, (3, 4), "other")),
            engine.order(lambda id: ErasePrefix(id, (5,))),
        )
        engine.cancel(orders[1])
        first.is_dead = True
        done: list[RequestEvent] = []
        while len(done) < len(orders):
            done += engine.step()
    saved, cancelled, erased = (order.id for order in orders)
    assert done == [PrefixDone(cancelled), PrefixDone(saved, 5), PrefixDone(erased, 5)]


def test_ranks_that_die_again_at_once_end_a_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(first := FakeRanks("first"), second := FakeRanks("second"), FakeRanks("third"), n_restarts=2)
    loaded = second.loaded

    def dead() -> EngineLoaded:
        found = loaded()
        second.is_dead = True
        return found

    monkeypatch.setattr(second, "loaded", dead)
    with rig.engine() as engine:
        request = engine.submit(asked((1,), GREEDY, 6))
        engine.cancel(request)
        first.is_dead = True
        engine.measure()
        assert rig.started == ["first", "second", "third"]
        assert engine.step() == [request.ended]


@pytest.mark.parametrize("ask", ["measure", "align_clocks", "tokenize", "tokenize_chat", "idle"])
def test_questions_are_asked_again(ask: str) -> None:
    rig = Rig(first := FakeRanks("first"), FakeRanks("second"))
    with rig.engine() as engine:
        first.is_dead = True
        said = Conversation(messages=({"role": "user", "content": "ab"},))
        asking: dict[str, Callable[[], object]] = {
            "measure": engine.measure,
            "align_clocks": engine.align_clocks,
            "tokenize": lambda: engine.tokenize("ab"),
            "tokenize_chat": lambda: engine.tokenize_chat(said).tokens,
            "idle": lambda: engine.idle(0.01),
        }
        assert asking[ask]() == ((97, 98) if ask.startswith("tokenize") else None)
    assert rig.started == ["first", "second"]


# What is not tried again


def test_no_restart_is_left() -> None:
    rig = Rig(FakeRanks("first", dies_at=2), FakeRanks("second", dies_at=4, error=RankError("the last one")))
    with pytest.raises(RankError, match="the last one"), rig.engine() as engine:
        rig.text(engine)
    assert len(rig.lines) == 2
    assert isinstance(rig.ended[1], RankError)
    assert not rig.ended[1].is_reported


def test_no_restart_is_wanted() -> None:
    rig = Rig(FakeRanks("first", dies_at=2), n_restarts=0)
    with rig.engine() as engine:
        request = engine.submit(asked((1,), GREEDY, 6))
        step_until(engine, lambda: len(request.tokens) == 2)
        with pytest.raises(RankError):
            step_until(engine, lambda: not request.is_active)
    assert rig.lines == []


@pytest.mark.parametrize("error", [ModelError("`model` is damaged"), RunError("libllama cannot decode")])
def test_errors_that_would_come_again(error: GgpipeError) -> None:
    rig = Rig(FakeRanks("first", load_error=error), n_restarts=3)
    with pytest.raises(type(error)), rig.engine():
        pass
    rig = Rig(FakeRanks("first", dies_at=1), FakeRanks("second", load_error=error), n_restarts=3)
    with pytest.raises(RunError, match=str(error)), rig.engine() as engine:
        rig.text(engine)
    assert rig.started == ["first", "second"]


def test_ranks_do_not_start_again() -> None:
    rig = Rig(FakeRanks("first", dies_at=1), StartError("mpirun ended"))
    with pytest.raises(RunError, match="mpirun ended"), rig.engine() as engine:
        rig.text(engine)


def test_texts_do_not_go_on_with_another_model() -> None:
    other = FakeRanks("second", model=ModelInfo(fingerprint="another"))
    rig = Rig(FakeRanks("first", dies_at=2, model=ModelInfo(fingerprint="one")), other, n_restarts=3)
    with (
        pytest.raises(RunError, match="`model` has changed since it was first loaded"),
        rig.engine() as engine,
    ):
        rig.text(engine)
    assert rig.started == ["first", "second"]


def test_a_first_start_that_fails() -> None:
    rig = Rig(StartError("mpirun ended"), n_restarts=3)
    with pytest.raises(StartError), rig.engine():
        pass
    assert rig.lines == []


# Faults while ranks are started


def test_the_first_ranks_die_before_they_are_connected() -> None:
    rig = Rig(RankError("rank 1 (there) ended: signal 9"), FakeRanks("second"))
    with rig.engine() as engine:
        assert rig.text(engine) == WHOLE
    assert rig.lines[0] == "rank 1 (there) ended: signal 9; starting the ranks again (1 of 1)"
    rig = Rig(RankError("rank 1 (there) ended: signal 9"), n_restarts=0)
    with pytest.raises(RankError), rig.engine():
        pass


def test_a_fault_while_loading_is_one_more_restart() -> None:
    deaths = [RankError("one"), StartError("two"), RankError("three")]
    rig = Rig(
        FakeRanks("first", load_error=deaths[0]), deaths[1], FakeRanks("third", load_error=deaths[2]),
        FakeRanks("fourth", dies_at=0), FakeRanks("fifth"), n_restarts=4,
    )  # fmt: skip
    with rig.engine() as engine:
        assert rig.text(engine) == WHOLE
    assert [line for line in rig.lines if "again" in line] == [
        "one; starting the ranks again (1 of 4)",
        "two; starting the ranks again (2 of 4)",
        "three; starting the ranks again (3 of 4)",
        "rank 1 (there) is gone; starting the ranks again (4 of 4)",
    ]


def test_ranks_that_refuse_one_way_are_started_in_another() -> None:
    full = UsageError("it does not fit")
    rig = Rig(FakeRanks("first", dies_at=2), FakeRanks("second", load_error=full), FakeRanks("third"))
    rig.n_ways = 2
    with rig.engine() as engine:
        assert rig.text(engine) == WHOLE
    assert rig.lines[1:3] == ["it does not fit", "way 1"]
    assert rig.ended[1] is full
    assert full.is_reported


def test_ranks_that_refuse_all_ways() -> None:
    full = UsageError("it does not fit at all")
    rig = Rig(FakeRanks("first", dies_at=2), UsageError("it does not fit"), FakeRanks("third", load_error=full))
    rig.n_ways = 2
    with pytest.raises(RunError, match="it does not fit at all"), rig.engine() as engine:
        rig.text(engine)


# What the user wants meanwhile


def test_a_stop_while_ranks_are_started() -> None:
    rig = Rig(FakeRanks("first", dies_at=2), FakeRanks("second"))
    rig.on_ways = rig.supervisor.stop
    with pytest.raises(RunError, match="stopped while loading"), rig.engine() as engine:
        rig.text(engine)
    assert rig.started == ["first"]
    assert rig.supervisor.is_ending()


def test_a_stop_before_the_ranks_die() -> None:
    rig = Rig(first := FakeRanks("first"), FakeRanks("second"))
    with rig.engine() as engine:
        request = engine.submit(asked((1,), GREEDY, 6))
        step_until(engine, lambda: len(request.tokens) == 2)
        first.is_dead = True
        engine.stop()
        with pytest.raises(RankError):
            engine.step()
    assert rig.started == ["first"]


def test_this_process_is_to_end() -> None:
    first = FakeRanks("first", error=Terminated("terminated from outside"))
    rig = Rig(first, FakeRanks("second"))
    with rig.engine() as engine:
        rig.supervisor.fail(lambda: Terminated("terminated from outside"))
        with pytest.raises(Terminated):
            rig.text(engine)
    assert first.failure is not None
    assert rig.started == ["first"]


def test_a_stop_ends_requests_as_ever() -> None:
    rig = Rig(FakeRanks("first", dies_at=2), FakeRanks("second"))
    with rig.engine() as engine:
        request = engine.submit(asked((1,), GREEDY, 60))
        step_until(engine, lambda: len(request.tokens) == 5)
        engine.stop()
        step_until(engine, lambda: not request.is_active)
        assert request.stats.finish is Finish.STOPPED
        assert not rig.supervisor.is_ending()
        assert rig.text(engine) == WHOLE


# The budget


def test_restarts_in_ten_minutes() -> None:
    budget = Budget(2)
    assert [budget.take(t) for t in (0, 10, 20, 599, 600, 605, 610)] == [1, 2, None, None, 2, None, 2]
    assert Budget(0).take(0) is None


def test_old_restarts_do_not_count() -> None:
    rig = Rig(*(FakeRanks(str(i), dies_at=i) for i in range(5)), FakeRanks("last"), n_restarts=1)
    with rig.engine() as engine:
        request = engine.submit(asked((1,), GREEDY, 6))
        while request.is_active:
            rig.now += 600
            engine.step()
    assert "".join(token.text for token in request.tokens) == WHOLE
    assert len(rig.started) == 6
