"""Random plans with servers that no other draw has: asynchronous ones, and hosts of embeddings.

    stale servers     1 to 3 workers of one rank each, 1 or 2 servers, bounds 0, 1, 3 and none, the learning
                      rate divided by the staleness or not, beside what one rank alone can have
    embedding hosts   1 to 3 workers, 1 to 3 hosts of all tables or of some, along either axis of data
                      parallelism, ddp with random buckets

The model, microbatches and clipping are those of a drawn plan; of its strategies stays what a rank does by
itself.
"""

from dataclasses import replace
from random import Random

from benchmarks.random_plans.random_draws import Draw
from benchmarks.random_plans.strategy_draws import DATA_AXES
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.embedding.embedding_host import EmbeddingHost
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.server.stale_server import StaleServer
from meshwright.plan.sharding.mesh import Mesh

TABLES = {
    "tables": ((), ("tables.user",), ("*item",)),
    "mixture": ((),),
    "two inputs": (("*token_embedding",),),
}


def with_stale_servers(drawn: Draw, rng: Random) -> Draw:
    """Returns `drawn` on workers of one rank each, and asynchronous servers."""
    servers = StaleServer(
        servers=rng.choice((1, 1, 2)),
        bound=rng.choice((0, 1, 3, None)),
        lr_by_staleness=rng.choice(("none", "inverse")),
    )
    own = [
        each
        for each in drawn.strategies
        if isinstance(each, (ActivationCheckpointing, ChunkedLoss, TiledMLP))
    ]
    mesh = Mesh(outer=rng.choice((1, 2, 2, 3)) + servers.servers)
    return replace(drawn, mesh=mesh, strategies=(*own, servers), num_missing_samples=0, guard=False)


def with_embedding_hosts(drawn: Draw, rng: Random) -> Draw:
    """Returns `drawn` with a model whose tables lie on hosts."""
    model, axis = rng.choice((*TABLES, "tables")), rng.choice(DATA_AXES)
    hosts = EmbeddingHost(axis, rng.choice((1, 2, 2, 3)), rng.choice(TABLES[model]))
    own = [each for each in drawn.strategies if isinstance(each, ChunkedLoss) and model == "mixture"]
    return replace(
        drawn,
        model=model,
        mesh=Mesh(**{axis: rng.choice((1, 2, 3, 3)) + hosts.hosts}),
        strategies=(BatchSplit(axis), *own, hosts, DDP(axis, rng.choice((25.0, 0.001)))),
        num_missing_samples=0,
        guard=False,
    )
