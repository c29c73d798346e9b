"""Bytes of weights, gradients and optimizer states under ZeRO: the paper's table from plans, and plans
against the memory of real ranks.

*Analytic.* data/zero_states.csv holds the paper's figures: 7.5 B, 128 B and 1 T parameters, 2-byte weights
and gradients, and 12 bytes of optimizer states. Each cell is computed from a plan of a model of that size
(planner/program_cost/rank_memory.py); it may differ by one unit of the last printed digit. Only states are
compared, as in the paper; the buffers of fixed size that a plan has in addition are shown.

*Against FSDP.* From 8 to 128 ranks, states of 4 + 4 + 8 bytes shrink by 16 P (1/8 - 1/128): for Llama 3 8B by
14.02 GiB, here from two plans. The difference that torchtitan measured (data/fsdp_memory.csv) is shown for
comparison: it is one of peaks, with all temporary memory.

*Live.* 2 and 4 processes over gloo train a Llama of 4.9 M parameters, two microbatches of one short sample.
Live bytes are all tensor storages that Python reaches (benchmarks/harness/live_bytes.py), less those from
before. After the third step they are compared with the states and buffers of the plan; at the peak within the
step, with the same plus the program's peak of temporary memory: the gradients of the block whose backward
runs, and activations. Each may differ by 1 % and two buffers of the largest block. The difference is the
memory in which messages arrive over gloo (comm/backends/gloo_workarounds.py), which a plan does not count:
two buffers, as large as a block.

All figures are differences as shares of the allowed difference, so each case holds at 1 or below.
"""

import csv
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.data_parallel.small_llamas import Case, make_executor, random_samples
from benchmarks.harness.live_bytes import add_live_probes, live_bytes
from benchmarks.harness.result import Result
from benchmarks.models.synthetic_models import even, llama3_8b
from meshwright.api import select_local_batch
from meshwright.comm.backends.gloo_workarounds import NUM_RECEIVE_BUFFERS
from meshwright.comm.collectives.group import World
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, PrecisionConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ModelSpec
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost.rank_memory import StateBytes, state_bytes, transient_nbytes
from meshwright.testing.ranks import ProcessPool

NAME = "zero_states"
CLAIM = "ZeRO's table of bytes per rank follows from plans, and live bytes on 2 and 4 ranks are the plan's"
DATA = Path(__file__).parents[1] / "data"
BLOCKS = {7_500_000_000: 30, 128_000_000_000: 64, 1_000_000_000_000: 125}
MIXED = PrecisionConfig(
    "bfloat16", "bfloat16", "bfloat16", master="float32", gradients="bfloat16", optimizer_states="float32"
)
FSDP_RANKS, FSDP_GIB, FSDP_UNIT = (8, 128), 14.02, 0.01
SHARE = 0.01


@dataclass(frozen=True)
class Cell:
    """A figure of the paper for a model, a stage (0: none) and a number of ranks, in GB, printed with
    `digits` decimals.
    """

    model: str
    parameters: int
    stage: int
    ranks: int
    printed: float
    digits: int


def cells(path: Path = DATA / "zero_states.csv") -> list[Cell]:
    """Returns the cells of the paper's figure and table."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Cell(
                row["model"],
                int(row["parameters"]),
                int(row["stage"]),
                int(row["ranks"]),
                float(row["gigabytes"]),
                len(row["gigabytes"].partition(".")[2]),
            )
            for row in csv.DictReader(file)
        ]


def shape_plan(model_spec: ModelSpec, stage: int, ranks: int, precision: PrecisionConfig) -> Plan:
    """Returns the plan of a model without values over `ranks`: DDP at stage 0, else ZeRO."""
    job = Job(ModelConfig("paper"), DataConfig("example"), TrainConfig(batch=ranks), precision=precision)
    if stage == 0:
        return Plan.make(job, Mesh(dp_replicate=ranks), model_spec, (BatchSplit(), DDP()))
    return Plan.make(job, Mesh(dp_shard=ranks), model_spec, (BatchSplit("dp_shard"), ZeRO(stage=stage)))


@cache
def states_of(parameters: int, stage: int, ranks: int) -> StateBytes:
    """Returns the bytes of rank 0 of the paper's plan."""
    return state_bytes(
        shape_plan(even(str(parameters), parameters, BLOCKS[parameters]), stage, ranks, MIXED), 0
    )


def analytic(cells: Sequence[Cell]) -> Iterator[dict[str, object]]:
    """Yields each cell, and how far the plan is off, in units of its last printed digit."""
    for cell in cells:
        states = states_of(cell.parameters, cell.stage, cell.ranks)
        gigabytes = states.model_states / 1e9
        row = {
            "model": cell.model,
            "stage": cell.stage,
            "ranks": cell.ranks,
            "printed": cell.printed,
            "plan": gigabytes,
        }
        yield {**row, "buffers": states.buffers / 1e9, "off": abs(gigabytes - cell.printed) * 10**cell.digits}


