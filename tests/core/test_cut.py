"""A cut deals whole units out: every element to one rank, sections alike, larger parts first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.cut import Cut


@given(
    units=st.integers(1, 9),
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    ranks=st.integers(1, 9),
)
def test_every_element_goes_to_one_rank_and_units_stay_whole(units: int, widths: list[int], ranks: int):
    cut = Cut(0, units, tuple(units * width for width in widths))
    dealt = [element for index in range(ranks) for first, end in cut.ranges(index, ranks) for element in range(first, end)]
    assert sorted(dealt) == list(range(sum(cut.sections)))
    for index in range(ranks):
        first, end = cut.units_of(index, ranks)
        assert cut.size(index, ranks) == (end - first) * sum(widths)
    sizes = [cut.size(index, ranks) for index in range(ranks)]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= sum(widths)


def test_grouped_heads_go_with_their_key():
    query, key = Cut(0, 3, (24,)), Cut(0, 3, (12,))  # 6 heads of 4, of which two share a key
    assert [query.ranges(index, 2) for index in range(2)] == [((0, 16),), ((16, 24),)]
    assert [key.ranges(index, 2) for index in range(2)] == [((0, 8),), ((8, 12),)]


def test_packed_sections_are_cut_each_by_itself():
    packed = Cut(1, 4, (8, 4, 4))
    assert packed.ranges(1, 2) == ((4, 8), (10, 12), (14, 16))
    assert packed.local((5, 16), 1, 2) == (5, 8)
    assert list(packed.boxes((5, 16), 0, 4)) == [((0, 0), (5, 2)), ((0, 8), (5, 1)), ((0, 12), (5, 1))]


@pytest.mark.parametrize("index", [0, 4])
def test_a_rank_without_units_has_nothing(index: int):
    cut = Cut(0, 3, (6,))
    assert cut.size(index, 5) == (2 if index == 0 else 0)
    assert len(list(cut.boxes((6, 2), index, 5))) == (index == 0)
