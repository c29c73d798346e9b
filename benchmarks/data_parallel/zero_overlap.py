"""The share of ZeRO's communication that computation hides, of the share that can be hidden, between two
hosts at 1 Gbit/s.

Two configurations in turn, two ranks each, on two network namespaces. One waits for every collective as soon
as it is issued (*serial*), the other is the engine as it is (*ours*). The durations of all actions, measured
in the serial step, are given to the simulator, which applies the program's two rules (plan/step/simulator.py:
a stream runs in order, an action starts when the actions that it waits for have ended). The result is the
step with everything hidden that can be (*simulated*).

    serial       F0 ~~ F1 ~~ B1 ~~ B0 ~~ STEP            wall S       can be hidden = S - P
    simulated    F0 F1 B1 B0 .. STEP                     wall P       hidden        = S - O
    ours         F0 F1 B1 B0 ... STEP                    wall O       claim: hidden / can be hidden >= 0.8

Two hosts share two cores here, and a gloo thread that moves bytes takes CPU time from the computation: that
part cannot be hidden.

    python -m benchmarks.data_parallel.zero_overlap --quick     three rounds of each, nothing written
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch

from benchmarks.harness.interleaved_timing import (
    LEAST_ROUNDS,
    Interval,
    Rounds,
    Verdict,
    Window,
    interval,
    measure,
    overall,
)
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import HEAVY, OPTIMIZER, WORKLOADS, Batches
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import Work
from meshwright.comm.rendezvous import RendezvousEndpoint
from meshwright.comm.world import init_world
from meshwright.engine.runtime.step_profiler import ISSUE, WAIT, ProfilerSpan, StepProfiler
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit as SplitBatch
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action, Program
from meshwright.plan.step.simulator import simulate
from meshwright.run.training.trainer import Trainer
from meshwright.testing.rank_worker import NetworkLocation
from tests.network.virtual_hosts import unavailable_reason, virtual_hosts

NAME = "zero_overlap"
RATE_MBIT, BAR = 1000, 0.8
CLAIM = (
    f"two hosts at 1 Gbit/s, large step: ZeRO hides at least {BAR:.0%} of the communication "
    f"that its program allows to hide"
)
# the kernel accounts packet processing to no process, so it looks like outside load (hierarchical_hosts
# measured 0.15 cores of it)
WINDOW = Window(clean=20, most=40, limit_s=300, threshold=0.5)
QUICK = Window(clean=3, most=3, warmup=1, threshold=float("inf"))
STAGES = (2, 3)


@dataclass(frozen=True)
class Case:
    """The rounds of one ZeRO stage."""

    stage: int
    rounds: Rounds

    @property
    def shares(self) -> list[float]:
        """Hidden communication over what can be hidden, round by round."""
        return [(s - o) / (s - p) for s, o, p in zip(*self.walls.values(), strict=True)]

    @property
    def walls(self) -> dict[str, list[float]]:
        """Seconds of the slowest rank: serial, ours, simulated."""
        simulated = [
            max(note for note in costs["serial"].notes if isinstance(note, float))
            for costs in self.rounds.clean
        ]
        return {
            **{name: self.rounds.figures(name, "wall_s") for name in ("serial", "ours")},
            "simulated": simulated,
        }

    @property
    def share(self) -> Interval:
        """The median of the shares, with its interval."""
        return interval(self.shares)

    @property
    def holds(self) -> Verdict:
        """Whether the whole interval is above the bar."""
        if len(self.rounds.clean) < LEAST_ROUNDS:
            return "unresolved"
        return True if self.share.low >= BAR else False if self.share.high < BAR else "unresolved"

    def as_dict(self) -> dict[str, object]:
        """Returns the case as a row of a result's detail."""
        walls = {name: median(found) for name, found in self.walls.items()}
        row = {
            "share": asdict(self.share),
            "holds": self.holds,
            "median_wall_s": walls,
            "shares": self.shares,
        }
        return {
            **row,
            "discarded": self.rounds.discarded,
            "outside_cores": [round(each, 3) for each in self.rounds.outside],
        }


