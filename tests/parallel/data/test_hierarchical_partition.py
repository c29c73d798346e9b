"""hpz gathers inside hosts what a step has gathered once: bytes by the law, memory to the byte, every bit."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

import meshwright as mw
from meshwright.comm.backends.fake import FakeWorld
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data import hierarchical_partition
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.testing.ranks import ProcessPool, run_on_threads
from meshwright.verifier.messages import issued_messages, planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits
from tests.paper_model import FIRST_ROLE, SyntheticModel
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.odd_llama import batches, llama, planned
from tests.tiny_model import (
    analyzed_model,
    case_of,
    edited,
    executor_of,
    first_of,
    tiny_job,
    token_samples,
    verdict_of,
)

SPLIT = mw.BatchSplit("dp_shard")
FOUR = mw.Mesh(dp_shard=4)
FLOAT32 = mw.PrecisionConfig("float32", "float32", "float32")


def plan_of(
    *strategies: Strategy,
    mesh: mw.Mesh = FOUR,
    micro_batch: int = 0,
    job: Job | None = None,
    analyzed: AnalyzedModel | None = None,
) -> Plan:
    """A plan of the tiny model with its shards over `dp_shard`."""
    analyzed, job = analyzed or analyzed_model(), job or tiny_job()
    zero = () if any(isinstance(each, mw.ZeRO) for each in strategies) else (mw.ZeRO(),)
    return mw.make_plan(analyzed, job, mesh, (SPLIT, *zero, *strategies), micro_batch)


def paper_plan(ranks: int, size: int, num_microbatches: int) -> Plan:
    paper = SyntheticModel(layers=5, numel=77)
    strategies = SPLIT, mw.ZeRO(), mw.HierarchicalPartition(size)
    job = replace(tiny_job(batch=4 * ranks), precision=FLOAT32)
    return Plan.make(job, mw.Mesh(dp_shard=ranks), paper.model_spec, strategies, 4 // num_microbatches)


def gathers(plan: Plan) -> list[Action]:
    return [action for action in plan.program.actions(FIRST_ROLE) if action.kind == "UNSHARD"]


def sent_by(actions: Iterable[Action], plan: Plan) -> int:
    """The bytes that a rank sends for all-gathers."""
    transfers = [action.transfer for action in actions if action.transfer is not None]
    return sum((each.num_ranks(plan.mesh) - 1) * each.nbytes for each in transfers)


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize(("ranks", "size"), [(4, 2), (6, 3), (6, 2), (1024, 8)])
def test_one_gather_of_a_group_is_over_all_ranks_and_the_others_are_within_hosts(
    ranks: int, size: int, num_microbatches: int
):
    plan = paper_plan(ranks, size, num_microbatches)
    assert static_checks(plan) == []
    numel = ranks * -(-77 // ranks)  # of a group, padding included
    over_all = [each for each in gathers(plan) if not each.transfer.num_neighbours]
    within = [each for each in gathers(plan) if each.transfer.num_neighbours]
    assert len(over_all) == 5
    # the last block's backward follows its forward, and the next microbatch begins where one ends
    assert len(within) == num_microbatches * (2 * 5 - 1) - (num_microbatches - 1) - 5
    assert sent_by(over_all, plan) == Fraction(ranks - 1, ranks) * 5 * numel * 4
    assert sent_by(within, plan) == Fraction(size - 1, size) * len(within) * numel * 4


def test_forward_gathers_over_all_ranks_and_backward_and_recomputation_within_hosts():
    plan = plan_of(mw.HierarchicalPartition(2), mw.ActivationCheckpointing())
    by_use = {each.name.split(", ")[1][0]: each.transfer.num_neighbours for each in gathers(plan)}
    assert by_use == {"F": 0, "R": 2, "B": 2}  # the embedding is not recomputed
    assert verdict_of(case_of(analyzed_model(), plan)).passed


def stepped(
    plan: Plan, world: World, analyzed: AnalyzedModel, steps: int = 2, rows: Sequence[int] = ()
) -> dict[str, object]:
    """The bits of all losses and of all that a checkpoint holds, what was sent, and the memory."""
    executor, found = executor_of(analyzed, plan, world), dict[str, torch.Tensor]()
    rows = torch.tensor(rows or plan.samples_read(world.rank))
    world.ledger.is_recording = True
    for step in range(steps):
        world.ledger.entries.clear()
        metrics = executor.step({key: value[rows] for key, value in token_samples().items()})
        found[f"loss {step}"] = torch.tensor([metrics.loss, metrics.grad_norm])
    sent = issued_messages(world.ledger.entries)
    saved = sorted(executor.state_dict())
    parameters = executor.gather_parameters()
    memory = executor.memory_by_category()
    executor.close()
    return {"bits": bits(found | parameters), "saved": saved, "sent": sent, "memory": memory}


def trained(plan: Plan, analyzed: AnalyzedModel, steps: int = 2) -> list[dict[str, object]]:
    return run_on_threads(lambda world: stepped(plan, world, analyzed, steps), plan.mesh)


COMBINATIONS = {
    "alone": ((), {}),
    "microbatches": ((), {"micro_batch": 1}),
    "kept for a microbatch": ((mw.ZeRO(gather="microbatch"),), {"micro_batch": 1}),
    "gathered three uses ahead": ((mw.ZeRO(prefetch=3),), {}),
    "checkpointing": ((mw.ActivationCheckpointing(),), {"micro_batch": 1}),
    "offload": ((mw.Offload(),), {}),
    "offload of gradients": ((mw.Offload(("optimizer_states", "gradients"), "host"),), {"micro_batch": 1}),
    "pipeline": ((mw.Pipeline(),), {"mesh": mw.Mesh(pp=2, dp_shard=4), "micro_batch": 1}),
    "interleaved pipeline": (
        (mw.Pipeline(schedule="interleaved", virtual_stages=2),),
        {"mesh": mw.Mesh(pp=2, dp_shard=4), "micro_batch": 1, "job": tiny_job(batch=16)},
    ),
    "replicas": (
        (mw.BatchSplit(), mw.ZeRO(replicate_axis="dp_replicate")),
        {"mesh": mw.Mesh(dp_replicate=3, dp_shard=4)},
    ),
    "compressed gradients": ((mw.Int8Compression(),), {"micro_batch": 1}),
}


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_every_bit_is_that_of_the_plan_without_it(combination: str):
    strategies, more = COMBINATIONS[combination]
    analyzed, kept = analyzed_model(p=0.3, tied=True, frozen=combination == "microbatches"), 0
    plain = plan_of(*strategies, analyzed=analyzed, **more)
    plan = plan_of(*strategies, mw.HierarchicalPartition(2), analyzed=analyzed, **more)
    assert static_checks(plan) == []
    for rank, (with_it, without) in enumerate(
        zip(trained(plan, analyzed), trained(plain, analyzed), strict=True)
    ):
        assert with_it["bits"] == without["bits"]
        assert with_it["saved"] == without["saved"]
        assert with_it["sent"] == planned_messages(plan.for_rank(rank))
        expected, base = state_bytes(plan, rank), state_bytes(plain, rank)
        allocations = {
            each.name: each.nbytes
            for action in plan.for_rank(rank).actions
            for each in action.allocations
            if each.name.startswith("secondary shard")
        }
        more_nbytes = sum(with_it["memory"].values()) - sum(without["memory"].values())
        assert more_nbytes == sum(allocations.values()) == expected.total - base.total
        kept += more_nbytes
    assert kept > 0


def test_it_learns_as_the_plan_without_it_for_20_steps_of_adamw():
    # peers: DeepSpeed #4851 (hpZ does not converge), #6926 (the loss stays where it was)
    job = replace(tiny_job(), precision=FLOAT32, optimizer=OptimizerConfig("adamw", lr=0.02))
    analyzed = analyzed_model()
    one = trained(plan_of(mw.HierarchicalPartition(2), job=job), analyzed, 20)
    other = trained(plan_of(job=job), analyzed, 20)
    assert [each["bits"] for each in one] == [each["bits"] for each in other]


@pytest.mark.parametrize("micro_batch", [0, 1])
def test_it_equals_one_device(micro_batch: int):
    analyzed = analyzed_model(tied=True)
    plan = plan_of(
        mw.HierarchicalPartition(3), mesh=mw.Mesh(dp_shard=6), micro_batch=micro_batch, analyzed=analyzed
    )
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)


def test_two_tensor_parallel_ranks_in_each_of_four_shards_equal_one_device():
    strategies = SPLIT, mw.ZeRO(), mw.TensorParallel(), mw.HierarchicalPartition(2)
    analyzed, plan = planned(llama(), mw.Mesh(dp_shard=4, tp=2), strategies, 1)
    assert_exact(analyzed, plan, batches(2))


def test_rank_777_of_1024_sends_what_the_program_says():
    plan = plan_of(mw.HierarchicalPartition(8), mesh=mw.Mesh(dp_shard=1024), job=tiny_job(batch=1024))
    found = stepped(plan, FakeWorld(plan.mesh, 777), analyzed_model(), 1, rows=[7])
    assert found["sent"] == planned_messages(plan.for_rank(777))


def test_processes_equal_threads(process_pool: ProcessPool):
    plan = plan_of(mw.HierarchicalPartition(2), micro_batch=1)
    found = process_pool.run(on_a_process, plan.mesh)
    threads = trained(plan, analyzed_model())
    assert [each["sent"] for each in found] == [each["sent"] for each in threads]
    assert all(messages["sent"] == planned_messages(plan.for_rank(0)) for messages in found)
    assert len({str(each["bits"]) for each in found}) == 1


def on_a_process(world: World) -> dict[str, object]:
    return stepped(plan_of(mw.HierarchicalPartition(2), micro_batch=1), world, analyzed_model())


OFFLOADED = mw.Offload(("optimizer_states", "gradients", "weights"), "host")


@pytest.mark.parametrize(
    ("strategies", "ranks", "told", "fix"),
    [
        ((mw.HierarchicalPartition(4),), 4, "weights have 4 shards", "choose one of 2, or remove hpz"),
        ((mw.HierarchicalPartition(8),), 3, "weights have 3 shards", "shard over more ranks, or remove hpz"),
        ((mw.HierarchicalPartition(4),), 6, "6 shards of weights do not divide", "choose one of 2, 3"),
        ((mw.ZeRO(stage=2), mw.HierarchicalPartition(2)), 4, "no weights are stored", "zero with stage = 3"),
        ((mw.ZeRO(gather="step"), mw.HierarchicalPartition(2)), 4, "once per step", 'gather = "use"'),
        ((OFFLOADED, mw.HierarchicalPartition(2)), 4, "shards of weights rest on the host", "remove weights"),
    ],
)
def test_what_it_cannot_do_is_refused_with_a_repair(
    strategies: tuple[Strategy, ...], ranks: int, told: str, fix: str
):
    with pytest.raises(PlanError) as refused:
        plan_of(*strategies, mesh=mw.Mesh(dp_shard=ranks))
    assert told in str(refused.value)
    assert fix in str(refused.value)


@pytest.mark.parametrize("size", [0, 1])
def test_a_partition_of_one_rank_is_refused(size: int):
    with pytest.raises(PlanError, match="write the ranks of a host"):
        mw.HierarchicalPartition(size)


PLAN = plan_of(mw.HierarchicalPartition(2))


def test_a_secondary_shard_that_is_not_renewed_after_a_step_is_found(monkeypatch: pytest.MonkeyPatch):
    shards = hierarchical_partition._SecondaryShards
    good = shards.wrap_reshard

    def only_in_the_first_step(self: object, handler: object) -> object:
        keep = good(self, handler)
        return lambda action: keep(action) if self._state.step.number == 0 else handler(action)

    monkeypatch.setattr(shards, "wrap_reshard", only_in_the_first_step)
    assert first_of(verdict_of(case_of(analyzed_model(), PLAN)))[:2] == (1, "gradient")


def test_a_wrong_slice_of_the_full_weights_is_found(monkeypatch: pytest.MonkeyPatch):
    shards = hierarchical_partition._SecondaryShards
    good = shards._ranges

    def ranges(self: object, flat_param: object) -> object:
        _, shard = good(self, flat_param)
        return flat_param.full_tensor.view(2, -1)[flat_param.group.index // 2], shard

    monkeypatch.setattr(shards, "_ranges", ranges)
    assert first_of(verdict_of(case_of(analyzed_model(), PLAN)))[:2] == (0, "gradient")


def test_a_secondary_shard_that_nothing_keeps_is_found():
    def forget(actions: list[Action]) -> list[Action]:
        return [replace(each, allocations=()) if each.kind == "RESHARD" else each for each in actions]

    problems = [each.problem for each in static_checks(edited(PLAN, forget))]
    assert any("frees secondary shard(layers.0), which is not allocated" in each for each in problems)
