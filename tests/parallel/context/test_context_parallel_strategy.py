"""Gathers of tokens in glue: the same results as one device, and the bytes that the program states."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, parallelize, trace, verify
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Loss
from meshwright.parallel.context import context_parallel_strategy
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.program import Program, Transfer
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.argument_names import argument_name
from tests.parallel.context import pooling_models
from tests.parallel.context.pooling_models import (
    Centred,
    Looping,
    Mean,
    Picked,
    Pooled,
    bert,
    gpt2,
    llama,
    samples,
)
from tests.parallel.context.test_ring_models import JOB, NUM_SAMPLES, REPLICAS, Own, planned
from tests.parallel.tensor.odd_llama import batches

known = cache(pooling_models.analyzed)
FLOAT = 4


def equal(analyzed: AnalyzedModel, plan: Plan) -> None:
    """The comparison counts messages too: each is one that the program states."""
    verdict = verify(analyzed, plan, samples(2))
    assert verdict.passed, verdict


ON_RINGS = [
    *((make, 3) for make in (Mean, Centred, Picked, Pooled, llama, gpt2, bert)),
    (Centred, 2),
    (bert, 2),
]


@pytest.mark.parametrize(("make", "ranks"), ON_RINGS, ids=argument_name)
def test_models_that_pool_tokens_on_a_ring(make: type[nn.Module], ranks: int):
    equal(known(make), planned(known(make), Mesh(cp=ranks), RingAttention(), REPLICAS, micro_batch=2))


@pytest.mark.parametrize(
    ("make", "mesh", "strategies"),
    [
        (Picked, Mesh(cp=2), (Ulysses(), REPLICAS)),
        (llama, Mesh(cp=3), (Ulysses(), REPLICAS)),
        (Centred, Mesh(cp=4), (HybridContextParallel(), REPLICAS)),
        (Centred, Mesh(cp=3), (RingAttention(), ZeRO(axis="cp"), ActivationCheckpointing())),
        (bert, Mesh(dp_shard=2, cp=2), (BatchSplit(axis="dp_shard"), RingAttention(), ZeRO(stage=2))),
        (Centred, Mesh(pp=2, cp=2), (Pipeline(), RingAttention(), REPLICAS)),
        (Centred, Mesh(pp=3, cp=2), (Pipeline(schedule="zb_h1"), RingAttention(), REPLICAS)),
        (
            Centred,
            Mesh(pp=2, cp=2),
            (Pipeline(schedule="interleaved"), Ulysses(), REPLICAS, ActivationCheckpointing()),
        ),
        (
            Pooled,
            Mesh(pp=2, cp=2),
            (Pipeline(split_points=("pooler",)), RingAttention(), REPLICAS),
        ),  # a part begins with what needs all tokens
        (llama, Mesh(pp=2, cp=2), (Pipeline(schedule="gpipe"), RingAttention(), ZeRO(axis="cp"))),
        (llama, Mesh(cp=2, tp=2), (TensorParallel(), RingAttention(), REPLICAS)),
    ],
    ids=argument_name,
)
def test_with_other_strategies(make: type[nn.Module], mesh: Mesh, strategies: tuple[Strategy, ...]):
    equal(known(make), planned(known(make), mesh, *strategies, micro_batch=1))


def gather_transfers(plan: Plan, kind: str, subject: str = "") -> list[Transfer]:
    """Returns what the actions of a kind move between ranks with other tokens, apart from attention, each
    microbatch the same.
    """
    found = [
        action.inner_transfers
        for action in plan.for_rank(0).actions
        if action.kind == kind and subject in ("", action.subject)
    ]
    assert len(set(found)) == 1
    return [move for move in found[0] if move.collective != "shift"]


def test_a_sum_over_tokens_sends_one_token_per_sample():
    plan = planned(known(Mean), Mesh(cp=3), RingAttention(), REPLICAS, micro_batch=2)
    logits = Transfer("all_reduce", ("cp",), 2 * 67 * FLOAT)
    assert gather_transfers(plan, "F", "head") == [logits]
    assert gather_transfers(plan, "LOSS") == [logits]
    assert gather_transfers(plan, "B", "head") == []


def test_selecting_a_token_sends_one_and_gathering_all_sends_the_longest_shard():
    plan = planned(known(Picked), Mesh(cp=2), RingAttention(), REPLICAS, micro_batch=2)
    some, most = 2 * 8 * FLOAT, 5 * 2 * 8 * FLOAT
    assert gather_transfers(plan, "F", "layers.1") == [
        Transfer("all_reduce", ("cp",), some),
        Transfer("all_gather", ("cp",), most),
    ]
    assert gather_transfers(plan, "B", "head") == [
        Transfer("reduce_scatter", ("cp",), 2 * most),
        Transfer("all_reduce", ("cp",), some),
    ]
    assert gather_transfers(plan, "LOSS") == []


def test_gathers_name_the_block_calls_whose_backward_needs_them():
    tokens = known(Centred).sequence_info
    assert tokens is not None
    found = [(each.block_call, each.backward_calls) for each in tokens.gathers]
    assert found[0] == (
        "layers.0",
        ("head#2", "head", "layers.1"),
    )  # the mean is in what each of them takes in
    assert [block_call for block_call, _ in found] == ["layers.0", "layers.1", "layers.1", "head", "head"]
    assert found[-2] == ("head", ("",))  # the last row of logits is given out


def test_gathers_are_sent_in_the_compute_dtype():
    job = replace(JOB, precision=PrecisionConfig(compute="bfloat16"))
    plan = make_plan(known(Picked), job, Mesh(cp=2), (RingAttention(), REPLICAS), 2)
    assert [move.dtype for move in gather_transfers(plan, "F", "layers.1")] == ["float32", "bfloat16"]
    found = trace(known(Picked), plan)
    assert found.passed, found


@pytest.mark.parametrize("make", [Picked, bert], ids=lambda make: make.__name__)
def test_evaluations_find_the_loss_of_one_device(make: type[nn.Module]):
    def losses(mesh: Mesh, *strategies: Strategy) -> list[float]:
        plan = planned(known(make), mesh, *strategies, micro_batch=2)

        def rank(world: World) -> float:
            with parallelize(known(make), plan, world=world) as engine:
                return engine.evaluate([engine.local_batch(each) for each in samples(2)]).loss

        return run_on_threads(rank, mesh)

    (alone,) = losses(Mesh())
    assert losses(Mesh(cp=3), RingAttention(), REPLICAS) == pytest.approx([alone] * 3, rel=1e-5)
    assert losses(Mesh(pp=2, cp=2), Pipeline(), RingAttention(), REPLICAS) == pytest.approx(
        [alone] * 4, rel=1e-5
    )


def squares(outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A loss that looks at neighbours."""
    return (outputs[:, 1:] - outputs[:, :-1]).square().sum()


