"""The report of `scripts/experiments/run`, in words and tables."""

from __future__ import annotations

import statistics
from pathlib import Path

from ggpipe.display.files import write_text
from ggpipe.display.format import human_seconds, percent
from scripts.experiments.places import SITES, Costs, costs_of
from scripts.experiments.simulations import ITERATIVE
from scripts.experiments.studies import (
    ASYNC,
    BOUND_DRAFT,
    FOUR,
    HEAT_ACCEPTANCES,
    LATENCY_ACCEPTANCE,
    LATENCY_TOKENS_S,
    N_NODES,
    VARIANTS,
    Compared,
    Findings,
    PairResult,
)
from scripts.experiments.tables import CSV_FILES, maybe, named, percent_span, span, table

_PROMISED = 1.5  # the least speed-up over synchronous speculation on 8 nodes in PipeInfer's paper
_NEAR = 0.9  # of the bound of chains
_USUAL_ROWS = (0.1, 0.3)  # a further row's time, as a share of the first row's, where stages are not ideal
_MODES = ["4 draft tokens", "sync, best", "async", "async, best"]


def write_report(folder: Path, found: Findings) -> None:
    """report.md. Raises UsageError when it cannot be written."""
    sections = (_summary, _pairs, _why, _shares, _bound, _parts, _costs, _work, _assumptions)
    write_text(folder / "report.md", "\n\n".join(section(found) for section in sections) + "\n")


# The summary


def _summary(found: Findings) -> str:
    main, other = found.main, found.at(SITES[1], N_NODES)
    over = [r.over_waiting(r.best_async) for r in main]
    most = max(found.scale.bound_nodes)
    near = [f"{percent(x * (1 - a))} at a = {a:g}" for (a, n), x in found.bound.items() if n == most]
    lines = [
        f"- **{N_NODES} nodes ({SITES[0].name}).** `async` is {span(r.gain(ASYNC) for r in main)} times as fast as "
        f"`iterative` with its defaults and {span(r.gain(r.best_async) for r in main)} times in its best setting; "
        f"`speculative` is {span(r.gain(r.best_waiting) for r in main)} times as fast in its best setting.",
        f"- **async over the best synchronous setting** of {len(found.scale.waiting)}: {span(over)} times as fast, "
        f"{span(r.over_waiting(ASYNC) for r in main)} with its defaults. The paper's 1.5 to 2.15 hold for "
        f"{sum(x >= _PROMISED for x in over)} of {len(main)} pairs. On {SITES[1].name}, where rows are cheaper, it is "
        f"{span(r.over_waiting(r.best_async) for r in other)}. Over four draft tokens, the most in a "
        f"synchronous run of the paper, it is {span(r.gain(r.best_async) / r.gain(FOUR) for r in main)}; and if the "
        "paper's rates are acceptance rates of chains (section 3), "
        f"{span(r.over_waiting(r.best_async) for r in found.shares)} over the best.",
        "- **Why not more.** Each rejected draft token costs a pass of the whole pipeline, so chains are at most "
        f"1/(1-a) times as fast as `iterative` in any mode. For {sum(_ceiling(r) < _PROMISED for r in main)} of "
        f"{len(main)} pairs that is less than {_PROMISED:g} times the best synchronous setting, whatever the scheduler "
        "does (section 2).",
        f"- **The bound** 1/(1-a) holds everywhere, and is approached as stages are added: {most} of them reach "
        f"{', '.join(near)}.",
        _short_parts(found),
        _short_costs(found),
        _short_acceptance(found),
        _short_work(found),
    ]
    return "\n\n".join([
        "# PipeInfer's settings in the simulator",
        "Every number here is simulated: ggpipe's own scheduler and drafter on virtual time, with the stages, links "
        "and synthetic outputs of section 8. The nodes are estimates. `scripts/experiments/run` writes this "
        "report; the same program writes the same numbers.",
        "## Summary",
        "\n".join(lines),
    ])  # fmt: skip


