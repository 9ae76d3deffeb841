"""Sweeps: values, what they change of a simulation, and that nothing is simulated twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.virtual import measured

from ggpipe.cluster.from_profile import spec_from_profile
from ggpipe.cluster.links import Link
from ggpipe.cluster.recording import BUNDLED, read
from ggpipe.cluster.toml import read_cluster
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.errors import UsageError
from ggpipe.sim.arrivals import Arrival, Traffic
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulation_spec import NAMES, SimulationSpec, SyntheticText
from ggpipe.sim.simulator import SimulationResult
from ggpipe.sim.sweep import Axis, parse_axis, sweep
from ggpipe.sim.virtual_cluster import placement_of


def setup(name: str = "nodes4-gigabit", n_predict: int = 16) -> SimulationSpec:
    spec = read_cluster(Path(name))
    assert spec.target is not None
    placement = placement_of(spec, spec.target, spec.drafts)
    tokens = SyntheticText(agreement=0.7, n_prompt=16)
    return SimulationSpec(
        cluster=spec,
        placement=placement,
        target=spec.target,
        drafts=spec.drafts,
        speculation=SpeculationConfig(),
        tokens=tokens,
        n_predict=n_predict,
        sizes=Sizes(n_ctx=0),
    )


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("draft=2..5", "draft", (2, 3, 4, 5)),
        ("draft=8", "draft", (8,)),
        ("np=1,2,4", "np", (1, 2, 4)),
        ("np=1,3..5,4,9", "np", (1, 3, 4, 5, 9)),
        ("draft=2..9/3", "draft", (2, 5, 8)),
        ("--draft-min=0..1", "draft-min", (0, 1)),
        ("prompt_tokens=100..300/100", "prompt-tokens", (100, 200, 300)),
        ("acceptance=0..1", "acceptance", (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)),
        ("pa=0.05..0.6", "pa", (0.05, 0.119, 0.188, 0.256, 0.325, 0.394, 0.462, 0.531, 0.6)),
        ("pa=0.1..0.4/0.1", "pa", (0.1, 0.2, 0.3, 0.4)),
        ("-pa=0,.5", "pa", (0.0, 0.5)),
        ("latency-us=20..100/40", "latency-us", (20, 60, 100)),
        ("gbit = 1, 10, 100", "gbit", (1, 10, 100)),
        ("pr=0.3..0.3", "pr", (0.3,)),
    ],
)
def test_values_of_an_axis(text: str, name: str, values: tuple[float, ...]) -> None:
    axis = parse_axis(text)
    assert axis.name == name
    assert axis.values == pytest.approx(values)
    if name in ("draft", "np", "draft-min", "prompt-tokens"):
        assert all(isinstance(value, int) for value in axis.values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("draft", "`sweep` draft: write NAME=VALUES"),
        ("=2", "nothing cannot be swept"),
        ("nodes=2..8", "nodes cannot be swept; names are draft, draft-min, pa, ps, pr, pd, np, acceptance"),
        ("draft=", "nothing is not a whole number"),
        ("draft=2..", "nothing is not a whole number"),
        ("draft=2.5", "2.5 is not a whole number"),
        ("draft=a", "a is not a whole number"),
        ("pa=x", "x is not a number"),
        ("pa=nan", "nan is not a number"),
        ("pa=inf", "inf is not a number"),
        ("pa=0..1e300/1e-300", "1e300 is not a number"),
        ("pa=0..1/1e-300", "has more than 2000 values"),
        ("draft=8..2", "8..2 is empty; write the smaller number first"),
        ("draft=2..8/0", "a step is above 0"),
        ("draft=2/2", "2/2 has a step and no range"),
        ("prompt-tokens=1..100000", "has more than 2000 values"),
        ("draft=1..2..3", "2..3 is not a whole number"),
        ("draft=1" + "0" * 400, "is not a whole number"),
    ],
)
def test_values_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_axis(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_many_simulations() -> None:
    axes = [Axis("draft", tuple(range(1, 31))), Axis("pa", tuple(i / 100 for i in range(50)))]
    with pytest.raises(UsageError, match="these sweeps are 3000 simulations, at most 2000 are possible"):
        sweep(setup(), axes, ("async",), fail)
    with pytest.raises(UsageError, match="draft=… is given twice"):
        sweep(setup(), [axes[0], axes[0]], ("async",), fail)
    with pytest.raises(UsageError, match="draft=… makes no difference without draft tokens"):
        sweep(setup(), axes[:1], ("iterative",), fail)


def test_every_name_changes_something() -> None:
    own = setup()
    for name in NAMES:
        value = 0.25 if name in ("pa", "ps", "pr", "pd", "acceptance", "overlap") else 4
        assert own.changed({name: value}) != own, name
    assert own.changed({}) == own


def test_changes_of_a_simulation() -> None:
    own = setup().changed({"draft": 3, "np": 2, "pa": 0.4, "ps": 0.3, "pr": 0.2, "pd": 0.1, "draft-min": 1})
    assert own.speculation == SpeculationConfig(
        policy="thresholds", n_draft=3, n_min=1, p_accept=0.4, p_split=0.3, p_recovery=0.2, p_decay=0.1, n_parallel=2
    )
    assert setup().changed({"draft-min": 9, "draft": 3}).speculation.n_min == 3
    assert setup().changed({"acceptance": 0.1, "prompt-tokens": 7}).tokens == SyntheticText(agreement=0.1, n_prompt=7)
    spec = setup().changed({"latency-us": 5, "gbit": 8}).cluster
    assert spec.network == Link(5e-6, 1e9)
    assert spec.local == setup().cluster.local


def test_measured_links_are_changed_between_nodes_only() -> None:
    spec = spec_from_profile(measured(("x", "y", "x")), "measured")
    own = replace(setup(), cluster=spec, placement=replace(setup().placement, target_on=spec.target_on, draft_on=()))
    links = own.changed({"latency-us": 500}).cluster.links
    assert {pair for pair, link in links.items() if link.latency_s == 500e-6} == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert links[0, 2] == spec.links[0, 2]
    assert links[0, 1].bytes_per_s == spec.links[0, 1].bytes_per_s


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pa": 1.5}, "`p_accept` must be a probability from 0 to 1"),
        ({"draft": 0}, "`n_draft` must be a number from 1 to"),
        ({"np": 0}, "`n_parallel` must be a number from 1 to 256, got 0"),
        ({"acceptance": 1.1}, "`acceptance` must be a share between 0 and 1, got 1.1"),
        ({"prompt-tokens": 0}, "`prompt_tokens` must be 1 or more, got 0"),
        ({"latency-us": -1}, "latency-us must be 0 or more"),
        ({"gbit": 0}, "gbit must be above 0"),
    ],
)
def test_changes_that_are_refused(values: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        setup().changed(values)


def test_changes_that_do_not_fit_a_cluster_or_a_recording() -> None:
    with pytest.raises(UsageError, match="gbit is that of the network between machines"):
        setup("two-cores").changed({"gbit": 1})
    recorded = replace(setup(), tokens=read(BUNDLED))
    with pytest.raises(UsageError, match="a recording has its own acceptance"):
        recorded.changed({"acceptance": 0.5})


@pytest.mark.parametrize(
    "changes", [{"n_predict": 10**12}, {"traffic": Traffic(listed=(Arrival(at_s=0, n_prompt=10**12),))}]
)
def test_texts_that_would_fill_the_memory(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"10000000000\d\d tokens are too long to simulate"):
        replace(setup(), **changes).check()


def test_texts_that_do_not_fit() -> None:
    own = replace(setup(), sizes=Sizes(n_ctx=31))
    with pytest.raises(UsageError, match="a context of 31 tokens cannot hold 32"):
        own.run("async")
    assert replace(own, sizes=Sizes(n_ctx=32)).run("async")[0].n_generated == 16


def test_models_that_do_not_fit() -> None:
    own = setup()
    small = tuple(replace(node, memory_bytes=8e9) for node in own.cluster.nodes)
    with pytest.raises(UsageError, match=r"node1 has 8 GB of memory, and its ranks need 1\d(\.\d)? GB"):
        replace(own, cluster=replace(own.cluster, nodes=small)).check()
    small = tuple(replace(node, memory_bytes=5e8 if node.name == "draft" else 64e9) for node in own.cluster.nodes)
    with pytest.raises(UsageError, match=r"draft has 0\.5 GB of memory"):
        replace(own, cluster=replace(own.cluster, nodes=small)).check()


def test_recorded_requests() -> None:
    own = replace(setup("two-cores"), tokens=read(BUNDLED))
    lengths = [stats.n_generated for stats in own.run("iterative")]
    assert lengths == [16] * len(read(BUNDLED).prompts)
    full = replace(own, n_predict=-1).run("iterative")
    assert [stats.n_generated for stats in full] == [len(take.text) for take in read(BUNDLED).prompts]


def test_all_combinations_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    serve = SimulationSpec.serve

    def counted(own: SimulationSpec, mode: Mode) -> list[SimulationResult]:
        modes.append(mode)
        return serve(own, mode)

    monkeypatch.setattr(SimulationSpec, "serve", counted)
    seen: list[tuple[int, int]] = []
    axes = [Axis("draft", (2, 4)), Axis("gbit", (0.5, 1, 10))]
    found = sweep(setup(), axes, ("iterative", "async"), lambda done, total: seen.append((done, total)))
    assert [tuple(each.values.values()) for each in found] == [(d, g) for d in (2, 4) for g in (0.5, 1, 10)]
    assert (modes.count("iterative"), modes.count("async")) == (3, 6)
    assert seen == [(i, 12) for i in range(1, 13)]
    slow, _, fast = (each.by_mode["iterative"].summary.tokens_per_s or 0.0 for each in found[:3])
    assert slow < fast
    assert found[0].by_mode["iterative"] == found[3].by_mode["iterative"]
    assert not any(own.requests for each in found for own in each.by_mode.values())
    modes.clear()
    with pytest.raises(UsageError, match="`p_accept` must be"):
        sweep(setup(), [Axis("pa", (0.1, 1.5))], ("async",), fail)
    assert not modes, "mistakes show before anything is simulated"


def test_modes_without_a_sweep() -> None:
    (only,) = sweep(setup(), (), ("async",))
    assert dict(only.values) == {}
    assert list(only.by_mode) == ["async"]
    (iterative,), (stats,) = setup().run("iterative"), only.by_mode["async"].requests
    assert iterative.decode_tps is not None
    assert stats.decode_tps is not None
    assert only.by_mode["async"].gain == pytest.approx(stats.decode_tps / iterative.decode_tps)


def fail(done: int, total: int) -> None:
    pytest.fail("something was simulated")


def test_more_users_and_higher_rates() -> None:
    found = sweep(setup(), [Axis("users", (1, 3))], ("iterative",))
    one, three = (each.by_mode["iterative"] for each in found)
    assert one.traffic is not None
    assert three.traffic is not None
    assert (three.tokens_per_s or 0.0) > 1.2 * (one.tokens_per_s or 0.0)
    assert three.tokens_per_s == three.traffic.total_tokens_per_s
    traffic = Traffic(n_total=6)
    found = sweep(replace(setup(), traffic=traffic), [Axis("rate", (0.001, 100.0))], ("iterative",))
    seldom, often = (each.by_mode["iterative"].traffic for each in found)
    assert seldom is not None
    assert often is not None
    assert (seldom.queue_p99_s or 0.0) < (often.queue_p99_s or 0.0)
    with pytest.raises(UsageError, match="`users` must be a number from 1 to 256, got 0"):
        sweep(setup(), [Axis("users", (0,))], ("iterative",))


def test_memory_for_all_requests_at_a_time() -> None:
    """The context is as large as all requests together need, unless it is given."""
    alone = setup()
    many = replace(alone, traffic=Traffic(users=200))
    assert sum(own.total for own in many.memory()) > sum(own.total for own in alone.memory())
    many.check()
    with pytest.raises(UsageError, match="a context of 10 tokens cannot hold"):
        replace(many, sizes=replace(many.sizes, n_ctx=10)).check()


def test_sizes_of_requests_from_a_file() -> None:
    listed = (Arrival(at_s=0.0, n_prompt=3, n_predict=5), Arrival(at_s=0.0))
    own = replace(setup(), traffic=Traffic(listed=listed))
    (served,) = own.serve("async")
    usual = setup().run("async")[0]
    sizes = [(stats.n_prompt, stats.n_generated) for stats in served.requests]
    assert sizes == [(3, 5), (usual.n_prompt, usual.n_generated)]
    recorded = replace(own, tokens=read(BUNDLED))
    (served,) = recorded.serve("async")
    assert (served.requests[0].n_prompt, served.requests[0].n_generated) == (3, 5)
