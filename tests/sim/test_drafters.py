"""Several drafters in one simulation: how far they coincide, what they bring together, what a head's states cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import n_examples
from support.virtual import ASYNC, several_drafts

from ggpipe.cluster.model_shape import ModelShape, block_head_shape, head_shape
from ggpipe.cluster.toml import read_cluster
from ggpipe.config.layer_split import LayerSplit
from ggpipe.core.drafters import registry
from ggpipe.core.drafters.eagle import HORIZON
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulation_spec import SimulationSpec, SyntheticText
from ggpipe.sim.simulator import simulate
from ggpipe.sim.text import SyntheticTokens
from ggpipe.sim.virtual_cluster import placement_of, with_drafts, with_splits
from ggpipe.stats.records import RequestStats


def setup(drafts: tuple[ModelShape, ...], tokens: SyntheticText, n_predict: int = 256) -> SimulationSpec:
    """Eight nodes for the target, and one for each draft model."""
    cluster = with_drafts(read_cluster(Path("nodes8-100g")), len(drafts))
    assert cluster.target is not None
    placement = placement_of(cluster, cluster.target, drafts)
    kinds = tuple(dict.fromkeys(draft.drafter for draft in drafts)) or ("ngram",)
    return SimulationSpec(
        cluster=cluster,
        placement=placement,
        target=cluster.target,
        drafts=drafts,
        speculation=replace(ASYNC, drafters=kinds),
        tokens=tokens,
        n_predict=n_predict,
        sizes=Sizes(n_ctx=0),
    )


def shapes() -> tuple[ModelShape, ModelShape]:
    """The draft model, and a head."""
    cluster = read_cluster(Path("nodes8-100g"))
    assert cluster.target is not None
    assert cluster.draft is not None
    return cluster.draft, head_shape(cluster.target)


def speed(stats: RequestStats) -> float:
    """Accepted tokens a second."""
    assert stats.decode_tps is not None
    return stats.decode_tps


# Texts


@settings(max_examples=n_examples(15, 40), deadline=None)
@given(st.sampled_from([0.0, 0.4, 0.6, 1.0]), st.sampled_from([0.0, 0.5, 0.8, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_each_drafter_agrees_as_often_as_it_is_to(first: float, second: float, overlap: float) -> None:
    n = 2000
    text = SyntheticTokens(first, 4, n, 3, others=(second, second), overlap=overlap)
    right = [[text.candidates(i, False, drafter)[0][0] == text.output[i] for i in range(n)] for drafter in range(3)]
    for own, expected in zip(right, (first, second, second), strict=True):
        assert sum(own) / n == pytest.approx(expected, abs=0.04)
    for drafter in range(3):
        for i in range(0, n, 97):
            ids = [token for token, _ in text.candidates(i, False, drafter)]
            assert len(set(ids)) == len(ids)
            probs = [prob for _, prob in text.candidates(i, False, drafter)]
            assert probs == sorted(probs, reverse=True)


@pytest.mark.parametrize(("overlap", "expected"), [(0.0, 0.36), (0.5, 0.48), (1.0, 0.6)])
def test_the_overlap_says_how_often_both_are_right(overlap: float, expected: float) -> None:
    n = 4000
    text = SyntheticTokens(0.6, 4, n, 3, others=(0.6,), overlap=overlap)
    first, second = ([text.candidates(i, False, drafter)[0][0] for i in range(n)] for drafter in range(2))
    both = sum(a == b == token for a, b, token in zip(first, second, text.output, strict=True))
    assert both / n == pytest.approx(expected, abs=0.03)
    same = sum(a == b for a, b in zip(first, second, strict=True))
    assert same / n == pytest.approx(expected + overlap * (1 - 0.6), abs=0.03), "mistakes coincide, too"


def test_the_first_drafter_is_the_same_with_others() -> None:
    alone, beside = SyntheticTokens(0.6, 4, 50, 3), SyntheticTokens(0.6, 4, 50, 3, others=(0.5,))
    assert alone.output == beside.output
    assert all(alone.candidates(i, False) == beside.candidates(i, False) for i in range(50))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_repeated_text_is_what_n_grams_find(share: float) -> None:
    text = SyntheticTokens(0.6, 64, 2000, 3, repeats=share)
    tokens = (*text.prompt, *text.output)
    triples = [tokens[i : i + 3] for i in range(len(tokens) - 3)]
    found, known = 0, set[tuple[int, ...]]()
    for triple in triples:
        found += triple in known
        known.add(triple)
    assert found / len(triples) == pytest.approx(share * 0.95, abs=0.12)
    right = [text.candidates(i, False)[0][0] == text.output[i] for i in range(2000)]
    assert sum(right) / 2000 == pytest.approx(0.6, abs=0.01), "the draft model is as often right as without"


# What they bring


def test_two_drafters_whose_mistakes_differ_are_faster_than_the_better_one() -> None:
    draft, _ = shapes()
    (alone,) = setup((draft,), SyntheticText(agreement=0.6)).run("async")
    merged = {}
    for overlap in (0.0, 0.5, 1.0):
        tokens = SyntheticText(agreement=0.6, others=(0.6,), overlap=overlap)
        (stats,) = setup((draft, draft), tokens).run("async")
        merged[overlap] = speed(stats) / speed(alone)
        assert stats.counters.by_drafter.keys() == {0, 1}
        assert {rank.drafter for rank in stats.ranks if rank.draft and rank.runs} == {"draft"}
    assert merged[0.0] > 1.25
    assert merged[0.0] > merged[0.5] > 1.08
    assert merged[1.0] > 0.97, "the same drafter twice costs nothing"


def test_n_grams_pay_by_what_repeats() -> None:
    speeds = [speed(setup((), SyntheticText(repeats=share)).run("async")[0]) for share in (0.0, 0.5, 1.0)]
    assert speeds == sorted(speeds)
    assert speeds[2] > 2 * speeds[0]


# Heads


def test_a_head_drafts_up_to_its_horizon() -> None:
    _, head = shapes()
    (stats,) = setup((head,), SyntheticText(agreement=0.95)).run("async")
    assert max(stats.counters.by_lead) == HORIZON
    assert {rank.drafter for rank in stats.ranks if rank.draft} == {"eagle3"}


def test_mtp_layers_read_one_state() -> None:
    """They draft as an EAGLE-3 head of the same size, whose text begins one token later."""
    _, head = shapes()
    layers = replace(head, taps=(head.n_layer,), drafter="mtp")
    tokens = SyntheticText(agreement=0.95)
    (stats,), (other,) = (setup((drafter,), tokens).run("async") for drafter in (layers, head))
    assert max(stats.counters.by_lead) == HORIZON
    assert {rank.drafter for rank in stats.ranks if rank.draft} == {"mtp"}
    assert speed(stats) > 0.95 * speed(other)


def test_a_block_reaches_further() -> None:
    """The DFlash head's draft tokens are known as far ahead as its blocks are long; they come later than others."""
    cluster = read_cluster(Path("nodes8-100g"))
    assert cluster.target is not None
    head = block_head_shape(cluster.target)
    (stats,) = setup((head,), SyntheticText(agreement=0.95)).run("async")
    assert HORIZON < max(stats.counters.by_lead) <= 15 == head.horizon
    assert {rank.drafter for rank in stats.ranks if rank.draft} == {"dflash"}
    (small,) = setup((replace(head, horizon=1),), SyntheticText(agreement=0.95)).run("async")
    assert speed(stats) > 1.5 * speed(small)


