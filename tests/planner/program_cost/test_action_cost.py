"""Cost of an action: its own operations at the speed of the device, for the fraction that the rank
computes.
"""

from dataclasses import replace
from functools import cache

import pytest

from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost import action_cost
from meshwright.planner.program_cost.action_cost import ActionCosts
from meshwright.planner.program_cost.device_time import ExecutionTarget
from tests.parallel.tensor.odd_llama import analyzed_llama, planned
from tests.planner.simple_machine import ground

NUM_SAMPLES, TOKENS = 6, 9
ALONE = Mesh()
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 68,
}
KEYS = 48 // 6 * 3
LAYER = 2 * TOKENS * (48 * 48 * 2 + 48 * KEYS * 2 + 48 * 52 * 3)  # FLOP of its products, per row
PAIRS = 4 * 6 * TOKENS * TOKENS * 8 / 2  # of attention, half of whose pairs the kernel leaves out


@cache
def plan_of(mesh: Mesh = ALONE, micro: int = 0) -> Plan:
    return planned(analyzed_llama(**SIZES), mesh, micro=micro, samples=NUM_SAMPLES)[1]


def priced(plan: Plan, on: ExecutionTarget, rank: int = 0) -> dict[str, float]:
    """Seconds of the actions of a rank, by name; those of a kind, all together, by its kind."""
    prices, found = ActionCosts(plan, rank, on), {}
    for action in plan.for_rank(rank).actions:
        seconds = prices.cost(action).seconds
        found[action.name] = seconds
        found[action.kind] = found.get(action.kind, 0.0) + seconds
    return found


def test_a_layer_takes_its_products_and_its_attention_at_the_speed_of_the_device():
    found = priced(plan_of(), ground(flops=1e9))
    assert found["F(model.layers.0, 0)"] == pytest.approx(NUM_SAMPLES * (LAYER + PAIRS) / 1e9)
    assert found["B(model.layers.0, 0)"] == pytest.approx(NUM_SAMPLES * (2 * LAYER + 2.5 * PAIRS) / 1e9)
    assert found["F(lm_head, 0)"] == pytest.approx(NUM_SAMPLES * 2 * TOKENS * 48 * 68 / 1e9)


