"""The flight recorder: numbered collectives with their source lines, readable by another process."""

import os

import pytest
import torch

from meshwright.comm.backends.fake import FakeWorld
from meshwright.comm.collectives.flight_recorder import NUM_SLOTS, open_ring, read_ring
from meshwright.plan.sharding.mesh import Mesh

MESH = Mesh(dp_shard=2, tp=3)


def test_collectives_are_numbered_in_their_group_and_remember_their_line():
    world = FakeWorld(MESH, 4)
    rows, columns = world.group(["tp"]), world.group(["dp_shard"])
    rows.all_reduce(torch.ones(4), action="REDUCE(0)")
    columns.all_gather(torch.empty(2, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    rows.barrier(action="save")
    first, second, third = world.ledger.flight_recorder.entries()
    assert [each.number for each in (first, second, third)] == [1, 1, 2]
    assert [each.sequence_id for each in (first, second, third)] == [1, 2, 3]
    assert (first.axes, first.call_text, first.action) == (("tp",), "all_reduce of float32 [4]", "REDUCE(0)")
    assert str(first) == "all_reduce of float32 [4] for REDUCE(0)"
    assert str(second) == "all_gather of int64 [1] (no action named)"
    assert first.channel == third.channel != second.channel
    file, _, line = first.location.rpartition(":")
    assert file.endswith("test_flight_recorder.py")
    assert int(line) + 1 == int(second.location.rpartition(":")[2])


def test_a_send_and_its_receive_have_one_number():
    one, other = FakeWorld(MESH, 0), FakeWorld(MESH, 2)
    for _ in range(2):
        one.group(["tp"]).send(torch.ones(1), target=2)
        other.group(["tp"]).recv(torch.ones(1), source=0)
    one.group(["tp"]).send(torch.ones(1), target=1)
    sent, received = one.ledger.flight_recorder.entries(), other.ledger.flight_recorder.entries()
    assert [(each.channel, each.number) for each in sent] == [
        (("pair", 0, 2), 1),
        (("pair", 0, 2), 2),
        (("pair", 0, 1), 1),
    ]
    assert [(each.channel, each.number) for each in received] == [(("pair", 0, 2), 1), (("pair", 0, 2), 2)]


def test_only_the_newest_stay():
    world = FakeWorld(MESH, 0)
    for i in range(NUM_SLOTS + 5):
        world.group(["tp"]).all_reduce(torch.ones(1), action=f"REDUCE({i})")
    issued = world.ledger.flight_recorder.entries()
    assert [each.number for each in issued] == list(range(6, NUM_SLOTS + 6))
    assert issued[-1].action == f"REDUCE({NUM_SLOTS + 4})"
    assert world.ledger.flight_recorder.sequence_id == NUM_SLOTS + 5


def test_an_axis_of_one_rank_sends_nothing_and_is_not_noted():
    world = FakeWorld(MESH, 0)
    tensor = torch.full((3,), 2.0)
    world.group(["cp"]).all_reduce(tensor, action="REDUCE(0)").wait()
    assert torch.equal(tensor, torch.full((3,), 2.0))
    assert world.ledger.flight_recorder.entries() == []
    assert world.ledger.sent_nbytes == {"REDUCE(0)": 0.0}


@pytest.mark.parametrize("action", ["x" * 2000, "\u00fc\n\"'" * 300])
def test_a_text_that_is_too_long_is_cut_and_the_others_stay(action):
    world = FakeWorld(MESH, 0)
    world.group(["tp"]).all_reduce(torch.ones([1] * 60), action=action)
    world.group(["tp"]).all_reduce(torch.ones(1), action="REDUCE(1)")
    long, short = world.ledger.flight_recorder.entries()
    assert (long.number, short.number, short.action) == (1, 2, "REDUCE(1)")


def test_another_process_could_read_the_ring_of_this_one_by_its_descriptor():
    world = FakeWorld(MESH, 0)
    group = world.group(["tp"])
    group.all_reduce(torch.ones(1), action="before")
    fd = world.ledger.flight_recorder.move_to_shared_memory()
    assert fd is not None
    ring = open_ring(os.getpid(), fd)
    os.close(fd)
    assert ring is not None
    group.all_reduce(torch.ones(1), action="after")
    assert [each.action for each in read_ring(ring)] == ["before", "after"]
    ring.close()
    assert open_ring(os.getpid(), 10**6) is None
