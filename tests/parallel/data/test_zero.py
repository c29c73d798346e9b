"""The program of ZeRO: bytes by the law, buffers, position of its actions, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest

from meshwright.comm.backends.fake import FakeWorld
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.messages import issued_messages, planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import FIRST_ROLE, SyntheticModel
from tests.parallel.data.test_zero_numbers import SHARD, sharded
from tests.tiny_model import analyzed_model, edited, executor_of, tiny_job, token_samples

PRECISIONS = [
    PrecisionConfig(),
    PrecisionConfig(reduce="bfloat16"),
    PrecisionConfig("float64", "float64", "float64"),
]

PAPER = SyntheticModel()


def synthetic_plan(
    zero: Strategy,
    ranks: int = 3,
    micro_batch: int = 0,
    paper: SyntheticModel = PAPER,
    precision: PrecisionConfig = PRECISIONS[0],
) -> Plan:
    job = replace(tiny_job(batch=4 * ranks), precision=precision)
    return Plan.make(job, Mesh(dp_shard=ranks), paper.model_spec, (SHARD, zero), micro_batch)


def actions_of(plan: Plan, *kinds: str) -> list[Action]:
    return [action for action in plan.program.actions(FIRST_ROLE) if action.kind in kinds]


def bytes_sent(plan: Plan, kind: str) -> int:
    """The bytes that leave one rank for all actions of `kind`."""
    ranks = plan.mesh.dp_shard
    return sum(
        (ranks - 1) * move.nbytes // (ranks if move.collective == "reduce_scatter" else 1)
        for action in actions_of(plan, kind)
        if (move := action.transfer) is not None
    )


def gather_nbytes(plan: Plan, dtype: str) -> int:
    """(n-1) ceil(N_b/n) wire bytes, summed over the bundles."""
    ranks = plan.mesh.dp_shard
    return sum(
        (ranks - 1) * -(-sum(w.numel for w in b.params) // ranks) * FLOAT_NBYTES[dtype]
        for b in plan.rank_view(0).param_groups
    )


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: precision.reduce)
@pytest.mark.parametrize("ranks", [2, 3, 7, 1024])
@pytest.mark.parametrize("micro", [1, 4])
def test_every_stage_sends_what_the_law_says(ranks: int, micro: int, precision: PrecisionConfig):
    paper = SyntheticModel(layers=5, numel=77)
    for zero, gathers, sums in [
        (ZeRO(stage=1), 1, 1),
        (ZeRO(stage=2), 1, micro),
        (ZeRO(stage=3, gather="microbatch"), micro, micro),
        (ZeRO(stage=3, gather="step"), 1, micro),
    ]:
        plan = synthetic_plan(zero, ranks, 4 // micro, paper, precision)
        assert static_checks(plan) == []
        spared = (
            (gathers - 1) * gather_nbytes(plan, precision.parameters) // 5
        )  # the first block ends one microbatch and begins the next
        assert bytes_sent(plan, "UNSHARD") == gathers * gather_nbytes(plan, precision.parameters) - spared, (
            zero
        )
        assert bytes_sent(plan, "REDUCE") == sums * gather_nbytes(plan, precision.reduce), zero


@pytest.mark.parametrize("micro", [1, 4])
def test_weights_gathered_for_each_use_are_sent_twice_except_those_of_the_last_block(micro: int):
    plan = synthetic_plan(ZeRO(), 3, 4 // micro, SyntheticModel(layers=5, numel=77))
    one = 2 * -(-77 // 3) * 4
    # the last block's backward follows its forward, and the next microbatch's first forward the first
    # block's backward
    assert bytes_sent(plan, "UNSHARD") == one * (micro * (2 * 5 - 1) - (micro - 1))


def bytes_sent_by_action(analyzed: AnalyzedModel, plan: Plan, world) -> dict[str, float]:
    """Returns what one rank sends in one step, per action, held against the program in passing."""
    world.ledger.is_recording = True
    executor_of(analyzed, plan, world).step(
        {key: value[: plan.local_batch] for key, value in token_samples().items()}
    )
    assert issued_messages(world.ledger.entries) == planned_messages(plan.for_rank(world.rank))
    return dict(world.ledger.sent_nbytes)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_rank_777_of_1024_sends_what_the_law_says(stage: int):
    analyzed = analyzed_model(tied=True)
    plan = sharded(
        analyzed, 1024, ZeRO(stage=stage, gather="step" if stage == 3 else "use"), 1, tiny_job(batch=2048)
    )
    told = bytes_sent_by_action(analyzed, plan, FakeWorld(plan.mesh, 777))
    for kind, times in (("UNSHARD", 1), ("REDUCE", 1 if stage == 1 else 2)):
        assert sum(
            Fraction(value) for name, value in told.items() if name.startswith(kind)
        ) == times * gather_nbytes(plan, "float64")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_rank_sends_what_the_program_says(stage: int):
    analyzed = analyzed_model(tied=True, frozen=False)
    plan = sharded(analyzed, 3, ZeRO(stage=stage), 2)
    for told in run_on_threads(lambda world: bytes_sent_by_action(analyzed, plan, world), plan.mesh):
        mine = sum(value for name, value in told.items() if name.startswith("UNSHARD"))
        assert mine == bytes_sent(plan, "UNSHARD")


def test_hsdp_reduces_inside_groups_and_then_across_replicas():
    mesh = Mesh(dp_replicate=4, dp_shard=3)
    job = tiny_job(batch=48)
    plan = Plan.make(
        job,
        mesh,
        SyntheticModel(layers=2, numel=77).model_spec,
        (BatchSplit(), SHARD, ZeRO(stage=2, replicate_axis="dp_replicate")),
        2,
    )
    assert static_checks(plan) == []
    moves = [(a.transfer.collective, a.transfer.axes, a.transfer.nbytes) for a in actions_of(plan, "REDUCE")]
    inside, across = ("reduce_scatter", ("dp_shard",), 78 * 8), ("all_reduce", ("dp_replicate",), 26 * 8)
    assert sorted(moves) == sorted([inside] * 4 + [across] * 2)


def test_weights_are_prefetched_one_block_ahead_and_resharded_after_use():
    names = [
        action.name
        for action in actions_of(
            synthetic_plan(ZeRO(), paper=SyntheticModel(3)), "F", "B", "UNSHARD", "RESHARD"
        )
    ]
    assert names[:6] == [
        "UNSHARD(layer0, F, 0)",
        "UNSHARD(layer1, F, 0)",
        "F(layer0, 0)",
        "RESHARD(layer0, F, 0)",
        "UNSHARD(layer2, F, 0)",
        "F(layer1, 0)",
    ]
    assert names[-4:] == ["B(layer1, 0)", "RESHARD(layer1, B, 0)", "B(layer0, 0)", "RESHARD(layer0, B, 0)"]


@pytest.mark.parametrize(("ahead", "buffers"), [(0, 1), (1, 2), (2, 3)])
def test_the_number_of_buffers_does_not_depend_on_the_model(ahead: int, buffers: int):
    for layers in (4, 9):
        plan = synthetic_plan(ZeRO(prefetch=ahead), paper=SyntheticModel(layers), micro_batch=1)
        taken = {hold.name for action in actions_of(plan, "UNSHARD", "PACK") for hold in action.allocations}
        assert taken == {f"weight buffer {i}" for i in range(buffers)} | {
            "gradient buffer 0",
            "gradient buffer 1",
        }


def test_a_budget_keeps_weights_that_would_be_regathered():
    paper, nbytes = SyntheticModel(6), 102 * 4
    counts = [
        len(actions_of(synthetic_plan(ZeRO(keep_mb=kept * nbytes / 2**20), paper=paper), "UNSHARD"))
        for kept in range(7)
    ]
    assert counts == [11, 10, 9, 8, 7, 6, 6]


@pytest.mark.parametrize(
    ("zero", "text"),
    [
        (
            lambda: ZeRO(stage=4),
            r"stage = 4; needed is 1, 2 or 3\n.*write 1 \(optimizer states\), 2 \(also gradients\) or 3",
        ),
        (lambda: ZeRO(stage=0), r"stage = 0; needed is 1"),
        (lambda: ZeRO(axis="tp"), r"axis = 'tp'; needed is 'dp_replicate', 'dp_shard' or 'cp'"),
        (lambda: ZeRO(axis="dp_replicate"), r"shards along dp_replicate would all see the same samples"),
        (lambda: ZeRO(replicate_axis="dp_shard"), r"axis and replicate_axis are both dp_shard"),
        (lambda: ZeRO(gather="never"), r"gather = 'never'"),
        (lambda: ZeRO(keep_mb=-1.0), r"keep_mb = -1.0"),
        (lambda: ZeRO(stage=2, prefetch=2), r"prefetch with stage 2, which keeps weights whole"),
    ],
)
def test_invalid_options_are_refused(zero: Callable[[], ZeRO], text: str):
    with pytest.raises(PlanError, match=text):
        synthetic_plan(zero())


def test_shards_without_a_replicate_axis_on_the_other_axis_are_refused_with_it():
    with pytest.raises(
        PlanError,
        match=(
            r"stay partial sums over dp_replicate\n.*replicate_axis = "
            r'"dp_replicate" '
            r"in their strategy"
        ),
    ):
        Plan.make(
            tiny_job(),
            Mesh(dp_replicate=2, dp_shard=2),
            SyntheticModel().model_spec,
            (BatchSplit(), SHARD, ZeRO()),
        )


def test_ddp_and_zero_together_are_refused():
    mesh, model_spec, both = (
        Mesh(dp_replicate=2, dp_shard=2),
        SyntheticModel().model_spec,
        (BatchSplit(), SHARD),
    )
    with pytest.raises(PlanError, match=(r"zero shards the weights\n.*replicate_axis = " r'"dp_replicate"')):
        Plan.make(tiny_job(), mesh, model_spec, (*both, ZeRO(), DDP()))
    with pytest.raises(
        PlanError, match=r'stores the weights along dp_replicate already\n.*replicate_axis = "dp_replicate"'
    ):
        Plan.make(tiny_job(), mesh, model_spec, (*both, DDP(), ZeRO(replicate_axis="dp_replicate")))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("UNSHARD", "which no UNSHARD has gathered"),
        ("REDUCE", "stays a partial sum over dp_shard"),
        ("RESHARD", "which UNSHARD(layer0, F, 0) has allocated already"),
    ],
)
def test_the_static_checks_report_a_missing_action(kind: str, text: str):
    plan = synthetic_plan(ZeRO(), paper=SyntheticModel(3))
    first = actions_of(plan, kind)[0]
    faults = static_checks(edited(plan, lambda actions: [action for action in actions if action != first]))
    assert any(text in str(fault) for fault in faults), faults
