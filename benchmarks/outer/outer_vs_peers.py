"""Rounds of two sites behind a slow link, beside those of torch, Accelerate and torchft, in one run.

The Llama of 25.6 M parameters of `outer_links`, one sample of 128 tokens at each of two sites, AdamW and
clipping, over gloo; the sites are network namespaces whose links pass 100 Mbit/s, and share two cores. A turn
is a round of 50 steps. All sides are measured in turn.

    local_sgd    parameters averaged, beside torch's PostLocalSGD and Accelerate's LocalSGD
    diloco       outer Nesterov steps, beside torchft 0.2's DiLoCo, with one fragment
    twin         PostLocalSGD once more: what the two differ by is noise

    bar          the wall seconds of a round of ours are at most those of each peer

A peer that does not install or start is told with its message, and the others are measured. Beside the
ratios: the bytes that the interface of the first site has sent in a round, and the loss of its last step.
torch and Accelerate average parameters under DDP alone, torchft those of one rank per site or of FSDP2.

    python -m benchmarks.outer.outer_vs_peers            about half an hour
    python -m benchmarks.outer.outer_vs_peers --quick    two rounds of 4 steps of a toy; writes nothing
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from subprocess import CalledProcessError
from typing import Any, NamedTuple

from benchmarks.harness.interleaved_timing import (
    Rounds,
    Window,
    interval,
    measure,
    overall,
    verdict,
)
from benchmarks.harness.peer_environment import ensure_packages
from benchmarks.harness.rank_processes import RankFailed, Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import HEAVY, plan_step
from benchmarks.outer.outer_links import RATE_MBIT, WORKLOAD, sent_nbytes
from benchmarks.outer.peer_sites import (
    STARTED,
    SitePlace,
    accelerate_local,
    post_local_sgd,
    torchft_diloco,
)
from meshwright.comm.rendezvous import RendezvousEndpoint
from meshwright.comm.world import init_world
from meshwright.parallel.outer.diloco import DiLoCo
from meshwright.parallel.outer.local_sgd import LocalSGD
from meshwright.parallel.outer.rounds import RoundStrategy
from meshwright.plan.sharding.mesh import Mesh
from tests.network.virtual_hosts import VirtualHosts, unavailable_reason, virtual_hosts

NAME = "outer_vs_peers"
CLAIM = (
    "two sites at 100 Mbit/s, Llama of 25.6 M, rounds of 50 steps of 256 tokens: a round of ours takes at "
    "most the wall time of torch's PostLocalSGD, Accelerate's LocalSGD and torchft's DiLoCo"
)
SITES, TORCHFT = 2, ("torchft==0.2.0", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
OURS = {"PostLocalSGD": "local_sgd", "Accelerate": "local_sgd", "torchft": "diloco"}  # by peer
MAY_BE_MISSING = ("Accelerate", "torchft")
BAR = 1.0
WINDOW = Window(clean=7, most=10, limit_s=1_500, warmup=1, threshold=0.5)
QUICK = Window(clean=2, most=2, warmup=1, threshold=float("inf"))
SiteStep = Callable[[], object]


class Turn(NamedTuple):
    """What one site has sent in a turn, and the loss of its last step."""

    sent: int
    loss: object


def our_site(strategy: RoundStrategy) -> Callable[[SitePlace, str, int], SiteStep]:
    """Returns what builds the step of a site of ours."""

    def build(place: SitePlace, workload: str, every: int) -> SiteStep:
        mesh = Mesh(outer=place.size)
        joining = init_world(mesh, place.rank, endpoint=place.endpoint, timeout_s=300)
        return plan_step(workload, mesh, (strategy,), STARTED.enter_context(joining))

    return build


def sides(every: int) -> Mapping[str, Callable[[SitePlace, str, int], SiteStep]]:
    """Returns what builds the step of a site of each side, with rounds of `every` steps."""
    return {
        "PostLocalSGD": post_local_sgd,
        "Accelerate": accelerate_local,
        "local_sgd": our_site(LocalSGD(sync_every=every)),
        "torchft": torchft_diloco,
        "diloco": our_site(DiLoCo(sync_every=every)),
        "twin": post_local_sgd,
    }


def site_turn(
    rank: int, size: int, *, side: str, workload: str, every: int, places: Sequence[SitePlace]
) -> SiteStep:
    """Builds, in each process of `Ranks`, a turn of a side."""
    places[rank].location.enter()
    step = sides(every)[side](places[rank], workload, every)

    def turn() -> Turn:
        begun = sent_nbytes()
        losses = [step() for _ in range(every)]
        return Turn(sent_nbytes() - begun, losses[-1])

    return turn


def measure_sides(
    every: int, window: Window, missing: Mapping[str, str], workload: str = WORKLOAD
) -> tuple[Rounds, dict[str, str]]:
    """Returns the rounds of all sides that start, and why others do not, those of `missing` among them."""
    found = dict(missing)
    with virtual_hosts(SITES, RATE_MBIT) as hosts, ExitStack() as opened:
        started = list[Ranks]()
        for number, side in enumerate(each for each in sides(every) if each not in missing):
            given: dict[str, Any] = {"workload": workload, "every": every, "places": _places(hosts, number)}
            try:
                ranks = opened.enter_context(Ranks(side, site_turn, SITES, preload=HEAVY, side=side, **given))
                ranks.step()
            except RankFailed as failure:
                if side not in MAY_BE_MISSING:
                    raise
                found[side] = str(failure)
            else:
                started.append(ranks)
        return measure(started, window), found


def _places(hosts: VirtualHosts, number: int) -> list[SitePlace]:
    endpoint = RendezvousEndpoint(hosts[0].address, 22000 + number)
    return [SitePlace(rank, SITES, host.location, host.address, endpoint) for rank, host in enumerate(hosts)]


def result(rounds: Rounds, every: int, missing: Mapping[str, str]) -> Result:
    """Returns the result, of rounds of `every` steps; it shows the peer that is nearest. `missing` are the
    peers that did not run, with the reason.
    """
    aa = interval(rounds.ratios("twin", "PostLocalSGD", "wall_s"))
    pairs = {
        (ours, peer): rounds.ratios(ours, peer, "wall_s")
        for peer, ours in OURS.items()
        if peer not in missing
    }
    ratios = {pair: interval(values) for pair, values in pairs.items()}
    nearest = max(ratios, key=lambda pair: ratios[pair].high)
    names = list(rounds.clean[0])
    return Result.of(
        NAME,
        CLAIM,
        values=pairs[nearest],
        median=ratios[nearest].median,
        spread=(ratios[nearest].low, ratios[nearest].high),
        bar=BAR,
        holds=overall(
            [
                *(verdict(each, aa, BAR) for each in ratios.values()),
                *("unresolved" for _ in missing),
            ]
        ),
        repeats=len(rounds.clean),
        discarded=rounds.discarded,
        detail={
            "steps of a round": every,
            "wall": {f"{ours} / {peer}": asdict(each) for (ours, peer), each in ratios.items()},
            "cpu": {f"{ours} / {peer}": asdict(interval(rounds.ratios(ours, peer))) for ours, peer in ratios},
            "aa": asdict(aa),
            "median_wall_s": {name: median(rounds.figures(name, "wall_s")) for name in names},
            "sent by the first site": {
                name: median(each.sent for each in _turns(rounds, name)) for name in names
            },
            "last loss": {name: _turns(rounds, name)[-1].loss for name in names},
            "not measured": dict(missing),
            "versions": {name: _version(name) for name in ("accelerate", "torchft")},
        },
    )


def _turns(rounds: Rounds, side: str) -> list[Turn]:
    """Returns the turns of the first site of `side`."""
    notes = (costs[side].notes[0] for costs in rounds.clean)
    return [each for each in notes if isinstance(each, Turn)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Measure and write the result; with --quick, only measure a little."""
    parser = argparse.ArgumentParser(description="rounds of sites behind a slow link, beside those of peers")
    parser.add_argument("--quick", action="store_true", help="two short rounds of a toy; writes nothing")
    quick = parser.parse_args().quick
    if why := unavailable_reason():
        sys.exit(why)
    missing = dict[str, str]()
    try:
        ensure_packages(f"benchmarks.outer.{NAME}", "torchft", TORCHFT)
    except CalledProcessError as failure:
        missing["torchft"] = f"it does not install: {failure}"
    every, window = (4, QUICK) if quick else (50, WINDOW)
    rounds, missing = measure_sides(every, window, missing, "toy8" if quick else WORKLOAD)
    found = result(rounds, every, missing)
    print(found.detail, file=sys.stderr)
    if not quick:
        print(found.write(NAME))


if __name__ == "__main__":
    main()
