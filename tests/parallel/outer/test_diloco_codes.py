"""DiLoCo whose outer gradients travel as codes: its definition, bytes, residuals in checkpoints, refusals."""

from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.messages import planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.parallel.outer.site_plans import (
    ADAMW,
    ANALYZED,
    ATTENDS,
    INNER,
    TIED,
    is_equal,
    samples_of,
    trained,
)
from tests.parallel.tensor.even_llama import analyzed_even_llama
from tests.parallel.tensor.odd_llama import batches
from tests.tiny_model import NUM_SAMPLES, case_of, executor_of, tiny_job, verdict_of

ROUNDS = mw.DiLoCo(sync_every=2)
INT8, INT4 = mw.Int8Compression(axis="outer"), mw.Int4Compression(axis="outer")
CLIPPED = mw.TopKCompression(axis="outer", local_clip=1.0)
NUMEL = sum(param.numel for param in ANALYZED.model_spec.trainable)


def coded_plan(
    inner: str, codec: Strategy, rounds: Strategy = ROUNDS, **job: object
) -> tuple[AnalyzedModel, Plan]:
    """The model and the plan of an arrangement whose outer gradients `codec` carries."""
    mesh, strategies, micro_batch = INNER[inner]
    analyzed = analyzed_even_llama() if inner in ATTENDS else ANALYZED
    return analyzed, mw.make_plan(analyzed, tiny_job(**job), mesh, (*strategies, rounds, codec), micro_batch)


@pytest.mark.parametrize(
    ("inner", "codec"),
    [
        ("one rank each", INT8),
        ("one rank each", INT4),
        ("zero 2", INT4),
        ("zero 3", INT8),
        ("stages and shards", INT8),
        ("slices", INT4),
        ("ddp", mw.Int4Compression(axis="outer", rounding="stochastic")),
        ("zero 1", mw.Int8Compression(axis="outer", error_feedback=False)),
    ],
)
def test_every_rank_equals_the_definition_less_what_codes_lose(inner: str, codec: Strategy):
    analyzed, plan = coded_plan(inner, codec)
    assert static_checks(plan) == []
    data = None if analyzed is ANALYZED else batches(1, NUM_SAMPLES)[0]
    verdict = verdict_of(case_of(analyzed, plan, data), 5)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    "codec",
    [
        mw.Int4Compression(axis="outer", rounding="stochastic"),
        mw.SignCompression(axis="outer"),
        mw.TopKCompression(axis="outer", density=0.1),
        mw.PowerSGDCompression(axis="outer", rank=1),
    ],
    ids=lambda codec: codec.mode,
)
def test_stages_that_share_a_tied_weight_end_rounds_with_the_same_one(codec: Strategy):
    mesh, strategies, micro_batch = INNER["stages"]
    for each in ((), (codec,)):
        plan = mw.make_plan(TIED, tiny_job(), mesh, (*strategies, ROUNDS, *each), micro_batch)
        assert static_checks(plan) == []
    verdict = verdict_of(case_of(TIED, plan), 4)
    assert verdict.passed, verdict


class ForgetsResidual(mw.Int4Compression):
    """Loses what its codes lose."""

    def sum_rounds(self, operand):
        yield from super().sum_rounds(operand)
        for residual in operand.kept.values():
            residual.zero_()


class OwesTwice(mw.Int4Compression):
    """Adds what is owed a second time."""

    def prepare(self, operand):
        operand.add_owed()


class SumsTwice(mw.Int4Compression):
    """Decodes twice the sum."""

    def decode_sum(self, codes, output):
        super().decode_sum(codes, output)
        output.mul_(2)

    def defined_sum(self, coded_sum, inputs, keys, states):
        return INT4.defined_sum(coded_sum, inputs, keys, states)


class SendsParameters(mw.DiLoCo):
    """Sends the parameters in place of the way that they went."""

    def begin_average(self, name, stepped, kept):
        return


@pytest.mark.parametrize(
    ("codec", "rounds", "step", "quantity"),
    [
        (ForgetsResidual(axis="outer"), ROUNDS, 1, "parameter"),
        (OwesTwice(axis="outer"), ROUNDS, 3, "parameter"),
        (SumsTwice(axis="outer"), ROUNDS, 1, "sum of codes"),
        (INT4, SendsParameters(sync_every=2), 1, "parameter"),
    ],
)
def test_a_wrong_coded_round_is_noticed_in_the_round_that_shows_it(
    codec: Strategy, rounds: Strategy, step: int, quantity: str
):
    analyzed, plan = coded_plan("one rank each", codec, rounds)
    verdict = verdict_of(case_of(analyzed, plan), 4)
    assert not verdict.passed
    assert (verdict.first_difference.step, verdict.first_difference.quantity) == (step, quantity)


