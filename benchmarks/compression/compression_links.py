"""Steps with compressed gradients against exact ones between two hosts, at 100 Mbit/s and at 1 Gbit/s.

A Llama of 25.6 M parameters, 256 tokens in a step, over gloo. Sides of a group are measured in turn in one
run; a second instance of its first side shows the noise.

    one rank per host      ddp with int8 or powersgd (few buckets, and many), torch's DDP, its PowerSGD hook
                           (rank 4, one bucket: with more it ends with an error on gloo)
    two ranks per host     zero 2, zero 3, tp 2 or pp 2 within the host, copies across hosts: only the sums of
                           gradients across hosts are codes; 100 Mbit/s alone, each with its own exact plan

Hosts are network namespaces (tests/network/virtual_hosts.py), which share two cores.

    python -m benchmarks.compression.compression_links              about 25 minutes
    python -m benchmarks.compression.compression_links --quick      three rounds at 1 Gbit/s, nothing written
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any, Literal

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
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
    "Mbit/s, 1.5 x at 1 Gbit/s, 2.8 x with zero 2, zero 3, tp 2 or pp 2 inside hosts; "
    "PowerSGD is at least as fast as torch's hook"
)
HOSTS, SLOW, FAST = 2, 100, 1000  # rates in Mbit/s
BARS = {SLOW: 3.1, FAST: 1.5}  # of ddp / ddp with int8
INNER_BAR, TORCH_BAR = 2.8, 1.0
PAIRS = {  # what is compared with what, with one rank per host
    "ddp int8": "ddp",
    "ddp powersgd": "ddp",
    "ddp powersgd, many buckets": "ddp",
    "torch ddp powersgd": "torch ddp",
}
WINDOWS = {
    100: Window(clean=9, most=12, limit_s=600, warmup=1, threshold=0.5),
    1000: Window(clean=12, most=24, limit_s=240, warmup=2, threshold=0.7),
}
CAST_HOOKS = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
OPENED = ExitStack()  # what a rank has opened, as long as its process lives
QUICK = Window(clean=3, most=3, warmup=1, threshold=float("inf"))
Tables = tuple[Mapping[str, Any], ...]  # strategies, as in a config
INT8, POWERSGD = (
    {"name": "compress", "mode": "int8"},
    {"name": "compress", "mode": "powersgd", "rank": 4},
)
SPLIT = {"name": "batch_split"}
DDP = (SPLIT, {"name": "ddp"})
FLAT = Mesh(dp_replicate=HOSTS)
SIDES: Mapping[str, Tables] = {
    "ddp": DDP,
    "ddp int8": (*DDP, INT8),
    "ddp powersgd": (*DDP, POWERSGD),
    "ddp powersgd, many buckets": (SPLIT, {"name": "ddp", "bucket_mb": 4.0}, POWERSGD),
}
SHARDED = Mesh(dp_replicate=HOSTS, dp_shard=2)
SPLITS = (SPLIT, {"name": "batch_split", "axis": "dp_shard"})
HYBRID = {"name": "zero", "replicate_axis": "dp_replicate"}
INNER: Mapping[str, tuple[Mesh, Tables]] = {  # exact plans of two ranks per host
    "zero 2": (SHARDED, (*SPLITS, {**HYBRID, "stage": 2})),
    "zero 3": (SHARDED, (*SPLITS, {**HYBRID, "stage": 3})),
    "tp 2": (Mesh(dp_replicate=HOSTS, tp=2), (*DDP, {"name": "tensor_parallel"})),
    "pp 2": (Mesh(dp_replicate=HOSTS, pp=2), (*DDP, {"name": "pipeline"})),
}


def our_step(
    rank: int,
    size: int,
    *,
    locations: Sequence[NetworkLocation],
    endpoint: RendezvousEndpoint,
    mesh: Mesh,
    strategies: Tables,
    across: str = "dp_replicate",
) -> Callable[[], object]:
    """Builds, in each process of `Ranks`, the step of a plan; hosts are divided along the axis `across`."""
    locations[mesh.coordinate(rank)[across]].enter()
    world = OPENED.enter_context(init_world(mesh, rank, endpoint=endpoint, timeout_s=300))
    workload = "small" if size == HOSTS else "short4"
    return plan_step(workload, mesh, [make_strategy(each) for each in strategies], world)


def torch_ddp_step(
    rank: int,
    size: int,
    *,
    locations: Sequence[NetworkLocation],
    endpoint: RendezvousEndpoint,
    hook: Literal["", "powersgd", "bf16", "fp16"] = "",
) -> Callable[[], object]:
    """Builds the step of torch's DDP, with one of its communication hooks or without."""
    locations[rank].enter()
    OPENED.enter_context(init_world(FLAT, rank, endpoint=endpoint, timeout_s=300))

    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        if hook == "powersgd":
            wrapped = DistributedDataParallel(model, bucket_cap_mb=1000, gradient_as_bucket_view=True)
            state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook)
            return wrapped
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if hook:
            wrapped.register_comm_hook(None, CAST_HOOKS[hook])
        return wrapped

    return torch_step(rank, size, WORKLOADS["small"], wrap)


def make_strategy(table: Mapping[str, Any]) -> Strategy:
    """Returns the strategy of a table of a config."""
    options = {key: value for key, value in table.items() if key not in ("name", "mode")}
    modes = STRATEGIES[table["name"]]
    return modes[table.get("mode", next(iter(modes)))](**options)


