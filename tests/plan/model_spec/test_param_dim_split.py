"""A split distributes whole units: every element on one rank, the first ranks get more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.plan.model_spec.param_dim_split import DimRanges, DimSplit


@given(
    units=st.integers(1, 9),
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    ranks=st.integers(1, 9),
)
def test_every_element_goes_to_one_rank_and_units_stay_whole(units: int, widths: list[int], ranks: int):
    cut = DimSplit(0, units, tuple(units * width for width in widths))
    sharded = [
        element
        for index in range(ranks)
        for first, end in cut.ranges(index, ranks)
        for element in range(first, end)
    ]
    assert sorted(sharded) == list(range(sum(cut.sections)))
    for index in range(ranks):
        first, end = cut.units_of(index, ranks)
        assert cut.size(index, ranks) == (end - first) * sum(widths)
    sizes = [cut.size(index, ranks) for index in range(ranks)]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= sum(widths)


def test_grouped_heads_go_with_their_key():
    query, key = DimSplit(0, 3, (24,)), DimSplit(0, 3, (12,))  # 6 heads of 4, of which two share a key
    assert [query.ranges(index, 2) for index in range(2)] == [((0, 16),), ((16, 24),)]
    assert [key.ranges(index, 2) for index in range(2)] == [((0, 8),), ((8, 12),)]


def test_packed_sections_are_cut_each_by_itself():
    packed = DimSplit(1, 4, (8, 4, 4))
    assert packed.ranges(1, 2) == ((4, 8), (10, 12), (14, 16))
    assert packed.local_shape((5, 16), 1, 2) == (5, 8)


@given(data=st.data(), lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_a_range_of_a_slice_is_found_in_the_full_tensor(data: st.DataObject, lengths: list[int]):
    ends = [
        sum(lengths[: i + 1]) + 3 * i for i in range(len(lengths))
    ]  # three elements of others between the ranges
    span = DimRanges(0, tuple((end - length, end) for length, end in zip(lengths, ends, strict=True)))
    mine = [element for first, end in span.ranges for element in range(first, end)]
    assert span.size == len(mine)
    first = data.draw(st.integers(0, len(mine)))
    length = data.draw(st.integers(0, len(mine) - first))
    assert [e for begin, end in span.global_ranges(first, length) for e in range(begin, end)] == mine[
        first : first + length
    ]


@pytest.mark.parametrize("index", [0, 4])
def test_a_rank_without_units_has_nothing(index: int):
    cut = DimSplit(0, 3, (6,))
    assert cut.size(index, 5) == (2 if index == 0 else 0)
    assert list(cut.dim_ranges(index, 5).global_ranges(0, 2)) == ([(0, 2)] if index == 0 else [])


@given(groups=st.integers(1, 4), each=st.integers(1, 4), width=st.integers(1, 3), ranks=st.integers(1, 16))
def test_single_heads_are_distributed_if_groups_are_too_few(groups: int, each: int, width: int, ranks: int):
    heads = groups * each
    query = DimSplit(0, groups, (heads * width,), num_heads=heads, per_head_numel=(each * width,))
    key = DimSplit(0, groups, (groups * width,), num_heads=heads, per_head_numel=(0,))
    assert (query.max_ranks, query.overlaps(ranks)) == (heads, False)
    assert key.overlaps(ranks) == (ranks > groups)
    sharded = [
        place
        for index in range(ranks)
        for first, end in query.ranges(index, ranks)
        for place in range(first, end)
    ]
    assert sharded == list(range(heads * width))
    for index in range(min(ranks, heads)):
        mine = [place // width for first, end in query.ranges(index, ranks) for place in range(first, end)][
            ::width
        ]
        keys = [place // width for first, end in key.ranges(index, ranks) for place in range(first, end)][
            ::width
        ]
        expected = [head // each for head in mine]
        assert keys in (expected, list(dict.fromkeys(expected)))  # with every head, or once for all of them
        assert len(mine) % len(keys) == 0


def test_shared_elements_follow_those_of_single_heads():
    packed = DimSplit(
        0, 2, (20,), num_heads=6, per_head_numel=(6,)
    )  # two groups of three heads, each of 2 features, with a key and a value of 2
    assert [packed.ranges(index, 4) for index in range(4)] == [
        ((0, 4), (6, 10)),  # heads 0 and 1 of the first group, and what they share
        ((4, 12), (16, 20)),  # head 2 with the first group's, head 3 with the second's
        ((12, 14), (16, 20)),
        ((14, 20),),
    ]
