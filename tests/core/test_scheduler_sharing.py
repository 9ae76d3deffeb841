"""How several requests share runs: rounds of accepted tokens, parts of prompts, draft tokens."""

from __future__ import annotations

from ggpipe.core.events import Arrived, RunEnded, Sample, Sampled, Submit
from ggpipe.core.messages import RowLogits, Run, RunResult, Span, Want, WantKind
from ggpipe.core.request import Limits, Request
from ggpipe.core.scheduler import Scheduler

ONE = Want(WantKind.TOP, 1)


class Pipeline:
    """A scheduler whose runs take what `seconds` says of their rows and of those that are text, in equal stages."""

    def __init__(self, n_stages: int, seconds: dict[int, float], text_s: float = 0.5, slowdown: float = 5.0) -> None:
        limits = Limits(
            n_ctx=10_000, n_batch=512, n_ubatch=512, n_in_flight=n_stages + 1, n_seq=8, n_requests=8,
            prefill_slowdown=slowdown,
        )  # fmt: skip
        self.scheduler = Scheduler(limits)
        self.runs: list[Run] = []
        """In flight."""
        self.sizes: list[tuple[int, int]] = []
        """Of each run: accepted tokens, and rows of prompts."""
        self._n_stages, self._seconds, self._text_s = n_stages, seconds, text_s
        self._now = 0.0

    def arrive(self, number: int, n_prompt: int = 1) -> None:
        prompt = tuple(range(1, n_prompt + 1))
        self._handle(Arrived(Request(id=number, prompt=prompt, n_predict=1000), ONE))

    def step(self) -> None:
        """The oldest run comes back."""
        run = self.runs.pop(0)
        n_text = sum(row.want < 0 for row in run.rows)
        seconds = self._seconds[max(len(run.rows) - n_text, 1)] + n_text * self._text_s
        spans = tuple(
            Span(rank=rank, start_s=0.0, compute_s=seconds, busy_s=seconds, sent_bytes=0)
            for rank in range(self._n_stages)
        )
        rows = tuple(RowLogits(i, (7,), (0.0,), 0.0) for i, row in enumerate(run.rows) if row.want >= 0)
        self._now += seconds
        self._handle(RunEnded(RunResult(run.id, rows, spans)))

    def _handle(self, event: Arrived | RunEnded | Sampled) -> None:
        events: list[Arrived | RunEnded | Sampled] = [event]
        while events:
            for action in self.scheduler.handle(events.pop(0), self._now):
                match action:
                    case Submit(run):
                        self.runs.append(run)
                        n_text = sum(row.want < 0 for row in run.rows)
                        self.sizes.append((len(run.rows) - n_text, n_text))
                    case Sample(request):
                        events.append(Sampled(request, 7, False, ONE))
            self.scheduler.validate()


def steady(n_users: int, n_stages: int, seconds: dict[int, float]) -> set[tuple[int, int]]:
    """The sizes of runs when users have decoded for a while."""
    pipeline = Pipeline(n_stages, seconds)
    for number in range(n_users):
        pipeline.arrive(number)
    for _ in range(60):
        pipeline.step()
    return set(pipeline.sizes[-4 * n_stages :])


DEAR = {n: float(n) for n in range(1, 9)}
FREE = dict.fromkeys(range(1, 9), 1.0)


def test_users_go_round_in_as_many_runs_as_there_are_stages_where_rows_are_dear() -> None:
    assert steady(4, 2, DEAR) == {(2, 0)}
    assert steady(8, 2, DEAR) == {(4, 0)}
    assert steady(2, 8, DEAR) == {(1, 0)}


def test_users_go_round_in_one_run_where_rows_are_free() -> None:
    assert steady(4, 2, FREE) == {(4, 0)}
    assert steady(8, 1, DEAR) == {(8, 0)}


def test_a_prompt_takes_the_time_that_decoding_leaves() -> None:
    """Runs take five times as long as without the prompt, and each brings the user's token as soon as it can."""
    pipeline = Pipeline(2, FREE)
    pipeline.arrive(1)
    for _ in range(30):
        pipeline.step()
    del pipeline.sizes[:]
    pipeline.arrive(2, 400)
    while sum(n for _, n in pipeline.sizes) < 399:
        pipeline.step()
    assert {n for _, n in pipeline.sizes[2:-1]} == {8}  # 1 s without, and 8 x 0.5 s
    assert [n for n, _ in pipeline.sizes[1:21]] == [1, 0] * 10  # every other run, as there are two stages


def test_two_prompts_share_the_rows() -> None:
    pipeline = Pipeline(2, FREE, slowdown=9.0)
    pipeline.arrive(1)
    for _ in range(30):
        pipeline.step()
    pipeline.arrive(2, 400)
    for _ in range(6):
        pipeline.step()
    pipeline.arrive(3, 400)
    pipeline.step()
    pipeline.step()
    last = pipeline.runs[-1]
    assert [sum(row.request == request for row in last.rows) for request in (2, 3)] == [8, 8]


def test_a_prompt_beside_nobody_goes_in_as_libllama_cuts_it() -> None:
    pipeline = Pipeline(2, FREE)
    pipeline.arrive(1, 1200)
    pipeline.step()
    assert pipeline.sizes == [(0, 512), (0, 512), (1, 175)]
