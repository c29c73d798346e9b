"""Coded sums beside what reads gradients: clipping, the noise scale, the trace and the text of a program."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.compression.codecs.sign import SignCompression
from meshwright.parallel.compression.gradient_compression import GradientCompression
from meshwright.plan.step.program import Action
from meshwright.report.terminal.action_table import plan_details
from meshwright.testing.ranks import run_on_threads
from tests.parallel.compression.coded_plans import ANALYZED, ARRANGEMENTS, coded_plan
from tests.tiny_model import case_of, edited, executor_of, tiny_job, token_samples, verdict_of

BATCH = token_samples(12, uneven=False)
Steps = list[tuple[float, float | None]]  # by step: gradient norm, noise scale


def train(codec: GradientCompression | None, arrangement: str, clip: float) -> list[Steps]:
    """The norm and the noise scale of three steps, on each rank."""
    strategies, mesh = ARRANGEMENTS[arrangement]
    job = tiny_job()
    job = replace(job, train=replace(job.train, clip=clip, noise_scale=True))
    strategies += () if codec is None else (codec,)
    plan = mw.make_plan(ANALYZED, job, mesh, strategies, 1)

    def play(world: World) -> Steps:
        executor = executor_of(ANALYZED, plan, world)
        try:
            rows = list(plan.samples_read(world.rank))
            batch = {key: value[rows] for key, value in BATCH.items()}
            found = [executor.step(batch) for _ in range(3)]
            return [(each.grad_norm, each.noise_scale) for each in found]
        finally:
            executor.close()

    return run_on_threads(play, mesh)


@pytest.mark.parametrize("arrangement", ["ddp", "zero 2"])
def test_the_noise_scale_is_that_of_the_gradients_and_not_of_what_is_owed(arrangement: str):
    exact, coded = train(None, arrangement, 0.0), train(Int8Compression(), arrangement, 0.0)
    assert coded == [coded[0]] * len(coded)  # the same on every rank
    for (norm, noise), (coded_norm, coded_noise) in zip(exact[0][:2], coded[0][:2], strict=True):
        assert norm != coded_norm
        assert coded_norm == pytest.approx(norm, rel=0.01)
        assert coded_noise == pytest.approx(noise, rel=0.05)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_sums_of_codes_are_clipped_by_their_own_norm(arrangement: str):
    """Parity has the norm, and parameters after a clip; here every step is clipped."""
    plan = coded_plan(SignCompression(), arrangement)
    clipped = replace(plan.job, train=replace(plan.job.train, clip=1e-3))
    plan = mw.make_plan(ANALYZED, clipped, plan.mesh, plan.strategies, plan.micro_batch)
    verdict = verdict_of(case_of(ANALYZED, plan), steps=2)
    assert verdict.passed, verdict
    assert {"grad norm", "parameter"} <= verdict.max_errors.keys()
    assert all(norm > 1e-3 for norm, _ in train(SignCompression(), arrangement, 1e-3)[0])


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_trace_finds_the_messages_that_the_program_states(arrangement: str):
    plan = coded_plan(Int8Compression(), arrangement)
    found = mw.trace(ANALYZED, plan)
    assert found.passed, found.diagnostics
    exact = mw.make_plan(ANALYZED, plan.job, plan.mesh, plan.strategies[:-1], plan.micro_batch)
    assert found.sent_nbytes < mw.trace(ANALYZED, exact).sent_nbytes * (0.15 if arrangement == "ddp" else 1)


def test_a_trace_names_codes_of_other_bytes_than_planned():
    plan = coded_plan(Int8Compression())

    def larger(action: Action) -> Action:
        if action.transfer is None or not action.transfer.carried_by:
            return action
        first, *rest = action.transfer.carried_by
        first = replace(first, nbytes=first.nbytes + 3)
        return replace(action, transfer=replace(action.transfer, carried_by=(first, *rest)))

    with pytest.raises(RuntimeError, match=r"REDUCE\(0\) has sent \d+ bytes, and its messages are"):
        mw.trace(ANALYZED, edited(plan, lambda actions: list(map(larger, actions))), [1])


@pytest.mark.parametrize(
    ("arrangement", "told"),
    [
        (
            "ddp",
            "all_reduce 2.59 KiB float64 over dp_replicate (as all_to_all of uint8, all_gather of uint8)",
        ),
        ("zero 2", "float64 over dp_shard (as all_to_all of uint8)"),
    ],
)
def test_the_text_of_a_program_shows_what_carries_a_sum(arrangement: str, told: str):
    console = Console(width=400, record=True, file=StringIO())
    console.print(plan_details(coded_plan(Int8Compression(), arrangement)))
    assert told in " ".join(console.export_text().split())
