"""DDP and ZeRO under context parallelism: one reduction over the ranks with other tokens and with other
samples.
"""

from fractions import Fraction
from pathlib import Path

import pytest

from meshwright.api import analyze, make_plan
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.plan.sharding.tensor_placements import FLAT, I, S
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints, load_tensors, save_tensors
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.messages import issued_messages, planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import FIRST_ROLE, SyntheticModel
from tests.parallel.data.optimizer_cases import RULES, Wide, error, outcome, trained
from tests.parallel.data.optimizer_cases import plan_of as plan_without
from tests.parallel.data.tokenwise_model import ReducesOver, TokenSharding
from tests.tiny_model import analyzed_model, case_of, executor_of, tiny_job, token_samples, verdict_of

SHARD, SHARDED, CP = BatchSplit(axis="dp_shard"), TokenSharding(), "cp"
BOTH, THREE = Mesh(dp_shard=2, cp=3), Mesh(cp=3)


def of(
    analyzed: AnalyzedModel,
    mesh: Mesh,
    strategies: tuple[Strategy, ...],
    micro_batch: int = 0,
    **changes: object,
) -> Plan:
    return make_plan(analyzed, tiny_job(**changes), mesh, strategies, micro_batch)


def synthetic_plan(mesh: Mesh, *strategies: Strategy, paper: SyntheticModel | None = None) -> Plan:
    return Plan.make(tiny_job(), mesh, (paper or SyntheticModel()).model_spec, strategies)


STORES = {
    "ddp on two ranks": (Mesh(cp=2), (SHARDED, DDP(axis=CP))),
    "ddp on three ranks": (THREE, (SHARDED, DDP(axis=CP))),
    "ddp on ranks with samples": (Mesh(dp_replicate=2, cp=3), (BatchSplit(), SHARDED, DDP())),
    "small buckets": (
        Mesh(dp_replicate=3, cp=2),
        (SHARDED, BatchSplit(), DDP(bucket_mb=0.0003, algorithm="ring")),
    ),
    "naive_ddp": (Mesh(dp_replicate=2, cp=3), (BatchSplit(), SHARDED, NaiveDDP())),
    "ddp on more ranks than tokens": (Mesh(cp=7), (SHARDED, DDP(axis=CP))),
    **{f"shards, stage {stage}": (BOTH, (SHARD, SHARDED, ZeRO(stage=stage))) for stage in (1, 2, 3)},
    **{
        f"shards of tokens alone, stage {stage}": (THREE, (SHARDED, ZeRO(axis=CP, stage=stage)))
        for stage in (1, 2, 3)
    },
    "shards for a microbatch": (BOTH, (SHARD, SHARDED, ZeRO(gather="microbatch"))),
    "shards for a step": (Mesh(dp_shard=3, cp=2), (SHARDED, SHARD, ZeRO(gather="step"))),
    "hsdp": (
        Mesh(dp_replicate=2, dp_shard=2, cp=2),
        (BatchSplit(), SHARD, SHARDED, ZeRO(replicate_axis="dp_replicate")),
    ),
    "hsdp along cp": (
        Mesh(dp_replicate=2, cp=3),
        (BatchSplit(), SHARDED, ZeRO(axis=CP, stage=2, replicate_axis="dp_replicate")),
    ),
}


@pytest.mark.parametrize("micro_batch", [0, 1])
@pytest.mark.parametrize("store", STORES)
def test_it_equals_one_device(store: str, micro_batch: int):
    analyzed = analyzed_model(tied=True)
    plan = of(analyzed, *STORES[store], micro_batch)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan), 2)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    "store", [DDP(), ZeRO(axis="dp_replicate"), ZeRO(axis="dp_replicate", stage=1)], ids=str
)
def test_reductions_without_the_cp_axis_are_noticed(store: Strategy):
    mesh, forgets = Mesh(dp_replicate=2, cp=3), ReducesOver(axes=("dp_replicate",))
    plan = synthetic_plan(mesh, BatchSplit(), SHARDED, store, forgets)
    assert any("stays a partial sum over cp" in str(fault) for fault in static_checks(plan))


