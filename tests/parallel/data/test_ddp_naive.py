"""The lesson in data parallelism: one all-reduce per parameter, and the oracle for the buckets of `replicate`."""

from dataclasses import replace

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import Reading
from meshwright.parallel.data.batch_split import Batch
from meshwright.parallel.data.ddp import Replicate
from meshwright.parallel.data.ddp_naive import Naive
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Precision
from meshwright.plan.step.single_device import ROLE
from meshwright.testing.ranks import on_threads
from meshwright.verifier.static_checks import prove
from tests.tiny_model import case_of, plan_of, player_of, reading_of, tiny_job, verdict_of

NAIVE = (Batch(), Naive())


@pytest.fixture(scope="module")
def reading() -> Reading:
    return reading_of()


def test_there_is_one_message_per_parameter_after_the_last_backward(reading: Reading):
    actions = plan_of(reading, 3, NAIVE, micro_batch=2).program.actions(ROLE)
    reduces = [i for i, action in enumerate(actions) if action.kind == "REDUCE"]
    assert [actions[i].subject for i in reduces] == [weight.name for weight in reading.anatomy.trainable]
    assert min(reduces) > max(i for i, action in enumerate(actions) if action.kind == "B")


def test_it_sends_the_bytes_of_replicate_in_more_messages(reading: Reading):
    sizes = {}
    for store in (Naive(), Replicate()):
        actions = plan_of(reading, 3, (Batch(), store)).program.actions(ROLE)
        sizes[store.name] = [action.transfer.nbytes for action in actions if action.kind == "REDUCE"]
    assert sum(sizes["naive"]) == sum(sizes["replicate"]) == sum(w.numel for w in reading.anatomy.trainable) * 8
    assert len(sizes["naive"]) > len(sizes["replicate"])


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 0), (3, 2)])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"spare": True}, {"p": 0.3}], ids=str)
def test_it_equals_one_device(options: dict[str, float | bool], ranks: int, micro_batch: int):
    reading = reading_of(**options)
    plan = plan_of(reading, ranks, NAIVE, micro_batch=micro_batch)
    assert prove(plan) == []
    verdict = verdict_of(case_of(reading, plan))
    assert verdict.passed, str(verdict)


def test_it_equals_replicate_after_ten_steps(reading: Reading):
    after = []
    for store in (Naive(), Replicate(bucket_mb=1e-4)):
        plan = plan_of(reading, 3, (Batch(), store), micro_batch=2)
        feed = case_of(reading, plan).rows

        def body(world: World, plan=plan, feed=feed) -> dict[str, torch.Tensor]:
            player = player_of(reading, plan, world)
            for step in range(10):
                player.step(feed(plan, world.rank)(step))
            return {name: p.detach() for name, p in player.state.subject.parameters.items()}

        after.append(on_threads(body, plan.mesh)[0])
    for name, tensor in after[0].items():
        torch.testing.assert_close(tensor, after[1][name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("store", "said"),
    [
        (Naive("tp"), "strategies.naive.axis: weights cannot be replicated along 'tp'\n  repair: choose one of: dp_replicate"),
        (
            Naive("dp_shard"),
            "strategies.naive: the copies along dp_shard would all see the same samples: nothing splits",
        ),
        (
            Naive(algorithm="tree <= 1 KiB"),
            "strategies.naive.algorithm: the rule 'tree <= 1 KiB' does not say what larger messages take\n  repair: let it end",
        ),
    ],
)
def test_a_field_that_cannot_be_is_refused(reading: Reading, store: Naive, said: str):
    with pytest.raises(PlanError) as caught:
        plan_of(reading, 3, (Batch(), store))
    assert said in str(caught.value)


def test_gradients_in_another_dtype_are_refused(reading: Reading):
    job = replace(tiny_job(), precision=Precision(reduce="bfloat16"))
    with pytest.raises(PlanError, match=r"gradients travel in float32 here, and precision\.reduce is bfloat16") as caught:
        plan_of(reading, 3, NAIVE, job=job)
    assert caught.value.faults[0].where == "precision.reduce"
    assert caught.value.faults[0].fix == 'use the strategy "replicate", or make the two dtypes equal'