def step(
    rank: int,
    size: int,
    *,
    locations: Sequence[NetworkLocation],
    endpoint: RendezvousEndpoint,
    stage: int,
    serial: bool,
) -> Callable[[], float | None]:
    """Builds, in each process of `Ranks`, one step under ZeRO stage `stage`; a serial step returns its
    simulated seconds.
    """
    torch.set_num_threads(1)
    locations[rank].enter()
    opened = ExitStack()
    mesh, spec, batches = Mesh(dp_shard=size), WORKLOADS["large"], Batches(WORKLOADS["large"])
    world = opened.enter_context(init_world(mesh, rank, endpoint=endpoint, timeout_s=120))
    analyzed = analyze(spec.model(), Batches(spec).next(), loss=token_cross_entropy())
    job = Job(
        ModelConfig("llama"),
        DataConfig("stdlib", sequence=spec.sequence),
        TrainConfig(batch=spec.batch),
        OPTIMIZER,
    )
    plan = make_plan(analyzed, job, mesh, (SplitBatch(axis="dp_shard"), ZeRO(stage=stage)))
    engine = parallelize(analyzed, plan, world=world)
    if serial:
        make_serial(engine.executor)
    return partial(_step, engine, batches, opened, serial)


def _step(engine: Trainer, batches: Batches, opened: ExitStack, serial: bool) -> float | None:
    batch = engine.local_batch(batches.next())
    if not serial:
        engine.step(batch)
        return None
    profiler = StepProfiler(torch.device("cpu"))
    engine.executor.step(batch, profiler=profiler)
    return simulated_s(engine.plan.program, profiler.spans())


def make_serial(executor: StepExecutor) -> None:
    """Makes every action of the comm stream end before the next action begins."""
    works = executor.state.works
    executor._entries = [  # only this benchmark wants it, so there is no option
        (
            action,
            partial(_run_blocking, handler, works) if action.stream == "comm" and handler else handler,
            waits,
        )
        for action, handler, waits in executor._entries
    ]


def _run_blocking(handler: Callable[[Action], None], works: dict[str, Work], action: Action) -> None:
    handler(action)
    if action.name in works:
        works[action.name].wait()


def simulated_s(program: Program, spans: Sequence[ProfilerSpan]) -> float:
    """Returns the seconds of a step whose actions take the times of `spans`, with the overlap that the
    program allows.
    """
    seconds = {span.name: span.end - span.begin for span in spans if span.action is not None}
    comm_calls_s = sum(span.end - span.begin for span in spans if span.kind in (ISSUE, WAIT))
    step_s = max(span.end for span in spans) - min(span.begin for span in spans)
    compute_s = sum(
        span.end - span.begin for span in spans if span.action is not None and span.stream == "compute"
    )
    # glue: the time outside of all actions; it stays on the compute stream
    glue_s = max(0.0, step_s - compute_s - comm_calls_s)
    forwards = [span.name for span in spans if span.action is not None and span.kind == "F"]
    for name in forwards:
        seconds[name] += glue_s / len(forwards)
    return max(tick.end for tick in simulate(program, lambda action: seconds.get(action.name, 0.0)))


def cases(stages: Sequence[int], window: Window) -> Iterator[Case]:
    """Measures the stages; writes one line about each to stderr."""
    with virtual_hosts(2, RATE_MBIT) as hosts:
        ports = iter(range(20000, 30000))
        for stage in stages:
            with ExitStack() as opened:
                sides = [
                    opened.enter_context(
                        Ranks(
                            name,
                            step,
                            2,
                            preload=HEAVY,
                            locations=[hosts[host].location for host in range(2)],
                            endpoint=RendezvousEndpoint(hosts[0].address, next(ports)),
                            stage=stage,
                            serial=name == "serial",
                        )
                    )
                    for name in ("serial", "ours")
                ]
                case = Case(stage, measure(sides, window))
            walls = {name: round(median(found), 3) for name, found in case.walls.items()}
            print(
                f"stage {stage}: hidden / can be hidden {case.share}, {case.holds}; {walls}", file=sys.stderr
            )
            yield case


def main() -> None:
    """Measure and write the result; with --quick, only measure a little."""
    if why := unavailable_reason():
        sys.exit(f"no hosts can be made here: {why}")
    if "--quick" in sys.argv[1:]:
        list(cases(STAGES, QUICK))
        return
    found = list(cases(STAGES, WINDOW))
    worst = min(found, key=lambda case: case.share.low)
    result = Result.of(
        NAME,
        CLAIM,
        values=worst.shares,
        median=worst.share.median,
        spread=(worst.share.low, worst.share.high),
        bar=BAR,
        holds=overall(case.holds for case in found),
        repeats=min(len(case.rounds.clean) for case in found),
        discarded=sum(case.rounds.discarded for case in found),
        detail={f"stage {case.stage}": case.as_dict() for case in found},
    )
    print(result.write(NAME))


if __name__ == "__main__":
    main()
