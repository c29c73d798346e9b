"""Resharding of all kinds of state: quantized optimizer states, whole matrices, master weights, a loss
scale.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.plan.job.job import Job, OptimizerConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints, load_tensors
from meshwright.run.checkpoint.manifest import read_manifest
from meshwright.testing.ranks import run_on_threads
from tests.parallel.data.optimizer_cases import Wide
from tests.run.checkpoint.test_resume_reshard import LAST, LAYOUTS, SAVED, Left, assert_holds, play
from tests.tiny_model import tiny_job, token_samples

ANALYZED = analyze(Wide, token_samples(2))
WIDE = PrecisionConfig("float64", "float64", "float64")
JOBS = {
    **{
        rule: (OptimizerConfig(rule, lr=0.01), WIDE)
        for rule in ("adamw_bf16", "adamw_8bit", "lion", "adafactor")
    },
    "muon": (OptimizerConfig("muon", lr=0.01, momentum=0.95), WIDE),
    "masters": (
        OptimizerConfig(lr=0.01),
        PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32"),
    ),
    "loss scale": (
        OptimizerConfig(lr=0.01),
        PrecisionConfig("float32", "float16", "float32", loss_scale=2.0**40),
    ),
}
SOME = ("one device", "stage 1 on 2", "stage 2 on 2 x 2", "stage 3 on 3")


def plan_of(layout: str, job: Job) -> Plan:
    mesh, strategies = LAYOUTS[layout]
    return make_plan(ANALYZED, job, mesh, strategies, 1 if mesh.world_size == 4 else 2)


@pytest.mark.parametrize("kept", JOBS)
def test_all_state_is_loaded_bitwise_and_training_continues_unchanged(kept: str, tmp_path: Path):
    optimizer, precision = JOBS[kept]
    job = replace(tiny_job(), optimizer=optimizer, precision=precision)
    runs = {}
    for layout in SOME:
        plan = plan_of(layout, job)

        def rank(world: World, plan: Plan = plan, layout: str = layout) -> Left:
            with parallelize(ANALYZED, plan, world=world) as engine:
                play(engine, plan, world, SAVED)
                middle = engine.save(tmp_path / layout)
                play(engine, plan, world, LAST)
                return Left(middle, engine.save(tmp_path / layout / "end"))

        runs[layout] = run_on_threads(rank, plan.mesh)[0]

    for layout in SOME:
        plan = plan_of(layout, job)

        def again(world: World, plan: Plan = plan, layout: str = layout) -> tuple[list[set[str]], Path]:
            with parallelize(ANALYZED, plan, world=world) as engine:
                names = []
                for run in (*(runs[other] for other in SOME if other != layout), runs[layout]):
                    assert engine.load(run.middle) == SAVED
                    names.append(assert_holds(engine, load_tensors(run.middle)[0].items()))
                play(engine, plan, world, LAST)
                return names, engine.save(tmp_path / layout / "again")

        told = run_on_threads(again, plan.mesh)
        assert compare_checkpoints(told[0][1], runs[layout].end) == []
        everything = set(read_manifest(runs[layout].middle).entries)
        for held in zip(*(names for names, _ in told), strict=True):
            assert set().union(*held) == everything
