"""The world of a process that has called `torch.distributed.init_process_group`, or nothing, by itself.

Commands join a world of their own (run/launch/join_world.py). Other programs come with what their author set
up, and with a device that follows from it:

    not initialized              one rank, on the GPU that torch calls the current one, else the CPU
    NCCL, alone or beside gloo   the GPU that init_process_group was given (device_id), else number LOCAL_RANK
    gloo                         the CPU
"""

import logging

import torch
import torch.distributed as dist

from meshwright.comm.backends.threads import single_rank_world
from meshwright.comm.collectives.group import World
from meshwright.comm.world import TorchWorld
from meshwright.device.local_device import (
    device_of_rank,
    local_platform,
    num_accelerators,
    own_device,
    platform_of,
    use_device,
)
from meshwright.device.platforms import CPU
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh

logger = logging.getLogger(__name__)


def current_world(mesh: Mesh, device: torch.device | None = None) -> World:
    """Returns the world of this process, as a rank of `mesh`, on `device` (None: as in the table above).

    Raises PlanError when torch.distributed has another number of ranks, has no backend for the device, or is
    not initialized (or destroyed again) in one of several processes of torchrun.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if mesh.world_size > 1 and dist.is_torchelastic_launched():
            raise PlanError(
                "torchrun started this process, and torch.distributed is not initialized: it would be one "
                f"rank, and the plan has {mesh.world_size}",
                fix="call torch.distributed.init_process_group() first",
                location="parallelize",
            )
        device = device or own_device()
        use_device(device)
        return single_rank_world(device)
    device = _device_of_default_group() if device is None else _checked_device(device)
    use_device(device)
    logger.info("rank %d of %d computes on %s", dist.get_rank(), mesh.world_size, device)
    return TorchWorld(mesh, dist.get_rank(), device)


def _device_of_default_group() -> torch.device:
    backends, platform = _backend_by_type(), local_platform()
    if platform == CPU or backends.get(platform.type) != platform.backend:
        # gloo for all types of device: its user wants the CPU
        wants_cpu = set(backends.values()) == {CPU.backend}
        return _checked_device(torch.device(CPU.type) if wants_cpu or platform != CPU else own_device())
    default_group, visible = dist.group.WORLD, num_accelerators()
    if default_group is not None and default_group.bound_device_id is not None:
        return default_group.bound_device_id
    local_rank = dist.get_node_local_rank(fallback_rank=dist.get_rank() % max(visible, 1))
    return device_of_rank(local_rank, every_visible=False)


def _checked_device(device: torch.device) -> torch.device:
    """Returns `device` if the default group can carry its tensors. Raises PlanError otherwise."""
    backends, platform = _backend_by_type(), platform_of(device)
    if backends.get(device.type) == platform.backend:
        return device
    here = local_platform()
    has = "no GPU" if here == CPU else f"{num_accelerators()} devices of {here.name}"
    wanted = platform if platform != CPU or here.backend is None else here
    raise PlanError(
        f"the default process group is on {dist.get_backend_config()}, {device} needs {platform.backend}, "
        f"and torch sees {has}",
        fix=f'call torch.distributed.init_process_group("{wanted.backend}")',
        location="parallelize",
    )


def _backend_by_type() -> dict[str, str]:
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
    return {device_type: backend for device_type, _, backend in pairs}
