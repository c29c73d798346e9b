"""Unlike devices: who does how much, that everybody waits for the slowest, and that no group mixes kinds."""

from dataclasses import replace

import pytest

from meshwright.planner.hardware import Machine, machine
from meshwright.planner.layout import FOLDED, HALVES, Layout, Order
from meshwright.planner.search import search
from meshwright.planner.shapes import Shape
from meshwright.planner.sketch import step
from meshwright.planner.unlike import Kind, alone, deal, search_unlike, weakest
from meshwright.planner.wish import SHARE, Wish

SHAPE = Shape("7b", 32, 4096, 32, vocab=32_000)
ORDERS = {"1f1b": (Order(), 1), "zb_h1": (HALVES, 1), "zb_v": (FOLDED, 2)}


def wish(machines: list[Machine], **said: object) -> Wish:
    return Wish(SHAPE, weakest(machines), 64, ORDERS, **said)


def test_two_halves_of_one_kind_are_that_kind():
    halves = [machine("A100", 8), machine("A100", 8)]
    given = replace(wish(halves), kinds=(8, 8))
    one = replace(given, machine=machine("A100", 16))
    found, whole = search_unlike(given, halves, 3), search(one, 3)
    assert found.best[0].seconds == pytest.approx(whole.best[0].seconds, rel=0.02)


def test_the_slow_ones_have_fewer_layers_in_the_measure_of_their_pace():
    kinds = [machine("H100", 8), machine("A100", 8)]
    found = search_unlike(wish(kinds, fixed={"pp": 2, "tp": 1}), kinds, 1).best[0]
    counts = dict(found.dealt)
    assert sum(count for _, count in found.dealt) == 32
    paces = {}
    for kind in kinds:
        less, more = (step(replace(SHAPE, layers=2 * layers), found.layout, kind) for layers in (1, 2))
        paces[kind.device.name] = more.compute + more.tensor - less.compute - less.tensor
    late = max(counts[name] * paces[name] for name in paces)
    for more, less in (("H100", "A100"), ("A100", "H100")):  # a layer from the one to the other makes nobody faster
        assert max((counts[more] + 1) * paces[more], (counts[less] - 1) * paces[less]) >= late


def test_a_step_takes_as_long_as_its_slowest_rank():
    kinds = [machine("H100", 8), machine("A100", 8)]
    found = search_unlike(wish(kinds, fixed={"pp": 4}), kinds, 1).best[0]
    busy = [
        step(replace(SHAPE, layers=4 * count), found.layout, replace(machine(kind, 16), per_host=8))
        for kind, count in found.dealt
    ]
    assert found.step.compute + found.step.tensor == pytest.approx(max(each.compute + each.tensor for each in busy), rel=0.01)


def test_memory_bounds_what_a_kind_takes():
    small = machine("H100", 2)
    small = replace(small, device=replace(small.device, memory=30 * 2**30))
    kinds = (Kind(machine("A100", 2), 0, 2), Kind(small, 2, 2))
    dealt = deal(SHAPE, Layout(pp=4, micros=8), kinds)
    assert dealt is not None
    assert sum(sum(kind.dealt) for kind in dealt) == 32
    assert dealt[1].layers < dealt[0].layers  # though it is three times as fast
    assert deal(replace(SHAPE, layers=300), Layout(pp=4, micros=8), kinds) is None


def test_copies_wait_for_the_slowest_and_fit_on_the_smallest():
    kinds = [machine("H100", 8), machine("A100 40GB", 8)]
    found = search_unlike(wish(kinds, fixed={"pp": 1}), kinds, 3)
    assert all(each.footprint.total <= SHARE * 40 * 2**30 for each in found.best)
    assert all(8 % (each.layout.tp * each.layout.cp) == 0 for each in found.best)
    slow = search(Wish(SHAPE, machine("A100 40GB", 16), 64, ORDERS, fixed={"pp": 1}), 1).best[0]
    assert found.best[0].seconds >= 0.99 * slow.seconds


def test_each_kind_alone_is_told():
    kinds = [machine("H100", 8), machine("V100", 8)]
    found = {kind.device.name: each for kind, each in alone(wish(kinds), kinds)}
    fast, slow = found["H100"], found["V100"]
    assert fast is not None
    assert slow is None or fast.seconds < slow.seconds