def test_a_loss_that_needs_all_tokens():
    loss = Loss(squares, lambda batch: torch.tensor(len(batch["labels"])))
    made = analyze(Own(), batches(1, NUM_SAMPLES)[0], loss=loss)
    plan = planned(made, Mesh(cp=3), RingAttention(), REPLICAS, micro_batch=2)
    share = 2 * 3 * 67 * FLOAT
    there, back = Transfer("all_gather", ("cp",), share), Transfer("reduce_scatter", ("cp",), 3 * share)
    assert gather_transfers(plan, "LOSS") == [there, there, back, back]
    verdict = verify(made, plan, batches(2, NUM_SAMPLES), loss=loss)
    assert verdict.passed, verdict


def test_a_loop_over_samples_is_refused():
    with pytest.raises(
        PlanError, match=r"gathers tokens of several ranks 3 times on 3 samples, and 4 times on 4"
    ):
        planned(known(Looping), Mesh(cp=2), RingAttention(), REPLICAS)


def test_a_program_that_forgets_a_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch):
    def forgetful(program: Program, view: RankView, job: Job, axis: str) -> Program:
        booked = glued(program, view, job, axis)
        return booked.edit(
            lambda actions: [
                replace(each, inner_transfers=()) if each.kind == "LOSS" else each for each in actions
            ]
        )

    glued = context_parallel_strategy.add_glue_gathers
    monkeypatch.setattr(context_parallel_strategy, "add_glue_gathers", forgetful)
    plan = planned(known(Mean), Mesh(cp=2), RingAttention(), REPLICAS)
    verdict = verify(known(Mean), plan, samples(2))
    assert not verdict.passed
    assert "LOSS" in str(verdict)
