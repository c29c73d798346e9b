"""The program of DDP: bytes by the law, buckets, position of its actions, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.comm.backends.fake import FakeWorld
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP, coalesce
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, PrecisionConfig
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ParamSpec
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.param_sharding import ParamGroup, ParamSharding
from meshwright.plan.step.program import Action
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.messages import issued_messages, planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import FIRST_ROLE, SyntheticModel
from tests.tiny_model import analyzed_model, executor_of, plan_of, tiny_job, token_samples

MIB = 2**20
PRECISIONS = [
    PrecisionConfig(),
    PrecisionConfig(reduce="bfloat16"),
    PrecisionConfig("float64", "float64", "float64"),
]


@pytest.fixture(scope="module")
def analyzed() -> AnalyzedModel:
    return analyzed_model()


def job_in(precision: PrecisionConfig, batch: int = 12) -> Job:
    return replace(tiny_job(batch), precision=precision)


def synthetic_plan(
    paper: SyntheticModel,
    ranks: int = 3,
    bucket_nbytes: float = MIB,
    micro_batch: int = 0,
    job: Job | None = None,
) -> Plan:
    strategies = (BatchSplit(), DDP(bucket_mb=bucket_nbytes / MIB))
    return Plan.make(
        job or job_in(PrecisionConfig()), Mesh(dp_replicate=ranks), paper.model_spec, strategies, micro_batch
    )


def actions_of(plan: Plan, kind: str) -> list[Action]:
    return [action for action in plan.program.actions(FIRST_ROLE) if action.kind == kind]


def law_nbytes(ranks: int, nbytes: int) -> Fraction:
    """The bytes that leave one rank when `nbytes` of gradients are summed over `ranks`: 2 (n-1)/n S."""
    return Fraction(2 * (ranks - 1) * nbytes, ranks)


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: precision.reduce)
@pytest.mark.parametrize("ranks", [2, 3, 7, 1024])
def test_the_program_sends_two_n_minus_one_nths_of_the_gradients(ranks: int, precision: PrecisionConfig):
    plan = synthetic_plan(
        SyntheticModel(layers=5, numel=77), ranks, bucket_nbytes=700, job=job_in(precision, batch=ranks)
    )
    total = sum(action.transfer.nbytes for action in actions_of(plan, "REDUCE"))
    assert law_nbytes(ranks, total) == law_nbytes(ranks, 5 * 77 * FLOAT_NBYTES[precision.reduce])


def bytes_sent_by_action(analyzed: AnalyzedModel, plan: Plan, world: World) -> dict[str, float]:
    """Returns what one rank sends in one step, per action, held against the program in passing."""
    world.ledger.is_recording = True
    executor_of(analyzed, plan, world).step(
        {key: value[: plan.local_batch] for key, value in token_samples().items()}
    )
    assert issued_messages(world.ledger.entries) == planned_messages(plan.for_rank(world.rank))
    return dict(world.ledger.sent_nbytes)


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: precision.reduce)
def test_rank_777_of_1024_sends_what_the_law_says(analyzed: AnalyzedModel, precision: PrecisionConfig):
    plan = plan_of(analyzed, 1024, (BatchSplit(), DDP(bucket_mb=300 / MIB)), 1, job_in(precision, batch=2048))
    sent = bytes_sent_by_action(analyzed, plan, FakeWorld(plan.mesh, 777))
    nbytes = sum(weight.numel for weight in analyzed.model_spec.trainable) * FLOAT_NBYTES[precision.reduce]
    assert sum(Fraction(value) for name, value in sent.items() if name.startswith("REDUCE")) == law_nbytes(
        1024, nbytes
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_sends_what_the_law_says(analyzed: AnalyzedModel, ranks: int):
    plan = plan_of(analyzed, ranks, (BatchSplit(), DDP(bucket_mb=300 / MIB)), 2)
    nbytes = sum(weight.numel for weight in analyzed.model_spec.trainable) * 8
    for sent in run_on_threads(lambda world: bytes_sent_by_action(analyzed, plan, world), plan.mesh):
        reduced = sum(value for name, value in sent.items() if name.startswith("REDUCE"))
        assert reduced == pytest.approx(float(law_nbytes(ranks, nbytes)), rel=1e-15)


def test_frozen_parameters_are_not_sent():
    frozen = analyzed_model(frozen=True)
    plan = plan_of(frozen, 3)
    assert "embed.weight" not in {name for action in actions_of(plan, "REDUCE") for name in action.tensors}
    assert (
        sum(a.transfer.nbytes for a in actions_of(plan, "REDUCE"))
        == sum(w.numel for w in frozen.model_spec.trainable) * 8
    )


def test_nothing_is_sent_while_micro_batches_accumulate():
    actions = synthetic_plan(SyntheticModel(layers=4), bucket_nbytes=1, micro_batch=1).program.actions(
        FIRST_ROLE
    )
    names = [action.name for action in actions]
    assert names.index("LOSS(3)") < min(names.index(f"REDUCE({n})") for n in range(4))
    assert sum(action.kind == "REDUCE" for action in actions) == 4


def test_gradients_leave_when_the_last_backward_of_their_block_ends():
    actions = synthetic_plan(SyntheticModel(layers=3), bucket_nbytes=1, micro_batch=2).program.actions(
        FIRST_ROLE
    )
    tail = [
        action.name for action in actions if action.kind in ("B", "REDUCE", "CLIP") and action.microbatch != 0
    ]
    assert tail == [
        "B(layer2, 1)",
        "REDUCE(0)",
        "B(layer1, 1)",
        "REDUCE(1)",
        "B(layer0, 1)",
        "REDUCE(2)",
        "CLIP()",
    ]


def test_a_bucket_packs_its_gradients_at_the_first_micro_batch():
    names = [
        action.name
        for action in synthetic_plan(SyntheticModel(layers=1), micro_batch=2).program.actions(FIRST_ROLE)
    ]
    assert names.index("PACK(layer0)") == names.index("B(layer0, 0)") + 1
    assert names.index("REDUCE(0)") == names.index("B(layer0, 1)") + 1


def test_gradients_sent_in_another_dtype_are_packed_once_they_are_complete():
    plan = synthetic_plan(
        SyntheticModel(layers=1), micro_batch=2, job=job_in(PrecisionConfig(reduce="bfloat16"))
    )
    names = [action.name for action in plan.program.actions(FIRST_ROLE)]
    assert names[names.index("B(layer0, 1)") :] == [
        "B(layer0, 1)",
        "PACK(layer0)",
        "REDUCE(0)",
        "LOSS_SUM()",
        "UNPACK(0)",
        "CLIP()",
        "STEP()",
    ]


@pytest.mark.parametrize(("reduce", "layers_per_bucket"), [("float32", 2), ("bfloat16", 4)])
def test_a_bucket_holds_bucket_mb_in_the_comm_dtype(reduce: str, layers_per_bucket: int):
    plan = synthetic_plan(
        SyntheticModel(layers=8, numel=100), bucket_nbytes=850, job=job_in(PrecisionConfig(reduce=reduce))
    )
    reduces = actions_of(plan, "REDUCE")
    assert [len(action.tensors) for action in reduces] == [layers_per_bucket] * (8 // layers_per_bucket)
    assert all(action.transfer.nbytes == 800 for action in reduces)


def test_buckets_fill_from_the_last_block_to_the_first():
    reduces = actions_of(synthetic_plan(SyntheticModel(layers=5), bucket_nbytes=850), "REDUCE")
    assert [action.tensors for action in reduces] == [
        ("layer4.weight", "layer3.weight"),
        ("layer2.weight", "layer1.weight"),
        ("layer0.weight",),
    ]


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 60))
def test_parameter_groups_are_coalesced_in_order_and_up_to_the_limit(sizes: list[int], limit: int):
    bundles = [
        ParamGroup(str(i), (ParamSharding(ParamSpec(f"w{i}", (size,), ("v",))),), "v")
        for i, size in enumerate(sizes)
    ]
    runs = coalesce(bundles, limit)
    assert [param_group for run in runs for param_group in run] == bundles
    totals = [sum(param_group.numel for param_group in run) for run in runs]
    assert all(total <= limit or len(run) == 1 for run, total in zip(runs, totals, strict=True))
    assert all(total + after[0].numel > limit for total, after in zip(totals, runs[1:], strict=False))


def test_a_group_with_uneven_slices_has_a_bucket_of_its_own():
    # behind it, offsets would differ between ranks, and so would the order in which a ring adds up
    even, uneven, last = (
        ParamGroup(name, (ParamSharding(ParamSpec(name, (4,), ("a",))),), "a", is_uneven=name == "uneven")
        for name in ("even", "uneven", "last")
    )
    assert coalesce((even, uneven, last), 100) == [[even], [uneven], [last]]
    assert coalesce((uneven, uneven, last), 100) == [[uneven, uneven], [last]]


def test_tied_weights_are_reduced_after_the_last_backward_of_all_their_users():
    plan = synthetic_plan(SyntheticModel(layers=3, tied=True), bucket_nbytes=1, micro_batch=2)
    names = [action.name for action in plan.program.actions(FIRST_ROLE)]
    tied = next(action for action in actions_of(plan, "REDUCE") if "layer0.weight" in action.tensors)
    assert tied.tensors == ("layer0.weight",)
    assert names.index(tied.name) > names.index("B(layer0, 1)") > names.index("B(layer2, 1)")
    assert sum("layer0.weight" in action.tensors for action in actions_of(plan, "REDUCE")) == 1


@pytest.mark.parametrize("micro_batch", [0, 2, 1])
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: precision.reduce)
@pytest.mark.parametrize(
    "paper", [SyntheticModel(), SyntheticModel(tied=True), SyntheticModel(layers=1)], ids=str
)
def test_its_program_passes_the_static_checks(
    paper: SyntheticModel, precision: PrecisionConfig, micro_batch: int
):
    assert (
        static_checks(
            synthetic_plan(paper, bucket_nbytes=850, micro_batch=micro_batch, job=job_in(precision))
        )
        == []
    )


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (
            lambda: DDP("tp"),
            (
                "strategies.ddp.axis: axis = 'tp'; needed is 'dp_replicate', 'dp_shard' or 'cp'\n"
                "  repair: choose one of: dp_rep"
            ),
        ),
        (
            lambda: DDP("dp_shard"),
            (
                'no strategy splits the batch there\n  repair: add [[strategies]] name = "batch_split", '
                'axis = "dp_shard"'
            ),
        ),
        (
            lambda: DDP(bucket_mb=0.0),
            (
                "strategies.ddp.bucket_mb: bucket_mb = 0.0; needed is a number above 0\n"
                "  repair: write bucket_mb = 25.0"
            ),
        ),
        (
            lambda: DDP(bucket_mb=float("nan")),
            "strategies.ddp.bucket_mb: bucket_mb = nan; needed is a number",
        ),
        (
            lambda: DDP(algorithm="rng"),
            "strategies.ddp.algorithm: there is no all_reduce algorithm 'rng'\n  repair: did you",
        ),
        (
            lambda: DDP(algorithm="hierarchical/2"),
            "strategies.ddp.algorithm: hierarchical/2: 3 ranks are not a whole number of",
        ),
        (
            lambda: DDP(algorithm="auto"),
            "strategies.ddp.algorithm: auto needs the measured cost of the links\n  repair: run `mesh",
        ),
    ],
    ids=["no data axis", "not split", "size", "nan", "algorithm", "hosts", "auto"],
)
def test_an_invalid_field_is_refused(analyzed: AnalyzedModel, store: Callable[[], DDP], message: str):
    with pytest.raises(PlanError) as caught:
        plan_of(analyzed, 3, (BatchSplit(), store()))
    assert message in str(caught.value)


def test_ddp_along_two_axes_is_refused_with_the_one_axis_to_use():
    strategies = (BatchSplit("dp_replicate"), BatchSplit("dp_shard"), DDP("dp_replicate"), DDP("dp_shard"))
    with pytest.raises(PlanError) as caught:
        Plan.make(
            job_in(PrecisionConfig()),
            Mesh(dp_replicate=2, dp_shard=3),
            SyntheticModel().model_spec,
            strategies,
        )
    assert [str(fault) for fault in caught.value.diagnostics] == [
        "strategies.ddp.axis: weights are kept whole along dp_replicate already, and now along dp_shard too\n"
        "  repair: make it one axis: mesh.dp_replicate = 6, mesh.dp_shard = 1"
    ]


def test_replicas_may_be_along_the_other_data_axis(analyzed: AnalyzedModel):
    strategies = (BatchSplit("dp_shard"), DDP("dp_shard"))
    plan = Plan.make(tiny_job(), Mesh(dp_shard=3), analyzed.model_spec, strategies)
    assert {action.transfer.axes for action in plan.program.actions(FIRST_ROLE) if action.transfer} == {
        ("dp_shard",)
    }
    assert static_checks(plan) == []


def test_gradients_are_views_of_their_bucket(analyzed: AnalyzedModel):
    """While the optimizer steps, every gradient is a view of a bucket: no second copy is in memory."""
    plan, seen = plan_of(analyzed, 3), []

    def look(action: Action, state: object) -> None:
        flats = [bucket.buffer.untyped_storage().data_ptr() for bucket in state.buckets.values()]
        seen.append(
            all(
                p.grad.untyped_storage().data_ptr() in flats
                for p in state.trained_module.trainable_parameters.values()
            )
        )

    executor_of(analyzed, plan, FakeWorld(plan.mesh, 1), extra_handlers={"CLIP": look}).step(
        {k: v[:4] for k, v in token_samples().items()}
    )
    assert seen == [True]
