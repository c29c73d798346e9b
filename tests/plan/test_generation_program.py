"""What `generate` sends is what the second program of a plan says, to the byte."""

from functools import partial
from typing import Any

import pytest

from benchmarks.generation.generation_bytes import LENGTH, NUM_PROMPTS, SHARDED_TOKENS, Case, sent_by_rank
from benchmarks.generation.generation_cases import plan_of
from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.server.parameter_server import ParameterServer
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.plan import generation_program as made
from meshwright.plan.generation_program import Rollout, generation_program, row_axes
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Program
from meshwright.plan.step.simulator import simulate
from tests.plan.test_plan import plan as plan_without_tokens

NEW = 4
SERVER = (BatchSplit("dp_replicate"), ParameterServer("dp_replicate", servers=1))
GRID = (BatchSplit("dp_shard"), TensorParallel2D(), ZeRO("dp_shard", stage=3))
CASES = {
    each.name: each
    for each in (
        Case("tensor", Mesh(tp=3)),
        Case("sharded tokens", Mesh(tp=3), strategies=SHARDED_TOKENS),
        Case("stages", Mesh(pp=3)),
        Case("virtual stages", Mesh(pp=2), strategies=(Pipeline("pp", "interleaved", virtual_stages=2),)),
        Case("stages and slices", Mesh(pp=2, tp=2), "gpt2"),
        Case("tokens", Mesh(cp=3)),
        Case("shards", Mesh(dp_shard=3)),
        Case("shards, block by block", Mesh(dp_shard=3), gather="block"),
        Case("shards of states", Mesh(dp_shard=2), strategies=(BatchSplit("dp_shard"), ZeRO(stage=1))),
        Case("tied shards, block by block", Mesh(dp_shard=2), "gpt2", gather="block"),
        Case("both ends on a rank", Mesh(pp=2), "gpt2", strategies=(Pipeline("pp", "zb_v"),)),
        Case("values in parts", Mesh(pp=2, tp=2), strategies=(TensorParallel(), Pipeline(scatter=True))),
        Case("shards in stages, block by block", Mesh(dp_shard=2, pp=2), gather="block"),
        Case("experts that tp has sliced", Mesh(tp=2), "mixtral"),
        Case("latent cache", Mesh(tp=2), "deepseek_v3"),
        Case("windows", Mesh(pp=2), "gemma3_text"),
    )
}


def rollout_of(case: Case, plan: Plan) -> Rollout:
    return Rollout(NUM_PROMPTS // plan.mesh.group_size(row_axes(plan)), LENGTH, NEW, case.gather)


def sent_in_program(program: Program, plan: Plan, rank: int) -> float:
    (actions,) = (role.actions for role in program.roles if rank in role.ranks)
    return sum(
        min_max_sent_nbytes(each, plan.mesh, rank)[1] for action in actions for each in action.sent_transfers
    )


def off_by(case: Case) -> float:
    """Returns how many bytes the program and the ledgers differ, on the rank where they differ most."""
    plan = case.plan()
    program = generation_program(plan, rollout_of(case, plan))
    found = sent_by_rank(case, plan, NEW)
    return max(abs(float(sent) - sent_in_program(program, plan, rank)) for rank, sent in enumerate(found))


@pytest.mark.parametrize("name", CASES)
def test_the_ledgers_of_all_ranks_are_those_of_the_program(name: str):
    assert off_by(CASES[name]) < 0.01


@pytest.mark.parametrize("name", CASES)
def test_no_role_waits_for_ever(name: str):
    plan = CASES[name].plan()
    program = generation_program(plan, rollout_of(CASES[name], plan))
    assert len(simulate(program)) == sum(len(role.actions) for role in program.roles)


def _prefill_of_one_token(right: Any, *args: Any) -> Any:
    self, action, rows, _ = args
    return right(self, action, rows, 1)


@pytest.mark.parametrize(
    ("name", "place", "fault"),
    [
        ("tensor", (made, "SCORE_NBYTES"), 40),
        ("stages", (made, "TOKEN_NBYTES"), 4),
        ("shards, block by block", (made, "AGREED_NBYTES"), 8),
        ("tensor", (made._RoleProgram, "_inner_transfers"), _prefill_of_one_token),
        ("tokens", (made, "_axes_of_tokens_alone"), lambda right, plan: set()),
        ("shards", (made, "DIGEST_NBYTES"), 16),
    ],
)
def test_a_program_of_other_sizes_is_noticed(name: str, place: Any, fault: Any, monkeypatch):
    if callable(fault):
        right = getattr(*place)
        fault = partial(fault, right) if place[0] is made else lambda *args, bad=fault: bad(right, *args)
    monkeypatch.setattr(*place, fault)
    assert off_by(CASES[name]) > 1


def test_routes_of_experts_are_expected():
    plan = plan_of("mixtral", Mesh(ep=2))
    (role,) = generation_program(plan, Rollout(3, LENGTH, 2)).roles
    sizes = [
        (action.kind, each.runtime_size)
        for action in role.actions
        for each in action.inner_transfers
        if each.runtime_size is not None
    ]
    assert {kind for kind, _ in sizes} == {"PREFILL", "DECODE"}
    for kind, size in sizes:
        tokens = 3 * (LENGTH if kind == "PREFILL" else 1)
        assert 0 < size.expected_rows <= size.max_rows == tokens


def test_batches_go_round_the_stages():
    rollout = Rollout(7, 5, 2)
    assert rollout.batch_sizes(3) == (3, 3, 1)
    assert rollout.batch_sizes(1) == (7,)
    assert Rollout(2, 5, 2).batch_sizes(3) == (1, 1)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (plan_without_tokens, "samples are no sequences of one length"),
        (
            partial(plan_of, "llama", Mesh(pp=2), (Pipeline("pp", "dualpipe"),)),
            "ranks .* have a block",
        ),
        (partial(plan_of, "llama", Mesh(dp_replicate=2), SERVER), "parameters that they step"),
        (partial(plan_of, "random llama, even", Mesh(dp_shard=2, tp=2), GRID), "slices of features"),
    ],
)
def test_what_is_not_known_is_refused(plan: Any, text: str):
    with pytest.raises(PlanError, match=text):
        generation_program(plan(), Rollout(2, 5, 2))
