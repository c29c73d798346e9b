"""The handshake: when ranks share memory, when they fall back to gloo, and what is logged."""

import logging
from unittest.mock import patch

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.comm.shared_memory.compile_library import SharedMemoryUnavailable
from meshwright.comm.shared_memory.shared_memory_group import SharedMemoryGroup
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool

JOINING = "meshwright.comm.shared_memory.handshake"


class Told(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def summed(world: World) -> tuple[bool, list[float], list[str]]:
    """Whether memory is shared, three sums, and what was logged."""
    log, told = logging.getLogger("meshwright.comm.world"), Told()
    log.addHandler(told)
    log.setLevel(logging.INFO)
    try:
        groups = [world.group(axes) for axes in (["dp_shard"], ["tp"], ["dp_shard", "tp"])]
    finally:
        log.removeHandler(told)
    tensors = [torch.full((5,), 1.0 + world.rank) for _ in groups]
    for group, tensor in zip(groups, tensors, strict=True):
        group.all_reduce(tensor).wait()
    shared = {isinstance(group, SharedMemoryGroup) for group in groups if group.size > 1}
    assert len(shared) == 1
    return shared.pop(), [float(tensor[0]) for tensor in tensors], told.lines


SUMS = [[4.0, 3.0, 10.0], [6.0, 3.0, 10.0], [4.0, 7.0, 10.0], [6.0, 7.0, 10.0]]  # ranks 0 1 | 2 3


def test_one_rank_without_a_compiler_puts_its_groups_on_gloo_and_logs_it(process_pool: ProcessPool) -> None:
    results = process_pool.run(one_of_three, Mesh(dp_shard=3))
    assert [(shared, total) for shared, total, _ in results] == [(False, 6.0)] * 3
    assert results[2][2] == [
        "WARNING ranks do not share memory, and communicate over gloo, which is slower: there is no C "
        "compiler"
    ]
    for rank in (0, 1):
        assert results[rank][2] == [
            "WARNING ranks do not share memory, and communicate over gloo, which is slower: rank 2 cannot"
        ]


def one_of_three(world: World) -> tuple[bool, float, list[str]]:
    log, told = logging.getLogger("meshwright.comm.world"), Told()
    log.addHandler(told)
    if world.rank == 2:
        with patch(f"{JOINING}.load_library", side_effect=SharedMemoryUnavailable("there is no C compiler")):
            group = world.group(["dp_shard"])
    else:
        group = world.group(["dp_shard"])
    log.removeHandler(told)
    tensor = torch.full((5,), 1.0 + world.rank)
    group.all_reduce(tensor).wait()
    return isinstance(group, SharedMemoryGroup), float(tensor[0]), told.lines


def test_ranks_that_share_memory_log_it_once(process_pool: ProcessPool) -> None:
    results = process_pool.run(summed, Mesh(dp_shard=2, tp=2))
    assert [sums for _, sums, _ in results] == SUMS
    assert all(
        (shared, lines) == (True, ["INFO ranks of this host sum through shared memory"])
        for shared, _, lines in results
    )


def _refuse(*_: object) -> int:
    raise SharedMemoryUnavailable("/proc/1/fd/1 cannot be opened (Permission denied)")


@pytest.mark.parametrize(
    ("what", "level", "why"),
    [("host", "INFO", "they are on several hosts"), ("closed", "WARNING", "one of them cannot open it")],
)
def test_ranks_that_cannot_reach_each_others_memory_use_gloo(
    process_pool: ProcessPool, what: str, level: str, why: str
) -> None:
    results = process_pool.run(alone_of_two, Mesh(dp_shard=2), what)
    assert [(shared, total) for shared, total, _ in results] == [(False, 3.0)] * 2
    assert results[0][2] == [
        f"{level} ranks do not share memory, and communicate over gloo, which is slower: {why}"
    ]


def alone_of_two(world: World, what: str) -> tuple[bool, float, list[str]]:
    log, told = logging.getLogger("meshwright.comm.world"), Told()
    log.addHandler(told)
    log.setLevel(logging.INFO)
    names = {"host": (f"{JOINING}._host_digest", lambda: 1), "closed": (f"{JOINING}.open_memory", _refuse)}
    if world.rank == 1:
        with patch(*names[what]):
            group = world.group(["dp_shard"])
    else:
        group = world.group(["dp_shard"])
    log.removeHandler(told)
    tensor = torch.full((5,), 1.0 + world.rank)
    group.all_reduce(tensor).wait()
    return isinstance(group, SharedMemoryGroup), float(tensor[0]), told.lines