@pytest.mark.parametrize("micro", [0, 2])
def test_the_operations_of_all_forwards_are_those_of_the_model(micro: int):
    plan = plan_of(micro=micro)
    left_out = 2 * NUM_SAMPLES * PAIRS  # attention's formula counts all pairs
    assert priced(plan, ground(flops=1.0))["F"] == pytest.approx(
        NUM_SAMPLES * sum(plan.model_spec.flops) - left_out
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensor_parallel_ranks_together_do_the_work_of_one_device(ranks: int):
    alone, plan = priced(plan_of(), ground(flops=1.0)), plan_of(Mesh(tp=ranks))
    each = [priced(plan, ground(flops=1.0), rank)["F(model.layers.1, 0)"] for rank in range(ranks)]
    assert sum(each) == pytest.approx(alone["F(model.layers.1, 0)"])


def test_a_kernel_leaves_out_whole_blocks_of_keys_alone():
    plain, coarse = (
        priced(plan_of(), replace(ground(flops=1.0), attention_block=block))["F(model.layers.0, 0)"]
        for block in (0, 512)
    )
    assert coarse - plain == pytest.approx(
        NUM_SAMPLES * PAIRS
    )  # rows shorter than a block are computed whole


def test_operations_between_products_are_bound_by_memory():
    plan = plan_of()
    done = plan.model_spec.memory.ops.by_block_call["model.layers.0"]
    found = priced(plan, ground(moved=1e9))
    assert found["F(model.layers.0, 0)"] == pytest.approx(
        done.forward.memory_op_nbytes(NUM_SAMPLES) / 1e9, rel=1e-3
    )
    states = 28 * sum(
        weight.numel for weight in plan.model_spec.trainable
    )  # gradient; weights and two moments, read and written
    assert found["STEP()"] == pytest.approx(states / 1e9, rel=0.01)


def test_expensive_elementwise_operations_are_priced_separately():
    plan = plan_of()
    passed = plan.model_spec.memory.ops.loss.memory_ops
    numbers = sum(each.count * each.output_numel.total(NUM_SAMPLES) for each in passed)
    assert {each.operation for each in passed} == {"", "_log_softmax", "_log_softmax_backward_data"}
    assert numbers == 2 * NUM_SAMPLES * TOKENS * 68
    assert priced(plan, ground(rich=1e-9))["LOSS"] == pytest.approx(1e-9 * numbers)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_vocab_parallel_loss_reads_local_logits_only(ranks: int):
    """Two exp of each logit, whose 4 bytes are read or written 18 times, those of the exp among them."""
    plan = planned(
        analyzed_llama(**SIZES),
        Mesh(tp=ranks),
        samples=NUM_SAMPLES,
        strategies=(TensorParallel(), VocabParallel()),
    )[1]
    each = [priced(plan, ground(moved=1e9), rank)["LOSS"] for rank in range(ranks)]
    told = (
        ranks * 2 * (ranks * 2 * NUM_SAMPLES * TOKENS * 4)
    )  # what each rank gathers, two numbers per token, is read and written once
    assert sum(each) == pytest.approx((18 * 4 * NUM_SAMPLES * TOKENS * 68 + told) / 1e9)
    rich = [priced(plan, ground(rich=1e-9), rank)["LOSS"] for rank in range(ranks)]
    assert sum(rich) == pytest.approx(2 * NUM_SAMPLES * TOKENS * 68 * 1e-9)
    assert priced(plan, ground(call_s=1.0))["LOSS"] == pytest.approx(action_cost.LOGITS_CALLS_PER_CHUNK)
    tiled = planned(
        analyzed_llama(**SIZES),
        Mesh(tp=ranks),
        samples=NUM_SAMPLES,
        strategies=(TensorParallel(), VocabParallel(), ChunkedLoss(2)),
    )[1]
    assert sum(priced(tiled, ground(rich=1e-9), rank)["LOSS"] for rank in range(ranks)) == pytest.approx(
        sum(rich)
    )


def test_exchanged_tensors_are_permuted_before_and_after(monkeypatch: pytest.MonkeyPatch):
    strategies = (Ulysses(), DDP(axis="cp"))
    plan = planned(analyzed_llama(**SIZES), Mesh(cp=3), samples=NUM_SAMPLES, strategies=strategies)[1]
    inner = next(
        action for action in plan.for_rank(0).actions if action.name == "F(model.layers.0, 0)"
    ).inner_transfers
    assert [move.collective for move in inner] == ["all_to_all"] * 4
    found = priced(plan, ground(moved=1e9))
    monkeypatch.setattr(action_cost, "LAYOUT_COPIES", {})
    copied = found["F(model.layers.0, 0)"] - priced(plan, ground(moved=1e9))["F(model.layers.0, 0)"]
    assert copied == pytest.approx(2 * 2 * sum(move.nbytes for move in inner) / 1e9)


def test_short_operations_take_a_call_each():
    plan = plan_of()
    done = plan.model_spec.memory.ops.by_block_call["model.norm"]
    on = ground(call_s=1e-3)
    assert priced(plan, on)["F(model.norm, 0)"] == pytest.approx(1e-3 * done.forward.num_ops)
    assert priced(plan, replace(on, slowdown=2.0))["F(model.norm, 0)"] == pytest.approx(
        2e-3 * done.forward.num_ops
    )


def test_both_halves_of_a_backward_take_what_the_whole_does():
    whole = priced(plan_of(Mesh(pp=2), 2), ground(flops=1.0))
    halves = planned(
        analyzed_llama(**SIZES),
        Mesh(pp=2),
        micro=2,
        samples=NUM_SAMPLES,
        strategies=(Pipeline(schedule="zb_h1"),),
    )[1]
    found = priced(halves, ground(flops=1.0))
    assert found["I(model.layers.0, 0)"] + found["W(model.layers.0, 0)"] == pytest.approx(
        whole["B(model.layers.0, 0)"]
    )
    assert found["W(model.layers.0, 0)"] == pytest.approx(2 * LAYER)  # two rows, one product of each layer


def test_each_half_of_a_backward_has_its_own_products(monkeypatch: pytest.MonkeyPatch):
    strategies = (Pipeline(schedule="zb_h1"),)
    plan = planned(analyzed_llama(**SIZES), Mesh(pp=2), micro=2, samples=NUM_SAMPLES, strategies=strategies)[
        1
    ]
    works, costs = [], ActionCosts(plan, 0, ground())
    monkeypatch.setattr(costs, "_ops_seconds", lambda work, *some, **more: works.append(work) or 0.0)
    for kind, is_weight_grad in (("W", True), ("I", False)):
        costs.cost(next(a for a in plan.for_rank(0).actions if a.name == f"{kind}(model.layers.0, 0)"))
        assert {each.is_weight_grad for each in works[-1].matmuls} == {is_weight_grad}


def test_a_message_between_stages_costs_its_time_where_it_is_sent():
    plan = plan_of(Mesh(pp=2), 2)
    first, second = (priced(plan, ground(links=1.0), rank) for rank in (0, 1))
    assert first["SEND"] > 0
    assert second["RECV"] == 0
    assert second["SEND_GRAD"] == first["SEND"] > first["RECV_GRAD"] == 0


def test_later_micro_batches_add_to_the_gradients_that_the_first_has_left():
    found = priced(plan_of(micro=3), ground(moved=1.0))
    weights = sum(weight.numel for weight in plan_of().model_spec.params_of("model.layers.0"))
    assert found["B(model.layers.0, 1)"] - found["B(model.layers.0, 0)"] == pytest.approx(3 * 4 * weights)


def test_an_operation_taken_for_another_size_is_noticed():
    plan = plan_of()
    weighed = plan.model_spec.memory
    done = weighed.ops.by_block_call["model.layers.0"]
    first, *rest = done.forward.matmuls
    wrong = replace(
        done, forward=replace(done.forward, matmuls=(replace(first, n=first.m, m=first.m), *rest))
    )
    works = replace(
        weighed.ops, block_calls=tuple(wrong if each is done else each for each in weighed.ops.block_calls)
    )
    changed_spec = replace(plan.model_spec, memory=replace(weighed, ops=works))
    bad = replace(plan, sharding=replace(plan.sharding, model_spec=changed_spec))
    assert priced(bad, ground(flops=1.0))["F"] != pytest.approx(priced(plan, ground(flops=1.0))["F"])


def test_without_its_operations_a_block_is_one_square_product():
    plan = plan_of()
    changed_spec = replace(plan.model_spec, memory=None)
    bare = replace(plan, sharding=replace(plan.sharding, model_spec=changed_spec))
    assert not ActionCosts(bare, 0, ground()).ops_known
    assert priced(bare, ground(flops=1.0))["F"] == pytest.approx(NUM_SAMPLES * sum(plan.model_spec.flops))
