"""Steps with compressed gradients against exact ones between two hosts, at 100 Mbit/s and at 1 Gbit/s.

A Llama of 25.6 M parameters, one sample of 128 tokens on each of two hosts (256 in a step), over gloo. All
sides of a rate are measured in turn in one run: torch DDP, its PowerSGD hook (rank 4, one bucket: with more
it dies on gloo), and our plans, exact and compressed; a second instance of the first side shows the noise.

    ddp            int8 and powersgd against ddp without them, and against torch
    zero 2, 3      int8 reduce-scatters against exact ones; at stage 3 weights still travel exactly

Hosts are network namespaces (tests/network/virtual_hosts.py), which share two cores.

    python -m benchmarks.compression.compression_links --quick      three rounds at 1 Gbit/s, nothing written
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.interleaved_timing import Rounds, Window, interval, measure, overall
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import HEAVY, WORKLOADS, plan_step, torch_step
from meshwright.comm.rendezvous import RendezvousEndpoint
from meshwright.comm.world import init_world
from meshwright.parallel import STRATEGIES
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.rank_worker import NetworkLocation
from tests.network.virtual_hosts import unavailable_reason, virtual_hosts

NAME = "compression_links"
CLAIM = (
    "two hosts, Llama of 25.6 M, 256 tokens a step: int8 gradients are at least 3.1 x as fast as ddp at 100 "
    "Mbit/s, and 1.5 x at 1 Gbit/s"
)
WORKLOAD, HOSTS = "small", 2
BARS = {100: 3.1, 1000: 1.5}  # of ddp / ddp with int8, by Mbit/s
PAIRS = {  # what is compared with what
    "ddp int8": "ddp",
    "ddp powersgd": "ddp",
    "torch ddp powersgd": "torch ddp",
    "zero 2 int8": "zero 2",
    "zero 3 int8": "zero 3",
}
WINDOWS = {
    100: Window(clean=5, most=8, limit_s=600, warmup=1, threshold=0.5),
    1000: Window(clean=12, most=24, limit_s=240, warmup=2, threshold=0.7),
}
OPENED = ExitStack()  # what a rank has opened, as long as its process lives
QUICK = Window(clean=3, most=3, warmup=1, threshold=float("inf"))
INT8, POWERSGD = (
    {"name": "compress", "mode": "int8"},
    {"name": "compress", "mode": "powersgd", "rank": 4},
)
DDP = ({"name": "batch_split"}, {"name": "ddp"})
SIDES: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "ddp": DDP,
    "ddp int8": (*DDP, INT8),
    "ddp powersgd": (*DDP, POWERSGD),
    "zero 2": ({"name": "batch_split"}, {"name": "zero", "axis": "dp_replicate", "stage": 2}),
    "zero 2 int8": ({"name": "batch_split"}, {"name": "zero", "axis": "dp_replicate", "stage": 2}, INT8),
    "zero 3": ({"name": "batch_split"}, {"name": "zero", "axis": "dp_replicate", "stage": 3}),
    "zero 3 int8": ({"name": "batch_split"}, {"name": "zero", "axis": "dp_replicate", "stage": 3}, INT8),
}


def our_step(
    rank: int,
    size: int,
    *,
    locations: Sequence[NetworkLocation],
    endpoint: RendezvousEndpoint,
    strategies: Sequence[Mapping[str, Any]],
) -> Callable[[], object]:
    """Builds, in each process of `Ranks`, the step of a plan."""
    locations[rank].enter()
    mesh = Mesh(dp_replicate=size)
    world = OPENED.enter_context(init_world(mesh, rank, endpoint=endpoint, timeout_s=300))
    return plan_step(WORKLOAD, mesh, [make_strategy(each) for each in strategies], world)


def torch_ddp_step(
    rank: int,
    size: int,
    *,
    locations: Sequence[NetworkLocation],
    endpoint: RendezvousEndpoint,
    powersgd: bool,
) -> Callable[[], object]:
    """Builds the step of torch's DDP, with its PowerSGD hook or without."""
    locations[rank].enter()
    OPENED.enter_context(init_world(Mesh(dp_replicate=size), rank, endpoint=endpoint, timeout_s=300))

    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        if not powersgd:
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1000, gradient_as_bucket_view=True)
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook)
        return wrapped

    return torch_step(rank, size, WORKLOADS[WORKLOAD], wrap)


