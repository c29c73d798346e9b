"""Unlike devices: who does how much, that everybody waits for the slowest, and that no group mixes kinds."""

from dataclasses import replace
from math import inf

import pytest

from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.parallel_config import FOLDED, HALVES, Layout, Order
from meshwright.planner.analytic.step_time import step
from meshwright.planner.machine.machine import Machine, machine
from meshwright.planner.search.candidates import batches
from meshwright.planner.search.heterogeneous import Apart, Kind, alone, deal, search_unlike, weakest
from meshwright.planner.search.lower_bounds import EXACT
from meshwright.planner.search.request import SHARE, Wish
from meshwright.planner.search.search import Best, search

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
    for more, less in (
        ("H100", "A100"),
        ("A100", "H100"),
    ):  # a layer from the one to the other makes nobody faster
        assert max((counts[more] + 1) * paces[more], (counts[less] - 1) * paces[less]) >= late


def test_a_step_takes_as_long_as_its_slowest_rank():
    kinds = [machine("H100", 8), machine("A100", 8)]
    found = search_unlike(wish(kinds, fixed={"pp": 4}), kinds, 1).best[0]
    busy = [
        step(replace(SHAPE, layers=4 * count), found.layout, replace(machine(kind, 16), per_host=8))
        for kind, count in found.dealt
    ]
    assert found.step.compute + found.step.tensor == pytest.approx(
        max(each.compute + each.tensor for each in busy), rel=0.01
    )


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


@pytest.mark.parametrize("sequence", [2048, 131_072])
@pytest.mark.parametrize("counts", [(8, 8), (4, 8), (6, 12)])
def test_the_winner_on_unlike_devices_is_that_of_all_layouts(sequence: int, counts: tuple[int, int]):
    kinds = [machine("H100", counts[0]), machine("A100 40GB", counts[1])]
    shape = Shape("3b", 13, 2048, 16, vocab=32_000, sequence=sequence)
    asked = replace(wish(kinds), shape=shape, kinds=counts, batch=24)
    short, whole = search_unlike(asked, kinds), search_unlike(asked, kinds, prune=False)
    assert [(each.layout, each.dealt) for each in short.best] == [
        (each.layout, each.dealt) for each in whole.best
    ]
    assert short.best
    assert short.seen < whole.seen * 0.75


def test_no_deal_takes_less_than_is_said_of_its_mesh():
    kinds = [machine("H100", 4), machine("V100", 8), machine("A100", 4)]
    shape = Shape("1b", 9, 1024, 8, vocab=32_000, sequence=16_384)
    ground, dealt = Apart(replace(wish(kinds), shape=shape, kinds=(4, 8, 4), batch=16), kinds), 0
    for mesh in ground.meshes():
        for sized in batches(ground.wish, mesh):
            best = Best(1000)
            ground.price(sized, best, inf)
            dealt += len(best.kept)
            for each in best.kept:
                order, chunks = ground.wish.orders[each.schedule]
                assert ground.floor(mesh) <= ground.least(sized) / EXACT
                assert ground.least(sized) <= ground.turn(sized, order, chunks) <= each.seconds
                assert ground.may_fit(sized)
    assert dealt > 50


def test_thousands_of_unlike_devices_take_few_layouts():
    """Of 82,000 layouts with long rows, 2 in a hundred are priced."""
    kinds = [machine("H100", 2048), machine("H200", 2048)]
    shape = Shape("8b", 32, 4096, 32, kv_heads=8, ffn=14_336, gated=True, sequence=131_072)
    asked = replace(wish(kinds), shape=shape, kinds=(2048, 2048), batch=4096)
    found = search_unlike(asked, kinds, 8)
    assert len(found.best) == 8
    assert found.seen < 4000
