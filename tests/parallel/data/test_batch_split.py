"""BatchSplit: placements, messages, cost, and parity when ranks have unequal numbers of valid tokens."""

from dataclasses import replace

import pytest
import torch

from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import IGNORE_INDEX
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import TrainConfig
from meshwright.plan.model_spec.model_spec import BatchTensor
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import I, P, R, S
from meshwright.plan.step.single_device_program import (
    BATCH_INFO,
    sequential_stage_calls,
    single_device_program,
)
from meshwright.run.data.shuffle import ShuffledOrder
from meshwright.testing.ranks import run_on_threads
from tests.paper_model import FIRST_ROLE, SyntheticModel
from tests.tiny_model import (
    NUM_SAMPLES,
    analyzed_model,
    case_of,
    executor_of,
    plan_of,
    tiny_job,
    token_samples,
    verdict_of,
)

SPACE = ShardingPlan.one_device(Mesh(dp_replicate=3, dp_shard=2), SyntheticModel().model_spec)
VIEW = RankView(SPACE, SPACE.mesh.coordinate(0))


@pytest.fixture(scope="module")
def analyzed() -> AnalyzedModel:
    return analyzed_model()


def test_samples_are_split_and_gradients_become_partial():
    space = BatchSplit().place(SPACE)
    assert space.batch_layout.placement("dp_replicate") == S(0)
    for param_sharding in space.param_shardings:
        assert param_sharding.layout.placement("dp_replicate") == R
        assert param_sharding.unreduced_grad_layout.placement("dp_replicate") == P
        assert param_sharding.grad_layout.placement("dp_replicate") == P
        assert param_sharding.layout.placement("dp_shard") == I


def test_only_the_two_numbers_of_the_step_are_sent():
    alone = single_device_program(
        VIEW, tiny_job(), 1, sequential_stage_calls(SPACE.model_spec.block_calls, 2)
    )
    split = BatchSplit().rewrite(alone, VIEW, tiny_job())
    sent = {a.kind: (a.transfer.collective, a.transfer.axes) for a in split.actions(FIRST_ROLE) if a.transfer}
    assert sent == dict.fromkeys(("TOKEN_COUNT", "LOSS_SUM"), ("all_reduce", ("dp_replicate",)))
    assert [a.name for a in split.actions(FIRST_ROLE)] == [a.name for a in alone.actions(FIRST_ROLE)]


def test_a_loss_of_the_whole_batch_gathers_its_outputs_and_one_count_per_shared_output():
    outputs = (
        BatchTensor("embedding", (4,), "float32"),
        BatchTensor("scale", (), "float32", per_sample=False),
        BatchTensor("unused", (9,), "float32", used_by_loss=False),
    )
    model_spec = replace(
        SPACE.model_spec,
        targets=(BatchTensor("index", (), "int64"),),
        outputs=outputs,
        needs_global_batch=True,
    )
    space = ShardingPlan.one_device(SPACE.mesh, model_spec)
    view = RankView(space, space.mesh.coordinate(0))
    alone = single_device_program(view, tiny_job(), 1, sequential_stage_calls(model_spec.block_calls, 1))
    view = RankView(BatchSplit().place(space), view.coordinate)
    actions = BatchSplit().rewrite(alone, view, tiny_job()).actions(FIRST_ROLE)
    local = tiny_job().train.batch // 3
    sent = {a.subject: a.transfer.nbytes for a in actions if a.kind == "GATHER" and a.transfer}
    # batch_info: the number of samples, and a sum of the one output that ranks share
    assert sent == {BATCH_INFO: 8 * 2, "index": 8 * local, "embedding": 8 * 4 * local}  # in float64
    last_forward = [a.name for a in actions if a.kind == "F"][-1]
    assert {a.waits for a in actions if a.kind == "GATHER"} == {(last_forward,)}


def test_two_split_axes_share_their_messages():
    program = single_device_program(
        VIEW, tiny_job(), 1, sequential_stage_calls(SPACE.model_spec.block_calls, 2)
    )
    for axis in ("dp_replicate", "dp_shard"):
        program = BatchSplit(axis).rewrite(program, VIEW, tiny_job())
    assert {a.transfer.axes for a in program.actions(FIRST_ROLE) if a.transfer} == {
        ("dp_replicate", "dp_shard")
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_activations_of_a_rank_are_one_nth(ranks: int):
    analyzed = analyzed_model()
    alone, split = (plan_of(analyzed, n).program.actions(FIRST_ROLE) for n in (1, ranks))
    held = [
        sum(h.nbytes for a in actions if a.kind == "F" for h in a.allocations) for actions in (alone, split)
    ]
    assert held[0] == ranks * held[1] > 0


def test_samples_are_not_split_along_the_tensor_parallel_axis():
    with pytest.raises(PlanError) as caught:
        plan_of(analyzed_model(), 2, [BatchSplit("tp")])
    assert "strategies.batch_split.axis: axis = 'tp'; needed is 'dp_replicate', 'dp_shard' or 'ep'" in str(
        caught.value
    )
    assert "choose one of: dp_replicate, dp_shard" in str(caught.value)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 0), (3, 0), (3, 2)])