def test_a_sum_over_samples_alone_leaves_another_gradient():
    analyzed = analyzed_model()
    plan = of(
        analyzed,
        Mesh(dp_replicate=2, cp=3),
        (BatchSplit(), SHARDED, DDP(), ReducesOver(axes=("dp_replicate",))),
    )
    verdict = verdict_of(case_of(analyzed, plan), 1)
    assert not verdict.passed
    assert verdict.first_difference.quantity == "gradient"


def test_gradients_are_reduced_once_over_both_axes():
    for mesh, store, axes in (
        (Mesh(dp_replicate=2, cp=3), DDP(), ("dp_replicate", "cp")),
        (Mesh(dp_replicate=2, cp=3), NaiveDDP(), ("dp_replicate", "cp")),
        (Mesh(dp_replicate=2, cp=3), ZeRO(axis="dp_replicate"), ("dp_replicate", "cp")),
        (THREE, DDP(axis=CP), ("cp",)),
        (THREE, ZeRO(axis=CP), ("cp",)),
    ):
        plan = synthetic_plan(mesh, *((BatchSplit(),) if mesh.dp_replicate > 1 else ()), SHARDED, store)
        moves = [
            a.transfer
            for a in plan.program.actions(FIRST_ROLE)
            if a.kind in ("REDUCE", "UNSHARD") and a.transfer
        ]
        assert {move.axes for move in moves} == {axes}
        place = S(FLAT) if isinstance(store, ZeRO) else I
        assert {
            param_sharding.grad_layout.placement(axis)
            for param_sharding in plan.sharding.param_shardings
            for axis in axes
        } == {place}
        assert not any(
            param_sharding.grad_layout.axes_with("P") for param_sharding in plan.sharding.param_shardings
        )


def test_ddp_sends_two_n_minus_one_nths_over_both_axes():
    paper, mesh = SyntheticModel(layers=4, numel=77), Mesh(dp_replicate=2, cp=3)
    plan = synthetic_plan(mesh, BatchSplit(), SHARDED, DDP(), paper=paper)
    moves = [
        action.transfer
        for action in plan.program.actions(FIRST_ROLE)
        if action.kind == "REDUCE" and action.transfer
    ]
    assert sum(move.nbytes for move in moves) == 4 * 77 * 8
    assert {move.num_ranks(mesh) for move in moves} == {6}
    analyzed = analyzed_model()
    real = of(analyzed, mesh, (BatchSplit(), SHARDED, DDP()))
    nbytes = analyzed.model_spec.nbytes("float64")
    for sent in run_on_threads(lambda world: sent_by(analyzed, real, world, "REDUCE"), mesh):
        assert float(sent) == pytest.approx(2 * 5 * nbytes / 6)


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_sends_n_minus_one_shards_each_way(stage: int):
    analyzed = analyzed_model()
    plan = of(analyzed, BOTH, (SHARD, SHARDED, ZeRO(stage=stage)))
    shards = sum(flat_param.shard_numel for flat_param in plan.rank_view(0).flat_param_specs.values()) * 8
    gathers = sum(action.kind == "UNSHARD" for action in plan.for_rank(0).actions) / len(
        plan.rank_view(0).flat_param_specs
    )
    for summed, gathered in run_on_threads(lambda world: sent_both(analyzed, plan, world), plan.mesh):
        assert summed == 5 * shards
        assert gathered == 5 * shards if gathers == 1 else gathered > 5 * shards


def sent_both(analyzed: AnalyzedModel, plan: Plan, world: World) -> tuple[Fraction, Fraction]:
    sent = ledger(analyzed, plan, world)
    return total(sent, "REDUCE"), total(sent, "UNSHARD")


def sent_by(analyzed: AnalyzedModel, plan: Plan, world: World, kind: str) -> Fraction:
    return total(ledger(analyzed, plan, world), kind)


