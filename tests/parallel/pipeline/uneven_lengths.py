"""Microbatches of one step whose rows differ in length, the last of fewer rows; and what one device makes of
them.
"""

from collections.abc import Sequence

import torch

from meshwright.api import make_plan, parallelize
from meshwright.comm.backends.threads import single_rank_world
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import IGNORE_INDEX, Batch
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.parallel.tensor.odd_llama import analyzed_llama
from tests.tiny_model import VOCABULARY, analyzed_model, tiny_job

Steps = Sequence[Sequence[tuple[int, int]]]  # by step, the (tokens, rows) of each microbatch
STEPS, MICRO_BATCH = (((9, 2), (5, 2), (12, 1)), ((5, 2), (9, 1))), 2
READINGS = {"tiny": analyzed_model, "llama": analyzed_llama}  # analyzed with samples of 5 tokens, and of 9
Parameters = dict[str, torch.Tensor]


def analyzed(name: str) -> AnalyzedModel:
    """Returns what the model of that name is made of."""
    return READINGS[name]()


def micro_batches(step: int, steps: Steps = STEPS) -> list[Batch]:
    """Those of one step; a row of each ignores half of its labels."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for length, samples in steps[step]:
        words = torch.randint(0, VOCABULARY, (2, samples, length), generator=generator)
        words[1, 0, : length // 2] = IGNORE_INDEX
        found.append({"input_ids": words[0], "labels": words[1]})
    return found


def planned(name: str, mesh: Mesh, *strategies: Strategy) -> Plan:
    """A plan of SGD in float64 over rows of any length."""
    return make_plan(analyzed(name), tiny_job(6), mesh, strategies, MICRO_BATCH)


def trained(world: World, name: str, plan: Plan, steps: Steps = STEPS) -> tuple[list[float], Parameters]:
    """The losses of all steps, that of an evaluation on their rows, and the parameters, on this rank."""
    given = [micro_batches(step, steps) for step in range(len(steps))]
    with parallelize(analyzed(name), plan, world=world) as engine:
        losses = [engine.step(micros).loss for micros in given]
        losses.append(engine.evaluate(given).loss)
        return losses, {name: value.clone() for name, value in engine.executor.gather_parameters().items()}


def on_one_device(name: str, steps: Steps = STEPS) -> tuple[list[float], Parameters]:
    """The same on one device."""
    return trained(single_rank_world(torch.device("cpu")), name, planned(name, Mesh()), steps)
