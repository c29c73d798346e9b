"""Resources of collectives: memory left by many calls, and the bytes that arrive on sockets."""

import gc
import os
import socket
import sys
from collections.abc import Callable

import psutil
import pytest
import torch
import torch.distributed as dist

from meshwright.comm.collectives.group import World
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool, run_on_threads
from tests.comm.gloo_ranks import over_gloo

BYTES_RECEIVED = 128  # of struct tcp_info: tcpi_bytes_received


def growth_of(world: World, repeats: int) -> int:
    """By how many bytes this process grows in `repeats` all_reduces and all_gathers of 64 KiB, after some to
    warm up.
    """
    group = world.group(["dp_shard"])

    def play(count: int) -> int:
        for _ in range(count):
            tensor = torch.ones(16384)
            group.all_reduce(tensor).wait()
            group.all_gather(torch.empty(16384 * group.size), tensor).wait()
        gc.collect()
        return psutil.Process().memory_info().rss

    before = play(repeats // 10)
    return play(repeats) - before


def test_many_calls_leave_no_memory_behind(process_pool: ProcessPool) -> None:
    mesh, kept = Mesh(dp_shard=2), 1000 * 3 * 65536  # what would be there if every call kept its tensors
    for growth in (
        run_on_threads(lambda world: growth_of(world, 1000), mesh),
        process_pool.run(growth_of, mesh, 1000),
        process_pool.run(over_gloo, mesh, growth_of, 1000),
    ):
        assert max(growth) < kept / 8


def arriving(work: Callable[[], object]) -> int:
    """The bytes that come to the TCP connections of this process during `work`, as the kernel counts them for
    each.
    """

    def received() -> int:
        total = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(name))) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        total += int.from_bytes(info[BYTES_RECEIVED : BYTES_RECEIVED + 8], sys.byteorder)
            except OSError:
                continue  # no socket, or closed meanwhile
        return total

    before = received()
    work()
    return received() - before


def scattered_sums(world: World) -> tuple[int, int]:
    """The bytes that come to this rank for a reduce_scatter of ours and for the backend's own, of 3 x 256
    KiB.
    """
    names = vars(dist)
    native = names["reduce_scatter_single" if "reduce_scatter_single" in names else "reduce_scatter_tensor"]
    group, tensor, output = world.group(["dp_shard"]), torch.ones(3 * 65536), torch.empty(65536)
    native(output, tensor.clone())  # connections are made
    group.reduce_scatter(output, tensor).wait()
    group.barrier()
    ours = arriving(lambda: group.reduce_scatter(output, tensor).wait())
    group.barrier()
    return ours, arriving(lambda: native(output, tensor.clone()))


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernel's count of a connection is read as on Linux"
)
def test_a_reduce_scatter_on_gloo_moves_its_own_bytes_and_the_native_one_an_all_reduces(
    process_pool: ProcessPool,
) -> None:
    operand_bytes = 3 * 65536 * 4
    for ours, native in process_pool.run(over_gloo, Mesh(dp_shard=3), scattered_sums):
        # what a rank that was ahead has sent may have come before the count began
        assert operand_bytes * 2 / 3 * 0.98 <= ours < operand_bytes * 2 / 3 * 1.01
        assert native > 1.8 * ours


def sum_of_a_pair(world: World) -> list[float]:
    tensor = torch.arange(3.0) + 10 * world.rank
    world.group(["pp"], (1, 0)).all_reduce(tensor).wait()
    return tensor.tolist()


def test_a_pair_in_descending_order_sums_like_any_other(process_pool: ProcessPool) -> None:
    assert process_pool.run(over_gloo, Mesh(pp=2), sum_of_a_pair) == [[10.0, 12.0, 14.0]] * 2
