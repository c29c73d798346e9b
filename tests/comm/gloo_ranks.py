"""Ranks of one host without shared memory: `process_pool.run(over_gloo, mesh, body)` runs `body` over
sockets.
"""

from collections.abc import Callable
from typing import TypeVar

from meshwright.comm.collectives.group import World
from meshwright.comm.world import TorchWorld
from meshwright.plan.sharding.mesh import AXES

Result = TypeVar("Result")


def over_gloo(world: World, body: Callable[..., Result], *args: object) -> Result:
    """Returns what `body(world, *args)` gives when all collectives of `world` are gloo's."""
    apart = TorchWorld(world.mesh, world.rank, "cpu", shared_memory=False)
    try:
        result = body(apart, *args)
        apart.group(AXES).barrier()
    finally:
        apart.close()
    return result
