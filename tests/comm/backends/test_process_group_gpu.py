"""NCCL through the Group interface, as far as one GPU can show: results of one rank, streams, and no host
synchronization.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.backends.process_group import StreamWork, TorchGroup
from meshwright.comm.collectives.deterministic_sum import SUMMABLE_DTYPES
from meshwright.comm.world import init_world
from meshwright.plan.sharding.mesh import AXES, Mesh

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: NCCL runs on no other device"
)

LONG = 500_000_000  # clock cycles: some tenths of a second, longer than the host needs for any call


@pytest.fixture
def group(tmp_path: Path) -> Iterator[TorchGroup]:
    """A group of one rank that does use NCCL: a world would give one that sends nothing."""
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    with init_world(Mesh(), 0, store_path=tmp_path / "store", backend="nccl", device=device) as world:
        everyone = dist.group.WORLD
        assert everyone is not None
        group = TorchGroup(AXES, (0,), everyone, world, world.watchdog)
        group.barrier()  # NCCL makes its connections in the first call
        yield group
        torch.cuda.synchronize()
        group.close()


@pytest.mark.parametrize("dtype", SUMMABLE_DTYPES, ids=str)
def test_every_collective_of_one_rank_gives_back_what_it_put_in(
    group: TorchGroup, dtype: torch.dtype
) -> None:
    mine = torch.arange(7, device="cuda").to(dtype)
    for work in (
        group.all_reduce(mine),
        group.reduce(mine),
        group.broadcast(mine),
        group.all_reduce(mine, algorithm="ring"),
    ):
        work.wait()
    assert torch.equal(mine.cpu(), torch.arange(7).to(dtype))
    for collective in (
        group.all_gather,
        group.reduce_scatter,
        group.all_to_all,
        group.shift,
        group.scatter,
        group.gather,
    ):
        output = torch.zeros_like(mine)
        collective(output, mine).wait()
        assert torch.equal(output, mine)


@pytest.mark.parametrize("algorithm", ["backend", "ring"])
def test_neither_the_call_nor_the_wait_stops_the_host(group: TorchGroup, algorithm: str) -> None:
    tensor, after = torch.ones(1000, device="cuda"), torch.cuda.Event()
    group.all_reduce(tensor, algorithm=algorithm).wait()  # whatever is made once has been made
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    group.all_reduce(tensor, algorithm=algorithm).wait()
    after.record()
    assert not after.query()  # the GPU still sleeps, and the host is here
    after.synchronize()
    assert torch.equal(tensor, torch.ones_like(tensor))


@pytest.mark.parametrize("algorithm", ["backend", "ring"])
def test_a_collective_comes_after_earlier_kernels_and_before_those_behind_its_wait(
    group: TorchGroup, algorithm: str
) -> None:
    tensor = torch.ones(1 << 20, device="cuda")
    torch.cuda._sleep(LONG)
    tensor.add_(1)
    group.all_reduce(tensor, algorithm=algorithm).wait()
    tensor.mul_(3)
    assert torch.equal(tensor, torch.full_like(tensor, 6))


def test_rounds_go_on_beside_the_stream_of_the_computation(group: TorchGroup) -> None:
    work = group.all_reduce(torch.ones(1000, device="cuda"), algorithm="ring")
    streams: list[torch.cuda.Stream] = []
    work.add_done_callback(lambda: streams.append(torch.cuda.current_stream()))
    assert isinstance(work, StreamWork)
    assert streams != [torch.cuda.current_stream()]
    work.wait()


def test_a_barrier_returns_when_the_gpu_has_come_to_it(group: TorchGroup) -> None:
    before = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    before.record()
    group.barrier()
    assert before.query()


def test_a_tensor_of_the_cpu_is_refused_with_the_repair(group: TorchGroup) -> None:
    with pytest.raises(
        ValueError, match=r"a tensor is on cpu, and this group .* works on cuda:0\. Move it: tensor\.to"
    ):
        group.all_reduce(torch.ones(3))
