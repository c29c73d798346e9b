"""Runs of asynchronous servers, replayed in their recorded order on other timings.

    runs      random numbers of workers and servers, bounds 0, 1, 3 and none, SGD with momentum and AdamW, the
              learning rate divided by the staleness or not, several microbatches, clipping, dropout. All
              ranks are threads, and sleep before each step as a seed says; in a third of the runs one worker
              is slow in every step
    replay    the same plan with the record, other seeds, another slow worker: parameters and optimizer states
              of servers, what workers have pulled, and their losses must have the same bits, and the record
              that the replay writes the same updates
    free      the same plan without the record, on the timings of the replay: how often it ends with other
              bits says whether there was anything to replay
    law       no update is more stale than (2 s + 1)(n - 1) under the bound s, with n workers
    verify    each plan equals its definition, in float64, to 1e-10

The figure is the number of runs for which all of this holds, but for the free ones.

    python -m benchmarks.outer.stale_replay
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Literal

import torch

from benchmarks.harness.case_store import CaseStore
from benchmarks.harness.result import Result
from benchmarks.random_plans.combinations import Row
from benchmarks.random_plans.random_models import MODELS, analyzed_model
from meshwright.api import make_plan, parallelize, verify
from meshwright.comm.collectives.group import World
from meshwright.parallel.server.arrival_record import most_staleness, read_record, record_path
from meshwright.parallel.server.stale_server import StaleServer
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.training.trainer import select_local_batch
from meshwright.testing.ranks import run_on_threads

NAME = "stale_replay"
CLAIM = (
    "50 runs of asynchronous parameter servers, replayed in their recorded order on other timings, end with "
    "the same bits; no update is more stale than (2 s + 1)(n - 1)"
)
SEED, NUM_RUNS, NUM_STEPS, NUM_VERIFIED = 30, 50, 6, 3
SLEEP_S, SLOW_S, LIMIT_S = 0.02, 0.06, 600.0
OPTIMIZERS = {
    "sgd": OptimizerConfig("sgd", lr=0.05, momentum=0.5, weight_decay=0.1),
    "adamw": OptimizerConfig("adamw", lr=0.01, weight_decay=0.1),
}


@dataclass(frozen=True)
class Run:
    """An asynchronous run; `bound` None: there is none. `slow`: one worker is slow in every step."""

    number: int
    model: str
    workers: int
    servers: int
    bound: int | None
    optimizer: str
    lr_by_staleness: Literal["none", "inverse"]
    num_microbatches: int
    clip: float
    slow: bool

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in asdict(self).items())

    @property
    def num_samples(self) -> int:
        """The samples of a step of all workers."""
        return self.workers * self.num_microbatches

    def plan(self, record: Path | None = None, replay: Path | None = None) -> Plan:
        """Returns the plan, which writes a record, or follows one."""
        model = MODELS[self.model]
        job = Job(
            ModelConfig(model.name),
            DataConfig("random", sequence=model.sequence_lengths[0]),
            TrainConfig(steps=NUM_STEPS, batch=self.num_samples, clip=self.clip),
            OPTIMIZERS[self.optimizer],
        )
        folders = {"record": str(record or ""), "replay": str(replay or "")}
        strategy = StaleServer(
            servers=self.servers, bound=self.bound, lr_by_staleness=self.lr_by_staleness, **folders
        )
        return make_plan(
            analyzed_model(self.model), job, Mesh(outer=self.workers + self.servers), (strategy,), 1
        )


def draws(seed: int = SEED) -> Iterator[Run]:
    """Yields random runs, without end."""
    number = 0
    while True:
        rng = Random(f"{seed}/{number}")
        yield Run(
            number,
            rng.choice(("llama", "gpt2, dropout")),
            rng.choice((2, 3, 3, 4)),
            rng.choice((1, 1, 2, 3)),
            (0, 1, 3, None)[number % 4],
            rng.choice(tuple(OPTIMIZERS)),
            rng.choice(("none", "inverse")),
            rng.choice((1, 2)),
            rng.choice((0.0, 0.5)),
            rng.random() < 1 / 3,
        )
        number += 1


def train(run: Run, plan: Plan, timing: int) -> list[str]:
    """Returns a digest of all that each rank ends with: `timing` decides when ranks sleep, and how long."""
    batches = MODELS[run.model].batches(NUM_STEPS, run.num_samples)

    def train_rank(world: World) -> str:
        digest, rng = sha256(), Random(f"{timing} {world.rank}")
        with parallelize(analyzed_model(run.model), plan, world=world) as trainer:
            for batch in batches:
                is_slow = run.slow and world.rank == timing % run.workers
                time.sleep(SLOW_S if is_slow else rng.random() * SLEEP_S)
                metrics = trainer.step(select_local_batch(batch, plan, world.rank))
                digest.update(repr((metrics.loss, metrics.grad_norm)).encode())
            for tensor in _tensors(trainer.executor.state.trained_module.parameters):
                digest.update(tensor)
            for optimizer in trainer.executor.state.optimizers:
                for states in optimizer.state.values():
                    digest.update(b"".join(_tensors(states)))
        return digest.hexdigest()

    return run_on_threads(train_rank, plan.mesh, timeout_s=LIMIT_S)


def _tensors(tensors: Mapping[str, object]) -> Iterator[bytes]:
    for _, each in sorted(tensors.items()):
        if isinstance(each, torch.Tensor):
            yield each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def compare(run: Run) -> Row:
    """Returns the row of one run: whether its replay has its bits, its updates by staleness, and more."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        first, second = Path(folder) / "run", Path(folder) / "replay"
        plan = run.plan(record=first)
        servers = plan.sharding.server_indices
        recorded = train(run, plan, 2 * run.number)
        replayed = train(run, run.plan(record=second, replay=first), 2 * run.number + 1)
        free = train(run, run.plan(), 2 * run.number + 1)
        records = [read_record(record_path(str(first), each)) for each in servers]
        again = [read_record(record_path(str(second), each)).updates for each in servers]
    batches = MODELS[run.model].batches(NUM_VERIFIED, run.num_samples)
    verdict = verify(analyzed_model(run.model), run.plan(), batches)
    orders = [each.updates for each in records]
    staleness = sum((each.staleness for each in records), Counter[int]())
    return {
        "case": str(run),
        "bound": "none" if run.bound is None else str(run.bound),
        "replayed": replayed == recorded and again == orders,
        "free": free == recorded,
        "staleness": {str(key): count for key, count in sorted(staleness.items())},
        "most": max(staleness),
        "law": None if run.bound is None else most_staleness(run.bound, run.workers),
        "verified": verdict.passed,
        "error": max(verdict.max_errors.values()),
    }


