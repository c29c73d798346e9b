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
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh

logger = logging.getLogger(__name__)


def current_world(mesh: Mesh, device: torch.device | None = None) -> World:
    """Returns the world of this process, as a rank of `mesh`, on `device` (None: as in the table above).

    Raises PlanError when torch.distributed has another number of ranks, or is not initialized in one of
    several processes of torchrun.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if mesh.world_size > 1 and dist.is_torchelastic_launched():
            raise PlanError(
                "torchrun started this process, and torch.distributed is not initialized: it would be one "
                f"rank, and the plan has {mesh.world_size}",
                fix="call torch.distributed.init_process_group() first",
                location="parallelize",
            )
        return single_rank_world(device or own_device())
    device = device or _device_of_default_group()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    logger.info("rank %d of %d computes on %s", dist.get_rank(), mesh.world_size, device)
    return TorchWorld(mesh, dist.get_rank(), device)


def own_device() -> torch.device:
    """Returns the device of a process without peers: the current GPU of torch, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def gpu_of_rank(local_rank: int, visible: int, *, every_visible: bool) -> torch.device:
    """Returns the GPU of the rank `local_rank` of a host: the one with its number, or the only one that is
    `visible` to it. With `every_visible` all ranks see the same.

    Raises PlanError when there is none for it.
    """
    alone_on_it = visible == 1 and not every_visible
    if local_rank >= visible and not alone_on_it:
        text = f"rank {local_rank} of this host needs a GPU of its own, and {visible} are visible"
        fix = f"start at most {visible} ranks per host, or CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        raise PlanError(text, fix=fix, location="environment")
    return torch.device("cuda", 0 if alone_on_it else local_rank)


def _device_of_default_group() -> torch.device:
    if "cuda:nccl" not in dist.get_backend_config():  # gloo for both kinds of device: its user wants the CPU
        return torch.device("cpu")
    default_group, visible = dist.group.WORLD, torch.cuda.device_count()
    if default_group is not None and default_group.bound_device_id is not None:
        return default_group.bound_device_id
    local_rank = dist.get_node_local_rank(fallback_rank=dist.get_rank() % max(visible, 1))
    return gpu_of_rank(local_rank, visible, every_visible=False)
