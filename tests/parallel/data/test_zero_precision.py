"""Mixed precision under ZeRO: bytes and sums per dtype, sharded master weights, and the loss scale of all
ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch

from meshwright.api import make_plan, parallelize, trace
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import Job, OptimizerConfig, PrecisionConfig
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.training.trainer import Trainer
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.messages import Message, issued_messages, planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits
from tests.paper_model import SyntheticModel
from tests.parallel.data.test_zero import bytes_sent, gather_nbytes, synthetic_plan
from tests.parallel.data.test_zero_numbers import SHARD
from tests.tiny_model import analyzed_model, tiny_job, token_samples

MIXED = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")
WIDE_SUMS = replace(MIXED, gradients="float32", reduce="float32")
HALF = PrecisionConfig("float16", "float16", "float16", master="float32")
PRECISIONS = [
    *(MIXED, WIDE_SUMS, HALF, replace(MIXED, reduce="float32"), replace(MIXED, gradients="float32")),
    *(
        PrecisionConfig(gradients="bfloat16"),
        PrecisionConfig(compute="float16", reduce="float16", loss_scale=256.0),
    ),
]
SGD, ADAMW = OptimizerConfig("sgd", lr=0.05, weight_decay=0.0, momentum=0.9), OptimizerConfig(lr=0.01)
ANALYZED = analyzed_model(tied=True)
STAGES = [ZeRO(stage=1), ZeRO(stage=2), ZeRO(stage=3)]


def job_in(precision: PrecisionConfig, optimizer: OptimizerConfig = ADAMW, clip: float = 0.0) -> Job:
    job = tiny_job(precision=precision, optimizer=optimizer)
    return replace(job, train=replace(job.train, clip=clip))


def sharded(
    zero: Strategy, ranks: int, job: Job, micro_batch: int = 0, analyzed: AnalyzedModel = ANALYZED
) -> Plan:
    return make_plan(analyzed, job, Mesh(dp_shard=ranks), (SHARD, zero), micro_batch)


def copies(ranks: int, job: Job, micro_batch: int = 0, analyzed: AnalyzedModel = ANALYZED) -> Plan:
    strategies = (BatchSplit(), DDP(bucket_mb=0.0005)) if ranks > 1 else ()
    return make_plan(analyzed, job, Mesh(dp_replicate=ranks), strategies, micro_batch)


def on_ranks(plan: Plan, work: Callable[[Trainer], object], analyzed: AnalyzedModel = ANALYZED) -> list:
    """Returns what `work` gives on every rank."""

    def rank(world: World) -> object:
        with parallelize(analyzed, plan, world=world) as engine:
            return work(engine)

    return run_on_threads(rank, plan.mesh)


def step(engine: Trainer, steps: int = 1) -> None:
    for _ in range(steps):
        engine.step(engine.local_batch(token_samples(12)))


def gathered_masters(engine: Trainer) -> dict[str, torch.Tensor]:
    """Every parameter as a checkpoint would hold it: the master, gathered."""
    store, names = engine.executor.state.flat_params, engine.executor.state.trained_module.parameters
    return {name: store.full_value(name, "TEST", use_masters=True).clone() for name in names}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("zero", STAGES, ids=lambda zero: str(zero.stage))
def test_states_take_two_and_two_and_twelve_bytes_over_the_ranks(zero: ZeRO, ranks: int):
    plan = sharded(zero, ranks, job_in(MIXED))
    padded = sum(flat_param.numel for flat_param in plan.rank_view(0).flat_param_specs.values())
    largest = max(flat_param.shard_numel for flat_param in plan.rank_view(0).flat_param_specs.values())

    def sizes(engine: Trainer) -> dict[str, int]:
        step(engine)
        held = [
            value for each in engine.executor.state.optimizers[0].state.values() for value in each.values()
        ]
        moments = sum(value.nbytes for value in held if value.ndim)
        return {
            **engine.executor.memory_by_category(),
            "optimizer_states": moments,
            "cast": engine.executor.state.update.nbytes,
        }

    found = on_ranks(plan, sizes)
    for said in found:
        assert said["parameters"] == 2 * padded // (ranks if zero.stage == 3 else 1)
        assert said["gradients"] == 2 * padded // (ranks if zero.stage > 1 else 1)
        assert said["master"] == 4 * padded // ranks
        assert said["cast"] <= 4 * largest
    assert sum(said["optimizer_states"] for said in found) == 8 * ANALYZED.model_spec.numel


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 1024])
@pytest.mark.parametrize("micro", [1, 4])
def test_every_message_has_the_bytes_of_its_role(ranks: int, micro: int, precision: PrecisionConfig):
    paper = SyntheticModel(layers=5, numel=77)
    for zero, gathers, sums in [
        (ZeRO(stage=1), 1, 1),
        (ZeRO(stage=2), 1, micro),
        (ZeRO(gather="step"), 1, micro),
    ]:
        plan = synthetic_plan(zero, ranks, 4 // micro, paper, precision)
        assert static_checks(plan) == []
        assert bytes_sent(plan, "UNSHARD") == gathers * gather_nbytes(plan, precision.parameters)
        assert bytes_sent(plan, "REDUCE") == sums * gather_nbytes(plan, precision.reduce)


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("micro_batch", [0, 2])
@pytest.mark.parametrize("zero", STAGES, ids=lambda zero: str(zero.stage))
def test_what_is_sent_has_the_dtypes_that_the_plan_says(
    zero: ZeRO, micro_batch: int, precision: PrecisionConfig
):
    plan = sharded(zero, 3, job_in(precision), micro_batch)
    assert static_checks(plan) == []

    def issued(engine: Trainer) -> list[Message]:
        engine.world.ledger.is_recording = True
        step(engine)
        return issued_messages(engine.world.ledger.entries)

    for found in on_ranks(plan, issued):
        assert found == planned_messages(plan.for_rank(0))
        assert {each.dtype for each in found if each.action.startswith("UNSHARD")} == {precision.parameters}
        assert {each.dtype for each in found if each.action.startswith("REDUCE")} == {precision.reduce}
        assert all(each.nbytes % FLOAT_NBYTES[each.dtype] == 0 for each in found)


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("zero", STAGES, ids=lambda zero: str(zero.stage))
def test_it_trains_as_one_device_does(zero: ZeRO, ranks: int, micro_batch: int, precision: PrecisionConfig):
    one = replace(precision, gradients="")
    alone = on_ranks(
        copies(1, job_in(one, SGD, 0.5)), lambda engine: (step(engine, 3), gathered_masters(engine))
    )[0][1]
    first = on_ranks(copies(1, job_in(one, SGD)), gathered_masters)[0]
    found = on_ranks(
        sharded(zero, ranks, job_in(precision, SGD, 0.5), micro_batch),
        lambda engine: (step(engine, 3), gathered_masters(engine)),
    )
    moved = max((alone[name] - first[name]).abs().max() for name in alone)
    for _, mine in found:
        assert bits(mine) == bits(found[0][1])
        for name, value in mine.items():
            assert (value - alone[name]).abs().max() < 0.05 * moved, (
                name
            )  # gradients of 8 bits are rounded once more


@pytest.mark.parametrize("precision", [MIXED, HALF], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("zero", [*STAGES, None], ids=lambda zero: str(zero.stage) if zero else "ddp")
def test_two_ranks_equal_two_micro_batches_of_one_device_to_the_last_bit(
    zero: ZeRO | None, precision: PrecisionConfig
):
    def trained(engine: Trainer) -> dict[str, torch.Tensor]:
        step(engine, 3)
        return gathered_masters(engine)

    untied = analyzed_model()  # a tied weight adds its summands in another order
    for optimizer in (SGD, ADAMW):
        job = job_in(replace(precision, loss_scale=1024.0 if precision == HALF else 65536.0), optimizer)
        alone = on_ranks(copies(1, job, 6, untied), trained, untied)[0]
        plan = copies(2, job, 0, untied) if zero is None else sharded(zero, 2, job, 0, untied)
        for mine in on_ranks(plan, trained, untied):
            if optimizer == SGD or zero is None:
                assert bits(mine) == bits(alone)
            for name, value in mine.items():
                # torch's AdamW rounds the last elements of a piece in another way than the rest
                torch.testing.assert_close(value, alone[name], rtol=2e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("zero", "precision"),
    [
        *((zero, each) for zero in (*STAGES, None) for each in (HALF, PrecisionConfig(compute="float16"))),
        *(
            (zero, replace(HALF, gradients="float32")) for zero in STAGES
        ),  # whole copies have no gradients of their own dtype
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale_once(
    zero: ZeRO | None, precision: PrecisionConfig
):
    job = job_in(replace(precision, loss_scale=1024.0), SGD, 0.5)
    plan = copies(3, job) if zero is None else sharded(zero, 3, job)

    def spoiled(engine: Trainer) -> tuple:
        step(engine)
        before = bits(gathered_masters(engine))
        mine = engine.world.rank == 1
        hook = engine.module.layers[1].linear.bias.register_hook(lambda grad: grad + inf if mine else grad)
        now = engine.step(engine.local_batch(token_samples(12)))
        hook.remove()
        same, then = (
            bits(gathered_masters(engine)) == before,
            engine.step(engine.local_batch(token_samples(12))),
        )
        return (
            now.overflow,
            now.is_skipped,
            now.loss_scale,
            same,
            then.overflow,
            then.loss_scale,
            bits(gathered_masters(engine)),
        )

    found = on_ranks(plan, spoiled)
    for each in found:
        assert each[:-1] == (True, True, 512.0, True, False, 512.0)
        assert each[-1] == found[0][-1]


@pytest.mark.parametrize(
    "precision", [MIXED, replace(HALF, loss_scale_window=2), WIDE_SUMS], ids=["bfloat16", "float16", "wide"]
)
@pytest.mark.parametrize(
    ("then", "now"),
    [(ZeRO(stage=3), ZeRO(stage=1)), (ZeRO(stage=2), ZeRO(stage=3)), (ZeRO(stage=3), ZeRO(stage=3))],
    ids=["3-1", "2-3", "3-3"],
)
def test_master_weights_optimizer_states_and_loss_scale_are_saved_and_loaded_exactly(
    tmp_path: Path, then: ZeRO, now: ZeRO, precision: PrecisionConfig
):
    def saved(engine: Trainer) -> tuple:
        step(engine, 3)
        engine.save(tmp_path)
        kept = bits(gathered_masters(engine))
        last = engine.step(engine.local_batch(token_samples(12)))
        return kept, last.loss_scale, bits(gathered_masters(engine))

    def loaded(engine: Trainer) -> tuple:
        engine.load(tmp_path / "step-00000003")
        kept = bits(gathered_masters(engine))
        last = engine.step(engine.local_batch(token_samples(12)))
        return kept, last.loss_scale, bits(gathered_masters(engine))

    went_on = on_ranks(sharded(then, 3, job_in(precision)), saved)
    for found in on_ranks(sharded(now, 3, job_in(precision)), loaded):
        assert found[:2] == went_on[0][:2]
        assert found[2] == went_on[0][2]
    other = on_ranks(sharded(now, 2, job_in(precision)), loaded)
    assert {str(each[:2]) for each in other} == {str(went_on[0][:2])}


def test_master_weights_recreated_from_rounded_weights_are_noticed():
    def trained(engine: Trainer, *, rounded: bool) -> dict[str, bytes]:
        step(engine, 2)
        for held in engine.executor.state.flat_params.by_param_group.values() if rounded else ():
            held.optimizer_tensor.copy_(held.shard)
        step(engine)
        return bits(gathered_masters(engine))

    plan = sharded(ZeRO(), 3, job_in(MIXED))
    right, wrong = (on_ranks(plan, lambda engine, r=r: trained(engine, rounded=r)) for r in (False, True))
    assert right[0] == right[1] == right[2]
    assert wrong[0] != right[0]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_a_rank_can_be_traced_without_memory(precision: PrecisionConfig):
    for zero in STAGES:
        traced = trace(ANALYZED, sharded(zero, 12, job_in(precision)), [7])
        assert traced.passed, str(traced)
