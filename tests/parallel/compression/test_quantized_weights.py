"""Weights gathered as codes: their bytes, the same values everywhere, masters that stay exact, refusals."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import meshwright as mw
from meshwright.comm.backends.fake import FakeWorld
from meshwright.comm.collectives.group import World
from meshwright.parallel.compression import quantized_weights
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig
from meshwright.plan.plan import Plan
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.action_cost import ActionCosts
from meshwright.planner.program_cost.compression_gain import compression_notes
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.testing.ranks import ProcessPool, run_on_threads
from meshwright.verifier.messages import issued_messages, planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.odd_llama import batches, llama, planned
from tests.planner.simple_machine import ground
from tests.tiny_model import (
    analyzed_model,
    case_of,
    executor_of,
    first_of,
    tiny_job,
    token_samples,
    verdict_of,
)

SPLIT = mw.BatchSplit("dp_shard")
FLOAT32 = mw.PrecisionConfig("float32", "float32", "float32")
MASTERS = mw.PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")
THREE = mw.Mesh(dp_shard=3)
CODES = mw.QuantizedWeights()


def plan_of(
    *strategies: Strategy,
    mesh: mw.Mesh = THREE,
    micro_batch: int = 0,
    job: Job | None = None,
    **options: float | bool,
) -> Plan:
    """A plan of the tiny model with its shards over `dp_shard`."""
    zero = () if any(isinstance(each, mw.ZeRO) for each in strategies) else (mw.ZeRO(),)
    analyzed = analyzed_model(**options)
    return mw.make_plan(analyzed, job or tiny_job(), mesh, (SPLIT, *zero, *strategies), micro_batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 70001])
def test_all_ranks_receive_the_values_of_the_codes_of_each_shard(numel: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(numel)
    shards = torch.randn(3, numel, generator=generator, dtype=torch.float64).to(dtype)
    shards[1] *= 1e-6
    shards[2] = 0
    rows = torch.empty(3, numel + 4 * -(-numel // 256), dtype=torch.uint8)
    before = shards.clone()
    for shard, codes in zip(shards, rows, strict=True):
        quantized_weights.encode_shard(shard, codes)
    assert torch.equal(shards, before)
    received = torch.empty_like(shards)
    quantized_weights.decode_shards(rows, received)
    assert torch.equal(received, torch.stack([CODES.gathered_values(shard) for shard in shards]))
    for shard, values in zip(shards, received, strict=True):
        blocks = (each.split(256) for each in (shard.double(), values.double()))
        for block, found in zip(*blocks, strict=True):
            largest = block.abs().max()
            rounding = largest * 2**-8 if dtype == torch.bfloat16 else largest * 1e-6
            assert (block - found).abs().max() <= largest / 254 + rounding


def test_a_gather_sends_a_byte_per_element_and_a_scale_per_block():
    plan = plan_of(CODES, mesh=mw.Mesh(dp_shard=3), micro_batch=2)
    assert static_checks(plan) == []
    specs = plan.rank_view(0).flat_param_specs
    gathers = [each for each in plan.for_rank(0).actions if each.kind == "UNSHARD"]
    for gather in gathers:
        (message,) = gather.transfer.messages
        numel = next(each.shard_numel for each in specs.values() if each.params[0][0] == gather.tensors[0])
        assert (message.collective, message.dtype) == ("all_gather", "uint8")
        assert message.nbytes == numel + 4 * -(-numel // 256)
        assert gather.transfer.nbytes == 8 * numel  # what it means: float64
        passes = CODES.coding_passes(gather, plan.rank_view(0))
        assert passes == {"encode int8": numel, "decode int8": 3 * numel}  # its own, and those of all


def test_the_price_of_a_gather_has_the_seconds_to_code():
    plan, target = plan_of(CODES), ground(links=1e6, coding=2e-6)
    gather = next(each for each in plan.for_rank(0).actions if each.kind == "UNSHARD")
    (message,), numel = gather.transfer.messages, gather.transfer.nbytes // 8
    cost = ActionCosts(plan, 0, target).cost(gather)
    assert cost.comm_s == pytest.approx(1e-6 * message.nbytes + 2e-6 * 4 * numel)
    assert list(compression_notes(plan, target)) == []
    (note,) = compression_notes(plan, ground(links=1e6))
    assert "not counted (decode int8, encode int8): `meshwright bench device` measures them" in note


ARRANGEMENTS: dict[str, tuple[tuple[Strategy, ...], dict[str, object]]] = {
    "alone": ((), {"tied": True, "p": 0.3}),
    "microbatches": ((), {"micro_batch": 1, "frozen": True}),
    "gathered once": ((mw.ZeRO(gather="step"),), {"micro_batch": 2}),
    "checkpointing": ((mw.ActivationCheckpointing(),), {"micro_batch": 2, "p": 0.3}),
    "hpz": ((mw.HierarchicalPartition(2),), {"mesh": mw.Mesh(dp_shard=4), "micro_batch": 1}),
    "replicas": (
        (mw.BatchSplit(), mw.ZeRO(replicate_axis="dp_replicate")),
        {"mesh": mw.Mesh(dp_replicate=2, dp_shard=3)},
    ),
    "pipeline": ((mw.Pipeline(),), {"mesh": mw.Mesh(pp=2, dp_shard=3), "micro_batch": 1, "tied": True}),
    "offload": ((mw.Offload(("optimizer_states", "gradients", "weights"), "host"),), {"micro_batch": 2}),
    "compressed gradients": ((mw.Int8Compression(),), {"micro_batch": 2}),
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_it_equals_one_device_that_computes_with_the_values_of_codes(arrangement: str):
    strategies, more = ARRANGEMENTS[arrangement]
    plan = plan_of(*strategies, CODES, **more)
    assert static_checks(plan) == []
    options = {key: value for key, value in more.items() if key in ("tied", "frozen", "p")}
    verdict = verdict_of(case_of(analyzed_model(**options), plan))
    assert verdict.passed, str(verdict)


def test_two_tensor_parallel_ranks_equal_one_device_that_computes_with_their_codes():
    strategies = SPLIT, mw.ZeRO(), mw.TensorParallel(), CODES
    analyzed, plan = planned(llama(intermediate_size=54), mw.Mesh(dp_shard=2, tp=3), strategies, 1)
    assert_exact(analyzed, plan, batches(2))


def stepped(plan: Plan, world: World, steps: int = 3, rows: tuple[int, ...] = ()) -> dict[str, object]:
    """The losses, masters and states after some steps, what the last step sent, and the memory."""
    executor, losses = executor_of(analyzed_model(), plan, world), list[float]()
    batch = {
        key: value[list(rows or plan.samples_read(world.rank))] for key, value in token_samples().items()
    }
    world.ledger.is_recording = True
    for _ in range(steps):
        world.ledger.entries.clear()
        losses.append(executor.step(batch).loss)
    sent, memory = issued_messages(world.ledger.entries), executor.memory_by_category()
    masters = executor.gather_parameters(use_masters=True)
    found = {"evaluated": executor.evaluate([batch]).loss, "saved": sorted(executor.state_dict())}
    executor.close()
    return {"losses": losses, "sent": sent, "memory": memory, "masters": masters, **found}


def trained(plan: Plan, steps: int = 3) -> list[dict[str, object]]:
    return run_on_threads(lambda world: stepped(plan, world, steps), plan.mesh)


@pytest.mark.parametrize("precision", [FLOAT32, MASTERS], ids=["float32", "masters"])
def test_ranks_send_and_hold_what_the_plan_says(precision: mw.PrecisionConfig):
    plan = plan_of(CODES, job=replace(tiny_job(), precision=precision), micro_batch=2)
    plain = plan_of(job=replace(tiny_job(), precision=precision), micro_batch=2)
    coded, exact = trained(plan), trained(plain)
    for rank, (found, without) in enumerate(zip(coded, exact, strict=True)):
        assert found["sent"] == planned_messages(plan.for_rank(rank))
        assert found["saved"] == without["saved"]
        more = sum(found["memory"].values()) - sum(without["memory"].values())
        assert more == state_bytes(plan, rank).total - state_bytes(plain, rank).total > 0
        assert found["losses"] == coded[0]["losses"]
        assert all(torch.equal(found["masters"][key], each) for key, each in coded[0]["masters"].items())


def test_an_evaluation_reads_the_exact_weights_and_a_step_those_of_the_codes():
    job = replace(tiny_job(), precision=FLOAT32, optimizer=OptimizerConfig("sgd", lr=1e-30, weight_decay=0.0))
    coded, exact = trained(plan_of(CODES, job=job), 1)[0], trained(plan_of(job=job), 1)[0]
    assert coded["evaluated"] == exact["evaluated"] == pytest.approx(exact["losses"][0], rel=1e-6)
    assert coded["losses"][0] != exact["losses"][0]
    assert coded["losses"][0] == pytest.approx(exact["losses"][0], rel=1e-2)


def test_steps_smaller_than_those_of_the_codes_are_not_lost():
    # what is stepped stays exact: else small updates would be rounded away, and the loss would stay (#6926)
    job = replace(tiny_job(), precision=FLOAT32, optimizer=OptimizerConfig("sgd", lr=1e-5, weight_decay=0.0))
    before = trained(plan_of(CODES, job=job), 1)[0]["masters"]
    coded, exact = trained(plan_of(CODES, job=job), 40)[0], trained(plan_of(job=job), 40)[0]
    for name, master in coded["masters"].items():
        moved, wanted = master - before[name], exact["masters"][name] - before[name]
        assert (moved - wanted).norm() <= 0.05 * wanted.norm()


def test_it_learns_as_fast_as_with_exact_weights():
    # peers: DeepSpeed #4851, #6926 (the loss stays where it was)
    job = replace(tiny_job(), precision=FLOAT32, optimizer=OptimizerConfig("adamw", lr=0.02))
    both = CODES, mw.HierarchicalPartition(2)
    coded = trained(plan_of(*both, mesh=mw.Mesh(dp_shard=4), job=job), 20)[0]["losses"]
    exact = trained(plan_of(mesh=mw.Mesh(dp_shard=4), job=job), 20)[0]["losses"]
    assert exact[-1] < 0.8 * exact[0]
    assert coded[-1] == pytest.approx(exact[-1], rel=0.02)


@pytest.mark.parametrize("ranks", [5, 12])
def test_shards_of_any_size_are_coded(ranks: int):
    # peers: DeepSpeed #4852 (crashes with qwZ)
    plan = plan_of(CODES, mesh=mw.Mesh(dp_shard=ranks), job=tiny_job(batch=ranks * 2))
    verdict = verdict_of(case_of(analyzed_model(), plan), steps=1)
    assert verdict.passed, str(verdict)


def test_rank_777_of_1024_sends_what_the_program_says():
    plan = plan_of(CODES, mesh=mw.Mesh(dp_shard=1024), job=tiny_job(batch=1024))
    found = stepped(plan, FakeWorld(plan.mesh, 777), 1, (7,))
    assert found["sent"] == planned_messages(plan.for_rank(777))


def test_processes_equal_threads(process_pool: ProcessPool):
    plan = plan_of(CODES, job=replace(tiny_job(), precision=FLOAT32), micro_batch=2)
    found, threads = process_pool.run(on_a_process, plan.mesh), trained(plan)
    assert [each["losses"] for each in found] == [each["losses"] for each in threads]
    assert [each["sent"] for each in found] == [each["sent"] for each in threads]


def on_a_process(world: World) -> dict[str, object]:
    return stepped(plan_of(CODES, job=replace(tiny_job(), precision=FLOAT32), micro_batch=2), world)


@pytest.mark.parametrize(
    ("strategies", "told", "fix"),
    [
        ((mw.ZeRO(stage=2), CODES), "no weights are stored in shards", "use zero with stage = 3"),
        ((mw.ZeRO(stage=1), CODES), "no weights are stored in shards", "or remove quantized_weights"),
    ],
)
def test_weights_that_are_stored_whole_are_refused(strategies: tuple[Strategy, ...], told: str, fix: str):
    with pytest.raises(PlanError) as refused:
        plan_of(*strategies)
    assert told in str(refused.value)
    assert fix in str(refused.value)


def test_one_rank_has_nothing_to_code():
    actions = plan_of(CODES, mesh=mw.Mesh()).for_rank(0).actions
    assert not any(each.transfer.carried_by for each in actions if each.transfer is not None)


def codes_over_masters(shard: torch.Tensor, full: torch.Tensor, rows: torch.Tensor, index: int) -> object:
    """Rounds that leave the values of the codes in the shard: the error adds up."""
    yield from _good_rounds(shard, full, rows, index)
    shard.copy_(full.view(len(rows), -1)[index])


def own_shard_exact(shard: torch.Tensor, full: torch.Tensor, rows: torch.Tensor, index: int) -> object:
    """Rounds after which a rank computes with its own shard, and others with its codes."""
    yield from _good_rounds(shard, full, rows, index)
    full.view(len(rows), -1)[index].copy_(shard)


def neighbours_codes(shard: torch.Tensor, full: torch.Tensor, rows: torch.Tensor, index: int) -> object:
    """Rounds after which two shards have changed places."""
    yield from _good_rounds(shard, full, rows, index)
    full.view(len(rows), -1)[:2] = full.view(len(rows), -1)[:2].flip(0)


_good_rounds = quantized_weights._gather_rounds


@pytest.mark.parametrize("fault", [codes_over_masters, own_shard_exact, neighbours_codes])
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, fault: Callable[..., object]):
    monkeypatch.setattr(quantized_weights, "_gather_rounds", fault)
    assert first_of(verdict_of(case_of(analyzed_model(), plan_of(CODES)), steps=2))[0] == 0
