"""Sums in two levels: the bytes of the law, what is refused, and ranks that compute what their codes say."""

from collections.abc import Sequence

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import ExchangedMessage, World
from meshwright.engine.runtime.comm_groups import group_keys
from meshwright.parallel.compression.codecs.sliced_sums import slice_numel
from meshwright.parallel.compression.codecs.two_level_sums import QgZCompression
from meshwright.parallel.compression.residuals import CodedOperand
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import LossGuard
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost.compression_gain import compression_gain
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.parallel.compression.coded_plans import ANALYZED, coded_sum
from tests.planner.simple_machine import ground
from tests.tiny_model import case_of, tiny_job, verdict_of

AXIS = ("dp_replicate",)
NUMEL = 6 * 700
DDP: tuple[mw.Strategy, ...] = (mw.BatchSplit(), mw.DDP())


def code_nbytes(numel: int, bits: int) -> int:
    """Codes and scales, by the formulas of int4 and int8."""
    return -(-numel * bits // 8) + 4 * -(-numel // 256)


def sharded(stage: int) -> tuple[mw.Strategy, ...]:
    return mw.BatchSplit("dp_shard"), mw.ZeRO(stage=stage)


def hybrid(stage: int) -> tuple[mw.Strategy, ...]:
    """Shards within hosts, and a copy of them on each host."""
    zero = mw.ZeRO(stage=stage, replicate_axis="dp_replicate")
    return mw.BatchSplit(), mw.BatchSplit("dp_shard"), zero


def plan_of(
    strategies: Sequence[mw.Strategy], codec: QgZCompression, mesh: Mesh, micro_batch: int = 2, **job: object
) -> Plan:
    settings: dict[str, object] = {"batch": 2 * mesh.world_size} | job
    return mw.make_plan(ANALYZED, tiny_job(**settings), mesh, (*strategies, codec), micro_batch)


def summed_on_ranks(
    codec: QgZCompression, size: int, collective: str, numel: int = NUMEL
) -> tuple[list[tuple[float, torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """What each rank sent, its output and what it owes; and the gradients of all ranks."""
    summed = coded_sum(torch.empty(numel), size, collective)
    inputs = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]

    def exchange(world: World) -> tuple[float, torch.Tensor, torch.Tensor]:
        values, owed = inputs[world.rank].clone(), torch.zeros(numel)
        scatters = collective == "reduce_scatter"
        output = torch.empty(slice_numel(numel, size)) if scatters else values
        by_param, kept = {"weight": values}, {"weight": owed}
        operand = CodedOperand(summed, values, by_param, output, world.rank, key=0, kept=kept)
        mesh = world.mesh
        sent = [
            ExchangedMessage(each.collective, each.nbytes, each.dtype, each.num_ranks(mesh))
            for each in codec.messages(summed)
        ]
        world.group(AXIS).exchange(codec.sum_rounds(operand), sent, action="REDUCE").wait()
        return world.ledger.sent_nbytes["REDUCE"], output, owed

    return run_on_threads(exchange, Mesh(dp_replicate=size)), inputs


@pytest.mark.parametrize(("near", "across"), [(2, "int8"), (3, "int8"), (3, "int4")])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_a_rank_sends_the_bytes_of_the_law_and_owes_what_is_not_applied(
    near: int, across: str, collective: str
):
    codec, size = QgZCompression(ranks_per_host=near, across=across), 6
    found, inputs = summed_on_ranks(codec, size, collective)
    hosts, part, bits = size // near, NUMEL // size, 8 if across == "int8" else 4
    within, between = (near - 1) * hosts * code_nbytes(part, 4), (hosts - 1) * code_nbytes(part, bits)
    back = 0 if collective == "reduce_scatter" else (size - 1) * code_nbytes(part, bits)
    assert [sent for sent, _, _ in found] == [within + between + back] * size
    outputs = [output for _, output, _ in found]
    if collective == "all_reduce":
        assert all(torch.equal(each, outputs[0]) for each in outputs), "the same bits on every rank"
    applied = outputs[0] if collective == "all_reduce" else torch.cat(outputs)
    owed = sum(residual for _, _, residual in found)
    assert (applied + owed - sum(inputs)).abs().max() < 1e-5
    assert 1e-3 < (applied - sum(inputs)).abs().max() < 2.5
    expected = codec.defined_sum(coded_sum(inputs[0], size, collective), inputs, [0] * size, {})
    assert torch.equal(applied, expected)


@pytest.mark.parametrize("numel", [1, 13, 6 * 300 - 5])
def test_slices_need_not_be_equal_and_may_be_empty(numel: int):
    found, inputs = summed_on_ranks(QgZCompression(ranks_per_host=2), 6, "all_reduce", numel)
    assert all(torch.equal(output, found[0][1]) for _, output, _ in found)
    owed = sum(residual for _, _, residual in found)
    assert (found[0][1] + owed - sum(inputs)).abs().max() < 1e-5


def test_messages_say_which_ranks_of_the_group_they_are_among():
    codec, mesh = QgZCompression(ranks_per_host=3), Mesh(dp_replicate=6)
    messages = codec.messages(coded_sum(torch.empty(600), 6))
    assert [(each.collective, each.num_ranks(mesh)) for each in messages] == [
        *(("all_to_all", 3), ("all_to_all", 2)),
        *(("all_gather", 2), ("all_gather", 3)),
    ]
    assert messages[0].member_groups(mesh) == ((0, 1, 2), (3, 4, 5))
    assert messages[1].member_groups(mesh) == ((0, 3), (1, 4), (2, 5))
    assert messages[1].member_ranks(mesh, 4) == (1, 4)
    plan = plan_of(DDP, codec, mesh)
    assert group_keys(plan, serializes_p2p=False) >= {(AXIS, ())}
    assert not any(among for _, among in group_keys(plan, serializes_p2p=False)), "one exchange among all"


@pytest.mark.parametrize(
    ("strategies", "mesh", "codec"),
    [
        (DDP, Mesh(dp_replicate=4), QgZCompression(ranks_per_host=2)),
        (sharded(1), Mesh(dp_shard=4), QgZCompression(ranks_per_host=2, across="int4")),
        (sharded(2), Mesh(dp_shard=4), QgZCompression(ranks_per_host=2, error_feedback=False)),
        (sharded(3), Mesh(dp_shard=6), QgZCompression(ranks_per_host=3, exact_steps=1)),
    ],
    ids=["ddp", "zero 1", "zero 2", "zero 3"],
)
def test_ranks_compute_what_their_codes_say(
    strategies: tuple[mw.Strategy, ...], mesh: Mesh, codec: QgZCompression
):
    plan = plan_of(strategies, codec, mesh, micro_batch=1 if mesh.dp_shard == 4 else 2)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(ANALYZED, plan), steps=2)
    assert verdict.passed, verdict


def test_a_rank_that_forgets_what_the_sum_of_its_host_lost_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(QgZCompression, "_owe", staticmethod(lambda part, lost: None))
    plan = plan_of(DDP, QgZCompression(ranks_per_host=2), Mesh(dp_replicate=4))
    assert not verdict_of(case_of(ANALYZED, plan), steps=2).passed


BY_SHARDS = QgZCompression("dp_shard", ranks_per_host=2)


@pytest.mark.parametrize(
    ("stage", "replicas", "micro_batch", "job"),
    [(1, 3, 2, {"guard": LossGuard("skip")}), (2, 2, 1, {}), (3, 2, 2, {})],
    ids=["zero 1, guard", "zero 2, two microbatches", "zero 3"],
)
def test_shards_within_hosts_and_copies_across_them_are_the_two_levels(
    stage: int, replicas: int, micro_batch: int, job: dict[str, object]
):
    mesh = Mesh(dp_replicate=replicas, dp_shard=2)
    plan = plan_of(hybrid(stage), BY_SHARDS, mesh, micro_batch, **job)
    assert static_checks(plan) == []
    for action in plan.for_rank(0).actions:
        if action.kind == "REDUCE" and action.transfer is not None:
            transfer, size = action.transfer, action.transfer.num_ranks(mesh)
            part = -(-transfer.nbytes // 8 // size)
            if transfer.collective == "reduce_scatter":
                law = [("all_to_all", 2 * code_nbytes(part, 4))]
            else:
                law = [("all_to_all", size * code_nbytes(part, 8)), ("all_gather", code_nbytes(part, 8))]
            assert [(each.collective, each.nbytes) for each in transfer.messages] == law
    owed = [each for each in plan.for_rank(0).states["compress"] if each.name == "residual"]
    assert {each.layout.axes_with("P") for each in owed} == {("dp_replicate", "dp_shard")}
    verdict = verdict_of(case_of(ANALYZED, plan), steps=2)
    assert verdict.passed, verdict


def test_a_rank_that_forgets_what_the_sum_of_its_shard_lost_is_found(monkeypatch: pytest.MonkeyPatch):
    keep = CodedOperand.keep_residual
    monkeypatch.setattr(
        CodedOperand, "keep_residual", lambda self: None if self.adds_residual else keep(self)
    )
    plan = plan_of(hybrid(1), BY_SHARDS, Mesh(dp_replicate=2, dp_shard=2))
    assert not verdict_of(case_of(ANALYZED, plan), steps=2).passed


def test_two_sums_need_error_feedback():
    codec = QgZCompression("dp_shard", ranks_per_host=2, error_feedback=False)
    with pytest.raises(PlanError, match="keep error_feedback, or remove compress"):
        plan_of(hybrid(1), codec, Mesh(dp_replicate=2, dp_shard=2))


def test_a_plan_counts_the_bytes_of_both_levels():
    plan = plan_of(sharded(1), QgZCompression(ranks_per_host=2), Mesh(dp_shard=4))
    saved = 0.0
    for action in plan.for_rank(0).actions:
        if action.transfer is not None and action.transfer.carried_by:
            numel = action.transfer.nbytes // 8
            coded = 2 * code_nbytes(numel // 4, 4) + code_nbytes(numel // 4, 8)
            saved += 3 / 4 * action.transfer.nbytes - coded
    assert compression_gain(plan, ground(coding=1.0)).saved_nbytes == pytest.approx(saved)
    assert saved > 0


@pytest.mark.parametrize(
    ("strategies", "mesh", "near", "told"),
    [
        (DDP, Mesh(dp_replicate=4), 3, "4 ranks sum along dp_replicate, and ranks_per_host = 3 leaves no"),
        (sharded(2), Mesh(dp_shard=4), 4, "choose one of 2, or remove compress"),
        (DDP, Mesh(dp_replicate=3), 8, 'use mode = "int8", or remove compress'),
        (hybrid(2), Mesh(dp_replicate=2, dp_shard=2), 2, 'write axis = "dp_shard" and its ranks on a host'),
    ],
    ids=["no divisor", "one host", "prime", "hybrid"],
)
def test_hosts_that_are_not_equal_or_not_several_are_refused(
    strategies: tuple[mw.Strategy, ...], mesh: Mesh, near: int, told: str
):
    with pytest.raises(PlanError) as refused:
        plan_of(strategies, QgZCompression(ranks_per_host=near), mesh)
    assert told in str(refused.value)
    assert all(each.fix for each in refused.value.diagnostics)


def test_fewer_than_two_ranks_of_a_host_are_refused():
    with pytest.raises(PlanError, match="write the ranks of a host that sum together, at least 2"):
        QgZCompression(ranks_per_host=1)
