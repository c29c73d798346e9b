"""Concurrent sums over gloo share two buffers, are right in any order of waiting, and allocate nothing in a
steady state.
"""

import torch

from meshwright.comm.backends.gloo_workarounds import NUM_RECEIVE_BUFFERS, ReceiveBuffers
from meshwright.comm.collectives.group import Work, World
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool
from tests.comm.gloo_ranks import over_gloo

SIZES = (6, 30, 12, 0, 9, 3)


def sums(world: World) -> list[list[float]]:
    group = world.group(("dp_shard",))
    given = [torch.arange(float(numel)) + 100 * world.rank + place for place, numel in enumerate(SIZES)]
    outputs = [torch.empty(numel // group.size) for numel in SIZES]
    works = [group.reduce_scatter(output, tensor) for output, tensor in zip(outputs, given, strict=True)]
    for work in reversed(works):
        work.wait()
    return [output.tolist() for output in outputs]


def test_six_concurrent_sums_are_right(process_pool: ProcessPool):
    found = process_pool.run(over_gloo, Mesh(dp_shard=3), sums)
    for place, numel in enumerate(SIZES):
        whole = 3 * (torch.arange(float(numel)) + place) + 300
        assert [value for rank in found for value in rank[place]] == whole.tolist()


class Noted(Work):
    """A work that tells whether it was waited for."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1

    @property
    def is_done(self) -> bool:
        return self.waited > 0

    def add_done_callback(self, callback: object) -> None:
        raise NotImplementedError("nobody asks")


def test_the_oldest_sum_is_awaited_and_its_buffer_reused():
    arrivals, seen, works = ReceiveBuffers(), [], []

    def issue(arrived: torch.Tensor) -> Work:
        assert [work.waited for work in works[-1:]] in ([], [0]), "the newest still travels"
        seen.append((arrived.data_ptr(), arrived.numel(), arrived.dtype))
        works.append(Noted())
        return works[-1]

    for like in (
        torch.empty(8),
        torch.empty(8),
        *(torch.empty(numel, dtype=torch.float64) for numel in (4, 2, 4, 3)),
    ):
        arrivals.receive(like, issue)
    assert len({address for address, _, _ in seen}) == NUM_RECEIVE_BUFFERS
    assert [numel for _, numel, _ in seen] == [8, 8, 4, 2, 4, 3]
    assert [work.waited for work in works] == [1, 1, 1, 1, 0, 0]


def test_sums_that_are_never_in_flight_together_have_one_buffer():
    arrivals, seen = ReceiveBuffers(), set[int]()

    def issue(arrived: torch.Tensor) -> Work:
        seen.add(arrived.data_ptr())
        return Noted()

    for numel in (8, 2, 8, 5):
        arrivals.receive(torch.empty(numel), issue).wait()
    assert len(seen) == 1
