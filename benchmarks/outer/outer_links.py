"""Two data centres behind a slow link: steps of sites that meet every 50 steps, and what crosses the link.

A Llama of 25.6 M parameters, one sample of 128 tokens at each of two sites (256 in a step), AdamW, over gloo.
The sites are network namespaces (tests/network/virtual_hosts.py) whose links pass 100 Mbit/s by a token
bucket, and which share two cores. All sides are measured in turn in one run; a turn is a round of 50 steps,
for exact data parallelism one step.

    ddp          exact: sums gradients in every step
    alone        the sites never meet: what a step costs without a link
    diloco       all outer gradients at the end of a round, while the sites wait
    streaming    8 fragments of blocks at offsets, each on its way for 4 steps while the sites go on
    int8         the same, with outer gradients as int8 codes (in the paper they are 4 bits wide)

    step         a round of streaming costs at most 1.05 x one of alone (wall seconds); that of int8 is given
                 as well: transport computes on the same two cores, and so do codes
    tokens/s     at least 15 x those of ddp, for diloco and for streaming
    bytes        what the interface behind the token bucket has sent, step by step: no payload between rounds,
                 and in a round 2 (k-1)/k c N with c = 4 bytes (int8: 1 + 1/64); streaming the same in all,
                 but for the last fragment, which travels while the others have their turn; at its peak less
                 than a quarter. The headers of TCP/IP and of gloo come on top; the ledger says payload alone.

    python -m benchmarks.outer.outer_links              about ten minutes
    python -m benchmarks.outer.outer_links --quick      three rounds of 8 steps at 1 Gbit/s; writes nothing
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.harness.interleaved_timing import Rounds, Window, interval, measure, overall
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import HEAVY, WORKLOADS, plan_step
from meshwright.comm.rendezvous import RendezvousEndpoint
from meshwright.comm.world import init_world
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.outer.diloco import DiLoCo
from meshwright.parallel.outer.local_sgd import LocalSGD
from meshwright.parallel.outer.streaming_diloco import StreamingDiLoCo
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.rank_worker import NetworkLocation
from tests.network.virtual_hosts import unavailable_reason, virtual_hosts

NAME = "outer_links"
CLAIM = (
    "two sites at 100 Mbit/s, Llama of 25.6 M, rounds of 50 steps of 256 tokens: a step of streaming DiLoCo "
    "takes at most 1.05 x one without a link, tokens/s are at least 15 x those of ddp, and the link carries "
    "the bytes of the formulas"
)
WORKLOAD, SITES, RATE_MBIT, NEVER, FRAGMENTS = "small", 2, 100, 1_000, 8
STEP_BAR, TOKENS_BAR, HEADERS = 1.05, 15.0, 0.08  # of the bytes that the interface sends
IDLE_NBYTES = 4_096  # in a step without a round: keep-alive packets, no payload
WINDOW = Window(clean=5, most=7, limit_s=900, warmup=1, threshold=0.5)
OPENED = ExitStack()  # what a rank has opened, as long as its process lives
QUICK = Window(clean=3, most=3, warmup=1, threshold=float("inf"))


class Turn(NamedTuple):
    """What the link of one rank has sent in each step of a turn."""

    sent: tuple[int, ...]


def sides(every: int) -> Mapping[str, tuple[Mesh, tuple[Strategy, ...]]]:
    """Returns the mesh and the strategies of each side, with rounds of `every` steps."""
    outer = Mesh(outer=SITES)
    streaming = StreamingDiLoCo(sync_every=every, fragments=FRAGMENTS, delay=4, mixing=0.5)
    return {
        "ddp": (Mesh(dp_replicate=SITES), (BatchSplit(), DDP())),
        "diloco": (outer, (DiLoCo(sync_every=every),)),
        "streaming": (outer, (streaming,)),
        "alone": (outer, (LocalSGD(sync_every=NEVER),)),  # the last fragment of streaming travels then
        "int8": (outer, (streaming, Int8Compression(axis="outer"))),
        "twin": (outer, (LocalSGD(sync_every=NEVER),)),
    }


def site_turn(
    rank: int,
    size: int,
    *,
    locations: Sequence[NetworkLocation],
    endpoint: RendezvousEndpoint,
    side: str,
    every: int,
) -> Callable[[], object]:
    """Builds, in each process of `Ranks`, a turn of a side."""
    locations[rank].enter()
    mesh, strategies = sides(every)[side]
    world = OPENED.enter_context(init_world(mesh, rank, endpoint=endpoint, timeout_s=300))
    step = plan_step(WORKLOAD, mesh, strategies, world)

    def turn() -> Turn:
        marks = [sent_nbytes()]
        for _ in range(1 if side == "ddp" else every):
            step()
            marks.append(sent_nbytes())
        return Turn(tuple(after - before for before, after in pairwise(marks)))

    return turn


def sent_nbytes() -> int:
    """Returns the bytes that the interfaces of this process's network have sent, but for loopback."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    fields = (line.replace(":", " ").split() for line in lines)
    return sum(int(each[9]) for each in fields if each[0] != "lo")


