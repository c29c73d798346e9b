"""Checkpoints of mixtures of experts cross from plan to plan and back; training goes on with the same bits.

    plan a    step 1, 2, save -> step 3, 4                  the undisturbed run
    plan b              load  -> save                       the parameters of a, bit by bit
    plan a                       load -> step 3, 4          losses, parameters of the first line, bit by bit

AdamW in float32, so the second half shows the optimizer states too. Plans are those of `expert_parity`, with
2 and 3 ranks along ep and uneven numbers of experts, and plans without ep. Pairs are drawn.

    python -m benchmarks.experts.expert_resume               40 crossings; a few minutes
    python -m benchmarks.experts.expert_resume --pairs 2     no result
"""

import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

import torch

from benchmarks.experts.expert_parity import BATCH, PLANS, Case, analyzed_family, batch
from benchmarks.harness.result import Result
from meshwright.api import make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.training.trainer import Trainer
from meshwright.testing.ranks import run_on_threads

NAME, NUM_PAIRS, STEPS_BEFORE, STEPS = "expert_resume", 40, 2, 4
CLAIM = (
    "40 checkpoints of mixtures of experts cross to another plan and back, between ep 2, ep 3 and no ep, "
    "with every other technique: no bit of a parameter differs, and training goes on with the same bits"
)
WITHOUT_EP: Mapping[str, Case] = {
    "one device": (Mesh(), None, 0),
    "no ep, ZeRO-3": (Mesh(dp_shard=3), (BatchSplit("dp_shard"), ZeRO()), 0),
    "no ep, tp 2": (Mesh(tp=2), None, 2),
    "no ep, 1F1B": (Mesh(pp=2), None, 2),
}
ALL = {**PLANS, **WITHOUT_EP}
FAMILIES = ("Mixtral", "Qwen2-MoE", "Qwen3-MoE")


@dataclass(frozen=True)
class Trained:
    """What a run shows: its losses, its parameters at the end, and those that it had loaded or saved."""

    losses: list[float]
    parameters: dict[str, torch.Tensor] = field(repr=False)
    middle: dict[str, torch.Tensor] = field(repr=False)

    def differs(self, other: "Trained") -> list[str]:
        """Returns what differs in any bit."""
        changed = _changed(self.parameters, other.parameters)
        return [*(["losses"] if self.losses != other.losses else []), *changed]


def _changed(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, each in expected.items() if not torch.equal(found[name], each)]


def plan_of(family: str, name: str) -> Plan:
    """Returns a plan for AdamW in float32."""
    optimizer = OptimizerConfig("adamw", lr=0.01)
    job = Job(train=TrainConfig(steps=STEPS, batch=BATCH, clip=0.5), optimizer=optimizer)
    return make_plan(analyzed_family(family), job, *ALL[name])


def train(
    family: str, plan: Plan, steps: Sequence[int], load: Path | None = None, save: Path | None = None
) -> Trained:
    """Returns what all ranks see: they load, save before step STEPS_BEFORE, and run `steps`."""

    def body(world: World) -> Trained:
        losses, middle = list[float](), dict[str, torch.Tensor]()
        with parallelize(analyzed_family(family), plan, world=world) as engine:
            if load is not None:
                engine.load(load)
            for step in (*steps, None):
                if engine.executor.steps_done == STEPS_BEFORE and not middle:
                    middle = _copies(engine)
                    if save is not None:
                        engine.save(save)
                if step is not None:
                    losses.append(engine.step(engine.local_batch(batch(step))).loss)
            parameters = _copies(engine)
        return Trained(losses, parameters, middle)

    first, *others = run_on_threads(body, plan.mesh, timeout_s=600)
    if any(each.differs(first) for each in others):
        raise RuntimeError(f"ranks of {plan.mesh} have different parameters")
    return first


def _copies(engine: Trainer) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in engine.executor.gather_parameters().items()}


@cache
def undisturbed(family: str, name: str, folder: Path) -> tuple[Trained, Path]:
    """Returns a run without a break, and its checkpoint of the middle."""
    place = folder / f"{family} {name}"
    found = train(family, plan_of(family, name), range(STEPS), save=place)
    return found, next(path for path in place.iterdir() if path.is_dir())


def crossing(family: str, first: str, second: str, folder: Path) -> list[str]:
    """Returns what differs after a crossing from plan `first` to `second` and back."""
    straight, saved = undisturbed(family, first, folder)
    place = folder / f"{family} {first} by {second}"
    other = train(family, plan_of(family, second), (), load=saved, save=place)
    lost = _changed(other.middle, straight.middle)
    back = next(path for path in place.iterdir() if path.is_dir())
    again = train(family, plan_of(family, first), range(STEPS_BEFORE, STEPS), load=back)
    rest = Trained(straight.losses[STEPS_BEFORE:], straight.parameters, {})
    return [*(f"{name} under {second}" for name in lost), *again.differs(rest)]


def pairs(number: int) -> list[tuple[str, str, str]]:
    """Returns that many different crossings, each with ep on at least one side."""
    rng, found = Random(0), dict[tuple[str, str], str]()
    while len(found) < number:
        first, second = rng.sample(list(ALL), 2)
        if max(ALL[first][0].ep, ALL[second][0].ep) > 1:
            found.setdefault((first, second), FAMILIES[len(found) % len(FAMILIES)])
    return [(family, *pair) for pair, family in found.items()]


def main() -> None:
    """Run the crossings and write the result."""
    parser = ArgumentParser()
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS)
    number = parser.parse_args().pairs
    torch.set_num_threads(1)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for family, first, second in pairs(number):
            name = f"{family}: {first} -> {second} -> {first}"
            rows[name] = crossing(family, first, second, Path(folder))
            print(f"{name}: {rows[name] or 'equal'}", flush=True)
    values = [float(len(row)) for row in rows.values()]
    result = Result.of_count(NAME, CLAIM, values, limit=0.0, bar=NUM_PAIRS, detail=rows)
    if number >= NUM_PAIRS:
        print(result.write(NAME))


if __name__ == "__main__":
    main()