def _short_parts(found: Findings) -> str:
    def loss(name: str) -> str:
        usual = "async, defaults"
        return percent_span(1 - (c[name].gain or 0) / (c[usual].gain or 1) for c in found.parts.values())

    return (
        f"- **Parts left out**, at low and high acceptance: `async` loses {loss('no continuous speculation')} of its "
        f"speed without continuous speculation, {loss('no multibuffering')} without multibuffering, "
        f"{loss('no cancellation')} without cancellation."
    )


def _short_costs(found: Findings) -> str:
    cells = [*found.latency.values(), *found.costs.values()]
    losing = [c for c in cells if c.default < c.waiting]
    defaults = "with its defaults in as many"
    if losing:
        worst = min(losing, key=lambda c: c.default / c.waiting)
        defaults = f"with its defaults in {len(losing)}, most with {_where(worst, worst.default)}"
    best = max(cells, key=lambda c: c.overlapping / c.waiting)
    usual = [c.overlapping / c.waiting for c in found.costs.values() if c.place.row_share in _USUAL_ROWS]
    low, high = map(percent, _USUAL_ROWS)
    words = [
        "- **Links, drafts, rows.** The best synchronous setting beats `async` in "
        f"{sum(c.overlapping < c.waiting for c in cells)} of {len(cells)} places, {defaults}. `async` is most ahead "
        f"with {_where(best, best.overlapping)}.",
        f"Where a further row takes {low} to {high} of the first it is {span(usual)} times as fast." if usual else "",
        "Links hardly matter: one message per run and hop takes little time compared with models of this size.",
    ]
    return " ".join(filter(None, words))


def _short_acceptance(found: Findings) -> str:
    worst = min(found.acceptance.values(), key=lambda c: c.acceptance)
    return (
        f"- **Low agreement.** With an agreement of {percent(worst.acceptance)} `async` is "
        f"{worst.default:.2f} times as fast as `iterative`, the best synchronous setting {worst.waiting:.2f} times. "
        f"TTFT is {span(r.ttft(ASYNC) for r in found.main)} times that of `iterative`."
    )


def _short_work(found: Findings) -> str:
    def mean(setting: str, value: str) -> str:
        shares = [getattr(r.figures[r.shown[setting]], value) for r in found.main]
        return percent(statistics.fmean(share or 0.0 for share in shares))

    return (
        f"- **Work.** Stages are busy {mean('iterative', 'occupancy')} of the time in `iterative`, "
        f"{mean('speculative, best', 'occupancy')} in the best synchronous setting and "
        f"{mean('async, best', 'occupancy')} in the best asynchronous one. Of that work "
        f"{mean('speculative, best', 'wasted')} and {mean('async, best', 'wasted')} were wasted on rejected draft "
        "tokens."
    )


# Sections


def _pairs(found: Findings) -> str:
    text = [
        "## 1. The paper's pairs",
        "Speed relative to `iterative` on all nodes. With a draft model, the last node has the draft and the others "
        "the target. *4 draft tokens*: synchronous, `--draft 4`. TTFT: time to first token, relative to `iterative`. "
        "ITL: mean time between tokens, in `iterative` and in the best asynchronous setting.",
    ]
    for site in SITES:
        rows, settings = [], []
        for r in found.at(site, N_NODES):
            rows.append([
                r.place.pair.name, percent(r.acceptance), *_gains(r), f"**{r.over_waiting(r.best_async):.2f}**",
                f"{r.over_waiting(ASYNC):.2f}", f"{r.ttft(ASYNC):.2f}", f"{r.ttft(r.best_waiting):.2f}",
                human_seconds(r.figures[ITERATIVE].itl_mean_s), human_seconds(r.figures[r.best_async].itl_mean_s),
            ])  # fmt: skip
            settings.append([r.place.pair.name, f"`{named(r.best_waiting)}`", f"`{named(r.best_async)}`"])
        header = [
            "pair",
            "agreement",
            *_MODES,
            "best/best",
            "async/best sync",
            "TTFT async",
            "TTFT sync",
            "ITL",
            "ITL async",
        ]
        text += [f"### {N_NODES} nodes: {site.name}", table(header, rows)]
        text.append(table(["pair", "best synchronous", "best asynchronous"], settings))
    rows = []
    for site in SITES:
        for pair in found.scale.pairs:
            cells = [r for r in found.pairs if r.place.pair == pair and r.place.site == site]
            gains = [f"{r.gain(r.best_async):.2f} ({r.over_waiting(r.best_async):.2f})" for r in cells]
            rows.append([pair.name, site.name, *gains])
    return "\n\n".join([
        *text,
        "### By number of nodes",
        f"In the best settings of {N_NODES} nodes: `async` over `iterative`, in brackets over the synchronous mode.",
        table(["pair", "nodes", *map(str, found.scale.n_nodes)], rows),
    ])  # fmt: skip


