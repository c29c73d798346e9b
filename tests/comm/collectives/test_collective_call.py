"""Validation and byte counts of collective calls, the same for all backends."""

import pytest
import torch

from meshwright.comm.backends.fake import FakeWorld
from meshwright.comm.collectives.collective_call import CollectiveCall, announce, ordered_axes, shares_memory
from meshwright.comm.collectives.deterministic_sum import ordered_sum
from meshwright.comm.collectives.group import Group
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh


def ring(size: int = 3) -> Group:
    return FakeWorld(Mesh(dp_shard=size), rank=1).group(["dp_shard"])


def test_the_ledger_records_each_collective_under_its_action() -> None:
    group = ring()
    group.ledger.is_recording = True
    group.all_reduce(torch.zeros(6), action="REDUCE(a)").wait()
    group.all_gather(torch.zeros(6), torch.zeros(2), action="UNSHARD(a)").wait()
    group.reduce_scatter(torch.zeros(2), torch.zeros(6), action="REDUCE(a)").wait()
    group.broadcast(torch.zeros(6), source=0, action="INIT").wait()
    group.broadcast(torch.zeros(6), source=1, action="INIT").wait()
    group.barrier(action="END")
    entries = [
        (entry.collective, entry.axes, entry.group_size, entry.nbytes, entry.sent_nbytes)
        for entry in group.ledger.entries
    ]
    assert entries == [
        ("all_reduce", ("dp_shard",), 3, 24, 32),
        ("all_gather", ("dp_shard",), 3, 8, 16),
        ("reduce_scatter", ("dp_shard",), 3, 24, 16),
        ("broadcast", ("dp_shard",), 3, 24, 0),
        ("broadcast", ("dp_shard",), 3, 24, 24),
        ("barrier", ("dp_shard",), 3, 0, 0),
    ]
    assert group.ledger.sent_nbytes == {"REDUCE(a)": 48, "UNSHARD(a)": 16, "INIT": 24, "END": 0}


def test_an_unknown_algorithm_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"(?s)no all_reduce algorithm 'backed'.*did you mean 'backend'\?"):
        ring().all_reduce(torch.zeros(3), algorithm="backed")


def test_a_refused_call_is_not_booked() -> None:
    group = ring()
    with pytest.raises(ValueError, match="not contiguous"):
        group.all_reduce(torch.zeros(2, 3).T, action="REDUCE")
    assert group.ledger.sent_nbytes == {}


def test_tensors_that_do_not_fit_are_refused_with_the_repair() -> None:
    group = ring()
    three = torch.zeros(3)
    with pytest.raises(ValueError, match=r"4 elements do not divide by 3 ranks\. Pad"):
        group.reduce_scatter(torch.zeros(1), torch.zeros(4))
    with pytest.raises(
        ValueError, match=r"the output has 6 elements; needed for 3 ranks are 9.*new_empty\(9\)"
    ):
        group.all_gather(torch.zeros(6), three)
    with pytest.raises(ValueError, match=r"the output is torch.float64; needed is torch.float32"):
        group.all_to_all(three.double(), three)
    with pytest.raises(ValueError, match="the output shares memory with the operand"):
        group.all_to_all(three, three)
    with pytest.raises(ValueError, match=r"from index 3 .*the group has 3 ranks\. Name a rank from 0 to 2"):
        group.broadcast(three, source=3)


def test_the_whole_tensor_of_a_scatter_or_gather_is_on_the_one_rank_and_nowhere_else() -> None:
    group, one, three = ring(), torch.zeros(1), torch.zeros(3)
    with pytest.raises(
        ValueError,
        match=r"from index 1 .*the rank at index 1 passed no full tensor\. Pass it at index 1",
    ):
        group.scatter(one, None, source=1)
    with pytest.raises(
        ValueError,
        match=r"to index 0 .*the rank at index 1 passed a full tensor\. .*and None elsewhere",
    ):
        group.gather(three, one)
    with pytest.raises(ValueError, match=r"the output has 2 elements; needed for 3 ranks are 3"):
        group.gather(torch.zeros(2), one, target=1)
    assert group.ledger.sent_nbytes == {}


def test_half_types_are_summed_in_float32_and_rounded_once() -> None:
    summands = [torch.tensor([1.0], dtype=torch.bfloat16)] + [
        torch.tensor([2.0**-9], dtype=torch.bfloat16)
    ] * 8
    assert ordered_sum(summands).dtype == torch.bfloat16
    assert ordered_sum(summands).item() == 1.0 + 2.0**-6  # each summand alone would be rounded away


def test_a_sum_leaves_its_summands_alone() -> None:
    summands = [torch.ones(2), torch.ones(2)]
    assert torch.equal(ordered_sum(summands), torch.full((2,), 2.0))
    assert torch.equal(summands[0], torch.ones(2))


def test_axes_are_put_in_the_order_of_the_mesh() -> None:
    assert ordered_axes(Mesh(), ("tp", "dp_shard", "tp")) == ("dp_shard", "tp")
    assert ordered_axes(Mesh(), ("tp", "ep", "dp_shard", "outer")) == ("dp_shard", "ep", "tp")
    assert ordered_axes(Mesh(outer=2), ("tp", "dp_shard", "outer")) == ("outer", "dp_shard", "tp")
    with pytest.raises(PlanError, match=r"(?s)no axis 'dp_shrd'.*did you mean 'dp_shard'"):
        ordered_axes(Mesh(), ("dp_shrd",))


def test_calls_that_serve_different_actions_can_meet() -> None:
    call = CollectiveCall("all_reduce", (3,), torch.float32, action="A")
    assert call == CollectiveCall("all_reduce", (3,), torch.float32, action="B")
    assert call != CollectiveCall("all_reduce", (4,), torch.float32, action="A")
    assert str(call) == "all_reduce of float32 [3] for A"


def test_a_call_that_recurs_is_made_once() -> None:
    group = ring()
    again = [announce(group, "all_reduce", torch.zeros(3), action="REDUCE(a)") for _ in range(2)]
    assert again[0] is again[1]
    assert announce(group, "all_reduce", torch.zeros(3), action="REDUCE(b)").action == "REDUCE(b)"
    assert group.ledger.sent_nbytes == {"REDUCE(a)": 32, "REDUCE(b)": 16}


def test_a_device_without_a_number_is_the_same_as_with_one() -> None:
    group, tensor = ring(), torch.zeros(3)
    group.device = torch.device("cpu:0")
    group.all_reduce(tensor).wait()
    group.device = torch.device("meta")
    with pytest.raises(
        ValueError,
        match=r"on rank 1 a tensor is on cpu, and this group \(ranks 0, 1, 2\) works on meta\. Move it",
    ):
        group.all_reduce(tensor)


def test_views_of_one_memory_overlap_where_they_share_elements() -> None:
    for memory in (torch.zeros(8), torch.zeros(8, device="meta")):
        assert shares_memory(memory[:4], memory[3:])
        assert not shares_memory(memory[:4], memory[4:])
        assert not shares_memory(memory, memory.clone())
        assert not shares_memory(memory[4:4], memory)
