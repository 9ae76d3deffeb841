"""How several requests share runs: rounds of accepted tokens, parts of prompts, draft tokens."""

from __future__ import annotations

import collections

import pytest
from support.requests import core_request

from ggpipe.core.events import Arrived, RunEnded, Sample, Sampled, SchedulerEvent, StopRequest, SubmitRun, Tick
from ggpipe.core.messages import LogitsKind, LogitsRequest, RowLogits, Run, RunResult, Span
from ggpipe.core.prompt_chunks import chunk_rows
from ggpipe.core.request import Limits
from ggpipe.core.scheduler import Scheduler

ONE = LogitsRequest(LogitsKind.TOP, 1)


class Pipeline:
    """A scheduler whose runs take what `seconds` says of their rows and what each row of text takes, in equal stages.

    `text_s`: that of each row of text, or by the least number of them."""

    def __init__(
        self,
        n_stages: int,
        seconds: dict[int, float],
        text_s: float | dict[int, float] = 0.5,
        slowdown: float = 5.0,
        partial_prefixes: bool = True,
        n_requests: int = 8,
        n_batch: int = 512,
    ) -> None:
        limits = Limits(
            n_ctx=10_000, n_batch=n_batch, n_ubatch=512, n_in_flight=n_stages + 1, n_seq=8, n_requests=n_requests,
            prefill_slowdown=slowdown, partial_prefixes=partial_prefixes,
        )  # fmt: skip
        self.scheduler = Scheduler(limits)
        self.runs: list[Run] = []
        """In flight."""
        self.sizes: list[tuple[int, int]] = []
        """Of each run: accepted tokens, and rows of prompts."""
        self._n_stages, self._seconds = n_stages, seconds
        self._text_s = text_s if isinstance(text_s, dict) else {1: text_s}
        self._now = 0.0

    def arrive(self, number: int, n_prompt: int = 1, first: int = 1) -> None:
        prompt = tuple(range(first, first + n_prompt))
        self._handle(Arrived(core_request(id=number, prompt=prompt, n_predict=1000), ONE))

    def embed(self, number: int, n_prompt: int) -> None:
        request = core_request(id=number, prompt=(1,) * n_prompt, n_predict=0, cache_prompt=False, pooling="last")
        self._handle(Arrived(request, ONE))

    def stop(self, number: int) -> None:
        self._handle(StopRequest(number))

    def wake(self) -> float:
        """The time comes for which the scheduler waits; returns how long it was away."""
        wake_at = self.scheduler.wake_at
        assert wake_at is not None
        waited_s, self._now = wake_at - self._now, wake_at
        self._handle(Tick())
        return waited_s

    def step(self) -> None:
        """The oldest run comes back."""
        run = self.runs.pop(0)
        n_text = sum(row.logits_request < 0 for row in run.rows)
        text_s = next((s for least, s in reversed(self._text_s.items()) if least <= n_text), 0.0)
        seconds = self._seconds[max(len(run.rows) - n_text, 1)] + n_text * text_s
        spans = tuple(
            Span(rank=rank, start_s=0.0, compute_s=seconds, busy_s=seconds, sent_bytes=0, n_rows=len(run.rows))
            for rank in range(self._n_stages)
        )
        rows = tuple(RowLogits(i, (7,), (0.0,), 0.0) for i, row in enumerate(run.rows) if row.logits_request >= 0)
        self._now += seconds
        self._handle(RunEnded(RunResult(run.id, rows, spans)))

    def _handle(self, event: SchedulerEvent) -> None:
        events: list[SchedulerEvent] = [event]
        while events:
            for action in self.scheduler.handle(events.pop(0), self._now):
                match action:
                    case SubmitRun(run):
                        self.runs.append(run)
                        n_text = sum(row.logits_request < 0 for row in run.rows)
                        self.sizes.append((len(run.rows) - n_text, n_text))
                    case Sample(request):
                        events.append(Sampled(request, 7, ONE))
            self.scheduler.validate()


def steady(n_users: int, n_stages: int, seconds: dict[int, float]) -> set[tuple[int, int]]:
    """The sizes that most runs have when users have decoded for a while."""
    pipeline = Pipeline(n_stages, seconds)
    for number in range(n_users):
        pipeline.arrive(number)
    return usual_sizes(pipeline, after=60)


def usual_sizes(pipeline: Pipeline, after: int) -> set[tuple[int, int]]:
    """The sizes that most runs have after so many more; now and then others are tried."""
    for _ in range(after + 20):
        pipeline.step()
    counts = collections.Counter(pipeline.sizes[-20:])
    return {size for size, n in counts.items() if n > 4}


DEAR = {n: float(n) for n in range(1, 9)}
FREE = dict.fromkeys(range(1, 9), 1.0)


def test_users_go_round_in_as_many_runs_as_there_are_stages_where_rows_are_dear() -> None:
    assert steady(4, 2, DEAR) == {(2, 0)}
    assert steady(8, 2, DEAR) == {(4, 0)}
    assert steady(2, 8, DEAR) == {(1, 0)}


