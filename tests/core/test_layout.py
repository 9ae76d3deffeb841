"""Shares of layers: what may be written, and which whole layers come of it."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ggpipe.config.layer_split import LayerSplit, n_ranks_of, parse_layer_split, text_of
from ggpipe.core.layout import Layout, RankPlace, crowding, decimal_split, lay_out, part_shares
from ggpipe.errors import LaunchError, UsageError


def counts(layout: Layout) -> list[int]:
    return [b - a for a, b in layout.layers]


# Parsing


@pytest.mark.parametrize(
    ("text", "target", "draft"),
    [
        ("1", (1.0,), ()),
        ("0.2,0.4,0.4", (0.2, 0.4, 0.4), ()),
        ("0.33,0.33,0.33", (0.33, 0.33, 0.33), ()),
        ("0,0.5,0.5", (0.0, 0.5, 0.5), ()),
        ("0.1,0.2,0.7", (0.1, 0.2, 0.7), ()),  # adds up to a little more than 1 in floating point
        ("0.1,0.4,0.5/1.0", (0.1, 0.4, 0.5), (1.0,)),
        ("0.5,0.5/0,1", (0.5, 0.5), (0.0, 1.0)),
    ],
)
def test_shares_are_read(text: str, target: tuple[float, ...], draft: tuple[float, ...]) -> None:
    assert parse_layer_split(text) == (LayerSplit(target), *((LayerSplit(draft),) if draft else ()))


def test_shares_of_several_draft_models_are_read() -> None:
    splits = parse_layer_split("0.5*2,0.5/1.0//0.4,0.6*2")
    assert splits[1:] == (LayerSplit((1.0,)), None, LayerSplit((0.4, 0.6), (1, 2)))
    assert (n_ranks_of(splits[:1]), n_ranks_of(splits[1:]), n_ranks_of(splits)) == (3, 4, 7)
    assert [split.sizes for split in splits if split] == [(2, 1), (1,), (1, 2)]
    assert text_of(splits) == "0.5*2,0.5/1.0//0.4,0.6*2"


@pytest.mark.parametrize(
    ("text", "shares", "group_sizes", "draft_shares", "draft_group_sizes"),
    [
        ("1.0*4", (1.0,), (4,), (), ()),
        ("0.5*2,0.5*2/1.0", (0.5, 0.5), (2, 2), (1.0,), ()),
        ("0.3,0.7*2/1.0*3", (0.3, 0.7), (1, 2), (1.0,), (3,)),
        ("0,1*2", (0.0, 1.0), (1, 2), (), ()),
        ("0.5 * 2,0.5", (0.5, 0.5), (2, 1), (), ()),
        ("0.5*1,0.5*1", (0.5, 0.5), (), (), ()),  # groups of one rank are no groups
    ],
)
def test_groups_are_read(
    text: str,
    shares: tuple[float, ...],
    group_sizes: tuple[int, ...],
    draft_shares: tuple[float, ...],
    draft_group_sizes: tuple[int, ...],
) -> None:
    splits = parse_layer_split(text)
    drafts = (LayerSplit(draft_shares, draft_group_sizes),) if draft_shares else ()
    assert splits == (LayerSplit(shares, group_sizes), *drafts)
    assert parse_layer_split(text_of(splits)) == splits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5*,0.5", "give a group's share and its number of ranks, as in 0.5*2"),
        ("0.5*two,0.5", "give a group's share and its number of ranks, as in 0.5*2"),
        ("0.5*1.5,0.5", "give a group's share and its number of ranks, as in 0.5*2"),
        ("0.5*-2,0.5", "give a group's share and its number of ranks, as in 0.5*2"),
        ("0.5*2*2", "give a group's share and its number of ranks, as in 0.5*2"),
        ("*2,0.5", "give one share per rank, as in 0.2,0.4,0.4"),
        ("1*0", "a group has 1 to 16 ranks"),
        ("1*17", "a group has 1 to 16 ranks"),
        ("0*2,1", "a head with a share of 0 computes nothing, so it cannot be a group"),
        ("0.6*2,0.5*2", "shares add up to 1.1, more than 1"),
        ("0.5,0.5/", "give shares for the draft ranks after the /, or leave it out"),
        ("", "give one share per rank, as in 0.2,0.4,0.4"),
        ("half,half", "give one share per rank, as in 0.2,0.4,0.4"),
        ("0.5,,0.5", "give one share per rank, as in 0.2,0.4,0.4"),
        ("/0.5", "give one share per rank, as in 0.2,0.4,0.4"),
        ("0.5/0.5/", "give shares for the draft ranks after the /, or leave it out"),
        ("0.5//", "give shares for the draft ranks after the /, or leave it out"),
        ("1/1/x", "give one share per rank, as in 0.2,0.4,0.4"),
        ("0.5,-0.1", "a share is a number between 0 and 1"),
        ("nan", "a share is a number between 0 and 1"),
        ("0.5,inf", "a share is a number between 0 and 1"),
        ("0.5,0,0.5", "only the first rank (the head) may have a share of 0"),
        ("0.3,0.3", "shares add up to 0.6, less than 1: some layers have no rank; for all, 0.5,0.5"),
        ("0.5", "shares add up to 0.5, less than 1: some layers have no rank; for all, 1"),
        ("0.5,0.5/0.1*2,0.3", "shares add up to 0.4, less than 1: some layers have no rank; for all, 0.25*2,0.75"),
        ("0.5,0.6", "shares add up to 1.1, more than 1"),
        ("1/0.5,0.6", "shares add up to 1.1, more than 1"),
        ("0", "no rank has a share"),
        ("0.5,0.5/0", "no rank has a share"),
    ],
)
def test_wrong_shares_end_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_layer_split(text)
    assert str(caught.value) == f"`layer_split` {text}: {message}"
    assert caught.value.exit_code == 2


@given(st.text(max_size=20) | st.text("0123456789.,/-e *", max_size=20))
def test_any_text_is_shares_or_a_usage_error(text: str) -> None:
    try:
        splits = parse_layer_split(text)
    except UsageError:
        return
    for split in filter(None, splits):
        shares, sizes = split.shares, split.group_sizes
        assert not sizes or (len(sizes) == len(shares) and max(sizes) > 1)
        assert 0 < sum(shares) <= 1 + 1e-5
        assert all(math.isfinite(share) and share >= 0 for share in shares)
    assert splits[0] is not None
    assert splits[-1] is not None
    assert parse_layer_split(text_of(splits)) == splits


# Laying out


@pytest.mark.parametrize(
    ("n_layer", "shares", "expected"),
    [
        (10, (1.0,), [10]),
        (10, (0.2, 0.4, 0.4), [2, 4, 4]),
        (32, (0.1, 0.4, 0.5), [4, 12, 16]),  # 3.2, 12.8, 16: the layer left over is the head's
        (10, (0.1, 0.2, 0.7), [1, 2, 7]),
        (10, (0.35, 0.35, 0.3), [4, 3, 3]),
        (10, (0.1, 0.3), [7, 3]),  # what nobody named is left over, too
        (100, (0.42, 0.29, 0.29), [42, 29, 29]),  # 0.29 * 100 is below 29 in floating point
        (8, (0.25, 0.375, 0.375), [2, 3, 3]),
        (3, (0.1, 0.34, 0.34), [1, 1, 1]),  # a head whose share is less than a layer lives on what is left over
    ],
)
def test_leftovers_go_to_the_head(n_layer: int, shares: tuple[float, ...], expected: list[int]) -> None:
    assert counts(lay_out(n_layer, len(shares), LayerSplit(shares))) == expected


@pytest.mark.parametrize(
    ("n_layer", "shares", "expected"),
    [
        (10, (0.0, 0.5, 0.5), [0, 5, 5]),
        (10, (0.0, 0.34, 0.66), [0, 3, 7]),  # 3.4 and 6.6: the second lost more
        (10, (0.0, 0.36, 0.64), [0, 4, 6]),  # 3.6 and 6.4: the first did
        (7, (0.0, 0.5, 0.5), [0, 4, 3]),
        (10, (0.0, 0.2, 0.2), [0, 5, 5]),  # 6 layers left over for two ranks
        (1, (0.0, 1.0), [0, 1]),
    ],
)
def test_a_head_of_share_0_only_coordinates(n_layer: int, shares: tuple[float, ...], expected: list[int]) -> None:
    layout = lay_out(n_layer, len(shares), LayerSplit(shares))
    assert counts(layout) == expected
    assert layout.layers[0] == (0, 0)
    assert layout.stage_ranks == tuple(range(1, len(shares)))


def test_without_shares_layers_are_spread_evenly_the_longer_ranges_first() -> None:
    assert counts(lay_out(10, 3, None)) == [4, 3, 3]
    assert counts(lay_out(8, 4, None)) == [2, 2, 2, 2]
    assert counts(lay_out(5, 1, None)) == [5]


def test_shares_and_ranks_must_agree_in_number() -> None:
    with pytest.raises(LaunchError) as caught:
        lay_out(10, 4, LayerSplit((0.5, 0.5)))
    assert str(caught.value) == ("`layer_split` names 2 ranks, but 4 were started: use mpirun -n 2, or give 4 shares")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("n_layer", "n_ranks", "shares", "empty"),
    [
        (2, 3, None, 2),
        (10, 3, (0.5, 0.05, 0.4), 1),
        (10, 2, (0.95, 0.05), 1),
        (1, 3, (0.0, 0.5, 0.5), 2),
    ],
)
def test_no_rank_is_left_without_a_layer(
    n_layer: int, n_ranks: int, shares: tuple[float, ...] | None, empty: int
) -> None:
    with pytest.raises(LaunchError) as caught:
        lay_out(n_layer, n_ranks, LayerSplit(shares) if shares is not None else None)
    assert str(caught.value) == (
        f"rank {empty} would get no layer: the model has {n_layer} layers for {n_ranks} ranks; "
        "give it a larger share, or use fewer ranks"
    )
    assert caught.value.exit_code == 2


def test_the_next_stage() -> None:
    layout = lay_out(6, 3, LayerSplit((0.0, 0.5, 0.5)))
    assert [layout.receivers_of(rank) for rank in range(3)] == [(1,), (2,), ()]
    assert lay_out(6, 1, None).receivers_of(0) == ()


# Groups


def test_the_ranks_of_groups() -> None:
    layout = lay_out(8, 6, parse_layer_split("0.25,0.25*2,0.5*3")[0])
    assert [stage.ranks for stage in layout.stages] == [(0,), (1, 2), (3, 4, 5)]
    assert layout.layers == ((0, 2), (2, 4), (2, 4), (4, 8), (4, 8), (4, 8))
    assert [layout.part_of(rank) for rank in layout.ranks] == [0, 0, 1, 0, 1, 2]
    assert [layout.receivers_of(rank) for rank in layout.ranks] == [(1, 2), (3, 4, 5), (), (), (), ()]


def test_a_head_that_only_coordinates_feeds_a_group() -> None:
    layout = lay_out(8, 3, LayerSplit((0.0, 1.0), (1, 2)))
    assert layout.layers == ((0, 0), (0, 8), (0, 8))
    assert layout.receivers_of(0) == (1, 2)
    assert layout.part_of(0) == 0


def test_groups_of_a_draft_follow_the_targets_ranks() -> None:
    layout = lay_out(4, 3, LayerSplit((0.5, 0.5), (2, 1)), 5)
    assert [stage.ranks for stage in layout.stages] == [(5, 6), (7,)]
    assert layout.ranks == range(5, 8)


def test_groups_and_ranks_must_agree_in_number() -> None:
    with pytest.raises(
        LaunchError, match="`layer_split` names 4 ranks, but 2 were started: use mpirun -n 4, or give 2"
    ):
        lay_out(8, 2, LayerSplit((0.5, 0.5), (2, 2)))


def test_no_group_is_left_without_a_layer() -> None:
    with pytest.raises(LaunchError) as caught:
        lay_out(2, 5, LayerSplit((0.8, 0.1, 0.1), (2, 2, 1)))
    assert str(caught.value) == (
        "rank 2 would get no layer: the model has 2 layers for 3 stages; give it a larger share, or use fewer stages"
    )


def test_parts_share_tensors_evenly_or_in_the_proportions_for_groups_of_their_size() -> None:
    assert part_shares(2) == (0.5, 0.5)
    assert part_shares(2, (3, 1)) == (0.75, 0.25)
    assert part_shares(4, (3, 1)) == (0.25,) * 4
    assert part_shares(1) == (1.0,)


@st.composite
def valid_shares(draw: st.DrawFn) -> tuple[float, ...]:
    """As a user writes them: a few decimals, the head perhaps without a share, together at most 1."""
    parts = draw(st.lists(st.integers(1, 50), min_size=1, max_size=8))
    if len(parts) > 1 and draw(st.booleans()):
        parts[0] = 0
    whole = sum(parts) + draw(st.integers(0, 20))
    digits = draw(st.sampled_from([2, 3, 17]))
    text = ",".join(f"{max(math.floor(n / whole * 10**digits) / 10**digits, n and 0.01):.17g}" for n in parts)
    try:
        split = parse_layer_split(text)[0]
    except UsageError:
        return (1.0,)
    assert split is not None
    return split.shares


@given(st.integers(1, 130), st.data())
def test_ranges_are_contiguous_and_cover_all_layers(n_layer: int, data: st.DataObject) -> None:
    shares = data.draw(st.none() | valid_shares())
    n_ranks = len(shares) if shares is not None else data.draw(st.integers(1, 8))
    try:
        layout = lay_out(n_layer, n_ranks, LayerSplit(shares) if shares is not None else None)
    except LaunchError:
        too_small = n_layer < n_ranks if shares is None else min(filter(None, shares)) * n_layer < 1
        assert too_small, "refused though every rank's share is a layer or more"
        return
    assert len(layout.layers) == n_ranks
    borders = [0, *(b for _, b in layout.layers)]
    assert [a for a, _ in layout.layers] == borders[:-1]
    assert borders[-1] == n_layer
    got = counts(layout)
    coordinates_only = shares is not None and shares[0] == 0
    assert all(n > 0 for n in got[coordinates_only:])
    assert (got[0] == 0) == coordinates_only
    assert layout.stage_ranks == tuple(range(int(coordinates_only), n_ranks))
    if shares is None:
        assert max(got) - min(got) <= 1
        assert got == sorted(got, reverse=True)
    elif not coordinates_only:
        for share, n in zip(shares[1:], got[1:], strict=True):
            assert n <= share * n_layer + 1e-3
            assert n > share * n_layer - 1
        assert got[0] > shares[0] * n_layer - 1


# Writing


def layout_of(counts: list[int], head: int = 0) -> Layout:
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return Layout.of_ranks([(a, a + n) for a, n in zip(starts, counts, strict=True)], head)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([8], "1.0"),
        ([4, 4], "0.5,0.5"),
        ([3, 5], "0.3,0.7"),
        ([20, 20, 20, 20], "0.25,0.25,0.25,0.25"),
        ([0, 4, 4], "0,0.5,0.5"),
        ([0, 8], "0,1.0"),
    ],
)
def test_shares_are_written_short(layers: list[int], text: str) -> None:
    assert str(decimal_split(layout_of(layers))) == text


@given(st.integers(0, 9), st.lists(st.integers(1, 9), max_size=40), st.lists(st.integers(1, 5), max_size=3))
@example(0, [1, 1, 1, 1, 2], [])
@example(0, [1, 1, 9, 9], [])
@example(0, [1, 1, 1, 1, 1, 1, 1, 7, *[9] * 8], [])  # 0.95 in all, but for what binary fractions round
def test_what_is_written_gives_the_same_layers(first: int, others: list[int], draft: list[int]) -> None:
    if first + len(others) == 0:
        return
    layout = layout_of([first, *others])
    draft_layout = layout_of(draft, len(layout.layers)) if draft else None
    target, *drafts = parse_layer_split(text_of([decimal_split(own) for own in (layout, draft_layout) if own]))
    assert lay_out(first + sum(others), len(layout.layers), target) == layout
    if draft_layout is not None:
        assert lay_out(sum(draft), len(draft), drafts[0], draft_layout.head) == draft_layout
    else:
        assert drafts == []


@given(st.integers(0, 9), st.lists(st.integers(1, 9), max_size=9), st.data())
def test_what_is_written_of_groups_gives_the_same_layers(first: int, others: list[int], data: st.DataObject) -> None:
    if first + len(others) == 0:
        return
    counts = [first, *others]
    sizes = tuple(data.draw(st.integers(1, 4)) if count else 1 for count in counts)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    layout = Layout.of_ranks([(b - n, b) for n, b in zip(counts, ends, strict=True)], 0, sizes)
    (split,) = parse_layer_split(str(decimal_split(layout)))
    assert lay_out(sum(counts), sum(sizes), split) == layout


def test_what_no_shares_give() -> None:
    with pytest.raises(ValueError, match="no shares give"):
        decimal_split(layout_of([3, 0, 3]))


@pytest.mark.parametrize(
    ("machines", "n_cores", "expected"),
    [
        ("aaa", 2, 3 * 4 / 2),
        ("aab", 8, 2 * 4 / 8),  # the draft has a machine of its own
        ("aba", 8, 2 * 4 / 8),
        ("abb", 4, 2 * 4 / 4),
        ("abc", 1, 0.0),  # no stages share a machine, however few cores it has
    ],
)
def test_how_crowded_machines_are(machines: str, n_cores: int, expected: float) -> None:
    target, draft = lay_out(8, 2, None), lay_out(4, 1, None, 2)
    places = [RankPlace(machine, n_cores, n_threads=4) for machine in machines]
    assert crowding(target, [draft], places) == expected


def test_the_median_stage_counts() -> None:
    places = [RankPlace("a", 8, 4), RankPlace("a", 8, 4), RankPlace("b", 2, 2), RankPlace("b", 2, 2)]
    assert crowding(lay_out(8, 4, None), [], places) == 2.0
    places = [*(RankPlace(machine, 8, 8) for machine in "abcd"), RankPlace("a", 8, 4)]
    assert crowding(lay_out(8, 4, None), [lay_out(4, 1, None, 4)], places) == 1.0, "a draft slows down one of four"


def test_a_rank_without_layers_does_not_crowd_a_machine() -> None:
    layout = lay_out(8, 3, LayerSplit((0.0, 0.5, 0.5)))
    assert crowding(layout, [], [RankPlace("a", 4, 4), RankPlace("a", 4, 4), RankPlace("b", 4, 4)]) == 0.0


def test_ranks_of_a_group_are_one_stage() -> None:
    layout = lay_out(8, 2, LayerSplit((1.0,), (2,)))
    assert crowding(layout, [], [RankPlace("a", 2, 2)] * 2) == 0.0
