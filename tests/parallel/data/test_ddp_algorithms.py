"""DDP with every all-reduce algorithm: the program names it, the messages use it, and results equal one
device.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

import meshwright as mw
from meshwright.comm.allreduce import get_algorithm
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy
from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints
from meshwright.testing.ranks import ProcessPool
from meshwright.verifier.parity import RankReport, compare_rank
from meshwright.verifier.reference import run_reference
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import FIRST_ROLE
from tests.parallel.data.test_ddp_numbers import ROUNDING, reduced_gradients
from tests.run.training.small_run import SmallRun
from tests.tiny_model import analyzed_model, case_of, plan_of, verdict_of

BUCKET_MB = 300 / 2**20
# among the sizes of the gradients of the tiny model, one at a time
RULE = "recursive_doubling <= 200 B, tree <= 350 B, else ring"
ALGORITHMS = [
    "naive",
    "reduce_broadcast",
    "ring",
    "one_shot",
    "recursive_halving",
    "recursive_doubling",
    "tree",
    RULE,
]


@pytest.fixture(scope="module")
def analyzed() -> AnalyzedModel:
    return analyzed_model()


def store(algorithm: str) -> DDP:
    return DDP(bucket_mb=BUCKET_MB, algorithm=algorithm)


def algorithms_by_nbytes(plan: Plan) -> dict[int, str]:
    """The algorithm of each gradient message, by its bytes."""
    return {
        a.transfer.nbytes: a.transfer.algorithm
        for a in plan.program.actions(FIRST_ROLE)
        if a.kind == "REDUCE" and a.transfer
    }


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("micro_batch", [0, 1])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_equals_one_device(analyzed: AnalyzedModel, algorithm: str, ranks: int, micro_batch: int):
    plan = plan_of(analyzed, ranks, (BatchSplit(), store(algorithm)), micro_batch)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    "strategy",
    [store("hierarchical/2"), NaiveDDP(algorithm="hierarchical/2"), NaiveDDP(algorithm=RULE)],
    ids=str,
)
def test_it_equals_one_device_on_two_hosts_and_one_parameter_at_a_time(
    analyzed: AnalyzedModel, strategy: Strategy
):
    verdict = verdict_of(case_of(analyzed, plan_of(analyzed, 4, (BatchSplit(), strategy), 1)))
    assert verdict.passed, str(verdict)


def test_each_message_uses_the_algorithm_that_the_rule_picks_for_its_bytes(analyzed: AnalyzedModel):
    plan = plan_of(analyzed, 3, (BatchSplit(), NaiveDDP(algorithm=RULE)))
    picked = algorithms_by_nbytes(plan)
    assert {nbytes: get_algorithm(name).name for nbytes, name in picked.items()} == {
        nbytes: "recursive_doubling" if nbytes <= 200 else "tree" if nbytes <= 350 else "ring"
        for nbytes in picked
    }
    assert set(picked.values()) == {"recursive_doubling", "tree", "ring"}
    counts = [
        a.transfer
        for a in plan.program.actions(FIRST_ROLE)
        if a.kind in ("TOKEN_COUNT", "LOSS_SUM") and a.transfer
    ]
    assert [move.algorithm for move in counts] == ["backend", "backend"]


def test_a_rule_by_size_counts_bytes_in_the_comm_dtype(analyzed: AnalyzedModel):
    rule = "tree <= 700 B, else ring"
    wide, narrow = (
        plan_of(
            analyzed,
            3,
            (BatchSplit(), DDP(algorithm=rule)),
            job=replace(plan_of(analyzed, 3).job, precision=PrecisionConfig(reduce=wire)),
        )
        for wire in ("float32", "bfloat16")
    )
    numel = sum(weight.numel for weight in analyzed.model_spec.trainable)
    assert 2 * numel <= 700 < 4 * numel
    assert (set(algorithms_by_nbytes(wide).values()), set(algorithms_by_nbytes(narrow).values())) == (
        {"ring"},
        {"tree"},
    )


@pytest.mark.parametrize("algorithm", ["ring", RULE, "hierarchical/2"])
def test_a_trace_finds_what_the_program_says(analyzed: AnalyzedModel, algorithm: str):
    found = mw.trace(analyzed, plan_of(analyzed, 4, (BatchSplit(), store(algorithm)), 1), [1, 3])
    assert found.passed, str(found)


class Odd(DDP):
    """Sums by another algorithm than its program says."""

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        def reduce(action: Action) -> None:
            assert action.transfer is not None
            runtime.state.start_collective(
                replace(action, transfer=replace(action.transfer, algorithm="tree"))
            )

        return {"REDUCE": reduce}


def test_a_sum_by_another_algorithm_than_the_program_says_is_found(analyzed: AnalyzedModel):
    plan = plan_of(analyzed, 3, (BatchSplit(), Odd(bucket_mb=BUCKET_MB, algorithm="ring")))
    found = mw.trace(analyzed, plan, [1])
    assert not found.passed
    assert "(3 ranks, tree)" in str(found)
    assert "(3 ranks, ring)" in str(found)
    verdict = verdict_of(case_of(analyzed, plan), 1)
    assert not verdict.passed
    assert "(3 ranks, ring)" in str(verdict)


@pytest.mark.parametrize("micro_batch", [0, 2])
@pytest.mark.parametrize("algorithm", ["ring", "recursive_halving", "recursive_doubling", "tree", "one_shot"])
def test_gradients_in_bfloat16_differ_only_by_the_roundings_of_the_algorithm(
    algorithm: str, micro_batch: int
):
    """Each of 3 summands is rounded once, and each of the 2 sums on the way once more, at most."""
    exact, magnitudes = reduced_gradients(PrecisionConfig(), micro_batch)
    rounded, _ = reduced_gradients(PrecisionConfig(reduce="bfloat16"), micro_batch, store(algorithm))
    assert any(not torch.equal(rounded[name], exact[name]) for name in exact)
    for name, grad in exact.items():
        bound = ((1 + ROUNDING) ** 3 - 1 + 1e-6) * magnitudes[name]  # 1e-6: float32
        assert ((rounded[name] - grad).abs() <= bound).all(), name


def compared(world: World, algorithm: str, micro_batch: int) -> tuple[RankReport, dict[str, float]]:
    analyzed = analyzed_model()
    plan = plan_of(analyzed, world.mesh.world_size, (BatchSplit(), store(algorithm)), micro_batch)
    case = case_of(analyzed, plan)
    return compare_rank(case, world, run_reference(case, 2)), dict(world.ledger.sent_nbytes)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "micro_batch"),
    [("ring", 3, 1), ("recursive_halving", 3, 0), (RULE, 3, 1), ("hierarchical/2", 4, 0)],
)
def test_it_equals_one_device_on_processes(
    process_pool: ProcessPool, algorithm: str, ranks: int, micro_batch: int
):
    plan = plan_of(analyzed_model(), ranks, (BatchSplit(), store(algorithm)), micro_batch)
    sums = [
        (a.name, a.transfer) for a in plan.program.actions(FIRST_ROLE) if a.kind == "REDUCE" and a.transfer
    ]
    results = process_pool.run(compared, plan.mesh, algorithm, micro_batch)
    for index, (report, sent) in enumerate(results):
        assert (report.differences, report.num_steps) == ([], 2)
        assert report.digests == results[0][0].digests
        for name, move in sums:
            assert sent[name] == 2 * 8 * get_algorithm(move.algorithm).num_sent(
                ranks, index, move.nbytes // 8
            )


@pytest.mark.parametrize("algorithm", ["ring", "tree <= 400 B, else recursive_halving"])
def test_a_resumed_run_is_bitwise_the_run_that_was_not_stopped(tmp_path, algorithm: str):
    straight = SmallRun(tmp_path / "straight", ranks=3, strategies=(BatchSplit(), store(algorithm)))
    straight.play()
    small_run = replace(straight, folder=tmp_path / "stopped", stop=lambda rank, done: done == 6)
    small_run.play()
    replace(small_run, stop=lambda rank, done: False).play()
    assert small_run.losses() == straight.losses()
    assert compare_checkpoints(small_run.at(12), straight.at(12)) == []
