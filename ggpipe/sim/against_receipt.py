"""Simulates what a receipt measured, and compares the speeds.

Times of runs, machines and links are those of the receipt's own profile. Tokens are synthetic: after each prompt,
the draft models are right as often as they were, and as much of the output repeats as n-grams found.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ggpipe.cluster.from_profile import spec_from_profile
from ggpipe.cluster.receipt import Receipt, ReceiptMode, ReceiptRun
from ggpipe.config.model import FIRST_DRAFT, TARGET
from ggpipe.config.speculation import Mode
from ggpipe.core.layout import Layout
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulation_spec import SimulationSpec, SyntheticText
from ggpipe.sim.virtual_cluster import VirtualPlacement
from ggpipe.stats.records import Spread, quartiles

_BASE: ReceiptMode = "iterative"
_SEEDS = 5
"""Synthetic outputs for each mode and prompt: one has its luck."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Speeds, measured or simulated."""

    tokens_per_s: float
    gain: float | None
    """Speed relative to iterative; None for iterative itself, or if it was not measured."""
    ttft_s: float


@dataclass(frozen=True, kw_only=True)
class ComparedMode:
    """A mode of a receipt, after one prompt or after all of them."""

    mode: ReceiptMode
    prompt: str | None
    """None: medians over all prompts."""
    measured: Figures
    """Medians of all rounds."""
    rounds: Spread
    """Quartiles of the measured tokens per second."""
    simulated: Figures

    @property
    def speed_ratio(self) -> float:
        """Simulated / measured tokens per second."""
        return self.simulated.tokens_per_s / self.measured.tokens_per_s

    @property
    def gain_ratio(self) -> float | None:
        """Simulated / measured speed relative to iterative."""
        return self.simulated.gain / self.measured.gain if self.simulated.gain and self.measured.gain else None

    @property
    def ttft_ratio(self) -> float | None:
        """Simulated / measured time to first token."""
        return self.simulated.ttft_s / self.measured.ttft_s if self.measured.ttft_s else None


def compare(receipt: Receipt, on_run: Callable[[int, int], None] = lambda done, total: None) -> list[ComparedMode]:
    """Simulate every mode and prompt of a receipt. Returns, for each mode, the comparison over all prompts and, if
    there are several, those after each of them.

    `on_run` is called with the number of simulations done and their total. Raises UsageError for ranks that do not fit
    into the memory that the receipt's machines had.
    """
    by_case = {
        (mode, prompt): [run for run in receipt.runs if (run.mode, run.prompt) == (mode, prompt)]
        for mode in receipt.modes
        for prompt in receipt.prompts
    }
    by_case = {case: runs for case, runs in by_case.items() if runs}
    specs = {case: list(_specs(receipt, *case)) for case in by_case}
    n_done, total = 0, sum(map(len, specs.values()))
    simulated: dict[tuple[ReceiptMode, str], tuple[float, float]] = {}
    for case, own in specs.items():
        requests = []
        for spec in own:
            requests += spec.run(_mode_of(case[0]))
            n_done += 1
            on_run(n_done, total)
        n_tokens, decode_s = sum(one.n_generated - 1 for one in requests), sum(one.decode_s for one in requests)
        simulated[case] = n_tokens / decode_s, statistics.fmean(one.ttft_s or 0.0 for one in requests)
    return list(_compared(receipt, by_case, simulated))


def _compared(
    receipt: Receipt,
    by_case: dict[tuple[ReceiptMode, str], list[ReceiptRun]],
    simulated: dict[tuple[ReceiptMode, str], tuple[float, float]],
) -> Iterator[ComparedMode]:
    bases = {(run.round, run.prompt): run.tokens_per_s for run in receipt.runs if run.mode == _BASE}
    for mode in receipt.modes:
        prompts = [prompt for prompt in receipt.prompts if (mode, prompt) in by_case]
        groups = [prompts, *([prompt] for prompt in prompts if len(prompts) > 1)]
        for number, chosen in enumerate(groups):
            runs = [run for prompt in chosen for run in by_case[mode, prompt]]
            speeds = quartiles(run.tokens_per_s for run in runs)
            assert speeds is not None
            virtual = [simulated[mode, prompt] for prompt in chosen]
            gains = [run.tokens_per_s / base for run in runs if (base := bases.get((run.round, run.prompt)))]
            virtual_gains = [
                simulated[mode, prompt][0] / simulated[_BASE, prompt][0]
                for prompt in chosen
                if (_BASE, prompt) in simulated
            ]
            has_gain = mode != _BASE and gains and virtual_gains
            yield ComparedMode(
                mode=mode,
                prompt=chosen[0] if number else None,
                measured=Figures(
                    tokens_per_s=speeds.middle,
                    gain=statistics.median(gains) if has_gain else None,
                    ttft_s=statistics.median(run.ttft_s for run in runs),
                ),
                rounds=speeds,
                simulated=Figures(
                    tokens_per_s=statistics.median(speed for speed, _ in virtual),
                    gain=statistics.median(virtual_gains) if has_gain else None,
                    ttft_s=statistics.median(ttft_s for _, ttft_s in virtual),
                ),
            )