def _why(found: Findings) -> str:
    rows = []
    for r in found.main:
        costs = costs_of(r.place)
        waiting, n = costs.best_waiting(r.acceptance)
        rows.append([
            r.place.pair.name, percent(costs.draft), percent(costs.slowest),
            *(f"{costs.rows[k]:.2f}" for k in (2, 4, 8)),
            f"{waiting:.2f} ({n})", f"{costs.one_by_one(r.acceptance):.2f}", f"{1 / (1 - r.acceptance):.2f}",
            f"**{_ceiling(r):.2f}**", f"{r.over_waiting(r.best_async):.2f}", _reason(r, costs),
        ])  # fmt: skip
    header = ["pair", "draft", "stage", "2 rows", "4 rows", "8 rows", "sync by formula", "one by one", "1/(1-a)"]
    return "\n\n".join([
        f"## 2. Why not more, on {N_NODES} nodes ({SITES[0].name})",
        "Times as shares of a token's time in all of the target: a token of the draft, the slowest stage, runs of "
        "several rows. *Sync by formula*: chains of n draft tokens bring (1-aⁿ⁺¹)/(1-a) tokens in the time of n tokens "
        "of the draft and one run of n+1 rows; best n in brackets. *One by one*: 1/((1-a) + a·max(draft, stage)): each "
        "draft token is a run of its own after the previous one, each rejection costs a pass of the pipeline. *At "
        "most*: 1/(1-a) over the best synchronous setting as simulated; only trees can exceed it.",
        table([*header, "at most", "simulated", "what limits it"], rows),
        "A fast draft and free rows make the synchronous mode strong, because it approaches 1/(1-a) as well. A "
        "slow draft makes it weak, but then also limits `async`. The paper compares with trees of at most "
        "four tokens; the column *4 draft tokens* of section 1 comes nearest to that.",
    ])  # fmt: skip


def _shares(found: Findings) -> str:
    rows = [
        [
            p.place.pair.name, percent(p.acceptance), percent(r.acceptance), *_gains(r),
            f"**{r.over_waiting(r.best_async):.2f}**", f"{_ceiling(r):.2f}",
        ]
        for p, r in zip(found.main, found.shares, strict=True)
    ]  # fmt: skip
    return "\n\n".join([
        "## 3. If the paper's rates are acceptance rates of chains",
        "The paper's acceptance rates are of trees of at most four tokens. Sections 1 and 2 take them as the "
        "agreement. If they are the accepted share of chains of four draft tokens, the agreement is higher (same nodes "
        "as section 2):",
        table(["pair", "accepted", "agreement", *_MODES, "best/best", "at most"], rows),
    ])  # fmt: skip


