"""Seconds and bytes of `generate`: products of few rows, the cache, and stages that work at once."""

from dataclasses import replace

import pytest

from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.generation_program import Rollout
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.kv_cache_spec import CachedLayer
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost.device_time import ExecutionTarget
from meshwright.planner.program_cost.generation_cost import (
    CACHE_PASSES,
    GenerationPrediction,
    predict_generation,
    rollout_program,
    sent_per_token,
    sent_weights_nbytes,
)
from meshwright.planner.program_cost.kv_cache_memory import kv_cache_nbytes
from tests.parallel.tensor.odd_llama import analyzed_llama, planned
from tests.planner.program_cost.test_action_cost import KEYS, NUM_SAMPLES, SIZES, plan_of
from tests.planner.simple_machine import ground

ROWS, PROMPT, WIDTH, NUM_LAYERS = 4, 5, 48, 2
ROLLOUT = Rollout(ROWS, PROMPT, 2)
LAYER = 2 * (48 * 48 * 2 + 48 * KEYS * 2 + 48 * 52 * 3)  # FLOP of the products of a layer, per token
HEAD = 2 * 48 * 68
ITEM, ANSWER = 4, 24  # bytes: of a number, and of a token in an answer
LAYERS = analyzed_llama(**SIZES).cached_layers or ()


def predicted(
    mesh: Mesh,
    on: ExecutionTarget,
    rollout: Rollout = ROLLOUT,
    layers: tuple[CachedLayer, ...] = tuple(LAYERS),
) -> GenerationPrediction:
    return predict_generation(plan_of(mesh), on, rollout, layers)


def test_a_token_takes_the_products_of_its_rows_and_attention_to_the_cache():
    found = predicted(Mesh(), ground(flops=1e9))
    pairs = 4 * 6 * 8  # of a query and a key: heads, features
    prefill = NUM_LAYERS * (PROMPT * LAYER + pairs * PROMPT * PROMPT / 2)
    assert found.prefill_s == pytest.approx(ROWS * (prefill + HEAD) / 1e9)
    decode = NUM_LAYERS * (LAYER + pairs * (PROMPT + 1))
    assert found.token_s == pytest.approx(ROWS * (decode + HEAD) / 1e9)
    assert found.tokens_per_s == pytest.approx(ROWS / found.token_s)
    assert found.gather_s == 0


def test_a_token_reads_the_cache_and_writes_it_anew():
    on = ground(moved=1e9)
    longer, without = (predicted(Mesh(), on, layers=each) for each in (LAYERS, ()))
    cached = kv_cache_nbytes(LAYERS, plan_of(Mesh()), 0, ROWS, PROMPT + 1)
    assert longer.token_s - without.token_s == pytest.approx(CACHE_PASSES * cached / 1e9)
    assert longer.prefill_s == pytest.approx(without.prefill_s)


def test_stages_work_at_once_where_each_has_a_batch():
    on = ground(flops=1e9)
    alone, stages = (predicted(each, on, replace(ROLLOUT, num_seqs=8)) for each in (Mesh(), Mesh(pp=2)))
    assert alone.token_s / 2 <= stages.token_s < 0.75 * alone.token_s
    one_batch = predicted(Mesh(pp=2), on, replace(ROLLOUT, num_seqs=1))
    assert one_batch.token_s == pytest.approx(predicted(Mesh(), on, replace(ROLLOUT, num_seqs=1)).token_s)


def test_a_batch_of_all_rows_goes_through_stages_that_share_ranks():
    virtual = planned(analyzed_llama(**SIZES), Mesh(pp=2), (Pipeline("pp", "zb_v"),), samples=NUM_SAMPLES)[1]
    on, rollout = ground(flops=1e9), replace(ROLLOUT, num_seqs=8)
    found = predict_generation(virtual, on, rollout, LAYERS)
    assert found.token_s == pytest.approx(predicted(Mesh(), on, rollout).token_s)


def test_launches_are_the_least_that_a_token_takes():
    found = predicted(Mesh(), ground(flops=1e15, call_s=1e-3))
    assert found.token_s == pytest.approx(found.prefill_s, rel=0.05)
    assert found.token_s > NUM_LAYERS * 20 * 1e-3


def test_weights_are_gathered_once_or_with_each_token():
    plan, on = plan_of(Mesh(dp_shard=2)), ground(links=1e9)
    once = predict_generation(plan, on, ROLLOUT, LAYERS)
    assert once.gather_s > 0
    assert once.token_s == pytest.approx(ANSWER * ROWS / 1e9)
    block = predict_generation(plan, on, replace(ROLLOUT, gather="block"), LAYERS)
    assert block.gather_s == 0
    assert block.token_s >= once.gather_s
    program = rollout_program(plan, ROLLOUT, LAYERS)
    view = plan.rank_view(0)
    shards = sum(map(view.shard_numel, view.flat_param_specs.values()))
    assert sent_weights_nbytes(plan, program) == shards * ITEM
    assert sent_per_token(plan, program) == {}


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (Mesh(), {}),
        (Mesh(tp=2), {"DECODE": (2 * NUM_LAYERS + 1) * ROWS * WIDTH * ITEM, "SAMPLE": 48 * ROWS}),
        (Mesh(pp=2), {"SEND": ROWS * WIDTH * ITEM}),
    ],
    ids=str,
)
def test_the_busiest_rank_sends_so_much_for_a_token(mesh: Mesh, expected: dict[str, float]):
    plan = plan_of(mesh)
    assert sent_per_token(plan, rollout_program(plan, ROLLOUT, LAYERS)) == expected


def test_stages_that_run_in_lockstep_are_not_known():
    with_states = [replace(LAYERS[0], states=((5, "float32"),))]
    for layers in (None, with_states):
        with pytest.raises(PlanError, match="stages send each other the outputs of all blocks"):
            rollout_program(plan_of(Mesh(pp=2)), ROLLOUT, layers)
    assert rollout_program(plan_of(Mesh()), ROLLOUT, with_states).roles
    assert NUM_SAMPLES != ROWS  # sizes of the step do not pass for those of a rollout
