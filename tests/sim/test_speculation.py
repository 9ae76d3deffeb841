"""What speculation brings on virtual clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.virtual import ASYNC, CHAINS, ITERATIVE, NO_OVERHEADS, checked, cluster, n_misses, tokens, watched

from ggpipe.cluster.recording import BUNDLED, read
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.sim.simulator import simulate
from ggpipe.sim.text import RecordedTokens, recorded
from ggpipe.stats.activity import wasted_s


@pytest.mark.parametrize("n", [4, 16])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_no_chain_beats_its_rejections(n: int, acceptance: float) -> None:
    """Each mistake costs a round of the pipeline, so speculation gains no more than 1 / (1 - agreement)."""
    own = cluster((1 / n,) * n, 0.1 / n)
    text = tokens(acceptance, 200)
    stats, plain = (checked(own, text, mode) for mode in (CHAINS, ITERATIVE))
    round_s = plain.itl_s[0]
    n_own = sum(not drafted for drafted in stats.drafted[1:])
    assert n_own >= n_misses(text) - 1, "only the draft's best candidates were drafted"
    assert stats.decode_s >= (n_misses(text) - 2) * round_s - 1e-9
    gain = plain.decode_s / stats.decode_s
    assert 1 < gain <= 199 / (n_misses(text) - 2)


def test_more_nodes_come_nearer_to_that_bound(full: bool) -> None:
    text = tokens(0.7, 300 if full else 150)
    found = []
    for n in (2, 8, 32):
        own = cluster((1 / n,) * n, 0.1 / n)
        found.append(checked(own, text, ITERATIVE).decode_s / checked(own, text, ASYNC).decode_s)
    assert found == sorted(found)
    assert found[-1] > 0.8 / 0.3


@pytest.mark.parametrize("mode", ["speculative", "async"])
def test_branches(mode: str) -> None:
    speculation = SpeculationConfig(mode=mode, n_parallel=3, p_split=0.1)  # type: ignore[arg-type]
    own = cluster((0.1, 0.1, 0.1), 0.01)
    text = tokens(0.5, 120)
    with watched() as seen:
        stats = simulate(own, text, speculation, 120)
    assert seen.schedulers[0].n_in_flight == 0
    second = sum(
        drafted and text.candidates(i, False)[0][0] != text.output[i] for i, drafted in enumerate(stats.drafted)
    )
    assert second > 5, "a further candidate was drafted and accepted"


def test_rejected_runs_are_stopped_and_make_room() -> None:
    own = cluster((0.1,) * 4, 0.001)
    text = tokens(0.5, 100)
    stopped, kept = (checked(own, text, replace(ASYNC, cancel=cancel)) for cancel in (True, False))
    assert stopped.counters.cancelled_runs > 0
    assert kept.counters.cancelled_runs == 0
    assert stopped.decode_s < kept.decode_s
    cancelled = [run for run in stopped.runs if run.cancelled]
    assert len(cancelled) == stopped.counters.cancelled_runs
    assert sum(span.compute_s for run in cancelled for span in run.spans) < 0.8 * len(cancelled) * 0.4
    assert sum(wasted_s(stopped).values()) < sum(wasted_s(kept).values())


def test_a_stop_takes_its_poll_and_its_abort() -> None:
    own = cluster((0.1,) * 4, 0.001, overheads=replace(NO_OVERHEADS, poll_delay_s=0.01, abort_s=0.02))
    stats = checked(own, tokens(0.5, 100), ASYNC)
    begun = sorted(span.compute_s for run in stats.runs if run.cancelled for span in run.spans if span.compute_s > 0)
    assert begun
    assert begun[0] >= 0.02


def test_one_micro_batch_at_a_time() -> None:
    own = cluster((0.1,) * 4, 0.001)
    text = tokens(0.8, 100)
    without, with_it = (checked(own, text, replace(ASYNC, continuous=on)) for on in (False, True))
    assert with_it.decode_s < without.decode_s


def repeated(acceptance: float, n_text: int = 200) -> RecordedTokens:
    """A text that says the same 20 tokens over and over."""
    part = tokens(acceptance, n_text=20)
    candidates, after = ([part.candidates(i, lost) for i in range(20)] for lost in (False, True))
    return RecordedTokens(part.prompt, part.output, candidates, after, n_text)


def test_what_stood_before_is_drafted_without_a_draft_model() -> None:
    text = repeated(0.5)
    iterative = checked(cluster((0.1,) * 4), text, ITERATIVE)
    copied = checked(cluster((0.1,) * 4), text, replace(ASYNC, drafters=("ngram",)))
    assert copied.counters.accepted_tokens > 150
    assert copied.decode_s < iterative.decode_s / 3
    assert not copied.draft_runs


def test_two_drafters_are_better_than_each_alone() -> None:
    """The draft model agrees with the target half of the time, and after 20 tokens the text repeats itself."""
    seconds = {}
    for drafters in (("draft",), ("ngram",), ("draft", "ngram")):
        stats = checked(cluster((0.1,) * 4, 0.02), repeated(0.5), replace(ASYNC, drafters=drafters))
        seconds[drafters] = stats.decode_s
    assert seconds["draft", "ngram"] < 0.6 * seconds["draft",]
    assert seconds["draft", "ngram"] < 1.1 * seconds["ngram",]


@pytest.mark.parametrize("mode", ["async", "speculative"])
@pytest.mark.parametrize("drafters", [("ngram",), ("draft", "ngram")])
def test_a_text_that_never_repeats_itself(mode: Mode, drafters: tuple[str, ...]) -> None:
    checked(cluster((0.1,) * 3, 0.02), tokens(0.7), SpeculationConfig(mode=mode, drafters=drafters))


def test_a_cutoff_keeps_doubtful_draft_tokens_back() -> None:
    own = cluster((0.1,) * 4, 0.01)
    text = tokens(0.5, 150)
    every, sure = (checked(own, text, replace(CHAINS, p_accept=p)) for p in (0.0, 0.7))
    assert sure.counters.submitted_tokens < every.counters.submitted_tokens
    assert (sure.counters.acceptance or 0) > (every.counters.acceptance or 0)
    relenting = checked(own, text, replace(CHAINS, p_accept=0.7, p_decay=0.1, p_recovery=0.05))
    assert sure.counters.submitted_tokens < relenting.counters.submitted_tokens


def test_recorded_tokens() -> None:
    request = recorded(read(BUNDLED).prompts[0], 100)
    own = cluster((0.1,) * 4, 0.005)
    stats, plain = (checked(own, request, mode) for mode in (ASYNC, ITERATIVE))
    assert plain.decode_s / stats.decode_s > 1.3
