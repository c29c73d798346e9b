"""Sampling of operation times on a synthetic clock, with slow operations left out."""

import torch

from meshwright.run.measure.operation_timer import DeviceTimer, UncachedMemory, time_operations


def test_an_operation_that_takes_too_long_and_all_that_are_larger_are_left_out():
    ran: list[int] = []
    took = {size: 10.0 if size >= 9 else 1e-6 for size in range(12)}

    class Made(DeviceTimer):
        def time_once(self, operation: object) -> float:
            return took[ran[-1]]

    cells = {size: (lambda size=size: ran.append(size)) for size in took}
    found = time_operations(Made(torch.device("cpu"), 2, 1e-6), cells)
    assert list(found) == list(range(9))
    assert all(len(samples) == 2 for samples in found.values())
    assert 10 not in ran


def test_what_lies_far_off_comes_again_when_all_of_it_was_given_out():
    far = UncachedMemory(torch.device("cpu"), torch.float32, 30)
    places = far.operands((2, 3), (4,))
    given = [next(places) for _ in range(4)]
    assert [tuple(piece.shape) for piece in given[0]] == [(2, 3), (4,)]
    pieces = [piece for pair in given[:3] for piece in pair]
    assert len({piece.data_ptr() for piece in pieces}) == len(pieces)
    assert sum(piece.numel() for piece in pieces) == 30
    assert given[3][0].data_ptr() == given[0][0].data_ptr()


def test_a_sample_repeats_what_is_short_and_runs_once_what_is_long():
    ran: list[int] = []
    watch = DeviceTimer(torch.device("cpu"), 1, 0.01)
    watch.time_sample(lambda: ran.append(1), 0.001)
    assert len(ran) == 10
    watch.time_sample(lambda: ran.append(1), 5.0)
    assert len(ran) == 11