def test_users_go_round_in_one_run_where_rows_are_free() -> None:
    assert steady(4, 2, FREE) == {(4, 0)}
    assert steady(8, 1, DEAR) == {(8, 0)}


def test_users_go_round_in_more_runs_than_there_are_stages_where_one_row_alone_is_cheap() -> None:
    one_cheap = {1: 1.0, 2: 2.75, 3: 3.2, 4: 3.6, 5: 4.0, 6: 4.4, 7: 4.8, 8: 5.15}
    assert steady(4, 2, one_cheap) == {(1, 0)}
    assert steady(8, 2, one_cheap) == {(4, 0)}


def test_what_was_slow_for_a_while_is_taken_up_again() -> None:
    """Here something else took the memory's bandwidth, which one row needs and four do not."""
    seconds = {1: 1.0, 2: 2.75, 3: 3.2, 4: 3.6}
    pipeline = Pipeline(2, seconds)
    for number in range(4):
        pipeline.arrive(number)
    assert usual_sizes(pipeline, after=60) == {(1, 0)}
    seconds[1] = 2.0
    assert usual_sizes(pipeline, after=60) == {(2, 0)}
    seconds[1] = 1.0
    assert usual_sizes(pipeline, after=500) == {(1, 0)}


def test_each_size_is_tried_a_few_times() -> None:
    """Also those that nothing speaks for: 8 rows at once seem best from the first run on."""
    pipeline = Pipeline(1, FREE)
    for number in range(8):
        pipeline.arrive(number)
    for _ in range(60):
        pipeline.step()
    tried = [n for n, n_text in pipeline.sizes if not n_text]
    assert all(tried.count(n) >= 2 for n in (1, 2, 4))
    assert set(tried[-20:]) == {8}


@pytest.mark.parametrize(("slowdown", "n_rows"), [(2.0, 12), (6.0, 64)])
def test_rows_of_a_long_prompt_are_as_many_as_the_time_allows(slowdown: float, n_rows: int) -> None:
    """A row is dear in short chunks and cheap in long ones: what the long ones took says little of short ones. Since
    long ones are cheaper, runs take up to three times `slowdown`: six times as long as without prompts, or as long as a
    whole chunk takes."""
    pipeline = Pipeline(2, FREE, text_s={1: 2.0, 2: 1.0, 4: 1.0, 8: 0.4, 64: 0.1}, slowdown=slowdown)
    pipeline.arrive(1, 1500)
    pipeline.step()
    for _ in range(30):
        pipeline.step()
    del pipeline.sizes[:]
    pipeline.arrive(2, 1000)
    while sum(n for _, n in pipeline.sizes) < 999:
        pipeline.step()
    usual = collections.Counter(sum(size) for size in pipeline.sizes[2:-1])
    assert usual.most_common(1)[0][0] == n_rows, usual


def test_a_prompt_takes_the_time_that_decoding_leaves() -> None:
    """Runs take five times as long as without the prompt. The first of them brings the user's token, which would else
    wait for a run that went in before."""
    pipeline = Pipeline(2, FREE)
    pipeline.arrive(1)
    for _ in range(30):
        pipeline.step()
    del pipeline.sizes[:]
    pipeline.arrive(2, 400)
    while sum(n for _, n in pipeline.sizes) < 399:
        pipeline.step()
    assert {sum(size) for size in pipeline.sizes[2:-1]} == {8}  # 1 s without, and 8 x 0.5 s: two tiles of rows
    assert [n for n, _ in pipeline.sizes[:20]] == [1, 0] * 10  # every other run, as there are two stages


@pytest.mark.parametrize(("n_stages", "text_s"), [(2, {1: 0.32, 16: 0.3}), (8, {1: 0.25})])
def test_runs_are_as_long_with_accepted_tokens_as_without(n_stages: int, text_s: dict[int, float]) -> None:
    """Runs that follow a longer one would wait in each stage."""
    pipeline = Pipeline(n_stages, FREE, text_s)
    pipeline.arrive(1)
    for _ in range(30):
        pipeline.step()
    pipeline.arrive(2, 200)
    for _ in range(60):
        pipeline.step()
    del pipeline.sizes[:]
    pipeline.arrive(3, 400)
    while sum(n for _, n in pipeline.sizes) < 399:
        pipeline.step()
    assert len({sum(size) for size in pipeline.sizes[2:-1]}) == 1
    assert {n > 0 for n, _ in pipeline.sizes} == {False, True}


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
    assert len(last.rows) == 16
    assert {sum(row.request == request for row in last.rows) for request in (2, 3)} <= {7, 8}