def measure_link(rate_mbit: int, every: int, window: Window) -> Rounds:
    """Returns the rounds of all sides between two sites of `rate_mbit`."""
    with virtual_hosts(SITES, rate_mbit) as hosts, ExitStack() as opened:
        ports = iter(range(22000, 23000))

        def open_side(side: str) -> Ranks:
            arguments: dict[str, Any] = {
                "endpoint": RendezvousEndpoint(hosts[0].address, next(ports)),
                "locations": [host.location for host in hosts],
            }
            started = Ranks(side, site_turn, SITES, preload=HEAVY, side=side, every=every, **arguments)
            return opened.enter_context(started)

        return measure([open_side(side) for side in sides(every)], window)


def link_bytes(rounds: Rounds, side: str) -> dict[str, float]:
    """Returns what rank 0 sends over the link: in a turn, in its busiest step, and in its least busy one."""
    notes = [costs[side].notes[0] for costs in rounds.clean]
    turns = [each.sent for each in notes if isinstance(each, Turn)]
    return {
        "turn": median(sum(each) for each in turns),
        "peak": median(max(each) for each in turns),
        "least": median(min(each) for each in turns),
    }


def result(rounds: Rounds, every: int) -> Result:
    """Returns the result; it shows the step of streaming."""
    numel = sum(each.numel() for each in WORKLOADS[WORKLOAD].model().parameters())
    law = 2 * (SITES - 1) / SITES * 4 * numel
    nbytes = {side: link_bytes(rounds, side) for side in ("ddp", "alone", "diloco", "streaming", "int8")}
    factors = {
        side: interval([every * each for each in rounds.ratios("ddp", side, "wall_s")])
        for side in ("diloco", "streaming", "int8")
    }
    steps = {side: interval(rounds.ratios(side, "alone", "wall_s")) for side in factors}
    step = steps["streaming"]
    largest = max(nbytes["streaming"]["peak"], 1)
    held = {
        "step": step.median <= STEP_BAR,
        "tokens": all(factors[each].low >= TOKENS_BAR for each in ("diloco", "streaming")),
        "nothing between rounds": max(nbytes[each]["least"] for each in ("alone", "diloco")) <= IDLE_NBYTES,
        "bytes of a round": all(
            share * law <= nbytes[each]["turn"] <= (1 + HEADERS) * law
            for each, share in (("ddp", 1.0), ("diloco", 1.0), ("streaming", 1 - 1.1 / FRAGMENTS))
        ),
        "bytes of codes": nbytes["int8"]["turn"] <= (1 + HEADERS) * (1 + 1 / 64) / 4 * law,
        "peak of streaming": largest < law / 4,
    }
    return Result.of(
        NAME,
        CLAIM,
        values=rounds.ratios("streaming", "alone", "wall_s"),
        median=step.median,
        spread=(step.low, step.high),
        bar=STEP_BAR,
        holds=overall(held.values()),
        repeats=len(rounds.clean),
        discarded=rounds.discarded,
        detail={
            "held": held,
            "tokens per second / ddp": {side: asdict(each) for side, each in factors.items()},
            "step / alone": {side: asdict(each) for side, each in steps.items()},
            "aa": asdict(interval(rounds.ratios("twin", "alone", "wall_s"))),
            "sent by rank 0": nbytes,
            "law": law,
            "median_wall_s": {name: median(rounds.figures(name, "wall_s")) for name in rounds.clean[0]},
        },
    )


def main() -> None:
    """Measure and write the result; with --quick, only measure a little."""
    parser = argparse.ArgumentParser(description="sites that meet in rounds behind a slow link")
    parser.add_argument("--quick", action="store_true", help="three short rounds at 1 Gbit/s; writes nothing")
    quick = parser.parse_args().quick
    if why := unavailable_reason():
        sys.exit(why)
    every = 8 if quick else 50
    found = result(measure_link(1_000 if quick else RATE_MBIT, every, QUICK if quick else WINDOW), every)
    print(found.detail, file=sys.stderr)
    if not quick:
        print(found.write(NAME))


if __name__ == "__main__":
    main()
