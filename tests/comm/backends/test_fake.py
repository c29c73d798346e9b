"""One rank of a large job, traced alone."""

import torch

from meshwright.comm.backends.fake import FakeWorld
from meshwright.plan.sharding.mesh import Mesh

RING = Mesh(dp_shard=3)


def test_results_are_those_of_equal_peers() -> None:
    group = FakeWorld(RING, rank=1).group(["dp_shard"])
    tensor = torch.arange(6.0)
    total, gathered, mine, arrived = tensor.clone(), torch.empty(18), torch.empty(2), torch.empty(6)
    group.all_reduce(total).wait()
    group.all_gather(gathered, tensor).wait()
    group.reduce_scatter(mine, tensor).wait()
    group.all_to_all(arrived, tensor).wait()
    group.broadcast(tensor, source=2).wait()
    passed = torch.empty(6)
    group.shift(passed, tensor, offset=-1).wait()
    assert torch.equal(passed, tensor)
    assert torch.equal(total, 3 * tensor)
    assert torch.equal(gathered, tensor.repeat(3))
    assert torch.equal(mine, 3 * tensor[2:4])
    assert torch.equal(arrived, tensor[2:4].repeat(3))
    assert torch.equal(tensor, torch.arange(6.0))


def test_meta_tensors_pass_through_every_collective() -> None:
    group = FakeWorld(RING, rank=2, device="meta").group(["dp_shard"])
    tensor = torch.empty(6, device="meta")
    group.all_reduce(tensor).wait()
    group.all_gather(tensor.new_empty(18), tensor).wait()
    group.reduce_scatter(tensor.new_empty(2), tensor).wait()
    group.all_to_all(torch.empty_like(tensor), tensor).wait()
    group.shift(torch.empty_like(tensor), tensor).wait()
    assert group.ledger.sent_nbytes[""] == (2 * 24 + 3 * 24 + 24 + 24) * 2 / 3 + 24


def test_a_rank_of_a_hundred_thousand_sees_its_peers_by_arithmetic() -> None:
    mesh = Mesh(pp=10, dp_shard=1000, tp=10)
    world = FakeWorld(mesh, rank=77_777)
    assert world.group(["tp"]).ranks == tuple(range(77_770, 77_780))
    assert world.group(["dp_shard"]).index == 777
    assert world.group(["dp_shard"]).ranks[:2] == (70_007, 70_017)
    tensor = torch.ones(2)
    world.group(["pp", "dp_shard", "tp"]).all_reduce(tensor, action="REDUCE").wait()
    assert torch.equal(tensor, torch.full((2,), 100_000.0))
    assert world.ledger.sent_nbytes["REDUCE"] == 2 * 8 * 99_999 / 100_000


def test_an_entry_names_the_dtype_of_what_was_put_in() -> None:
    world = FakeWorld(RING, rank=1)
    world.ledger.is_recording = True
    group = world.group(["dp_shard"])
    group.all_reduce(torch.ones(3, dtype=torch.bfloat16), action="HALF").wait()
    group.all_gather(
        torch.empty(6, dtype=torch.float64), torch.ones(2, dtype=torch.float64), action="WIDE"
    ).wait()
    assert [(entry.action, entry.nbytes, entry.dtype) for entry in world.ledger.entries] == [
        ("HALF", 6, "bfloat16"),
        ("WIDE", 16, "float64"),
    ]


def test_a_finished_result_calls_back_at_once() -> None:
    called: list[int] = []
    FakeWorld(RING, rank=1).group(["dp_shard"]).all_reduce(torch.ones(2)).add_done_callback(
        lambda: called.append(1)
    )
    assert called == [1]
