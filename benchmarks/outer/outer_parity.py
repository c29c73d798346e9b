"""Rounds and servers around any other technique: every site and every server computes what it defines.

    plans    random plans (benchmarks/random_plans/random_draws.py) that nothing perturbs, each trained at two
             or three sites, which meet by local SGD (also on two levels), DiLoCo or streaming DiLoCo with
             random options; or with servers in place of ddp; or with asynchronous servers or embedding hosts
             (server_draws.py). Inside: {ddp, ZeRO 1 to 3, hybrid} x {tensor,
             context and expert parallelism, pipelines of every schedule} x {recomputation, chunked loss} ...
    parity   as `verify` does, in float64, to 1e-10, over two rounds: every number of every site equals the
             definition, played in one process by as many replicas; of asynchronous servers in the order in
             which gradients arrived
    faults   engines and plans with a planted fault (planted_outer_faults.py): the numbers, the bits after a
             resume, or the static checks of the plan must tell

The figure is the number of plans that match. Plans that are refused are drawn again.

    python -m benchmarks.outer.outer_parity              120 plans and the faults
    python -m benchmarks.outer.outer_parity --only 17    one plan, with what differs; no result
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from random import Random
from types import MappingProxyType

from benchmarks.harness.result import Result
from benchmarks.outer.planted_outer_faults import FAULTS, is_found
from benchmarks.outer.server_draws import with_embedding_hosts, with_stale_servers
from benchmarks.random_plans.combinations import Row
from benchmarks.random_plans.parity_of_draws import compared_draws, counts_of, parity_result
from benchmarks.random_plans.random_draws import MAX_RANKS, Draw, draw
from benchmarks.random_plans.random_plans import try_plan
from meshwright.parallel.embedding.embedding_host import EmbeddingHost
from meshwright.parallel.outer.diloco import DiLoCo
from meshwright.parallel.outer.local_sgd import LocalSGD
from meshwright.parallel.outer.rounds import RoundStrategy
from meshwright.parallel.outer.streaming_diloco import StreamingDiLoCo
from meshwright.parallel.server.parameter_server import ParameterServer
from meshwright.parallel.server.stale_server import StaleServer
from meshwright.plan.strategy_interface import Strategy

SERVERS = ParameterServer, StaleServer, EmbeddingHost
NAME = "outer_parity"
CLAIM = (
    "120 random plans with sites that train apart, or with servers, compute what their technique defines, to "
    "1e-10 in float64; every planted fault is found"
)
SEED, NUM_PLANS = 30, 120
LEFT_OUT = 0.6  # of the draws that have no servers, which are few
SERVED = 0.12  # of all draws: with asynchronous servers or embedding hosts
INNER_RANKS = 8  # at most, at each site: twice or three times as many run


def _local_sgd(rng: Random, axis: str = "outer", every: int = 0) -> LocalSGD:
    return LocalSGD(
        axis,
        every or rng.choice((1, 2, 3)),
        warmup_steps=0 if every else rng.choice((0, 0, 1)),
        optimizer_states=rng.choice(("own", "mean")),
    )


def _diloco(rng: Random, every: int = 0) -> DiLoCo:
    chosen = every or rng.choice((1, 2, 3))
    return DiLoCo(sync_every=chosen, outer_lr=rng.choice((0.7, 1.0)), outer_momentum=rng.choice((0.0, 0.9)))


def _streaming(rng: Random) -> StreamingDiLoCo:
    every = rng.choice((2, 3, 4))
    delay = rng.randint(0, every - 1)
    return StreamingDiLoCo(
        sync_every=every,
        fragments=rng.randint(1, min(3, every)),
        delay=delay,
        mixing=rng.choice((0.0, 0.5)) if delay else 0.0,
    )


def _two_levels(rng: Random) -> tuple[RoundStrategy, ...]:
    inner = _local_sgd(rng, "site", rng.choice((1, 2)))
    every = inner.sync_every * rng.choice((1, 2))
    return inner, (_diloco(rng, every) if rng.random() < 0.5 else _local_sgd(rng, "outer", every))


ROUNDS: Mapping[str, Callable[[Random], tuple[RoundStrategy, ...]]] = MappingProxyType(
    {
        "local SGD": lambda rng: (_local_sgd(rng),),
        "local SGD on two levels": _two_levels,
        "DiLoCo": lambda rng: (_diloco(rng),),
        "streaming DiLoCo": lambda rng: (_streaming(rng),),
    }
)


def draws(seed: int = SEED) -> Iterator[Draw]:
    """Yields random plans with rounds or servers, without end."""
    for number in count():
        drawn, rng = draw(seed, number), Random(f"{seed}/{number}/outer")
        if drawn.perturbation or drawn.mesh.world_size > INNER_RANKS:
            continue
        if rng.random() < SERVED:
            yield rng.choice((with_stale_servers, with_embedding_hosts))(drawn, rng)
            continue
        if any(isinstance(each, ParameterServer) for each in drawn.strategies):
            yield _with_dedicated(drawn) if rng.random() < 0.5 else drawn
            continue
        if rng.random() < LEFT_OUT:
            continue
        rounds = ROUNDS[rng.choice((*ROUNDS, "streaming DiLoCo"))](rng)
        sizes = {each.axis: rng.choice((2, 2, 3)) for each in rounds}
        mesh = replace(drawn.mesh, **({"outer": 2, "site": 2} if len(rounds) == 2 else sizes))
        if mesh.world_size <= MAX_RANKS:
            yield replace(drawn, mesh=mesh, strategies=(*drawn.strategies, *rounds), guard=False)


def _with_dedicated(drawn: Draw) -> Draw:
    """Returns `drawn` with servers that are no workers."""
    strategies = tuple(
        replace(each, dedicated=True) if isinstance(each, ParameterServer) else each
        for each in drawn.strategies
    )
    return replace(drawn, strategies=strategies)


def technique_of(drawn: Draw) -> str:
    """Returns the name of the rounds or servers of `drawn`."""
    rounds = [each for each in drawn.strategies if isinstance(each, RoundStrategy)]
    if len(rounds) == 2:
        return "local SGD on two levels"
    outer = rounds or [each for each in drawn.strategies if isinstance(each, SERVERS)]
    return _name(outer[0])


def _name(strategy: Strategy) -> str:
    match strategy:
        case StreamingDiLoCo():
            return "streaming DiLoCo"
        case DiLoCo():
            return "DiLoCo"
        case LocalSGD():
            return "local SGD"
        case ParameterServer(dedicated=True):
            return "dedicated servers"
        case StaleServer():
            return "asynchronous servers"
        case EmbeddingHost():
            return "embedding hosts"
    return "servers that are workers"


def compare(drawn: Draw) -> Row:
    """Returns the row of one plan: its outcome beside one device."""
    return {**try_plan(drawn), "technique": technique_of(drawn)}


def result(rows: Sequence[Row], faults: Mapping[str, str]) -> Result:
    """Returns the result of these plans and of the planted faults, each with how it was found, or ""."""
    more = {"kinds": counts_of(rows, "technique")}
    return parity_result(NAME, CLAIM, rows, SEED, NUM_PLANS, more, faults)


def main() -> None:
    """Compares the plans, plants the faults, and writes the result."""
    rows = compared_draws(NAME, draws(), NUM_PLANS, compare)
    faults = {name: is_found(fault) for name, fault in FAULTS.items()}
    print(result(rows, faults).write(NAME))


if __name__ == "__main__":
    main()
