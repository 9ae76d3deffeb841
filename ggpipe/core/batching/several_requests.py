"""What goes into the next run when several requests share the pipeline: accepted tokens, then prompts, then draft
tokens.

As many runs with accepted tokens or prompts go round as bring most. A token that comes while that many are in flight
waits, and goes in together with others.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence

from ggpipe.core.batching import frontier
from ggpipe.core.batching.load import Load, Take
from ggpipe.core.drafters.calibration import Calibration
from ggpipe.core.request_state import Phase, RequestState
from ggpipe.core.tree import Node

_CLEARLY_LESS = 0.98  # of a time: below this it is worth splitting a run of several requests in two
_HARDLY_LONGER = 1.1  # times a run with accepted tokens: so long are runs of draft tokens alone beside others, at most
_TILE = 4  # rows that matrix kernels of llama.cpp take together
_MANY_RUNS = 4  # of a long prompt, at least
_FIRST_ROWS = 16  # of a run with a prompt beside others' tokens, before a run has shown what rows of prompts take


def next_takes(load: Load, states: Sequence[RequestState]) -> Sequence[Take]:
    """What goes in next; nothing when it is better to wait."""
    takes = _takes(load, states)
    return takes if load.limits.partial_prefixes else _unmixed(load, takes)


def _takes(load: Load, states: Sequence[RequestState]) -> Sequence[Take]:
    prompts = [state for state in states if state.phase is Phase.PREFILL]
    decoding = [state for state in states if state.phase is Phase.DECODING and state.request.n_predict]
    for state in decoding:
        state.root_waits_until = None
    ready = [state for state in decoding if _root_is_ready(state)]
    if not ready and not prompts:
        return _draft_tokens(load, decoding)
    if not ready and load.n_in_flight >= (load.n_stages if decoding else load.limits.n_in_flight):
        return ()
    ready.sort(key=lambda state: state.root_since)
    n_rounds = load.n_stages
    n_runs = len(load.runs_of_text(states))
    if not prompts:
        times = _round_times(load, len(decoding))
        n_rounds, round_s = _quickest(times)
        if n_runs <= load.n_stages:
            losses = {n: times[math.ceil(len(decoding) / n)] / round_s - 1 for n in range(1, len(ready) + 1)}
            if n := load.to_try(losses):
                return [Take(state, nodes=[state.tree.root]) for state in ready[:n]]
    if ready and n_runs >= n_rounds:
        return ()
    if not prompts:
        ready = ready[: math.ceil(len(decoding) / n_rounds)]
    n_tokens = load.limits.n_rows
    if prompts and len(ready) >= n_tokens:
        n_tokens -= load.rows_for_prompts(len(prompts), len(ready))
    takes = [Take(state, nodes=[state.tree.root]) for state in ready[:n_tokens]]
    if prompts:
        n_new = sum(len(state.request.prompt) - state.counters.cached_tokens for state in prompts)
        n_prompt = min(load.limits.prompt_rows(n_new), load.limits.n_rows - len(takes))
        n_left = sum(len(state.request.prompt) - state.n_past for state in prompts)
        if decoding and not _goes_at_once(load, len(takes), n_left, len(decoding), len(prompts)):
            n_prompt = _prompt_rows(load, len(takes), len(decoding), n_prompt)
            if not ready and load.n_in_flight and not load.has_prompts and n_left > _MANY_RUNS * n_prompt:
                return ()  # it goes in with the tokens in flight, which would else wait for it
        return [*takes, *_shared_out(prompts, n_prompt)]
    return _with_draft_tokens(load, takes, decoding, n_rounds)


def _unmixed(load: Load, takes: Sequence[Take]) -> Sequence[Take]:
    """One embedding, or all but embeddings, in turns: with recurrent states libllama orders the rows of several
    sequences as it likes."""
    texts = [take for take in takes if not take.state.request.embeds]
    embeddings = [take for take in takes if take.state.request.embeds]
    takes_embedding = bool(embeddings) and (load.embeds_next or not texts)
    if embeddings:
        load.embeds_next = not takes_embedding
    return embeddings[:1] if takes_embedding else texts


def _with_draft_tokens(load: Load, takes: list[Take], decoding: Sequence[RequestState], n_rounds: int) -> list[Take]:
    """Accepted tokens with the draft tokens that go in beside them."""
    n_rows, taken = len(takes), {take.state for take in takes}
    nodes, chances = _best_first(load, [s for s in decoding if s in taken or (s.tree.root.submitted and _is_async(s))])
    chances = chances[: load.limits.n_rows - n_rows]
    if not chances:
        return takes
    if not all(_is_async(state) for state in taken):  # there are no later runs for their draft tokens
        n = frontier.rows_beside_roots(n_rows, chances, load.shared_cost)
    elif n_rounds < load.n_stages:
        n = frontier.rows_beside_early_roots(n_rows, chances, load.shared_cost)
    else:  # runs that are equally long: all behind a longer one would wait for it
        n_roots, calibration = math.ceil(len(decoding) / n_rounds), nodes[0][0].drafters.leading.calibration
        usual = frontier.usual_rows_beside_roots(n_roots, load.limits.n_rows, load.shared_cost, calibration)
        n = max(min(n_roots + usual - n_rows, len(chances)), 0)
    return _with_nodes(takes, nodes[:n])


def _draft_tokens(load: Load, decoding: Sequence[RequestState]) -> Sequence[Take]:
    """A run of draft tokens alone, when the pipeline would else have nothing to do."""
    if load.n_in_flight >= load.n_stages:
        return ()
    nodes, chances = _best_first(load, [state for state in decoding if _is_async(state) and load.may_draft(state)])
    if not nodes or load.too_early():
        return ()
    n = min(frontier.best_rows(chances, load.shared_cost), load.limits.n_rows)
    n_roots = math.ceil(len(decoding) / _round(load, len(decoding))[0])
    most_s = _HARDLY_LONGER * load.shared_cost.time(n_roots)
    while n > 1 and load.shared_cost.time(n) > most_s:
        n -= 1
    return _with_nodes([], nodes[:n])


def lead(load: Load, state: RequestState, calibration: Calibration, others: Sequence[RequestState]) -> int:
    """How far its drafter with this calibration may be ahead of the root. Where others' tokens fill the pipeline, as
    far as a draft token is worth a row beside them; else as for one request."""
    speculation = state.request.speculation
    if any(other.phase is Phase.PREFILL for other in others):
        return 0
    n_rounds, _ = _round(load, len(others) + 1)
    if n_rounds >= load.n_stages or not _is_async(state):
        n_roots = math.ceil((len(others) + 1) / n_rounds)
        usual = frontier.usual_rows_beside_roots(n_roots, speculation.n_draft, load.shared_cost, calibration)
        return math.ceil(usual / n_roots)
    if not speculation.continuous:
        return speculation.n_draft
    usual = frontier.usual_rows(speculation.n_draft, load.shared_cost, calibration)
    return min(usual * (load.limits.n_in_flight + 1), calibration.reach)


def _best_first(load: Load, states: Iterable[RequestState]) -> tuple[list[tuple[RequestState, Node]], list[float]]:
    """Draft tokens of these requests that have room, the most probable path first, with the chance of each path.

    Parents come before their children.
    """
    spare = load.spare_cells
    found: list[tuple[float, int, RequestState, Node]] = []
    for state in states:
        waiting = state.waiting_draft_tokens()[: state.request.speculation.n_draft]
        waiting = waiting[: max(state.n_cells - state.n_used, 0) + spare]
        worst = 1.0
        for node, chance in zip(waiting, state.chances(waiting), strict=True):
            worst = min(worst, chance)
            found.append((worst, len(found), state, node))
    found.sort(key=lambda one: (-one[0], one[1]))
    nodes: list[tuple[RequestState, Node]] = []
    used: dict[RequestState, int] = collections.defaultdict(int)
    for _, _, state, node in found:
        used[state] += 1
        if used[state] > state.n_cells - state.n_used:
            if not spare:
                break
            spare -= 1
        nodes.append((state, node))
    return nodes, [one[0] for one in found[: len(nodes)]]


def _round(load: Load, n_tokens: int) -> tuple[int, float]:
    """In how many runs so many accepted tokens go round, to bring most tokens a second, and the time of the slowest
    stage for a round."""
    return _quickest(_round_times(load, n_tokens))


def _round_times(load: Load, n_tokens: int) -> dict[int, float]:
    """The time of the slowest stage in which so many accepted tokens go round, by the number of their runs."""
    cost = load.shared_cost
    times: dict[int, float] = {}
    for n in sorted({math.ceil(n_tokens / size) for size in range(1, n_tokens + 1)}):
        size = math.ceil(n_tokens / n)
        n_shorter = n * size - n_tokens
        all_s = (n - n_shorter) * cost.time(size) + n_shorter * cost.time(max(size - 1, 1))
        times[n] = max(all_s, cost.length * cost.time(size))
    return times


def _quickest(times: Mapping[int, float]) -> tuple[int, float]:
    """The number of runs with the shortest time, and that time; the fewest runs where it is equal."""
    best, best_s = 1, math.inf
    for n, round_s in times.items():
        if round_s < best_s * _CLEARLY_LESS:
            best, best_s = n, round_s
    return best, best_s


def _is_async(state: RequestState) -> bool:
    return state.request.speculation.mode == "async"


def _root_is_ready(state: RequestState) -> bool:
    if state.tree.root.submitted:
        return False
    return state.request.speculation.mode != "speculative" or state.drafters.all_complete


def _goes_at_once(load: Load, n_tokens: int, n_left: int, n_decoding: int, n_waiting: int) -> bool:
    """All that is left of prompts goes into one run, beside `n_tokens` accepted tokens: more requests wait than decode,
    and the run takes those no longer than `prefill_slowdown` of theirs for each request.

    That delays those that decode once, and many short runs of prompts take more time than one. With several stages,
    short runs keep all of them busy.
    """
    if load.n_stages > 1 or n_waiting <= n_decoding or n_tokens + n_left > load.limits.n_rows:
        return False
    usual_s = load.cost.seconds(n_decoding)
    most_s = load.limits.prefill_slowdown * usual_s * (n_decoding + n_waiting) / n_decoding
    return load.cost.text_row_s(1) is not None and load.cost.text_s(n_tokens, n_left) < most_s


def _prompt_rows(load: Load, n_tokens: int, n_decoding: int, most: int) -> int:
    """Rows of prompts beside `n_tokens` accepted tokens, while `n_decoding` requests decode: those that bring most
    prompt tokens a second, so many that runs take about `prefill_slowdown` times as long as without; at least one.

    A run has whole tiles of rows, whoever they are for: those of a tile that is not full take as long as a full one's.
    """
    cost = load.cost
    if cost.text_row_s(1) is None or not cost.is_known:
        return min(max(_FIRST_ROWS - n_tokens, 1), most)
    first, usual_s = max(n_tokens, 1), _round(load, n_decoding)[1] / load.n_stages
    more_s = load.limits.prefill_slowdown * usual_s - cost.seconds(first)
    best, fastest = 0, 0.0
    fewest = _TILE
    while fewest <= n_tokens + most:
        row_s = cost.text_row_s(fewest) or 0.0
        n_all = first + round(more_s / row_s) if row_s else n_tokens + most
        n_all = min((n_all + _TILE // 2) // _TILE * _TILE, 2 * fewest - _TILE, n_tokens + most)
        n = n_all - n_tokens
        if n_all >= fewest and n > 0 and (rate := n / cost.text_s(n_tokens, n)) > fastest:
            best, fastest = n, rate
        fewest *= 2
    return min(best or 1, most)


def _shared_out(states: Sequence[RequestState], n_rows: int) -> list[Take]:
    """The next tokens of these prompts, `n_rows` in all if there are so many, in equal parts where they suffice. A part
    has a tile of rows at least: where there are more prompts than tiles, those with the fewest tokens left go first,
    so that not all of them end last."""
    takes: list[Take] = []
    in_order = sorted(states, key=lambda state: len(state.request.prompt) - state.n_past)
    for i, state in enumerate(in_order):
        part = min(max(math.ceil(n_rows / (len(in_order) - i)), _TILE), n_rows)
        n = state.cut(min(len(state.request.prompt), state.n_past + part)) - state.n_past
        if n:
            takes.append(Take(state, n_prompt=n))
        n_rows -= n
    return takes


def _with_nodes(takes: list[Take], nodes: Iterable[tuple[RequestState, Node]]) -> list[Take]:
    """The same with these draft tokens, parents before their children."""
    by_state = {take.state: take for take in takes}
    for state, node in nodes:
        by_state.setdefault(state, Take(state)).nodes.append(node)
    return list(by_state.values())