def holds(row: Row) -> bool:
    """Returns whether the run of `row` was replayed, kept the law and equals its definition."""
    keeps_law = row["law"] is None or row["most"] <= row["law"]
    return bool(row["replayed"] and keeps_law and row["verified"])


def result(rows: Sequence[Row]) -> Result:
    """Returns the result of these rows: how many hold, and their updates by bound and staleness."""
    histograms: dict[str, Counter[int]] = {}
    for row in rows:
        counts = {int(staleness): count for staleness, count in row["staleness"].items()}
        histograms.setdefault(row["bound"], Counter[int]()).update(counts)
    detail = {
        "seed": SEED,
        "steps": NUM_STEPS,
        "replayed": sum(row["replayed"] for row in rows),
        "other_bits_without_record": sum(not row["free"] for row in rows),
        "verified": sum(row["verified"] for row in rows),
        "largest_error": max(row["error"] for row in rows),
        "updates_by_bound_and_staleness": {
            bound: dict(sorted(histograms[bound].items())) for bound in sorted(histograms)
        },
        "findings": [row for row in rows if not holds(row)],
    }
    values = [0.0 if holds(row) else 1.0 for row in rows]
    found = Result.of_count(NAME, CLAIM, values, limit=0.0, bar=NUM_RUNS, detail=detail)
    return replace(found, holds=bool(found.holds) and detail["other_bits_without_record"] > 0)


def main() -> None:
    """Runs and replays all of them, and writes the result."""
    store = CaseStore(NAME)
    rows = store.read()
    chosen = [run for run, _ in zip(draws(), range(NUM_RUNS), strict=False)]
    for run in chosen:
        if str(run) not in rows:
            row = rows[str(run)] = compare(run)
            store.add(row)
            print(holds(row), row["case"], row["staleness"], file=sys.stderr, flush=True)
    print(result([rows[str(run)] for run in chosen]).write(NAME))


if __name__ == "__main__":
    main()