def total(sent: dict[str, float], kind: str) -> Fraction:
    return sum((Fraction(value) for name, value in sent.items() if name.startswith(kind)), Fraction(0))


def ledger(analyzed: AnalyzedModel, plan: Plan, world: World) -> dict[str, float]:
    """Returns what this rank sends in a step by action, which is what the plan says."""
    world.ledger.is_recording = True
    executor = executor_of(analyzed, plan, world)
    executor.step({key: value[plan.samples_read(world.rank)] for key, value in token_samples().items()})
    assert issued_messages(world.ledger.entries) == planned_messages(plan.for_rank(world.rank))
    executor.close()
    return dict(world.ledger.sent_nbytes)


def test_flat_params_are_sharded_over_both_axes_in_rank_order():
    plan = synthetic_plan(BOTH, SHARD, SHARDED, ZeRO(), paper=SyntheticModel(layers=2, numel=100))
    for flat_param in plan.rank_view(0).flat_param_specs.values():
        assert (flat_param.axes, flat_param.num_ranks, flat_param.shard_numel) == (("dp_shard", "cp"), 6, 17)
        pieces = [
            flat_param.param_shards(plan.mesh.index(plan.mesh.coordinate(rank), flat_param.axes))
            for rank in range(6)
        ]
        assert [(piece.begin, piece.end) for (piece,) in pieces] == [
            (0, 17),
            (17, 34),
            (34, 51),
            (51, 68),
            (68, 85),
            (85, 100),
        ]


def test_parameter_groups_are_named_as_without_context_parallelism():
    names = [
        param_group.name
        for param_group in synthetic_plan(BOTH, SHARD, SHARDED, ZeRO()).rank_view(0).param_groups
    ]
    assert names == [
        param_group.name
        for param_group in synthetic_plan(Mesh(dp_shard=2), SHARD, ZeRO()).rank_view(0).param_groups
    ]


@pytest.mark.parametrize(
    ("mesh", "strategies"), [STORES["shards, stage 3"], STORES["ddp on ranks with samples"]]
)
def test_ranks_hold_the_planned_shards(mesh: Mesh, strategies: tuple[Strategy, ...]):
    analyzed = analyzed_model()
    plan = of(analyzed, mesh, strategies, 2)

    def held(world: World) -> tuple[int, int]:
        executor = executor_of(analyzed, plan, world)
        for _ in range(2):
            executor.step(
                {key: value[plan.samples_read(world.rank)] for key, value in token_samples().items()}
            )
        sizes = executor.memory_by_category()
        executor.close()
        return sum(sizes.values()), sizes["parameters"]

    for rank, found in enumerate(run_on_threads(held, mesh)):
        said = state_bytes(plan, rank)
        assert found == (said.total, said.parameters)


@pytest.fixture(scope="module")
def wide() -> AnalyzedModel:
    return analyze(Wide, token_samples(2))


def optimizer_plan(wide: AnalyzedModel, rule: str, mesh: Mesh, store: Strategy) -> Plan:
    strategies = (*((SHARD,) if mesh.dp_shard > 1 else ()), SHARDED, store)
    return of(wide, mesh, strategies, optimizer=RULES[rule])


@pytest.mark.parametrize("rule", ["adamw", "adamw_8bit", "adafactor", "several"])
def test_optimizers_of_every_alignment_step_as_on_one_device(wide: AnalyzedModel, rule: str):
    alone = outcome(wide, plan_without(wide, rule))
    assert error(outcome(wide, optimizer_plan(wide, rule, BOTH, ZeRO(stage=2))), alone) < 1e-10
    assert error(outcome(wide, optimizer_plan(wide, rule, THREE, ZeRO(axis=CP))), alone) < 1e-10


