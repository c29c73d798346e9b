"""Measuring a device: real figures of tiny sizes, of a clock that is made up, and what is too slow left out."""

import pytest
import torch

from meshwright.core.profile import LEAST, VERSION, Profile
from meshwright.core.work import RICH
from meshwright.run.rating import Far, Sizes, Watch, rated, sizes_of, spread_of, timed

TINY = Sizes(
    (*((size, size, 8, 1) for size in (4, 8, 12, 16, 24, 32)), (8, 8, 8, 2)),
    tuple((1, 2, queries, 16, 8) for queries in (4, 8, 12, 16, 24, 32)),
    (4096, 65536),
)


def test_a_device_is_measured_at_every_size_and_makes_a_profile_without_faults():
    found = rated(torch.device("cpu"), TINY, quick=True)
    assert {(each.m, each.n, each.k, each.batch) for each in found.products} == set(TINY.products)
    assert {each.dtype for each in found.products} == {each.dtype for each in found.attention} == {"float32", "bfloat16"}
    assert [each.nbytes for each in found.moved] == [4096, 65536]
    assert {each.operation for each in found.computed} == set(RICH)
    assert 0 < found.call_s < 1e-2
    profile = Profile(VERSION, "", "cpu", "here", torch.__version__, 1, 1, 1 << 30, **vars(found))
    assert not list(profile.faults())
    assert profile.product_seconds(20, 20, 8) > 0


def test_the_usual_sizes_are_enough_for_a_law_and_a_gpu_has_larger_ones():
    for kind, quick in (("cpu", False), ("cpu", True), ("cuda", False)):
        sizes = sizes_of(kind, quick=quick)
        assert len(sizes.products) == len(set(sizes.products)) >= LEAST
        assert len(sizes.attention) == len(set(sizes.attention)) >= LEAST
        assert list(sizes.moved) == sorted(set(sizes.moved))
    assert max(sizes_of("cuda").products) > max(sizes_of("cpu").products)
    assert len(sizes_of("cpu", quick=True).products) < len(sizes_of("cpu").products)


def test_an_operation_that_takes_too_long_and_all_that_are_larger_are_left_out():
    ran: list[int] = []
    took = {size: 10.0 if size >= 9 else 1e-6 for size in range(12)}

    class Made(Watch):
        def once(self, operation: object) -> float:
            return took[ran[-1]]

    cells = {size: (lambda size=size: ran.append(size)) for size in took}
    found = timed(Made(torch.device("cpu"), 2, 1e-6), cells)
    assert list(found) == list(range(9))
    assert all(len(samples) == 2 for samples in found.values())
    assert 10 not in ran


def test_what_lies_far_off_comes_again_when_all_of_it_was_given_out():
    far = Far(torch.device("cpu"), torch.float32, 30)
    places = far.places((2, 3), (4,))
    given = [next(places) for _ in range(4)]
    assert [tuple(piece.shape) for piece in given[0]] == [(2, 3), (4,)]
    pieces = [piece for pair in given[:3] for piece in pair]
    assert len({piece.data_ptr() for piece in pieces}) == len(pieces)
    assert sum(piece.numel() for piece in pieces) == 30
    assert given[3][0].data_ptr() == given[0][0].data_ptr()


def test_a_sample_repeats_what_is_short_and_runs_once_what_is_long():
    ran: list[int] = []
    watch = Watch(torch.device("cpu"), 1, 0.01)
    watch.sample(lambda: ran.append(1), 0.001)
    assert len(ran) == 10
    watch.sample(lambda: ran.append(1), 5.0)
    assert len(ran) == 11


def test_spread_is_the_distance_of_the_quartiles_as_a_share():
    assert spread_of([1.0, 1.0, 1.0]) == 0.0
    assert spread_of([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert spread_of([7.0]) == 0.0
