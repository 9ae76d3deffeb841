"""What is swept, what one may change of a simulation, and that nothing is simulated twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from virtual import measured

from ggpipe.config import SpeculationConfig
from ggpipe.errors import UsageError
from ggpipe.runtime.stats import RequestStats
from ggpipe.sim.build import placement_of
from ggpipe.sim.cluster import Link
from ggpipe.sim.cluster_file import read_cluster
from ggpipe.sim.profiled import spec_from_profile
from ggpipe.sim.recording import BUNDLED, read
from ggpipe.sim.setup import NAMES, MadeUp, Setup
from ggpipe.sim.simulator import Sizes
from ggpipe.sim.sweep import Axis, check_axes, parse_axis, sweep


def setup(name: str = "nodes4-gigabit", n_predict: int = 16) -> Setup:
    spec = read_cluster(Path(name))
    assert spec.target is not None
    placement = placement_of(spec, spec.target, spec.draft)
    tokens = MadeUp(0.7, 16)
    return Setup(spec, placement, spec.target, spec.draft, SpeculationConfig(), tokens, n_predict, Sizes(n_ctx=0))


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
def test_values(text: str, name: str, values: tuple[float, ...]) -> None:
    axis = parse_axis(text)
    assert axis.name == name
    assert axis.values == pytest.approx(values)
    if name in ("draft", "np", "draft-min", "prompt-tokens"):
        assert all(isinstance(value, int) for value in axis.values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("draft", "--sweep draft: write NAME=VALUES"),
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
def test_values_that_are_none(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_axis(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_much() -> None:
    axes = [Axis("draft", tuple(range(1, 21))), Axis("pa", tuple(i / 100 for i in range(50)))]
    check_axes(axes, 2)
    with pytest.raises(UsageError, match="these sweeps are 3000 simulations, and at most 2000 are possible"):
        check_axes(axes, 3)
    with pytest.raises(UsageError, match="draft=… is there twice"):
        check_axes([axes[0], axes[0]], 1)


def test_every_name_changes_something() -> None:
    own = setup()
    for name in NAMES:
        value = 0.25 if name in ("pa", "ps", "pr", "pd", "acceptance") else 3
        assert own.changed({name: value}) != own, name
    assert own.changed({}) == own


def test_what_is_changed() -> None:
    own = setup().changed({"draft": 3, "np": 2, "pa": 0.4, "ps": 0.3, "pr": 0.2, "pd": 0.1, "draft-min": 1})
    assert own.speculation == SpeculationConfig("async", 3, 1, 0.4, 0.3, 0.2, 0.1, 2)
    assert setup().changed({"draft-min": 9, "draft": 3}).speculation.n_min == 3
    assert setup().changed({"acceptance": 0.1, "prompt-tokens": 7}).tokens == MadeUp(0.1, 7)
    spec = setup().changed({"latency-us": 5, "gbit": 8}).spec
    assert spec.network == Link(5e-6, 1e9)
    assert spec.local == setup().spec.local


def test_measured_links_are_changed_between_nodes_only() -> None:
    spec = spec_from_profile(measured(("x", "y", "x")), "measured")
    own = replace(setup(), spec=spec, placement=replace(setup().placement, target_on=spec.target_on, draft_on=()))
    links = own.changed({"latency-us": 500}).spec.links
    assert {pair for pair, link in links.items() if link.latency_s == 500e-6} == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert links[0, 2] == spec.links[0, 2]
    assert links[0, 1].bytes_per_s == spec.links[0, 1].bytes_per_s


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pa": 1.5}, "-pa is between 0 and 1"),
        ({"draft": 0}, "--draft and -np are 1 or more"),
        ({"np": 0}, "--draft and -np are 1 or more"),
        ({"acceptance": 1.1}, "acceptance is a share between 0 and 1; 1.1 is not"),
        ({"prompt-tokens": 0}, "a prompt has one token or more, not 0"),
        ({"latency-us": -1}, "latency-us is 0 or more"),
        ({"gbit": 0}, "gbit is above 0"),
    ],
)
def test_what_cannot_be(values: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        setup().changed(values)


def test_what_a_cluster_or_a_recording_has_not() -> None:
    with pytest.raises(UsageError, match="gbit is of the network between nodes, and all ranks are on one"):
        setup("two-cores").changed({"gbit": 1})
    recorded = replace(setup(), tokens=read(BUNDLED))
    with pytest.raises(UsageError, match="a recording says its own acceptance"):
        recorded.changed({"acceptance": 0.5})


def test_texts_that_do_not_fit() -> None:
    own = replace(setup(), sizes=Sizes(n_ctx=31))
    with pytest.raises(UsageError, match="a context of 31 tokens cannot hold 32"):
        own.run("async")
    assert replace(own, sizes=Sizes(n_ctx=32)).run("async")[0].n_generated == 16


def test_models_that_do_not_fit() -> None:
    own = setup()
    small = tuple(replace(node, memory_bytes=8e9) for node in own.spec.nodes)
    with pytest.raises(UsageError, match=r"node1 has 8 GB of memory, and its ranks need 1\d(\.\d)? GB"):
        replace(own, spec=replace(own.spec, nodes=small)).check()
    small = tuple(replace(node, memory_bytes=5e8 if node.name == "draft" else 64e9) for node in own.spec.nodes)
    with pytest.raises(UsageError, match=r"draft has 0\.5 GB of memory"):
        replace(own, spec=replace(own.spec, nodes=small)).check()


def test_recorded_requests() -> None:
    own = replace(setup("two-cores"), tokens=read(BUNDLED))
    lengths = [stats.n_generated for stats in own.run("iterative")]
    assert lengths == [16] * len(read(BUNDLED).takes)
    full = replace(own, n_predict=-1).run("iterative")
    assert [stats.n_generated for stats in full] == [len(take.text) for take in read(BUNDLED).takes]


def test_all_combinations_and_nothing_twice() -> None:
    runs: list[str] = []
    seen: list[tuple[int, int]] = []

    def measure(stats: Sequence[RequestStats]) -> float:
        runs.append(stats[0].speculation.mode)
        return stats[0].decode_s

    axes = [Axis("draft", (2, 4)), Axis("gbit", (0.5, 1, 10))]
    points = sweep(setup(), axes, ("iterative", "async"), measure, lambda done, of: seen.append((done, of)))
    assert [tuple(point.values.values()) for point in points] == [(d, g) for d in (2, 4) for g in (0.5, 1, 10)]
    assert (runs.count("iterative"), runs.count("async")) == (3, 6)
    assert seen == [(i, 12) for i in range(1, 13)]
    slow, _, fast = (point.by_mode["iterative"] for point in points[:3])
    assert fast < slow
    assert points[0].by_mode["iterative"] == points[3].by_mode["iterative"]
    with pytest.raises(UsageError, match="-pa is between"):
        sweep(setup(), [Axis("pa", (0.1, 1.5))], ("async",), lambda stats: pytest.fail("it was run"))