@pytest.mark.parametrize("rule", ["adamw_8bit", "several"])
def test_a_checkpoint_is_loaded_under_another_plan(wide: AnalyzedModel, rule: str, tmp_path: Path):
    six, three, one = (
        optimizer_plan(wide, rule, BOTH, ZeRO()),
        optimizer_plan(wide, rule, THREE, ZeRO(axis=CP, stage=1)),
        plan_without(wide, rule),
    )

    def first(world: World) -> Path:
        executor = executor_of(wide, six, world)
        trained(executor, world, 2)
        return save_tensors(tmp_path / "six", 2, executor.state_dict(), {}, world.group(AXES), 1)

    def again(plan: Plan, world: World, folder: Path) -> Path:
        executor = executor_of(wide, plan, world)
        executor.load_state_dict(load_tensors(saved)[0], 2)
        return save_tensors(folder, 2, executor.state_dict(), {}, world.group(AXES), 1)

    saved = run_on_threads(first, six.mesh)[0]
    for name, plan in (("three", three), ("one", one), ("six again", six)):
        there = run_on_threads(
            lambda world, plan=plan, name=name: again(plan, world, tmp_path / name), plan.mesh
        )[0]
        assert compare_checkpoints(saved, there) == []


REFUSED = {
    "no sequence sharding": (
        Mesh(cp=2),
        (DDP(axis=CP),),
        "strategies.ddp: the replicas along cp would all see the same tokens",
    ),
    "and no shards": (
        Mesh(cp=2),
        (ZeRO(axis=CP),),
        'no strategy shards those of a sample there\n  repair: add [[strategies]] name = "ring"',
    ),
    "twice": (
        Mesh(dp_replicate=2, cp=2),
        (BatchSplit(), SHARDED, DDP(), DDP(axis=CP)),
        (
            "weights are kept whole along dp_replicate already, and now along cp too\n  repair: keep one "
            "of them, along an"
        ),
    ),
    "twice, the other way round": (
        Mesh(dp_replicate=2, cp=2),
        (BatchSplit(), SHARDED, DDP(axis=CP), DDP()),
        "weights are kept whole along cp already, and now along dp_replicate too\n  repair: keep one of them",
    ),
    "replicas of shards": (
        Mesh(dp_shard=2, cp=2),
        (SHARD, SHARDED, ZeRO(replicate_axis=CP)),
        "strategies.zero.replicate_axis: replicate_axis = 'cp', where ranks have other tokens of a sample",
    ),
    "ddp and zero": (
        Mesh(dp_replicate=2, dp_shard=2, cp=2),
        (BatchSplit(), SHARD, SHARDED, DDP(), ZeRO()),
        (
            "stores the weights along cp already\n  repair: keep one of them; zero can replicate "
            "too: replicate_axis = "
            '"dp_replicate"'
        ),
    ),
    "no samples summed": (
        Mesh(dp_replicate=2, cp=2),
        (BatchSplit(), SHARDED, DDP(axis=CP)),
        "stay partial sums over dp_replicate",
    ),
    "no store": (
        Mesh(cp=2),
        (SHARDED,),
        "stay partial sums over cp\n  repair: add a strategy that reduces them along cp",
    ),
    "masters": (
        Mesh(dp_replicate=2, cp=2),
        (BatchSplit(), SHARDED, DataParallelMaster()),
        "the ranks along cp would each have a master of their own",
    ),
    "hosts": (
        Mesh(cp=3),
        (SHARDED, DDP(axis=CP, algorithm="hierarchical/2")),
        "hierarchical/2: 3 ranks are not a whole number",
    ),
    "nobody there": (Mesh(cp=2), (), 'give the axis a strategy (for tokens of a sample: "ring")'),
}


@pytest.mark.parametrize(("mesh", "strategies", "text"), REFUSED.values(), ids=REFUSED)
def test_invalid_combinations_are_refused(mesh: Mesh, strategies: tuple[Strategy, ...], text: str):
    with pytest.raises(PlanError) as caught:
        synthetic_plan(mesh, *strategies)
    assert text in str(caught.value)
