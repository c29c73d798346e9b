"""Pipelines and their evaluations under what NCCL may make a rank wait for (verifier/nccl_deadlocks.py).

    synchronize    a send ends when its receive has begun, and any one rank may wait for its device between
                   any two computations: must hold for every plan and every evaluation
    first_use      the first message of two ranks stops both, as if pairs were not connected beforehand
    every_call     each message stops its rank, as with CUDA_LAUNCH_BLOCKING=1

Every schedule, of models with one value from block to block, with skip connections, with an encoder whose
output all layers of the decoder take, and with two inputs; on 2, 3, 4 and 8 ranks, with 1, 3 and 8
microbatches. The first rule is the claim; the detail has the schedules that the others would stop.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.harness.result import Result
from benchmarks.pipeline.pipeline_models import MODELS, TOKENS, analyzed_model
from meshwright.api import make_plan
from meshwright.engine.forward_backward.pipelined_eval_order import evaluation_program
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.verifier.nccl_deadlocks import NCCL_RULES, NcclRule, find_nccl_deadlocks

NAME = "nccl_deadlocks"
CLAIM = (
    "no pipeline waits for ever on NCCL, in any schedule and in evaluations: sends end only when their "
    "receive has begun, and any one rank may wait for its device, and for posted receives with it, between "
    "any two computations"
)
RANKS, MICROBATCHES, FORWARDS, LAYERS = (2, 3, 4, 8), (1, 3, 8), (1, 2, 9), 16


@dataclass(frozen=True)
class Case:
    """One model under one schedule; `virtual_stages` is 0 if the schedule defines their number."""

    model: str
    schedule: str
    num_ranks: int
    virtual_stages: int
    num_microbatches: int

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.schedule}, {self.num_ranks} ranks x {self.virtual_stages or 'its'} stages, "
            f"{self.num_microbatches} microbatches"
        )

    def plan(self) -> Plan:
        """Makes the plan. Raises PlanError if it is refused."""
        job = Job(
            ModelConfig(self.model),
            DataConfig("random", sequence=TOKENS),
            TrainConfig(batch=self.num_microbatches),
        )
        pipeline = Pipeline(schedule=self.schedule, virtual_stages=self.virtual_stages)
        return make_plan(analyzed_model(self.model, LAYERS), job, Mesh(pp=self.num_ranks), (pipeline,), 1)

    def programs(self) -> Iterator[tuple[str, Plan]]:
        """Yields the plan, and the plan with the program of each evaluation. Raises PlanError if refused."""
        plan = self.plan()
        yield "step", plan
        for num_forwards in FORWARDS:
            program = evaluation_program(plan.program, plan.sharding, num_forwards)
            yield f"evaluation of {num_forwards}", replace(plan, program=program)


def cases() -> Iterator[Case]:
    """Yields every model, schedule, number of ranks and of microbatches; some of them are refused."""
    for model, schedule, num_ranks, count in product(MODELS, SCHEDULES, RANKS, MICROBATCHES):
        for virtual_stages in (0,) if SCHEDULES[schedule].num_virtual_stages else (0, 2):
            yield Case(model.name, schedule, num_ranks, virtual_stages, count)


def check(case: Case) -> Iterator[tuple[NcclRule, str, list[str]]]:
    """Yields rule, program and findings of a case; nothing if the plan is refused."""
    try:
        programs = list(case.programs())
    except PlanError:
        return
    for name, plan in programs:
        for rule in NCCL_RULES:
            yield rule, name, list(find_nccl_deadlocks(plan.program, plan.mesh, rule))


def main() -> None:
    """Checks all cases, and writes the result."""
    findings: list[float] = []
    stopped: defaultdict[tuple[NcclRule, str], list[int]] = defaultdict(lambda: [0, 0])
    num_plans = 0
    for case in cases():
        rows = list(check(case))
        num_plans += bool(rows)
        for rule, name, found in rows:
            kind = case.schedule if name == "step" else f"{case.schedule}, evaluation"
            counts = stopped[rule, kind]
            counts[0], counts[1] = counts[0] + bool(found), counts[1] + 1
            if rule == "synchronize":
                findings.append(float(len(found)))
                for text in found:
                    print(f"{case}, {name}: {text}", file=sys.stderr)
    detail: dict[str, Any] = {"plans": num_plans}
    for (rule, kind), (count, of) in stopped.items():
        detail.setdefault(rule, []).append(f"{kind}: stops {count} of {of}")
    outcome = Result.of_count(NAME, CLAIM, findings, limit=0.0, bar=len(findings), detail=detail)
    print(f"{outcome.median:g} of {outcome.bar:g} programs of {num_plans} plans do not stop", file=sys.stderr)
    print(outcome.write(NAME))


if __name__ == "__main__":
    main()
