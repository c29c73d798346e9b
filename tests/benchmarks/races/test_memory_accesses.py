"""Regions share memory where views do; accesses of freed memory race with its next owner."""

import itertools

import pytest
import torch

from benchmarks.races.memory_accesses import Access, FreedMemory, Memory, Region, Site
from benchmarks.races.vector_clocks import VectorClocks

BUFFER = torch.arange(64)
VIEWS = {
    "all": BUFFER,
    "first half": BUFFER[:32],
    "second half": BUFFER[32:],
    "even": BUFFER[::2],
    "odd": BUFFER[1::2],
    "left columns": BUFFER.view(8, 8)[:, :4],
    "right columns": BUFFER.view(8, 8)[:, 4:],
    "transposed": BUFFER.view(8, 8)[2:4].T,
    "repeated": BUFFER[5:6].expand(7),
    "diagonal": BUFFER.view(8, 8).diagonal(),
}
SITE = Site("add", "F(0)", (("model.py", 3, "forward"),))


@pytest.mark.parametrize(("one", "other"), list(itertools.product(VIEWS, VIEWS)))
def test_regions_overlap_where_views_share_elements(one: str, other: str):
    shared = set(VIEWS[one].flatten().tolist()) & set(VIEWS[other].flatten().tolist())
    assert region(VIEWS[one]).overlaps(region(VIEWS[other])) == bool(shared)


def test_a_race_names_both_places():
    clocks, memory = VectorClocks(), Memory(0)
    whole = region(BUFFER)
    assert not list(memory.add(Access(1, clocks.launch(1), whole, False, SITE), clocks))
    (race,) = memory.add(Access(0, clocks.launch(0), whole, True, SITE), clocks)
    assert str(race).splitlines() == [
        "race",
        "  read on stream 1, add in F(0)",
        "      model.py:3 forward",
        "  write on stream 0, add in F(0)",
        "      model.py:3 forward",
    ]


def test_an_access_that_was_replaced_is_forgotten():
    clocks, memory = VectorClocks(), Memory(0)
    for number in range(100):
        list(memory.add(Access(0, clocks.launch(0), region(BUFFER[number % 8 :]), True, SITE), clocks))
    list(memory.add(Access(0, clocks.launch(0), region(BUFFER), True, SITE), clocks))
    assert len(memory.accesses) == 1


def test_freed_memory_races_once_with_the_next_allocation_of_its_stream():
    clocks, memory, freed = VectorClocks(), Memory(0), FreedMemory()
    list(memory.add(Access(1, clocks.launch(1), region(BUFFER), False, SITE), clocks))
    freed.add(0, memory.unordered_at_reuse(clocks))
    assert not list(freed.reuse(1, clocks, SITE))
    assert [race.is_reuse for race in freed.reuse(0, clocks, SITE)] == [True]
    assert not list(freed.reuse(0, clocks, SITE))


def region(view: torch.Tensor) -> Region:
    return Region.of_view(view.storage_offset(), tuple(view.shape), tuple(view.stride()), view.itemsize)
