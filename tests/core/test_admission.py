"""Who is served next, where requests wait."""

from __future__ import annotations

from collections.abc import Sequence

from support.requests import core_request

from ggpipe.core.admission import Admission
from ggpipe.core.events import Arrived
from ggpipe.core.in_flight import InFlight
from ggpipe.core.kv.prefix_cache import PrefixCache
from ggpipe.core.messages import LogitsKind, LogitsRequest
from ggpipe.core.request import Limits
from ggpipe.core.request_state import SequenceState


class Queue:
    """Requests, named by their users and a number: `a1`."""

    def __init__(self, n_requests: int) -> None:
        limits = Limits(n_ctx=1000, n_batch=8, n_ubatch=8, n_in_flight=1, n_seq=8, n_requests=n_requests)
        in_flight: InFlight[SequenceState] = InFlight(limits.n_seq, limits.n_requests)
        self._prefixes = PrefixCache(limits, in_flight.ids, in_flight.ops, None)
        self._admission = Admission(limits, self._prefixes)
        self._ids: dict[str, int] = {}

    def arrive(self, *names: str) -> None:
        for name in names:
            self._ids[name] = number = len(self._ids)
            request = core_request(id=number, prompt=(1,), n_predict=5, user=name[0])
            self._admission.wait(Arrived(request, LogitsRequest(LogitsKind.TOP, 1)))

    def admitted(self) -> Sequence[str]:
        names = list(self._ids)
        return [names[state.id] for state in self._admission.admit()]

    def end(self, *names: str) -> None:
        for name in names:
            state = self._admission.states.pop(self._ids[name])
            self._prefixes.close(state.prefix, (), clean=True)

    def leave(self, name: str) -> bool:
        return self._admission.withdraw(self._ids[name]) is not None


def test_one_request_of_a_user_does_not_wait_behind_all_of_anothers() -> None:
    queue = Queue(n_requests=2)
    queue.arrive("a1", "a2", "a3", "a4", "a5", "b1")
    assert queue.admitted() == ["a1", "b1"]
    queue.arrive("c1", "b2")
    queue.end("a1")
    assert queue.admitted() == ["a2"]  # of the two without a request that is served, it waits longer
    queue.end("b1")
    assert queue.admitted() == ["c1"]
    queue.end("c1")
    assert queue.admitted() == ["b2"]
    queue.end("a2", "b2")
    assert queue.admitted() == ["a3", "a4"]


def test_users_take_turns_and_each_ones_requests_come_in_order() -> None:
    queue = Queue(n_requests=1)
    queue.arrive("a1", "a2", "a3", "b1", "b2", "c1")
    order: list[str] = []
    while admitted := queue.admitted():
        order += admitted
        queue.end(*admitted)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_who_leaves_the_queue_takes_no_turn() -> None:
    queue = Queue(n_requests=1)
    queue.arrive("a1", "b1", "a2")
    assert queue.leave("b1")
    assert not queue.leave("b1")
    assert queue.admitted() == ["a1"]
    assert not queue.leave("a1")
    queue.end("a1")
    assert queue.admitted() == ["a2"]
    assert queue.admitted() == []