def _bound(found: Findings) -> str:
    scale, rows = found.scale, []
    for a in scale.bound_acceptances:
        gains = [found.bound[a, n] for n in scale.bound_nodes]
        rows.append([f"{a:g}", f"{1 / (1 - a):.2f}", *(f"{x:.2f} ({percent(x * (1 - a))})" for x in gains)])
    most = max(scale.bound_nodes)
    below = [f"{a:g}" for a in scale.bound_acceptances if found.bound[a, most] * (1 - a) < _NEAR]
    verdict = f"With {most} stages all come within 10 % of the bound"
    if below:
        verdict += (
            f", but for a = {', '.join(below)}: there rejections are so rare that the draft tokens between two of "
            "them, a stage's time apart, add time to the pass that each rejection costs"
        )
    return "\n\n".join([
        "## 4. The bound of chains",
        "A rejected draft token costs a pass through the pipeline, as long as a token takes in `iterative`. So chains "
        "(`-np 1`) are at most 1/(1-a) times as fast, on any number of nodes. Equal stages, a token of the draft "
        f"{100 * BOUND_DRAFT:g} % of the target's, free rows, links of 25 µs, `async` with its defaults; by "
        "number of stages, in brackets as a share of the bound:",
        table(["a", "1/(1-a)", *map(str, scale.bound_nodes)], rows),
        verdict + ".",
    ])  # fmt: skip


def _parts(found: Findings) -> str:
    heads = [f"{percent(c.pair.acceptance)}, {c.site.name.rpartition(', ')[2]}, {c.confidence}" for c in found.parts]
    rows = []
    for name in VARIANTS:
        figures = [by_name[name] for by_name in found.parts.values()]
        rows.append([name, *(f"{f.gain:.2f} ({maybe(f.summary.wasted)})" for f in figures)])
    pairs = " and ".join(dict.fromkeys(c.pair.name for c in found.parts))
    return "\n\n".join([
        f"## 5. Parts left out, on {N_NODES} older nodes",
        f"{pairs}: speed relative to `iterative`, in brackets the wasted share of the stages' work. *No "
        "multibuffering*: two runs in flight, that of the last token and one of draft tokens. *Neither*: no continuous "
        "speculation, no cancellation.",
        table(["", *heads], rows),
    ])  # fmt: skip


def _costs(found: Findings) -> str:
    scale = found.scale
    rows = [[human_seconds(t), *(_cell(found.latency[t, x]) for x in scale.latencies_s)] for t in LATENCY_TOKENS_S]
    parts = [
        "## 6. Links, drafts, rows, acceptance",
        "Seven equal stages, and the draft on a node of its own. `async` over the best synchronous setting "
        f"({', '.join(f'`{named(s)}`' for s in scale.few_waiting)}): with its defaults / the best of "
        f"{', '.join(f'`{named(s)}`' for s in scale.few_overlapping)}.",
        f"By the latency of links (agreement {percent(LATENCY_ACCEPTANCE)}, the draft's token 5 % of the target's, a "
        "further row 10 % of the first):",
        table(["a token takes", *(f"{x * 1e6:g} µs" for x in scale.latencies_s)], rows),
    ]
    for a in HEAT_ACCEPTANCES:
        rows = [[percent(d), *(_cell(found.costs[a, d, r]) for r in scale.row_shares)] for d in scale.draft_shares]
        parts.append(
            f"Agreement {percent(a)}; by the time of a draft's token relative to the target's (down) and of a further "
            "row relative to the first (across):"
        )
        parts.append(table(["draft", *map(percent, scale.row_shares)], rows))
    rows = [
        [percent(c.acceptance), f"{1 / (1 - c.acceptance):.2f}", f"{c.waiting:.2f}", f"{c.default:.2f}",
         f"{c.overlapping:.2f}"]
        for c in found.acceptance.values()
    ]  # fmt: skip
    parts.append("By agreement (the draft's token 5 %, a further row 10 %), over `iterative`:")
    parts.append(table(["agreement", "1/(1-a)", *_MODES[1:]], rows))
    return "\n\n".join(parts)


