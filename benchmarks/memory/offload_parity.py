"""Offload beside any other technique: every plan ends with the bits of the same plan without it.

    plans    random plans (benchmarks/random_plans/random_draws.py) that nothing perturbs, each with model
             states on the host in one of its modes or on disk, half of them with activations on the host or
             in parts too: {ddp, ZeRO 1 to 3, hybrid} x {tensor, context and expert parallelism,
             pipelines of every schedule} x {recomputation, gist, chunked loss} ...
    bits     three steps of AdamW, bfloat16 with float32 masters, on threads: losses, norms, weights, masters
             and optimizer states of every rank, with offload and without it
    parity   the same plan beside one device in float64, as in random_plans: at most 1e-10
    faults   engines and plans with a planted fault (planted_offload_faults.py): bits or the static checks of
             the plan must tell

The figure is the number of plans with equal bits and parity. Plans that are refused are drawn again.

    python -m benchmarks.memory.offload_parity              100 plans and the faults; 15 minutes on 2 cores
    python -m benchmarks.memory.offload_parity --only 17    one plan, with what differs; no result
"""

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import count
from random import Random

import torch

from benchmarks.harness.result import Result
from benchmarks.memory.planted_offload_faults import FAULTS, is_found
from benchmarks.random_plans.combinations import Row
from benchmarks.random_plans.offload_draws import (
    with_activation_offload,
    with_partitioned_activations,
    with_states_offload,
)
from benchmarks.random_plans.parity_of_draws import compared_draws, counts_of, parity_result
from benchmarks.random_plans.random_draws import Draw, draw
from benchmarks.random_plans.random_models import MODELS, analyzed_model
from benchmarks.random_plans.random_plans import LIMIT_S, try_plan
from meshwright.api import make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.optim.sharded_state_dict import TensorShard
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.memory.partitioned_activations import PartitionedActivations
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.parallel.server.parameter_server import ParameterServer
from meshwright.plan.job.job import OptimizerConfig, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.testing.ranks import run_on_threads

NAME = "offload_parity"
CLAIM = (
    "100 random plans with offload end with the bits of the same plan without it, and equal one device to "
    "1e-10 in float64; every planted fault is found"
)
STEPPING_FOR_OTHERS = (DataParallelMaster, ParameterServer)  # where states stay on the device
LEAVING = (Offload, DiskOffload, ActivationOffload, PartitionedActivations)
SEED, NUM_PLANS, NUM_STEPS = 28, 100, 3
MIXED = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")
ADAMW = OptimizerConfig("adamw", lr=0.01, weight_decay=0.1)


def draws(seed: int = SEED) -> Iterator[Draw]:
    """Yields random plans with offload, without end."""
    for number in count():
        drawn = draw(seed, number)
        others = without_offload(drawn).strategies
        if drawn.perturbation or any(isinstance(each, STEPPING_FOR_OTHERS) for each in others):
            continue
        rng = Random(f"{seed}/{number}/mode")
        offloaded = with_states_offload(rng, others)
        if rng.random() < 0.5:
            offloaded = with_partitioned_activations(rng, with_activation_offload(rng, offloaded))
        yield replace(drawn, strategies=offloaded, guard=False)


def mixed_plan(drawn: Draw) -> Plan:
    """Returns the plan of `drawn` with AdamW in mixed precision."""
    job = replace(drawn.plan().job, optimizer=ADAMW, precision=MIXED)
    return make_plan(analyzed_model(drawn.model), job, drawn.mesh, drawn.strategies, drawn.micro_batch)


def digests(drawn: Draw) -> list[dict[str, str]]:
    """Returns for each rank the digests of all that it holds after NUM_STEPS steps of `drawn`, by name."""
    plan, model = mixed_plan(drawn), MODELS[drawn.model]
    batches = model.batches(NUM_STEPS, drawn.num_samples)
    last = drawn.num_samples - drawn.num_missing_samples
    batches[-1] = {key: value[:last] for key, value in batches[-1].items()}

    def train_rank(world: World) -> dict[str, str]:
        torch.set_num_threads(1)
        with parallelize(analyzed_model(drawn.model), plan, loss=model.loss(), world=world) as trainer:
            metrics = [trainer.step(trainer.local_batch(batch)) for batch in batches]
            found = {"metrics": torch.tensor([(each.loss, each.grad_norm) for each in metrics])}
            for name, value in trainer.executor.state_dict().items():
                found[name] = value.values if isinstance(value, TensorShard) else value
            return {name: _digest(tensor) for name, tensor in found.items()}

    return run_on_threads(train_rank, plan.mesh, timeout_s=LIMIT_S)


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return sha256(flat.numpy().tobytes()).hexdigest()[:16]


def without_offload(drawn: Draw) -> Draw:
    """Returns `drawn` with everything on the device, and whole."""
    others = tuple(each for each in drawn.strategies if not isinstance(each, LEAVING))
    return replace(drawn, strategies=others)


def offload_of(drawn: Draw) -> Offload | DiskOffload:
    """Returns the offload of model states of `drawn`."""
    return next(each for each in drawn.strategies if isinstance(each, (Offload, DiskOffload)))


def mode_of(offload: Offload | DiskOffload) -> str:
    """Returns what is offloaded, and who steps, in words."""
    if isinstance(offload, DiskOffload):
        return f"{' '.join(offload.what)} on disk, {offload.num_buffers} buffers"
    return f"{' '.join(offload.what)}, {offload.step_on} steps"


def other_bits(drawn: Draw) -> list[str]:
    """Returns the names of what has other bits than without offload, with the rank."""
    torch.set_num_threads(1)
    pairs = zip(digests(drawn), digests(without_offload(drawn)), strict=True)
    return [
        f"rank {rank}: {name}"
        for rank, (found, wanted) in enumerate(pairs)
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]


def compare(drawn: Draw) -> Row:
    """Returns the row of one plan: its outcome beside one device, and what has other bits than without
    offload.
    """
    row = {**try_plan(drawn), "mode": mode_of(offload_of(drawn))}
    if row["outcome"] != "matched":
        return row
    try:
        other = other_bits(drawn)
    except Exception:  # stored as a row: one plan must not end the run
        return {**row, "outcome": "crashed", "message": traceback.format_exc()}
    return {**row, "outcome": "other bits" if other else "matched", "other_bits": other[:10]}


def result(rows: Sequence[Row], faults: dict[str, str]) -> Result:
    """Returns the result of these plans and of the planted faults, each with how it was found, or ""."""
    more = {"modes": counts_of(rows, "mode")}
    return parity_result(NAME, CLAIM, rows, SEED, NUM_PLANS, more, faults)


def main() -> None:
    """Compares the plans, plants the faults, and writes the result."""
    rows = compared_draws(NAME, draws(), NUM_PLANS, compare)
    faults = {name: is_found(fault) for name, fault in FAULTS.items()}
    print(result(rows, faults).write(NAME))


if __name__ == "__main__":
    main()
