"""A draft model as a drafter: what it decodes next, and which draft tokens go to the head.

It has a tree of its own for each request, with the draft model's KV cache behind it, and the last token it knows
accepted as its root. It decodes the tips of the most probable branches, all in one run. Each answer gives candidates,
and some of these become children (`growth`): the draft tokens, which are sent to the head at once. How far it runs
ahead is bounded from the root, so it stops by itself and goes on when a token is accepted. Then its tree moves as the
target's does: the branch that holds the token stays, cells and all; a token that it did not draft is decoded afresh.

What it decoded of an ended request's text is kept for prompts that begin alike (`prefix_cache`).
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence

from ggpipe.core.draft_messages import Accepted, Begin, Done, Expansion, MicroBatch
from ggpipe.core.drafters.base import DraftAction, DraftEvent, DraftPipeline, Send
from ggpipe.core.drafters.growth import Growth
from ggpipe.core.drafters.thresholds import Thresholds
from ggpipe.core.events import RunDone, RunEnded, Submit, Tick
from ggpipe.core.in_flight import InFlight, Part, cancel_action, records_of
from ggpipe.core.kv.prefix_cache import PrefixCache
from ggpipe.core.messages import Row, RunResult, Save, Want, WantKind
from ggpipe.core.prompt_chunks import chunk_end
from ggpipe.core.run_cost import RunCost, most_per_second
from ggpipe.core.tree import Node

_SHORTEST_ATTEMPT_S = 1e-3  # before any run of draft tokens has shown how long one takes
_MIN_CANDIDATES = 4  # of each answer; some more than become draft tokens, for whoever records what the draft proposed
_BEST_FIRST_CANDIDATES = 8  # of each answer, for trees that grow best-first


class DraftModel:
    """See the module's text. It serves several requests; one run of draft tokens is in flight at a time."""

    def __init__(self, drafter: int, pipeline: DraftPipeline) -> None:
        """`drafter`: its id, which the head knows it by. `pipeline`: of the draft model."""
        limits = self._limits = pipeline.limits
        self._vocabularies = pipeline.vocabularies
        self._drafter = drafter
        self._in_flight: InFlight[Growth] = InFlight(limits.n_seq, limits.n_requests + limits.n_prefixes)
        self._prefixes = PrefixCache(limits, self._in_flight.ids, self._in_flight.ops, pipeline.restored)
        self._requests: dict[int, Growth] = {}
        self._cost = RunCost()
        """What runs of draft tokens take."""
        self._attempt_s = 0.0
        """Of the latest run of draft tokens."""

    def handle(self, event: DraftEvent, now: float) -> list[DraftAction]:
        """Take in one event that happened at `now` (seconds, any clock that does not go back).

        Raises ValueError for a run that is not in flight.
        """
        actions: list[DraftAction] = []
        match event:
            case Begin():
                self._begin(event)
            case Accepted():
                self._accepted(event, actions)
            case Done(request):
                self._done(request, now, actions)
            case RunEnded(result):
                self._run_ended(result, now, actions)
            case Tick():
                for growth in self._requests.values():
                    if growth.retry_at is not None and now >= growth.retry_at:
                        growth.retry_at = None
        for growth in self._requests.values():
            for batch in growth.grow():
                self._send(growth, batch, False, actions)
        self._decode(now, actions)
        for growth in self._requests.values():
            self._settle(growth, now, actions)
        if self._in_flight.ops and not self._requests:  # no run is coming that could carry them
            actions.append(self._in_flight.submit_ops(now))
        return actions

    @property
    def wake_at(self) -> float | None:
        """When to send `Tick`, by the clock of `now`; None when only other events matter."""
        return min((g.retry_at for g in self._requests.values() if g.retry_at is not None), default=None)

    def validate(self) -> None:
        """Check what must hold between events. Raises AssertionError."""
        trees = [(growth, growth.tree.validate()) for growth in self._requests.values()]
        self._in_flight.validate(trees)
        self._prefixes.validate()
        taken = sum(len(ids) for _, ids in trees) + len(self._prefixes)
        assert len(self._in_flight.ids) == self._limits.n_seq - taken, "an id is lost"
        assert self._prefixes.n_cells + self._n_used <= self._limits.n_ctx
        for growth in self._requests.values():
            assert growth.text[-1] == growth.tree.root.token
            assert growth.tree.root.pos == len(growth.text) - 1
            assert all(best and not node.children for node, best in growth.open.items())

    # The text

    def _begin(self, begin: Begin) -> None:
        prefix = self._prefixes.open(begin.prompt, begin.cache_prompt)
        self._requests[begin.request] = Growth(
            begin=begin,
            prefix=prefix,
            thresholds=Thresholds(begin.speculation),
            text=list(begin.prompt),
            lead=begin.lead,
            n_decoded=prefix.n_tokens,
            n_cached=prefix.n_tokens,
        )

    def _accepted(self, message: Accepted, actions: list[DraftAction]) -> None:
        growth = self._requests.get(message.request)
        if growth is None:
            return
        growth.lead = message.lead
        if growth.held:  # they are numbered from this epoch's root
            self._send_held(growth, False, actions)
        dead = growth.accept(message.tokens, message.epoch)
        self._cancel(self._in_flight.drop(growth, dead), actions)

    def _done(self, request: int, now: float, actions: list[DraftAction]) -> None:
        growth = self._requests.pop(request, None)
        if growth is not None:
            clean = not self._in_flight.of(growth) and not growth.tree.n_submitted
            computed = tuple(self._computed(growth))
            is_kept = self._prefixes.close(growth.prefix, computed, clean)
            if growth.begin.saves != "nothing" and not growth.is_saved:
                is_wanted = growth.saves_prompt or growth.begin.saves == "text"
                is_new = is_wanted and is_kept and len(computed) > growth.n_cached
                self._save(growth, computed if is_new else (), now, actions)
            self._cancel(self._in_flight.leave(growth), actions)

    def _cancel(self, runs: Sequence[int], actions: list[DraftAction]) -> None:
        if runs:
            actions.append(cancel_action(self._in_flight.cancel(runs)))

    # Draft tokens

    def _run_ended(self, result: RunResult, now: float, actions: list[DraftAction]) -> None:
        run = self._in_flight.end(result)
        if not run.parts:
            return
        actions.append(RunDone(records_of(run, result)))
        if run.cancelled:
            return
        if not run.n_text:
            self._attempt_s = now - run.submitted_at
            if result.slowest_s > 0:
                self._cost.ended(len(run.run.rows), result.slowest_s, result.total_s)
        for part in run.parts:
            part.owner.answered(part.nodes)
            if part.n_text and part.request in self._requests:
                self._prefixes.grow(part.owner.prefix, self._computed(part.owner))

    def _settle(self, growth: Growth, now: float, actions: list[DraftAction]) -> None:
        """Send what was drafted. When nothing more comes by itself, report that, or try again soon with lower
        thresholds."""
        parts = self._in_flight.of(growth)
        # With nothing in flight at all, nothing could be submitted just now.
        waits = self._in_flight.n_computed > 0 and (
            any(self._in_flight.is_computed(part.run) for part in parts)
            or self._text_waits(growth)
            or bool(growth.tips())
        )
        may_retry = growth.may_retry and growth.retry_at is None
        if not waits and may_retry and any(growth.may_grow(node) for node in growth.open):
            growth.thresholds.n_failed += 1
            growth.retry_at = now + max(self._attempt_s, _SHORTEST_ATTEMPT_S)
        enough = growth.n_batch >= growth.begin.speculation.n_min
        stuck = not growth.overlaps or (not growth.tree.root.children and growth.retry_at is None)
        complete = not waits and stuck and not growth.complete
        if enough and (complete or growth.held):
            self._send_held(growth, complete, actions)
        elif complete:
            self._send(growth, (), True, actions)

    def _send_held(self, growth: Growth, complete: bool, actions: list[DraftAction]) -> None:
        self._send(growth, tuple(growth.held), complete, actions)
        growth.held = []

    def _send(
        self, growth: Growth, expansions: tuple[Expansion, ...], complete: bool, actions: list[DraftAction]
    ) -> None:
        growth.complete = growth.complete or complete
        batch = MicroBatch(
            request=growth.begin.request,
            epoch=growth.epoch,
            expansions=expansions,
            complete=complete,
            drafter=self._drafter,
        )
        actions.append(Send(batch))

    # The pipeline

    def _computed(self, growth: Growth) -> Sequence[int]:
        """The text, as far as it is computed and may go into the prefix cache."""
        return growth.text[: self._in_flight.computed(growth, growth.n_decoded)] if growth.begin.cache_prompt else ()

    def _decode(self, now: float, actions: list[DraftAction]) -> None:
        """Submit text first, in chunks; then the tips of all requests in one run."""
        for growth in self._requests.values():
            while self._in_flight.n_computed < self._limits.n_in_flight and self._text_waits(growth):
                at = growth.n_decoded
                most = min(self._chunk_end(growth) - at, self._free_cells)
                if growth.saves_prompt:
                    n_saved = len(growth.begin.prompt) - 1
                    if at == n_saved:
                        self._save(growth, growth.begin.prompt[:-1], now, actions)
                    else:
                        most = min(most, n_saved - at)
                chunk = growth.text[at : at + most]
                growth.n_decoded += len(chunk)
                last = growth.n_decoded == len(growth.text)
                nodes = growth.tree.place([growth.tree.root], self._in_flight.next_run, 1) if last else []
                wants: dict[Want, int] = {}
                part = self._part(growth, nodes, chunk[: len(chunk) - last], at, wants)
                actions.append(self._submit([part], wants, now))
        if self._in_flight.n_computed:
            return
        parts: list[Part[Growth]] = []
        wants, n_rows = {}, 0
        n_best = self._n_best_first()
        for growth in list(self._requests.values()):
            n_own = n_best[growth] if growth.is_best_first else growth.begin.speculation.draft_rows
            most = min(n_own, self._limits.n_rows - n_rows, self._free_cells)
            if nodes := growth.tree.place(growth.tips(), self._in_flight.next_run, most):
                parts.append(self._part(growth, nodes, (), 0, wants))
                n_rows += len(nodes)
                self._requests[growth.begin.request] = self._requests.pop(
                    growth.begin.request
                )  # others come first next
        if parts:
            actions.append(self._submit(parts, wants, now))

    def _n_best_first(self) -> Mapping[Growth, int]:
        """How many tips of each tree that grows best-first are decoded next: the most probable paths of all requests,
        as many as bring most for the run's time."""
        tips = [
            (growth.path_probability(node), growth)
            for growth in self._requests.values()
            if growth.is_best_first
            for node in itertools.islice(growth.tips(), growth.begin.speculation.draft_rows)
        ]
        tips.sort(key=lambda tip: -tip[0])
        n = most_per_second((probability for probability, _ in tips[: self._limits.n_rows]), self._cost)
        return collections.Counter(growth for _, growth in tips[:n])

    def _chunk_end(self, growth: Growth) -> int:
        """Where the run ends that computes the next tokens of a text, where cells suffice. What follows the prompt is
        short: tokens that were not drafted."""
        start, n_prompt = growth.n_cached, len(growth.begin.prompt)
        if growth.n_decoded >= n_prompt:
            return growth.n_decoded + self._limits.n_rows
        n_tokens = len(growth.text) - start
        n_rows = self._limits.prompt_rows(n_prompt - start)
        return start + chunk_end(growth.n_decoded - start, n_tokens, n_rows, n_rows)

    def _save(self, growth: Growth, tokens: tuple[int, ...], now: float, actions: list[DraftAction]) -> None:
        growth.is_saved = True
        save = Save(growth.begin.request, growth.tree.own, tokens)
        actions.append(self._in_flight.submit_save(growth, save, now))

    def _submit(self, parts: Sequence[Part[Growth]], wants: Iterable[Want], now: float) -> Submit:
        self._prefixes.shrink(self._limits.n_ctx - self._n_used)
        return self._in_flight.submit(parts, tuple(wants), now)

    def _text_waits(self, growth: Growth) -> bool:
        wanted = growth.n_decoded < len(growth.text) and growth.deepest > growth.tree.root.pos
        return wanted and self._free_cells > 0

    @property
    def _free_cells(self) -> int:
        return max(self._limits.n_ctx - self._prefixes.n_held - self._n_used, 0)

    @property
    def _n_used(self) -> int:
        """Cells of all requests outside the prefix cache."""
        return sum(growth.n_used for growth in self._requests.values())

    def _part(
        self, growth: Growth, nodes: list[Node], text: Sequence[int], at: int, wants: dict[Want, int]
    ) -> Part[Growth]:
        """One request's rows of a run: `text` from position `at` on, then nodes."""
        request, own = growth.begin.request, (growth.tree.own,)
        rows = [Row(token=self._readable(token), pos=at + i, seqs=own, request=request) for i, token in enumerate(text)]
        for node in nodes:
            want = wants.setdefault(self._want(growth), len(wants))
            seqs = tuple(sorted(node.seqs))
            rows.append(Row(token=self._readable(node.token), pos=node.pos, seqs=seqs, request=request, want=want))
        return Part(owner=growth, request=request, rows=rows, nodes=nodes, n_draft_tokens=len(nodes))

    def _want(self, growth: Growth) -> Want:
        only_draft = self._vocabularies.only_draft if self._vocabularies is not None else ()
        n = _BEST_FIRST_CANDIDATES if growth.is_best_first else _MIN_CANDIDATES
        n = max(n, growth.begin.speculation.n_parallel)
        return Want(WantKind.TOP, n, (*growth.begin.banned, *only_draft))

    def _readable(self, token: int) -> int:
        """A token of the text as the draft model can read it. The tree keeps the target's."""
        return token if self._vocabularies is None else self._vocabularies.for_draft(token)
