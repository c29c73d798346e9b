"""Sequences of another length than the plan's send what the plan for that length states, and no other number
of bytes passes.
"""

from dataclasses import replace

import pytest

from meshwright.api import select_local_batch
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.float64_parity_setup import make_parity_case
from meshwright.verifier.one_device.parity_case import ParityCase
from meshwright.verifier.parity import RankReport, compare_rank, make_verdict
from meshwright.verifier.reference import run_reference
from tests.parallel.tensor.odd_llama import NUM_SAMPLES, TOKENS, batches, llama, planned

LENGTHS = (TOKENS, 6, 12)  # by step
PLANS: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "stages": (Mesh(pp=2), (Pipeline(),)),
    "stages of slices": (
        Mesh(pp=2, tp=3),
        (Pipeline(schedule="zb_h1"), TensorParallel(), VocabParallel(), SequenceParallel()),
    ),
    "a ring": (Mesh(cp=3), (RingAttention(), DDP(axis="cp"))),
}


def compared(mesh: Mesh, strategies: tuple[Strategy, ...]) -> tuple[ParityCase, list[RankReport]]:
    """A comparison in which each step has rows of another length, and the last one fewer of them; and what
    its ranks report.
    """
    steps = [batches(1, NUM_SAMPLES, length)[0] for length in LENGTHS]
    steps[-1] = {key: value[:3] for key, value in steps[-1].items()}
    analyzed, plan = planned(llama(), mesh, strategies, micro=2)
    case = make_parity_case(
        analyzed,
        plan,
        token_cross_entropy(),
        lambda plan, rank: lambda step: select_local_batch(steps[step], plan, rank),
    )
    reference = run_reference(case, len(steps))
    return case, run_on_threads(lambda world: compare_rank(case, world, reference), mesh)


@pytest.mark.parametrize("name", PLANS)
def test_sequences_of_other_lengths_send_what_the_plan_of_that_length_states(name: str):
    case, reports = compared(*PLANS[name])
    verdict = make_verdict(case, reports, "threads", {})
    assert verdict.passed, verdict


def test_bytes_of_another_sequence_length_do_not_pass():
    case, reports = compared(*PLANS["stages"])
    for other in (reports[0].microbatch_shapes[0], ()):  # those of the first step; as planned
        false = [
            replace(
                report, microbatch_shapes=[report.microbatch_shapes[0], other, report.microbatch_shapes[2]]
            )
            for report in reports
        ]
        verdict = make_verdict(case, false, "threads", {})
        assert (
            verdict.first_difference.step,
            verdict.first_difference.quantity,
            verdict.num_other_differences,
        ) == (
            1,
            "ledger",
            1,
        )
        assert "SEND" in verdict.first_difference.name
    shorter = [
        replace(entry, nbytes=entry.nbytes - 8) if "SEND" in entry.action else entry
        for entry in reports[0].sent_entries
    ]
    assert not make_verdict(
        case, [replace(reports[0], sent_entries=shorter), reports[1]], "threads", {}
    ).passed