def _work(found: Findings) -> str:
    rows = []
    for r in found.main:
        for name, setting in r.shown.items():
            f = r.figures[setting]
            per_run = "-" if f.accepted_per_run is None else f"{f.accepted_per_run:.2f}"
            rows.append([
                r.place.pair.name if setting is ITERATIVE else "", name, maybe(f.occupancy), maybe(f.wasted),
                maybe(f.draft_occupancy), maybe(f.acceptance), per_run,
            ])  # fmt: skip
    return "\n\n".join([
        f"## 7. Work and waste, on {N_NODES} nodes ({SITES[0].name})",
        "Busy: share of the time, mean of the target's stages. Wasted: share of their work, cancelled runs and "
        "rejected rows. Accepted: share of the submitted draft tokens. What `async` wastes is time of stages that had "
        "nothing else to do.",
        table(["pair", "", "busy", "wasted", "draft busy", "accepted", "accepted per run"], rows),
    ])  # fmt: skip


def _assumptions(found: Findings) -> str:
    lines = [
        f"- **{site.name}**: {site.node.cores} cores; {site.node.bytes_per_s / 1e9:.0f} GB/s of memory, as one process "
        f"gets them; {site.node.core_flop_per_s / 1e9:.0f} GFLOP/s a core in 4-bit matrix products; links of "
        f"{site.network.latency_s * 1e6:.0f} µs and {site.network.bytes_per_s * 8e-9:.2g} Gbit/s. Estimates."
        for site in SITES
    ]
    models = {m.name: m for pair in found.scale.pairs for m in (pair.target, pair.draft)}
    sizes = [f"{name} {m.parameters * m.bits / 8e9:.1f} GB in {m.layers} layers" for name, m in models.items()]
    lines += [
        f"- **Models**: {', '.join(sizes)}. Dolphin in Q3_K_M, as the original's script has it; others in Q4_K_M.",
        "- **Stages** take the longer of the times for reading weights and for computing rows. So rows are free until "
        "arithmetic is the limit; real kernels are slower for 2 to 4 rows: this favours the synchronous mode. Section "
        "6 varies it.",
        "- **ggpipe's own overhead** for messages and decisions is that of a small two-core machine.",
        f"- **Output**: {found.scale.n_text} tokens after a prompt of 80, as in the original's script; synthetic. "
        "The agreement is as stated and the draft's probabilities are calibrated unless stated otherwise. Where its "
        "best candidate is not the target's token, the second is in at most a quarter of the positions; trees gain "
        "more where that share is higher.",
        f"- **Best settings** are the best of {len(found.scale.waiting)} synchronous and "
        f"{len(found.scale.overlapping)} asynchronous ones on {N_NODES} nodes: the three that are best on one text are "
        f"compared on {len(found.scale.seeds)} others. From text to text speeds differ by some 3 %.",
        "- **The synchronous mode** would gain nothing from giving all nodes to the target and running the draft "
        "inside the head: it waits for the sum over all layers, which is the same.",
        f"- **Files**: {', '.join(CSV_FILES)} have all numbers.",
    ]
    return "## 8. What is assumed\n\n" + "\n".join(lines)


# Words


def _gains(r: PairResult) -> list[str]:
    return [f"{r.gain(setting):.2f}" for name, setting in r.shown.items() if name != "iterative"]


def _ceiling(r: PairResult) -> float:
    """The bound of chains relative to the best synchronous setting."""
    return 1 / (1 - r.acceptance) / r.gain(r.best_waiting)


def _reason(r: PairResult, costs: Costs) -> str:
    if r.over_waiting(r.best_async) >= _PROMISED:
        return f"reaches {_PROMISED:g}"
    if _ceiling(r) < _PROMISED:
        return "the bound: at this agreement chains gain no more"
    if costs.draft > costs.slowest / 2:
        return "the draft: a draft token takes nearly a stage's time"
    return "few stages: draft tokens come a stage's time apart"


def _cell(c: Compared) -> str:
    return f"{c.default / c.waiting:.2f} / {c.overlapping / c.waiting:.2f}"


def _where(c: Compared, gain: float) -> str:
    p = c.place
    return (
        f"an agreement of {percent(c.acceptance)}, a draft at {percent(p.draft_share)} of the target's time per "
        f"token, and rows at {percent(p.row_share)} of the first ({gain / c.waiting:.2f})"
    )
