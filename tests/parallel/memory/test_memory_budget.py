"""The program of a memory budget: what it chooses, that it fits, and what is refused."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.gist import Gist
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import SyntheticModel
from tests.parallel.memory.test_activation_checkpointing import model_spec, synthetic_plan
from tests.parallel.memory.unequal_model import MIB, SAMPLES, activations, kinds, planned, unequal

RERUNS = ("RECOMPUTE", "RECOMPUTE_OUTPUT")
LEAST, FULL = activations(planned(MemoryBudget())), activations(planned())


def flops(plan: Plan) -> int:
    return sum(action.flops for action in plan.program.roles[0].actions)


def test_a_budget_that_everything_fits_in_changes_nothing():
    plan, plain = planned(MemoryBudget(budget_mb=2 * FULL / MIB)), planned()
    assert plan.program == plain.program


def test_a_smaller_budget_takes_fewer_bytes_and_more_operations():
    found = []
    for fraction in (0.9, 0.7, 0.5, 0.3, 0.1):
        nbytes = LEAST + fraction * (FULL - LEAST)
        plan = planned(MemoryBudget(budget_mb=nbytes / MIB))
        assert static_checks(plan) == []
        assert activations(plan) <= nbytes
        found.append(flops(plan))
    assert found == sorted(found)
    assert flops(planned()) < found[0] < found[-1] <= flops(planned(MemoryBudget()))


def test_zero_takes_as_few_bytes_as_possible_and_drops_inputs():
    plan = planned(MemoryBudget())
    assert static_checks(plan) == []
    assert "F_INPUT_DROPPED" in {kind for kind, _ in kinds(plan, "F", "F_INPUT_DROPPED")}
    without = planned(MemoryBudget(choices=("recompute",)))
    assert not kinds(without, "F_INPUT_DROPPED", "RECOMPUTE_OUTPUT")
    assert LEAST < activations(without) < FULL


def test_it_takes_fewer_operations_than_greedy_in_as_many_bytes():
    layers = [call for call in unequal().model_spec.block_calls if "layers" in call]
    # operations per byte are about equal here, so greedy recomputes the first and keeps the later ones
    for count in range(2, len(layers)):
        greedy = planned(ActivationCheckpointing(blocks=tuple(layers[:count])))
        budget = planned(MemoryBudget(budget_mb=1.1 * activations(greedy) / MIB))
        assert flops(budget) <= flops(greedy)


def test_blocks_that_may_not_run_again_are_kept():
    plan = planned(MemoryBudget(blocks=("layers.[0-3]",)))
    assert {call for _, call in kinds(plan, *RERUNS)} <= {f"layers.{number}" for number in range(4)}
    assert kinds(plan, *RERUNS)


def test_measured_milliseconds_decide_what_runs_again():
    nbytes = LEAST + 0.6 * (FULL - LEAST)
    calls = unequal().model_spec.block_calls
    for slow in ("layers.2", "layers.5"):
        times = tuple(100.0 if call == slow else 1.0 for call in calls)
        plan = planned(MemoryBudget(nbytes / MIB, ("recompute",), forward_ms=times))
        assert slow not in {call for _, call in kinds(plan, *RERUNS)}
        assert kinds(plan, *RERUNS)


def test_gist_is_one_of_the_choices():
    plan = planned(MemoryBudget(choices=("gist",)))
    assert LEAST < activations(plan) < FULL
    assert static_checks(plan) == []
    names = {each.name for action in plan.program.roles[0].actions for each in action.allocations}
    assert any(name.startswith("values not zero") for name in names)


def test_microbatches_in_flight_count_in_a_pipeline():
    plain = planned(Pipeline(schedule="1f1b"), mesh=Mesh(pp=2), micro_batch=SAMPLES // 4)
    stages = [activations(plain, rank) for rank in (0, 1)]
    nbytes = 0.7 * max(stages)
    mine = Pipeline(schedule="1f1b"), MemoryBudget(nbytes / MIB)
    plan = planned(*mine, mesh=Mesh(pp=2), micro_batch=SAMPLES // 4)
    assert static_checks(plan) == []
    assert all(activations(plan, rank) <= nbytes for rank in (0, 1))
    assert kinds(plan, *RERUNS)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "interleaved"])
def test_other_schedules_fit_too(schedule: str):
    where = {"mesh": Mesh(pp=2), "micro_batch": SAMPLES // 4}
    pipeline = Pipeline(schedule=schedule)
    full, least = (
        [activations(planned(pipeline, *mine, **where), rank) for rank in (0, 1)]
        for mine in ((), (MemoryBudget(),))
    )
    # with halves of backwards, what the last stage runs again stays until W, as if it were kept
    assert least[0] < full[0]
    assert least[1] <= full[1]
    nbytes = (max(full) + max(least)) / 2
    plan = planned(pipeline, MemoryBudget(nbytes / MIB), **where)
    assert static_checks(plan) == []
    assert all(activations(plan, rank) <= nbytes for rank in (0, 1))


def test_the_refusal_says_the_least_bytes_that_do():
    with pytest.raises(PlanError) as refused:
        planned(MemoryBudget(budget_mb=0.001))
    text = str(refused.value)
    assert re.search(r"budget_mb = 0\.001, and the activations of the block calls 'embed' to 'head'", text)
    enough = float(re.search(r"write budget_mb = ([\d.]+) or more", text).group(1))
    assert activations(planned(MemoryBudget(budget_mb=enough))) <= enough * MIB
    with pytest.raises(PlanError, match="write budget_mb"):
        planned(MemoryBudget(budget_mb=enough - 1e-3))


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (lambda: MemoryBudget(budget_mb=-1.0), "budget_mb = -1.0; needed is a number of at least 0"),
        (lambda: MemoryBudget(choices=("encode",)), "choices contains 'encode'"),
        (lambda: MemoryBudget(choices=("segment",)), "`choices` leaves out recompute"),
        (lambda: MemoryBudget(choices=("gist",)), "gist saves 0 bytes"),
        (
            lambda: MemoryBudget(forward_ms=(1.0, 2.0)),
            "forward_ms has 2 numbers, and the model 5 block calls",
        ),
        (
            lambda: MemoryBudget(matmul_ms=(1.0,) * 5),
            "matmul_ms is a part of the time of blocks, and forward_ms is missing",
        ),
        (lambda: MemoryBudget(blocks=("layers.*",)), r"'layers\.\*' matches no block"),
    ],
)
def test_invalid_options_are_refused(mine: Callable[[], MemoryBudget], text: str):
    with pytest.raises(PlanError, match=text) as refused:
        synthetic_plan(mine(), model=model_spec())
    assert all(each.fix for each in refused.value.diagnostics)


def test_a_model_that_is_one_block_is_refused():
    with pytest.raises(PlanError, match="whose backward follows its forward at once"):
        synthetic_plan(MemoryBudget(), model=SyntheticModel(1).model_spec)


@pytest.mark.parametrize("first", [True, False])
def test_two_strategies_that_choose_what_runs_again_are_refused(first: bool):
    mine = (ActivationCheckpointing(), MemoryBudget())
    with pytest.raises(PlanError, match="both decide which block calls run again"):
        planned(*(mine if first else mine[::-1]))


def test_gist_twice_is_refused():
    with pytest.raises(PlanError, match="encoded already"):
        planned(MemoryBudget(choices=("gist",)), Gist())


def test_ranks_with_unequal_slices_choose_alike():
    model = replace(model_spec())
    mine = (BatchSplit("dp_shard"), ZeRO(), MemoryBudget())
    plan = synthetic_plan(*mine, ranks=3, model=model)
    assert static_checks(plan) == []
    again = [kinds(plan, *RERUNS, rank=rank) for rank in range(3)]
    assert again[0]
    assert again[0] == again[1] == again[2]