def make_strategy(table: Mapping[str, Any]) -> Strategy:
    """Returns the strategy of a table of a config."""
    options = {key: value for key, value in table.items() if key not in ("name", "mode")}
    modes = STRATEGIES[table["name"]]
    return modes[table.get("mode", next(iter(modes)))](**options)


def measure_rate(rate_mbit: int, window: Window) -> Rounds:
    """Returns the rounds of all sides between two hosts of `rate_mbit`."""
    with virtual_hosts(HOSTS, rate_mbit) as hosts, ExitStack() as opened:
        ports = iter(range(21000, 22000))

        def open_side(name: str, build: Callable[..., Callable[[], object]], **arguments: Any) -> Ranks:
            endpoint = RendezvousEndpoint(hosts[0].address, next(ports))
            locations = [host.location for host in hosts]
            return opened.enter_context(
                Ranks(name, build, HOSTS, preload=HEAVY, locations=locations, endpoint=endpoint, **arguments)
            )

        sides = [open_side(name, our_step, strategies=each) for name, each in SIDES.items()]
        sides += [open_side("twin", our_step, strategies=DDP)]
        sides += [open_side("torch ddp", torch_ddp_step, powersgd=False)]
        sides += [open_side("torch ddp powersgd", torch_ddp_step, powersgd=True)]
        return measure(sides, window)


def result(found: Mapping[int, Rounds]) -> Result:
    """Returns the result; it shows the slower rate."""
    verdicts, detail = list[bool](), dict[str, object]()
    for rate, rounds in found.items():
        factors = {name: interval(rounds.ratios(base, name, "wall_s")) for name, base in PAIRS.items()}
        against_torch = interval(rounds.ratios("torch ddp powersgd", "ddp powersgd", "wall_s"))
        verdicts.append(factors["ddp int8"].low >= BARS[rate])
        detail[f"{rate} Mbit/s"] = {
            "factors": {name: asdict(each) for name, each in factors.items()},
            "torch powersgd / ours": asdict(against_torch),
            "aa": asdict(interval(rounds.ratios("twin", "ddp", "wall_s"))),
            "median_wall_s": {name: median(rounds.figures(name, "wall_s")) for name in rounds.clean[0]},
            "rounds": len(rounds.clean),
            "discarded": rounds.discarded,
        }
    shown = found[min(found)]
    factor = interval(shown.ratios("ddp", "ddp int8", "wall_s"))
    return Result.of(
        NAME,
        CLAIM,
        values=shown.ratios("ddp", "ddp int8", "wall_s"),
        median=factor.median,
        spread=(factor.low, factor.high),
        bar=BARS[min(found)],
        holds=overall(verdicts),
        repeats=min(len(rounds.clean) for rounds in found.values()),
        discarded=sum(rounds.discarded for rounds in found.values()),
        detail=detail,
    )


def lines(rate: int, rounds: Rounds) -> Iterator[str]:
    """Yields a line for each pair."""
    for name, base in PAIRS.items():
        yield f"{rate} Mbit/s: {base} / {name} = {interval(rounds.ratios(base, name, 'wall_s'))}"
    wall = {name: round(median(rounds.figures(name, "wall_s")), 3) for name in rounds.clean[0]}
    yield f"{rate} Mbit/s: {wall}"


def main() -> None:
    """Measure and write the result; with --quick, only measure a little."""
    parser = argparse.ArgumentParser(description="compressed gradients between hosts")
    parser.add_argument("--quick", action="store_true", help="three rounds at 1 Gbit/s; nothing is written")
    quick = parser.parse_args().quick
    if why := unavailable_reason():
        sys.exit(why)
    found = dict[int, Rounds]()
    for rate in (1000,) if quick else BARS:
        found[rate] = measure_rate(rate, QUICK if quick else WINDOWS[rate])
        print("\n".join(lines(rate, found[rate])), file=sys.stderr)
    if not quick:
        print(result(found).write(NAME))


if __name__ == "__main__":
    main()