@contextmanager
def open_hosts(rate_mbit: int) -> Iterator[Callable[..., Ranks]]:
    """Yields what opens a side on both hosts: (name, build, number of ranks, arguments of `build`)."""
    with virtual_hosts(HOSTS, rate_mbit) as hosts, ExitStack() as opened:
        ports, locations = iter(range(21000, 22000)), [host.location for host in hosts]

        def open_side(
            name: str, build: Callable[..., Callable[[], object]], size: int = HOSTS, **arguments: Any
        ) -> Ranks:
            endpoint = RendezvousEndpoint(hosts[0].address, next(ports))
            return opened.enter_context(
                Ranks(name, build, size, preload=HEAVY, locations=locations, endpoint=endpoint, **arguments)
            )

        yield open_side


def measure_rate(rate_mbit: int, window: Window) -> Rounds:
    """Returns the rounds of all sides with one rank per host, at `rate_mbit`."""
    with open_hosts(rate_mbit) as open_side:
        sides = [open_side(name, our_step, mesh=FLAT, strategies=each) for name, each in SIDES.items()]
        sides += [open_side("twin", our_step, mesh=FLAT, strategies=DDP)]
        sides += [open_side("torch ddp", torch_ddp_step)]
        sides += [open_side("torch ddp powersgd", torch_ddp_step, hook="powersgd")]
        return measure(sides, window)


def measure_inner(name: str, rate_mbit: int, window: Window) -> Rounds:
    """Returns the rounds of "exact", "int8" and "twin" of the plan `name`, with two ranks per host."""
    mesh, strategies = INNER[name]
    sides = {"exact": strategies, "int8": (*strategies, INT8), "twin": strategies}
    with open_hosts(rate_mbit) as open_side:
        return measure(
            [
                open_side(side, our_step, mesh.world_size, mesh=mesh, strategies=each)
                for side, each in sides.items()
            ],
            window,
        )


def median_walls(rounds: Rounds) -> dict[str, float]:
    """Returns the median seconds of a step of each side."""
    return {name: round(median(rounds.figures(name, "wall_s")), 3) for name in rounds.clean[0]}


def result(found: Mapping[int, Rounds], inner: Mapping[str, Rounds]) -> Result:
    """Returns the result; it shows ddp at the slower rate."""
    verdicts, detail = list[bool](), dict[str, object]()
    for rate, rounds in found.items():
        factors = {name: interval(rounds.ratios(base, name, "wall_s")) for name, base in PAIRS.items()}
        against_torch = {
            name: interval(rounds.ratios("torch ddp powersgd", name, "wall_s"))
            for name in PAIRS
            if name.startswith("ddp powersgd")
        }
        verdicts.append(factors["ddp int8"].low >= BARS[rate])
        if rate == SLOW:
            verdicts += [each.median >= TORCH_BAR for each in against_torch.values()]
        detail[f"{rate} Mbit/s"] = {
            "factors": {name: asdict(each) for name, each in factors.items()},
            "torch powersgd / ours": {name: asdict(each) for name, each in against_torch.items()},
            "aa": asdict(interval(rounds.ratios("twin", "ddp", "wall_s"))),
            **counts(rounds),
        }
    for name, rounds in inner.items():
        factor = interval(rounds.ratios("exact", "int8", "wall_s"))
        verdicts.append(factor.low >= INNER_BAR)
        detail[f"{SLOW} Mbit/s, {name}"] = {
            "factor": asdict(factor),
            "aa": asdict(interval(rounds.ratios("twin", "exact", "wall_s"))),
            **counts(rounds),
        }
    shown = found[SLOW]
    factor = interval(shown.ratios("ddp", "ddp int8", "wall_s"))
    return Result.of(
        NAME,
        CLAIM,
        values=shown.ratios("ddp", "ddp int8", "wall_s"),
        median=factor.median,
        spread=(factor.low, factor.high),
        bar=BARS[SLOW],
        holds=overall(verdicts),
        repeats=min(len(rounds.clean) for rounds in (*found.values(), *inner.values())),
        discarded=sum(rounds.discarded for rounds in (*found.values(), *inner.values())),
        detail=detail,
    )


def counts(rounds: Rounds) -> dict[str, object]:
    """Returns the median steps and the numbers of rounds, for the details of a result."""
    return {
        "median_wall_s": median_walls(rounds),
        "rounds": len(rounds.clean),
        "discarded": rounds.discarded,
    }


def lines(title: str, rounds: Rounds, pairs: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each pair."""
    for name, base in pairs.items():
        yield f"{title}: {base} / {name} = {interval(rounds.ratios(base, name, 'wall_s'))}"
    yield f"{title}: {median_walls(rounds)}"


def main() -> None:
    """Measure and write the result; with --quick, only measure a little."""
    parser = argparse.ArgumentParser(description="compressed gradients between hosts")
    parser.add_argument("--quick", action="store_true", help="three rounds at 1 Gbit/s; nothing is written")
    quick = parser.parse_args().quick
    if why := unavailable_reason():
        sys.exit(why)
    found, inner = dict[int, Rounds](), dict[str, Rounds]()
    for rate in (FAST,) if quick else BARS:
        found[rate] = measure_rate(rate, QUICK if quick else WINDOWS[rate])
        print("\n".join(lines(f"{rate} Mbit/s", found[rate], PAIRS)), file=sys.stderr)
    for name in INNER:
        inner[name] = measure_inner(name, FAST if quick else SLOW, QUICK if quick else WINDOWS[SLOW])
        pairs = {"int8": "exact", "twin": "exact"}
        print("\n".join(lines(name, inner[name], pairs)), file=sys.stderr)
    if not quick:
        print(result(found, inner).write(NAME))


if __name__ == "__main__":
    main()