def against_fsdp() -> dict[str, object]:
    """Returns the difference of two plans of Llama 3 8B with float32 states, and the measured difference."""
    few, many = (
        state_bytes(shape_plan(llama3_8b(), 3, ranks, PrecisionConfig()), 0).model_states
        for ranks in FSDP_RANKS
    )
    gib = (few - many) / 2**30
    peaks: dict[str, dict[int, float]] = {}
    with (DATA / "fsdp_memory.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            peaks.setdefault(row["variant"], {})[int(row["ranks"])] = float(row["peak_gib"])
    measured = {
        variant: round(found[FSDP_RANKS[0]] - found[FSDP_RANKS[1]], 2) for variant, found in peaks.items()
    }
    law = 16 * llama3_8b().numel * (1 / FSDP_RANKS[0] - 1 / FSDP_RANKS[1]) / 2**30
    figures = {"plan_gib": gib, "law_gib": law, "printed_gib": FSDP_GIB, "torchtitan_gib": measured}
    return {**figures, "off": max(abs(gib - FSDP_GIB), abs(gib - law)) / FSDP_UNIT}


def cases() -> list[Case]:
    """Returns the cases that are measured on processes."""
    found = []
    for precision in (PrecisionConfig(), MIXED):
        more = {"num_micro": 2, "precision": precision, "model": "small"}
        for ranks in (2, 4):
            found += [Case(ZeRO(stage=stage), ranks, **more) for stage in (1, 2, 3)]
        found += [Case(ZeRO(stage=stage, replicate_axis="dp_replicate"), 2, 2, **more) for stage in (1, 2, 3)]
    return found


def measure_live_bytes(world: World, case: Case) -> tuple[int, int]:
    """Returns the peak live bytes of this rank in the third step of `case`, and the live bytes after it."""
    gc.collect()
    gc.freeze()  # so that the modules of torch and transformers are not scanned at every probe
    plan, samples, is_active = add_live_probes(case.plan()), [0], [False]
    batch = select_local_batch(random_samples(case.num_samples), plan, world.rank)
    before = live_bytes()
    executor = make_executor(
        case,
        plan,
        world,
        {"COMPARE": lambda action, state: samples.append(live_bytes()) if is_active[0] else None},
    )
    for step in range(3):
        is_active[0] = step == 2
        executor.step(batch)
    gc.collect()
    after = live_bytes()
    executor.close()
    gc.unfreeze()
    return max(samples) - before, after - before


def block_buffer(plan: Plan) -> int:
    """Returns the bytes of the largest unsharded block."""
    return (
        max(flat_param.numel for flat_param in plan.rank_view(0).flat_param_specs.values())
        * FLOAT_NBYTES[plan.job.precision.parameters]
    )


def compare_live_bytes(pool: ProcessPool, cases: Sequence[Case]) -> Iterator[dict[str, object]]:
    """Yields the comparison of each case; writes one line about each to stderr."""
    for case in cases:
        plan = case.plan()
        planned = [state_bytes(plan, rank) for rank in range(plan.mesh.world_size)]
        measured = pool.run(measure_live_bytes, case.mesh, case, timeout_s=300)
        extra, transient, off, ratios = 2 * block_buffer(plan), transient_nbytes(plan), 0.0, []
        for states, (peak, after) in zip(planned, measured, strict=True):
            allowed, planned_peak = SHARE * states.total + extra, states.total + transient
            off = max(off, abs(peak - planned_peak) / allowed, abs(after - states.total) / allowed)
            ratios.append({"peak": peak / planned_peak, "after": after / states.total})
        print(
            f"{case}: off {off:.3f}, of the plan's {planned[0].total:,} bytes: {ratios[0]}", file=sys.stderr
        )
        yield {
            "case": str(case),
            "plan": [each.as_dict() for each in planned],
            "live": [{"peak": peak, "after": after} for peak, after in measured],
            "transient": transient,
            "receive_buffers": _receive_nbytes(plan),
            "rest": [
                after - states.total - _receive_nbytes(plan)
                for states, (_, after) in zip(planned, measured, strict=True)
            ],
            "ratios": ratios,
            "two_block_buffers": extra,
            "off": off,
        }


def _receive_nbytes(plan: Plan) -> int:
    """Returns the bytes of the receive buffers of gloo reduce-scatters."""
    largest = max(flat_param.numel for flat_param in plan.rank_view(0).flat_param_specs.values())
    return NUM_RECEIVE_BUFFERS * largest * FLOAT_NBYTES[plan.job.precision.reduce]


def result(
    paper: Sequence[dict[str, object]], fsdp: dict[str, object], live: Sequence[dict[str, object]]
) -> Result:
    """Returns the result: how many cells and ranks are within the allowed difference."""
    values = [float(str(row["off"])) for row in (*paper, fsdp, *live)]
    detail = {"paper": list(paper), "fsdp": fsdp, "live": list(live)}
    return Result.of_count(NAME, CLAIM, values, limit=1.0, bar=len(values), detail=detail)


def main() -> None:
    """Compute the table from plans, measure on processes, and write the result."""
    paper = list(analytic(cells()))
    print(f"analytic: {max(float(str(row['off'])) for row in paper):.2f} units off at most", file=sys.stderr)
    with ProcessPool(4, shared_memory=False) as pool:
        found = result(paper, against_fsdp(), list(compare_live_bytes(pool, cases())))
    print(f"{found.median:g} of {found.bar:g} hold", file=sys.stderr)
    print(found.write(NAME))


if __name__ == "__main__":
    main()
