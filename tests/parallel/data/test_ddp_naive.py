"""naive_ddp: one all-reduce per parameter, which is the reference for the buckets of DDP."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import PrecisionConfig
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import FIRST_ROLE
from tests.tiny_model import analyzed_model, case_of, executor_of, plan_of, tiny_job, verdict_of

NAIVE = (BatchSplit(), NaiveDDP())


@pytest.fixture(scope="module")
def analyzed() -> AnalyzedModel:
    return analyzed_model()


def test_there_is_one_message_per_parameter_after_the_last_backward(analyzed: AnalyzedModel):
    actions = plan_of(analyzed, 3, NAIVE, micro_batch=2).program.actions(FIRST_ROLE)
    reduces = [i for i, action in enumerate(actions) if action.kind == "REDUCE"]
    assert [actions[i].subject for i in reduces] == [weight.name for weight in analyzed.model_spec.trainable]
    assert min(reduces) > max(i for i, action in enumerate(actions) if action.kind == "B")


def test_it_sends_the_bytes_of_ddp_in_more_messages(analyzed: AnalyzedModel):
    sizes = {}
    for store in (NaiveDDP(), DDP()):
        actions = plan_of(analyzed, 3, (BatchSplit(), store)).program.actions(FIRST_ROLE)
        sizes[store.name] = [action.transfer.nbytes for action in actions if action.kind == "REDUCE"]
    assert (
        sum(sizes["naive_ddp"])
        == sum(sizes["ddp"])
        == sum(w.numel for w in analyzed.model_spec.trainable) * 8
    )
    assert len(sizes["naive_ddp"]) > len(sizes["ddp"])


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 0), (3, 2)])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"spare": True}, {"p": 0.3}], ids=str)
def test_it_equals_one_device(options: dict[str, float | bool], ranks: int, micro_batch: int):
    analyzed = analyzed_model(**options)
    plan = plan_of(analyzed, ranks, NAIVE, micro_batch=micro_batch)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)


def test_it_equals_ddp_after_ten_steps(analyzed: AnalyzedModel):
    after = []
    for store in (NaiveDDP(), DDP(bucket_mb=1e-4)):
        plan = plan_of(analyzed, 3, (BatchSplit(), store), micro_batch=2)
        read_batch = case_of(analyzed, plan).batch_reader

        def body(world: World, plan=plan, read_batch=read_batch) -> dict[str, torch.Tensor]:
            executor = executor_of(analyzed, plan, world)
            for step in range(10):
                executor.step(read_batch(plan, world.rank)(step))
            return {name: p.detach() for name, p in executor.state.trained_module.parameters.items()}

        after.append(run_on_threads(body, plan.mesh)[0])
    for name, tensor in after[0].items():
        torch.testing.assert_close(tensor, after[1][name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (
            lambda: NaiveDDP("tp"),
            (
                "strategies.naive_ddp.axis: axis = 'tp'; needed is 'dp_replicate', 'dp_shard' or 'cp'\n"
                "  repair: choose one of: dp_replicate"
            ),
        ),
        (
            lambda: NaiveDDP("dp_shard"),
            "strategies.naive_ddp: the replicas along dp_shard would all see the same samples: no strategy",
        ),
        (
            lambda: NaiveDDP(algorithm="tree <= 1 KiB"),
            (
                "strategies.naive_ddp.algorithm: the rule 'tree <= 1 KiB' does not say what larger "
                "messages take\n  repair: let it end"
            ),
        ),
    ],
)
def test_an_invalid_field_is_refused(analyzed: AnalyzedModel, store: Callable[[], NaiveDDP], message: str):
    with pytest.raises(PlanError) as caught:
        plan_of(analyzed, 3, (BatchSplit(), store()))
    assert message in str(caught.value)


def test_gradients_in_another_dtype_are_refused(analyzed: AnalyzedModel):
    job = replace(tiny_job(), precision=PrecisionConfig(reduce="bfloat16"))
    with pytest.raises(
        PlanError, match=r"gradients are sent in float32 here, and precision\.reduce is bfloat16"
    ) as caught:
        plan_of(analyzed, 3, NAIVE, job=job)
    assert caught.value.diagnostics[0].location == "precision.reduce"
    assert caught.value.diagnostics[0].fix == 'use the strategy "ddp", or make the two dtypes equal'
