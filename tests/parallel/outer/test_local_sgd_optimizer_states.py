"""Local SGD that averages optimizer states: its definition, AdamW's moments, bytes, refusals, resume."""

from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig, ParamGroupConfig
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.parity import parity_job
from meshwright.verifier.reference import run_reference
from tests.parallel.outer.site_plans import (
    ADAMW,
    ANALYZED,
    check_plan,
    is_equal,
    samples_of,
    site_plan,
    trained,
)
from tests.tiny_model import case_of, executor_of, plan_of, tiny_job, token_samples, verdict_of

MEAN = mw.LocalSGD(sync_every=2, optimizer_states="mean")
MUON = OptimizerConfig("muon", lr=0.01, momentum=0.9)
MOMENTUM = OptimizerConfig("sgd", lr=0.1, weight_decay=0.1, momentum=0.5)


@pytest.mark.parametrize("inner", ["one rank each", "zero 3", "stages and shards"])
def test_every_rank_equals_the_definition_in_every_step(inner: str):
    check_plan(inner, MEAN, optimizer=MOMENTUM)


def test_rounds_of_one_step_with_momentum_are_data_parallelism_where_momenta_are_averaged():
    data, train = token_samples(uneven=False), mw.TrainConfig(steps=20, batch=12, clip=0.0)
    job = tiny_job(train=train, optimizer=MOMENTUM)
    rounds = mw.LocalSGD(sync_every=1, optimizer_states="mean")
    plan = mw.make_plan(ANALYZED, job, mw.Mesh(outer=3), (rounds,))
    apart = run_reference(case_of(ANALYZED, plan, data), 4).sites[2].steps[-1].parameters
    together = run_reference(case_of(ANALYZED, plan_of(ANALYZED, 3, job=job), data), 4).steps[-1].parameters
    for name, value in together.items():
        torch.testing.assert_close(apart[name], value, rtol=1e-12, atol=1e-14)


class KeepsStates(mw.LocalSGD):
    """Averages the parameters alone."""

    def check(self, job, sharding):
        return iter(())

    def averaged_states(self, job, param):
        return ()


def test_states_that_stay_apart_are_noticed_in_the_first_step_that_uses_them():
    fault = KeepsStates(sync_every=2, optimizer_states="mean")
    analyzed, plan = site_plan("one rank each", fault, optimizer=MOMENTUM)
    verdict = verdict_of(case_of(analyzed, plan), 4)
    assert not verdict.passed
    assert (verdict.first_difference.step, verdict.first_difference.quantity) == (2, "parameter")


def states_after_a_round(inner: str, rounds: mw.LocalSGD, config: OptimizerConfig) -> list[dict]:
    """Each rank's optimizer states after two steps, by name and first element."""
    _, plan = site_plan(inner, rounds, optimizer=config)

    def body(world: World) -> dict[tuple[str, int], torch.Tensor]:
        executor = executor_of(ANALYZED, plan, world)
        for step in range(2):
            executor.step(samples_of(plan, world.rank, step))
        found = {
            (name.partition("optimizer/")[2], each.start): each.values.clone()
            for name, each in executor.state_dict().items()
            if "optimizer/" in name
        }
        executor.close()
        return found

    return run_on_threads(body, plan.mesh)


@pytest.mark.parametrize(
    ("inner", "config", "keys"),
    [
        ("zero 3", ADAMW, {"exp_avg", "exp_avg_sq"}),
        ("one rank each", ADAMW, {"exp_avg", "exp_avg_sq"}),
        ("one rank each", OptimizerConfig("adamw_bf16", lr=0.01), {"exp_avg", "exp_avg_sq"}),
        (
            "one rank each",
            OptimizerConfig("muon", lr=0.01, momentum=0.9),
            {"exp_avg", "exp_avg_sq", "momentum"},
        ),
    ],
)
def test_all_sites_go_on_with_the_mean_of_each_state(inner: str, config: OptimizerConfig, keys: set[str]):
    own = states_after_a_round(inner, mw.LocalSGD(sync_every=2), config)
    mean = states_after_a_round(inner, MEAN, config)
    averaged = [name for name in own[0] if name[0].partition("/")[0] in keys]
    assert {name[0].partition("/")[0] for name in averaged} == keys
    num_site_ranks = len(own) // 3
    for rank, found in enumerate(mean):
        of_sites = own[rank % num_site_ranks :: num_site_ranks]
        for name, value in found.items():
            if name[0].partition("/")[0] not in keys:
                assert torch.equal(value, own[rank][name]), name
                continue
            expected = sum(each[name].double() for each in of_sites) / len(of_sites)
            tolerance = 2**-8 if value.dtype == torch.bfloat16 else 1e-12
            torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=1e-30)
            assert torch.equal(value, mean[rank % num_site_ranks][name])