def _mode_of(mode: ReceiptMode) -> Mode:
    return "iterative" if mode == "single" else mode


def _specs(receipt: Receipt, mode: ReceiptMode, prompt: str) -> Iterator[SimulationSpec]:
    """The simulations for one mode and prompt: they differ in their tokens only."""
    runs = [run for run in receipt.runs if run.prompt == prompt]
    settings, is_single = receipt.settings, mode == "single"
    placement = _single_placement(receipt) if is_single else _placement(receipt)
    drafts = () if is_single else tuple(model.shape for model in receipt.models[FIRST_DRAFT:])
    n_predict = max(run.n_generated_tokens for run in runs)
    first, *others = [_agreement(runs, model) for model in range(FIRST_DRAFT, FIRST_DRAFT + len(drafts))] or [0.0]
    for seed in range(1 if mode in ("iterative", "single") else _SEEDS):
        yield SimulationSpec(
            cluster=spec_from_profile(receipt.profile, "the receipt's machines"),
            placement=placement,
            target=receipt.models[TARGET].shape,
            drafts=drafts,
            speculation=settings.speculation,
            tokens=SyntheticText(
                agreement=first,
                others=tuple(others),
                repeats=_repeats(runs),
                n_prompt=runs[0].n_prompt_tokens,
                seed=seed,
            ),
            n_predict=n_predict,
            sizes=Sizes(0, settings.n_batch, settings.n_ubatch),
        )


def _agreement(runs: Sequence[ReceiptRun], model: int) -> float:
    """How often the model's best token was the target's; 0 if it never named one."""
    own = [drafter for run in runs for drafter in run.drafters if drafter.model == model]
    n_judged = sum(drafter.judged for drafter in own)
    return sum(drafter.right for drafter in own) / n_judged if n_judged else 0.0


def _repeats(runs: Sequence[ReceiptRun]) -> float:
    """The share of the output that drafters without a model had named, in the mode in which they named most."""
    shares = [0.0]
    for mode in dict.fromkeys(run.mode for run in runs):
        own = [run for run in runs if run.mode == mode]
        n_found = sum(drafter.in_output for run in own for drafter in run.drafters if drafter.model == TARGET)
        shares.append(n_found / sum(run.n_generated_tokens for run in own))
    return min(max(shares), 1.0)


def _placement(receipt: Receipt) -> VirtualPlacement:
    hosts = list(dict.fromkeys(rank.host for rank in receipt.profile.ranks))
    drafts = [receipt.layout_of(model) for model in range(FIRST_DRAFT, len(receipt.models))]
    target = receipt.layout_of(TARGET)
    assert target is not None
    n_target = len(target.ranks)
    node_of = [hosts.index(rank.host) for rank in receipt.profile.ranks]
    first = {rank.rank: rank for rank in reversed(receipt.ranks)}  # a rank's first model counts
    inside = [own for model, layout in enumerate(drafts, FIRST_DRAFT) if not layout for own in receipt.ranks_of(model)]
    return VirtualPlacement(
        target_on=tuple(node_of[:n_target]),
        draft_on=tuple(node_of[n_target:]),
        layout=target,
        draft_layouts=tuple(drafts),
        threads=tuple(first[rank].threads[0] for rank in range(len(node_of))),
        draft_threads=inside[0].threads[0] if inside else None,
        tensor_split=receipt.settings.tensor_split,
        tensor_wire=receipt.settings.tensor_wire,
    )


def _single_placement(receipt: Receipt) -> VirtualPlacement:
    """The whole target in the first rank's process."""
    threads = receipt.settings.single_threads
    assert threads is not None
    layout = Layout.of_ranks([(0, receipt.models[TARGET].shape.n_layer)])
    return VirtualPlacement(target_on=(0,), layout=layout, threads=(threads,))