@pytest.mark.parametrize(("n_batch", "n_stages"), [(4, 1), (2, 1), (2, 2), (1, 1), (1, 2)])
def test_a_prompt_has_a_share_of_runs_that_accepted_tokens_would_fill(n_batch: int, n_stages: int) -> None:
    pipeline = Pipeline(n_stages, dict.fromkeys(range(1, 5), 1.0), n_batch=n_batch)
    for number in range(7):
        pipeline.arrive(number)
    for _ in range(30):  # all of them decode
        pipeline.step()
    before = len(pipeline.sizes)
    pipeline.arrive(7, n_prompt=20)
    for _ in range(100):
        pipeline.step()
    found = pipeline.sizes[before:]
    assert sum(rows for _, rows in found) == 20 - 1  # its last row wants a token
    assert all(n + rows <= n_batch for n, rows in found)
    assert sum(n for n, _ in found) > 50  # and the texts go on


def test_a_prompt_beside_nobody_goes_in_as_libllama_cuts_it() -> None:
    pipeline = Pipeline(1, FREE)
    pipeline.arrive(1, 1200)
    pipeline.step()
    assert pipeline.sizes == [(0, 512), (0, 512), (1, 175)]


@pytest.mark.parametrize("n_prompts", [1, 2, 4])
def test_prompts_on_several_stages_go_in_as_runs_that_keep_them_busy(n_prompts: int) -> None:
    pipeline, n_each = Pipeline(4, FREE), 1200 // n_prompts
    for number in range(n_prompts):
        pipeline.arrive(number, n_each, first=1 + number * n_each)
    assert pipeline.sizes == [(0, chunk_rows(n_each, 4, 512))] * 5, "the first comes alone"
    for _ in range(20):
        pipeline.step()
    assert pipeline.sizes[5:25] == [(0, chunk_rows(1200, 4, 512))] * 20


def test_prompts_that_outnumber_the_tiles_of_a_run_do_not_all_end_last() -> None:
    pipeline = Pipeline(8, FREE)
    for number in range(8):
        pipeline.arrive(number, 40, first=1 + number * 40)
    ended: dict[int, int] = {}
    for n_runs in range(60):
        for row in pipeline.runs[0].rows:
            if row.pos == 39:
                ended[row.request] = n_runs
        pipeline.step()
    assert len(ended) == 8
    assert max(ended.values()) > 1.5 * min(ended.values())


def test_prompts_of_more_users_than_decode_go_in_at_once() -> None:
    pipeline = Pipeline(1, {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3}, text_s=0.2, slowdown=3.0)
    pipeline.arrive(1, n_prompt=17)
    pipeline.step()
    pipeline.step()  # its tokens have shown what a run takes
    for number in (2, 3, 4):
        pipeline.arrive(number, n_prompt=9)
    pipeline.step()
    assert pipeline.sizes[-1] == (4, 24), "one waits for three, and no longer than three of its runs for each of four"
    for number in (5, 6, 7):
        pipeline.arrive(number, n_prompt=33)
    pipeline.step()
    assert pipeline.sizes[-1][1] < 20, "four wait for three"


def test_a_first_prompt_waits_a_little_for_those_that_come_with_it() -> None:
    def sizes(pipeline: Pipeline) -> list[int]:
        return [len(run.rows) for run in pipeline.runs if run.rows]

    pipeline = Pipeline(1, FREE, text_s=0.01)
    pipeline.arrive(1, n_prompt=11)
    assert pipeline.sizes == [(1, 10)], "what runs take is not known yet"
    for _ in range(3):
        pipeline.step()
    pipeline.stop(1)
    pipeline.step()
    for number in (2, 3, 4):
        pipeline.arrive(number, n_prompt=11)
    assert not sizes(pipeline)
    assert 0 < pipeline.wake() <= 0.01, "no long wait, whatever runs take"
    assert sizes(pipeline) == [33]
    for number in (2, 3, 4):
        pipeline.stop(number)
    while sizes(pipeline):
        pipeline.step()
    for number in range(5, 13):
        assert not sizes(pipeline)
        pipeline.arrive(number)
    assert sizes(pipeline) == [8], "there is no room for more"


def test_a_first_prompt_waits_for_nobody_where_short_runs_are_of_use() -> None:
    for pipeline in (Pipeline(2, FREE), Pipeline(1, FREE, n_requests=1), Pipeline(1, FREE, partial_prefixes=False)):
        for number in (1, 2):
            pipeline.arrive(number, n_prompt=11)
            assert pipeline.runs
            while pipeline.runs:
                pipeline.stop(number)
                pipeline.step()


def test_embeddings_of_recurrent_models_take_turns_with_texts() -> None:
    """Their rows are in no run of others. With two requests writing, there is a row to take in every run."""
    pipeline = Pipeline(2, FREE, partial_prefixes=False)
    pipeline.arrive(1)
    pipeline.arrive(2)
    pipeline.embed(3, 20)
    for _ in range(60):
        for run in pipeline.runs:
            requests = {row.request for row in run.rows}
            assert requests == {3} or 3 not in requests
        pipeline.step()
    assert pipeline.scheduler.counters(1)
    with pytest.raises(KeyError):
        pipeline.scheduler.counters(3)