@pytest.mark.parametrize("inner", ["one rank each", "zero 2"])
def test_a_round_sends_moments_too_and_the_buffers_have_their_size(inner: str):
    _, own = site_plan(inner, mw.LocalSGD(sync_every=2), optimizer=ADAMW)
    _, plan = site_plan(inner, MEAN, optimizer=ADAMW)
    messages = [
        {each.subject: each.transfer.nbytes for each in found.for_rank(0).actions if each.kind == "AVERAGE"}
        for found in (own, plan)
    ]
    assert messages[1] == {name: 3 * nbytes for name, nbytes in messages[0].items()}
    sizes = list(messages[1].values())

    def body(world: World) -> tuple[dict[str, int], dict[str, int]]:
        world.ledger.is_recording = True
        executor = executor_of(ANALYZED, plan, world)
        for step in range(2):
            executor.step(samples_of(plan, world.rank, step))
        sent = {
            each.action: each.nbytes for each in world.ledger.entries if each.action.startswith("AVERAGE")
        }
        found = executor.memory_by_category()
        executor.close()
        return sent, found

    for rank, (sent, found) in enumerate(run_on_threads(body, plan.mesh)):
        assert sent == {f"AVERAGE({name})": nbytes for name, nbytes in messages[1].items()}
        assert found["buckets"] == state_bytes(plan, rank).buffers
        assert found["buckets"] >= max(sizes[::2]) + max(sizes[1::2])


def test_a_run_resumes_in_the_middle_and_at_the_end_of_a_round_bit_for_bit(tmp_path: Path):
    rounds = mw.LocalSGD(sync_every=3, optimizer_states="mean")
    _, plan = site_plan("zero 3", rounds, optimizer=ADAMW)
    straight = trained(plan, tmp_path, range(7), lambda done: done in (3, 4))
    for step in (3, 4):
        assert is_equal(trained(plan, tmp_path, range(step, 7)), straight), step
    moments = "site.1/optimizer/"
    assert not is_equal(trained(plan, tmp_path, range(4, 7), leaves_out=moments), straight)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (OptimizerConfig("adamw_8bit"), "adamw_8bit steps embed.weight, and its states have no mean"),
        (OptimizerConfig("adafactor"), "adafactor steps embed.weight"),
        (
            OptimizerConfig("sgd", groups=(ParamGroupConfig("head.*", name="adamw_8bit"),)),
            "steps head.weight",
        ),
        (OptimizerConfig("sgd"), "sgd without momentum keeps no states"),
    ],
)
def test_states_without_a_mean_are_refused_with_a_repair(config: OptimizerConfig, told: str):
    with pytest.raises(PlanError, match=told) as refused:
        site_plan("one rank each", MEAN, optimizer=config)
    assert 'optimizer_states = "own"' in refused.value.diagnostics[0].fix


def test_an_optimizer_of_the_caller_that_keeps_other_states_is_refused_at_the_first_average():
    _, plan = site_plan("one rank each", MEAN, optimizer=ADAMW)

    def body(world: World) -> str:
        executor = executor_of(
            ANALYZED, plan, world, optimizer=lambda groups: torch.optim.AdamW(groups, amsgrad=True)
        )
        executor.step(samples_of(plan, world.rank, 0))
        with pytest.raises(PlanError) as refused:
            executor.step(samples_of(plan, world.rank, 1))
        executor.close()
        return str(refused.value)

    told = run_on_threads(body, plan.mesh)[0]
    assert "exp_avg, exp_avg_sq, max_exp_avg_sq" in told
    assert 'optimizer_states = "own"' in told


def test_verify_steps_with_momentum_where_any_group_of_the_job_keeps_states():
    groups = (ParamGroupConfig("head.*", name="adamw"),)
    given = tiny_job(optimizer=OptimizerConfig("sgd", groups=groups))
    job = parity_job(given)
    assert job.optimizer.momentum
    mw.make_plan(ANALYZED, job, mw.Mesh(outer=3), (MEAN,))
