"""Steps with compressed gradients against those of peers, between two hosts at 1 Gbit/s: torch's bf16 and
fp16 hooks of DDP, and DeepSpeed's ZeRO++.

A Llama of 25.6 M parameters, 256 tokens in a step, one rank per host, over gloo, all sides in turn in one
run; a second instance of torch's fp16 hook shows the noise. torch's PowerSGD hook is in `compression_links`.

    ours                                                       peer
    ddp, compress mode cast (bfloat16, float16)                DDP with bf16_compress_hook, fp16_compress_hook
    zero 3, quantized_weights, compress mode int8              ZeRO++: zero_quantized_weights and _gradients
    ddp, compress mode sign                                    1-bit Adam

A peer that does not start is told with its message, and its row is left out.

    python -m benchmarks.compression.compression_vs_peers              about six minutes
    python -m benchmarks.compression.compression_vs_peers --quick      three rounds, nothing written
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from benchmarks.compression.compression_links import (
    DDP,
    FAST,
    FLAT,
    HOSTS,
    OPENED,
    QUICK,
    SPLITS,
    counts,
    open_hosts,
    our_step,
    torch_ddp_step,
)
from benchmarks.harness.interleaved_timing import Rounds, Window, interval, measure
from benchmarks.harness.peer_environment import DEEPSPEED_VERSION, ensure_deepspeed
from benchmarks.harness.rank_processes import Build, RankFailed, Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import deepspeed_zero
from meshwright.comm.rendezvous import RendezvousEndpoint
from meshwright.comm.world import init_world
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.rank_worker import NetworkLocation
from tests.network.virtual_hosts import unavailable_reason

NAME = "compression_vs_peers"
CLAIM = (
    "two hosts at 1 Gbit/s, Llama of 25.6 M, 256 tokens a step: with gradients in 16 bits a step takes at "
    "most the time of one with torch's hook"
)
BAR = 1.0
WINDOW = Window(clean=12, most=24, limit_s=300, warmup=2, threshold=0.7)
SHARDED = Mesh(dp_shard=HOSTS)
ZERO_3 = (SPLITS[1], {"name": "zero", "stage": 3})
OURS: Mapping[str, tuple[Mesh, tuple[Mapping[str, Any], ...]]] = {
    "bf16": (FLAT, (*DDP, {"name": "compress", "mode": "cast"})),
    "fp16": (FLAT, (*DDP, {"name": "compress", "mode": "cast", "dtype": "float16"})),
    "ZeRO++": (SHARDED, (*ZERO_3, {"name": "quantized_weights"}, {"name": "compress", "mode": "int8"})),
    "1-bit": (FLAT, (*DDP, {"name": "compress", "mode": "sign"})),
}


def zero_plus_plus_step(
    rank: int, size: int, *, locations: Sequence[NetworkLocation], endpoint: RendezvousEndpoint
) -> Callable[[], object]:
    """Builds the step of DeepSpeed's ZeRO stage 3 with quantized weights and gradients."""
    locations[rank].enter()
    OPENED.enter_context(init_world(FLAT, rank, endpoint=endpoint, timeout_s=300))
    quantized = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    return deepspeed_zero(rank, size, "small", "", stage=3, options=quantized)


# Peers by the row that they are in; a peer that does not start is told. "twin" is fp16 once more.
PEERS: Mapping[str, tuple[Build, Mapping[str, object]]] = {
    "bf16": (torch_ddp_step, {"hook": "bf16"}),
    "fp16": (torch_ddp_step, {"hook": "fp16"}),
    "twin": (torch_ddp_step, {"hook": "fp16"}),
    "ZeRO++": (zero_plus_plus_step, {}),
}
SHOWN, TWIN = "fp16", "twin"


def measure_all(window: Window) -> tuple[Rounds, dict[str, str]]:
    """Returns the rounds of all sides that start, and why other peers do not."""
    not_started = dict[str, str]()
    if find_spec("deepspeed.runtime.fp16.onebit") is None:
        not_started["1-bit"] = f"DeepSpeed {DEEPSPEED_VERSION} has no 1-bit Adam (runtime/fp16/onebit)"
    with open_hosts(FAST) as open_side:
        sides = list[Ranks]()
        for name, (mesh, strategies) in OURS.items():
            across = "dp_shard" if mesh == SHARDED else "dp_replicate"
            sides.append(open_side(name, our_step, mesh=mesh, strategies=strategies, across=across))
        for name, (build, arguments) in PEERS.items():
            try:
                peer = open_side(peer_name(name), build, **arguments)
                peer.step()
            except RankFailed as failure:
                not_started[name] = str(failure).strip().splitlines()[-1]
            else:
                sides.append(peer)
        return measure(sides, window), not_started


def peer_name(name: str) -> str:
    """Returns the name of the peer's side of a row."""
    return f"peer {name}"


def result(rounds: Rounds, not_started: Mapping[str, str]) -> Result:
    """Returns the result; it shows fp16, the other rows are told."""
    ratios = {
        name: rounds.ratios(name, peer_name(name), "wall_s")
        for name in OURS
        if peer_name(name) in rounds.clean[0]
    }
    found = {name: interval(values) for name, values in ratios.items()}
    shown = found[SHOWN]
    return Result.of(
        NAME,
        CLAIM,
        values=ratios[SHOWN],
        median=shown.median,
        spread=(shown.low, shown.high),
        bar=BAR,
        holds=shown.median <= BAR,
        repeats=len(rounds.clean),
        discarded=rounds.discarded,
        detail={
            "ours / peer": {name: asdict(each) for name, each in found.items()},
            "aa": asdict(interval(rounds.ratios(peer_name(TWIN), peer_name(SHOWN), "wall_s"))),
            "did not start": dict(not_started),
            "DeepSpeed": DEEPSPEED_VERSION,
            **counts(rounds),
        },
    )


def main() -> None:
    """Measure and write the result; with --quick, only measure a little."""
    parser = argparse.ArgumentParser(description="compressed gradients beside those of peers")
    parser.add_argument("--quick", action="store_true", help="three rounds; nothing is written")
    quick = parser.parse_args().quick
    if why := unavailable_reason():
        sys.exit(why)
    ensure_deepspeed(f"benchmarks.compression.{NAME}")
    found = result(*measure_all(QUICK if quick else WINDOW))
    print(found.detail, file=sys.stderr)
    if not quick:
        print(found.write(NAME))


if __name__ == "__main__":
    main()
