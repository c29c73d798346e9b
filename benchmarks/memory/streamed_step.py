"""How close a step with states on disk comes to the ideal: reads, steps and writes all beside one another.

A Llama of 52 M parameters in 16 layers on one device in float32, AdamW, 32 tokens a step: 12 bytes per
parameter (what is stepped, and both moments) are read and written once a step, through three buffers of a
layer each. In each round, in turn:

    streamed    a step with `disk_offload`
    in memory   a step of the plan without it: what computing takes alone
    disk alone  the reads and writes of that step, same records, same order, same buffers, and nothing else

    ideal = max(step in memory, what comes before the first read + disk alone)
    ratio = streamed / ideal                                     bar: 1.10; wall seconds, medians of rounds

A second instance of the streamed step, the twin, shows the noise. A step in memory comes before each of the
three that use the disk, in rounds of either order: a disk that has just written is slower. All start anew
several times, since one file may lie in a faster place than another.

    python -m benchmarks.memory.streamed_step            four minutes, on a quiet machine
    python -m benchmarks.memory.streamed_step --quick    a small model, few rounds; writes nothing
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch

from benchmarks.harness.interleaved_timing import (
    LEAST_ROUNDS,
    Cost,
    Rounds,
    Window,
    interval,
    measure,
    pooled,
    verdict,
)
from benchmarks.harness.result import Result
from benchmarks.memory.bounded_host import TOKENS, batch_of, llama
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.backends.threads import single_rank_world
from meshwright.engine.params.rank_file import RankFile
from meshwright.engine.runtime.host_memory import page_aligned
from meshwright.engine.runtime.step_profiler import StepProfiler
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.training.trainer import Trainer

NAME = "streamed_step"
CLAIM = (
    "a step with optimizer states on disk takes at most 1.10 x the longer of computing alone, and of reading "
    "and writing alone"
)
BAR, NUM_BUFFERS = 1.10, 3
FOLDER = "/var/tmp"
WINDOW, QUICK = Window(5, 10, 60), Window(3, 4, 60, window_s=0.0, threshold=64.0, warmup=1)  # of each start
STARTS = 5
SIZES = {"large": (512, 1408, 16), "small": (256, 704, 4)}  # hidden, intermediate, layers


@dataclass(frozen=True)
class Transfer:
    """A read or a write of the step: `nbytes` from byte `begin` of the file on, in the buffer `number`."""

    writes: bool
    begin: int
    nbytes: int
    number: int


def plan_of(analyzed: AnalyzedModel, folder: str) -> Plan:
    """Returns the plan with states in `folder`, or in memory for ""."""
    job = Job(
        ModelConfig("model"),
        DataConfig("example", sequence=TOKENS),
        TrainConfig(batch=1),
        OptimizerConfig("adamw", lr=1e-4),
    )
    strategies = (DiskOffload(folder, num_buffers=NUM_BUFFERS),) if folder else ()
    return make_plan(analyzed, job, Mesh(), strategies)


class EngineStep:
    """One configuration: a step of a plan; it notes the seconds before the first read."""

    def __init__(self, name: str, engine: Trainer) -> None:
        self.name, self._engine, self._batch = name, engine, batch_of(0)

    def step(self) -> Cost:
        """Runs a step."""
        profiler = StepProfiler(torch.device("cpu"))

        def run() -> None:
            self._engine.executor.step(self._batch, profiler=profiler)

        cost = _timed(run)
        spans = profiler.spans()
        reads = [span.begin for span in spans if span.kind == "READ_STATES"]
        before = min(reads) - min(span.begin for span in spans) if reads else 0.0
        return Cost(cost.cpu_s, cost.wall_s, (before,))


class DiskAlone:
    """One configuration: the reads and writes of a step and nothing else."""

    name = "disk alone"

    def __init__(self, transfers: Sequence[Transfer], folder: str) -> None:
        self._transfers = transfers
        self._file = RankFile(folder, max(each.begin + each.nbytes for each in transfers))
        self._file.tensor.fill_(1)
        self._file.drop_cache()
        largest = max(each.nbytes for each in transfers)
        self._buffers = [page_aligned(largest) for _ in range(NUM_BUFFERS)]

    def step(self) -> Cost:
        """Reads and writes once, in the order of the plan."""
        return _timed(self._run)

    def close(self) -> None:
        """Removes the file."""
        self._file.close()

    def _run(self) -> None:
        works = []
        for each in self._transfers:
            start = self._file.start_write if each.writes else self._file.start_read
            works.append(start(each.begin, self._buffers[each.number][: each.nbytes], "alone"))
        for work in works:
            work.wait()


def transfers_of(plan: Plan) -> list[Transfer]:
    """Returns the reads and writes of a step of `plan`, in the order in which they start."""
    found, place, begin = list[Transfer](), dict[str, tuple[int, int]](), 0
    for action in plan.for_rank(0).actions:
        if action.transfer is None or action.kind not in ("READ_STATES", "WRITE_STATES"):
            continue
        if action.kind == "READ_STATES":
            place[action.subject] = begin, len(place) % NUM_BUFFERS
            begin += action.transfer.nbytes
        at, number = place[action.subject]
        found.append(Transfer(action.kind == "WRITE_STATES", at, action.transfer.nbytes, number))
    return found


def _timed(run: Callable[[], None]) -> Cost:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall)


def ideals(rounds: Rounds) -> list[float]:
    """Returns the ideal seconds of each round."""
    return [
        max(costs["in memory"].wall_s, before + costs["disk alone"].wall_s)
        for costs in rounds.clean
        for before in costs["streamed"].notes
        if isinstance(before, float)
    ]


def measured(size: str, window: Window) -> tuple[Rounds, list[Transfer]]:
    """Returns the rounds of the model of `size`, and the reads and writes of a step."""
    analyzed = analyze(lambda: llama(SIZES[size]), batch_of(0))
    plans = {name: plan_of(analyzed, folder) for name, folder in _folders().items()}
    engines = {
        name: parallelize(analyzed, plan, world=single_rank_world(torch.device("cpu")))
        for name, plan in plans.items()
    }
    transfers = transfers_of(plans["streamed"])
    disk = DiskAlone(transfers, FOLDER)
    try:
        rests = [EngineStep(name, engines["in memory"]) for name in ("in memory", "rest", "last rest")]
        streamed, twin = (EngineStep(name, engines[name]) for name in ("streamed", "twin"))
        order = [rests[0], streamed, rests[1], twin, rests[2], disk]
        return measure(order, window), transfers
    finally:
        disk.close()
        for engine in engines.values():
            engine.close()


def _folders() -> dict[str, str]:
    return {"streamed": FOLDER, "in memory": "", "twin": FOLDER}


def main() -> None:
    """Measures, and writes the result."""
    torch.set_num_threads(1)
    quick = "--quick" in sys.argv[1:]
    size, window = ("small", QUICK) if quick else ("large", WINDOW)
    starts = [measured(size, window) for _ in range(1 if quick else STARTS)]
    rounds, transfers = pooled([part for part, _ in starts]), starts[0][1]
    streamed, ideal = rounds.figures("streamed", "wall_s"), ideals(rounds)
    ratios = [one / other for one, other in zip(streamed, ideal, strict=True)]
    ratio, noise = interval(ratios), interval(rounds.ratios("twin", "streamed", "wall_s"))
    seconds = {
        name: median(rounds.figures(name, "wall_s")) for name in ("streamed", "in memory", "disk alone")
    }
    nbytes = sum(each.nbytes for each in transfers)
    detail = {"seconds": seconds, "ideal": median(ideal), "disk_nbytes": nbytes, "aa": asdict(noise)}
    print(ratio, detail, file=sys.stderr)
    if quick:
        return
    result = Result.of(
        NAME,
        CLAIM,
        values=ratios,
        median=ratio.median,
        spread=(ratio.low, ratio.high),
        bar=BAR,
        holds=verdict(ratio, noise, BAR) if len(ratios) >= LEAST_ROUNDS else "unresolved",
        repeats=len(ratios),
        discarded=rounds.discarded,
        detail=detail,
    )
    print(result.write(NAME))


if __name__ == "__main__":
    main()