def test_taps_take_the_links_time() -> None:
    """A row of the target costs three states."""
    _, head = shapes()
    fast = setup((head,), SyntheticText(agreement=0.7), 64)
    speeds = [speed(fast.changed({"gbit": gbit}).run("async")[0]) for gbit in (100, 0.1)]
    slim = setup((replace(head, taps=(40,)),), SyntheticText(agreement=0.7), 64)
    assert speed(slim.changed({"gbit": 0.1}).run("async")[0]) > 1.03 * speeds[1]
    assert speeds[0] > speeds[1]


# Places


def test_further_draft_models_get_machines_like_the_first_ones() -> None:
    draft, head = shapes()
    own = setup((draft, head, draft), SyntheticText(others=(None, None)))
    assert [own.cluster.nodes[node].name for node in own.placement.draft_on] == ["draft", "draft-2", "draft-3"]
    assert [layout and layout.head for layout in own.placement.draft_layouts] == [8, 9, 10]
    own.check()
    spec = read_cluster(Path("nodes8-100g"))
    assert with_drafts(spec, 1) is spec
    assert with_drafts(replace(spec, draft_on=()), 3).nodes == spec.nodes, "inside the head, as the first one"


def test_a_split_names_the_ranks_of_several_draft_models() -> None:
    spec = read_cluster(Path("nodes8-100g"))
    draft, head = shapes()
    assert spec.target is not None
    splits = (LayerSplit((0.25,) * 4), LayerSplit((0.5, 0.5)), None, LayerSplit((0.4, 0.3, 0.3)))
    own = with_splits(spec, splits)
    assert with_drafts(own, 3) == own
    placement = placement_of(own, spec.target, (draft, head, draft))
    assert placement.draft_on == (4, 5, 6, 7, 8)
    assert placement.layer_splits == splits
    assert placement.draft_layout(1) is None


@pytest.mark.parametrize("agreements", [(0.65, 0.8), (0.6, 0.6)])
def test_draft_models_bring_more_if_they_share_their_tokens(
    agreements: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast draft model and a slow one that is right more often, or two alike."""
    first, second = agreements
    draft_s = (0.007, 0.09) if first < second else (0.01, 0.01)
    virtual = several_drafts([0.031] * 8, draft_s, row_share=0.05)

    def seconds() -> float:
        texts = [SyntheticTokens(first, 40, 192, seed, others=(second,), overlap=0.6) for seed in range(2)]
        return sum(192 / (simulate(virtual, text, ASYNC, 192).decode_tps or 0.0) for text in texts)

    shared_s = seconds()
    monkeypatch.setattr(registry, "sharing", lambda kinds: ())
    assert shared_s < 0.98 * seconds()