@pytest.mark.parametrize("codec", [INT8, INT4])
@pytest.mark.parametrize("inner", ["ddp", "zero 2"])
def test_a_round_sends_codes_of_outer_gradients_and_nothing_else_is_coded(inner: str, codec: Strategy):
    _, plan = coded_plan(inner, codec)
    k, rank = plan.num_sites, plan.for_rank(0)
    sums = [each for each in rank.actions if each.kind == "OUTER_REDUCE"]
    for each in sums:
        part = -(-each.transfer.nbytes // 8 // k)  # float64
        sent = sum(min_max_sent_nbytes(message, plan.mesh)[1] for message in each.transfer.messages)
        assert sent == 2 * (k - 1) * codec.code_nbytes(part)
    assert not any(each.transfer.carried_by for each in rank.actions if each.kind == "REDUCE")

    def body(world: World) -> list[list[tuple[str, int]]]:
        world.ledger.is_recording = True
        executor, found = executor_of(ANALYZED, plan, world), []
        for step in range(4):
            world.ledger.entries.clear()
            executor.step(samples_of(plan, world.rank, step))
            found.append(
                [(each.action, each.nbytes) for each in world.ledger.entries if "outer" in each.axes]
            )
        executor.close()
        return found

    for rank_number, steps in enumerate(run_on_threads(body, plan.mesh)):
        planned = planned_messages(plan.for_rank(rank_number), step=1)
        assert steps[0] == steps[2] == []
        assert sorted(steps[1]) == sorted(
            (each.action, each.nbytes) for each in planned if "outer" in each.axes
        )
        assert steps[3] == steps[1]


@pytest.mark.parametrize(("inner", "share"), [("one rank each", 1), ("zero 3", 2)])
def test_outer_state_and_residual_take_12_bytes_per_parameter_in_the_shards_of_a_site(inner: str, share: int):
    _, plan = coded_plan(inner, INT8, precision=mw.PrecisionConfig())
    totals = sum(state_bytes(plan, rank).strategy_states - 32 for rank in range(share))
    assert totals == 12 * NUMEL


def test_a_coded_run_resumes_in_the_middle_of_a_round_with_what_is_owed(tmp_path: Path):
    _, plan = coded_plan("zero 3", INT4, mw.DiLoCo(sync_every=2), optimizer=ADAMW)
    straight = trained(plan, tmp_path, range(5), lambda done: done in (2, 3))
    owed = [each for name, each in straight[0].items() if name.startswith("compress/residual/")]
    assert any(each.abs().max() > 0 for each in owed if each.numel())
    for step in (2, 3):
        assert is_equal(trained(plan, tmp_path, range(step, 5)), straight), step
    assert not is_equal(trained(plan, tmp_path, range(3, 5), leaves_out="state/compress/"), straight)


def test_other_sites_take_up_all_that_is_owed_at_the_end_of_a_round(tmp_path: Path):
    _, plan = coded_plan("one rank each", INT4)
    saved = trained(plan, tmp_path, range(2), lambda done: done == 2)
    fewer = mw.make_plan(ANALYZED, tiny_job(), mw.Mesh(outer=2), (ROUNDS, INT4))
    taken = trained(fewer, tmp_path, range(2, 2))
    for name in (name for name in saved[0] if "residual" in name):
        owed, mine = (sum(each[name] for each in found) for found in (saved, taken))
        torch.testing.assert_close(mine, owed, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("strategies", "told", "fix"),
    [
        ((INT8, ROUNDS), "no sites meet along outer", "list diloco before compress"),
        ((mw.LocalSGD(sync_every=2), INT8), "local_sgd averages parameters", "use diloco"),
        ((ROUNDS, mw.Int8Compression()), "inside sites that train apart", 'axis = "outer"'),
        (
            (ROUNDS, mw.TopKCompression(axis="outer", local_clip=1.0)),
            "is an outer gradient",
            "local_clip = 0",
        ),
    ],
)
def test_codes_that_no_round_can_carry_are_refused_with_a_repair(strategies: tuple, told: str, fix: str):
    inner = (mw.BatchSplit(), mw.DDP())
    with pytest.raises(PlanError, match=told) as refused:
        mw.make_plan(ANALYZED, tiny_job(), mw.Mesh(outer=3, dp_replicate=2), (*inner, *strategies), 1)
    assert any(fix in each.fix for each in refused.value.diagnostics)