def test_ranks_with_unequal_counts_of_valid_tokens_equal_one_device(
    analyzed: AnalyzedModel, ranks: int, micro_batch: int
):
    data = token_samples()
    data["labels"][ShuffledOrder(NUM_SAMPLES, seed=0).ids(0, 12)[: 12 // ranks]] = (
        IGNORE_INDEX  # in the first step, nothing of rank 0 counts
    )
    verdict = verdict_of(case_of(analyzed, plan_of(analyzed, ranks, micro_batch=micro_batch), data), steps=4)
    assert verdict.passed, str(verdict)


def test_a_step_in_which_nothing_counts_changes_nothing_and_is_no_difference(analyzed: AnalyzedModel):
    data = token_samples()
    data["labels"][:] = IGNORE_INDEX
    verdict = verdict_of(case_of(analyzed, plan_of(analyzed, 3), data))
    assert verdict.passed, str(verdict)
    assert verdict.max_errors["parameter"] == 0.0


@pytest.mark.parametrize("micro_batch", [0, 2, 1])
@pytest.mark.parametrize("samples", [13, 16, 23])
def test_ranks_that_run_out_of_data_take_part_with_zero_weight(
    analyzed: AnalyzedModel, samples: int, micro_batch: int
):
    """The last of two steps is short: some ranks hold fewer rows, some none."""
    job = tiny_job(data=DataConfig("example", epochs=1))
    plan = plan_of(analyzed, 3, micro_batch=micro_batch, job=job)
    verdict = verdict_of(case_of(analyzed, plan, token_samples(samples)), steps=5)
    assert verdict.passed, str(verdict)
    assert verdict.num_steps == 2


def test_dropout_belongs_to_samples_also_where_the_last_batch_is_short():
    analyzed = analyzed_model(p=0.4)
    job = tiny_job(data=DataConfig("example", epochs=1))
    for micro_batch in (0, 2):
        verdict = verdict_of(
            case_of(analyzed, plan_of(analyzed, 3, micro_batch=micro_batch, job=job), token_samples(17)),
            steps=2,
        )
        assert verdict.passed, str(verdict)


def test_a_batch_of_one_sample_per_rank_equals_one_device(analyzed: AnalyzedModel):
    job = tiny_job(batch=3)
    verdict = verdict_of(case_of(analyzed, plan_of(analyzed, 3, job=job)), steps=4)
    assert verdict.passed, str(verdict)


def test_metrics_are_the_same_on_every_rank(analyzed: AnalyzedModel):
    plan = plan_of(analyzed, 3)
    batch = case_of(analyzed, plan).batch_reader

    def body(world: object) -> list[object]:
        executor = executor_of(analyzed, plan, world)
        return [
            executor.step(batch(plan, world.rank)(step), stop=world.rank == 1 and step == 1)
            for step in range(2)
        ]

    first, *others = run_on_threads(body, plan.mesh)
    assert all(other == first for other in others)
    assert [metrics.stop_requested for metrics in first] == [False, True], "one rank asks, all ranks know"


def test_the_loss_is_that_of_the_global_batch_not_the_mean_of_means(analyzed: AnalyzedModel):
    """Held against one forward over all rows: a mean of per-rank means would differ,
    because counts differ.
    """
    plan = plan_of(analyzed, 3, job=replace(tiny_job(), train=TrainConfig(steps=20, batch=12)))
    read_batch = case_of(analyzed, plan).batch_reader
    module, _, _ = analyzed.make_module("cpu", torch.float64)
    parts = [read_batch(plan, rank)(0) for rank in range(3)]
    sums = [
        torch.nn.functional.cross_entropy(
            module(part["input_ids"]).flatten(0, 1), part["labels"].flatten(), reduction="sum"
        )
        for part in parts
    ]
    counts = [(part["labels"] != IGNORE_INDEX).sum().item() for part in parts]
    assert len(set(counts)) > 1
    loss = run_on_threads(
        lambda world: executor_of(analyzed, plan, world).step(read_batch(plan, world.rank)(0)).loss, plan.mesh
    )[0]
    assert loss == pytest.approx(sum(sums).item() / sum(counts), rel=1e-13)
    assert loss != pytest.approx(sum((s / c).item() for s, c in zip(sums, counts, strict=True)) / 3, rel=1e-6)
