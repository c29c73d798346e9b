"""Compares the batch that each rank passes to an evaluation, by a digest of names, dtypes, shapes and bytes.

A trainer divides the batches of an evaluation among its ranks itself, so all ranks pass the same ones.
"""

from hashlib import sha256

import torch

from meshwright.comm.collectives.group import World
from meshwright.model.loss.loss_definition import Batch
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import AXES


def check_same_batch(tensors: Batch, world: World) -> None:
    """Raises PlanError on all ranks if one of them passes other `tensors`."""
    digest = sha256()
    for key, value in sorted(tensors.items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    own = torch.frombuffer(bytearray(digest.digest()[:8]), dtype=torch.int64).to(world.device)
    group = world.group(AXES)
    every = own.new_zeros(group.size)
    group.all_gather(every, own, action="EVALUATE").wait()
    if len(set(every.tolist())) > 1:
        raise PlanError(
            "the ranks passed different batches to an evaluation, which shares them itself",
            fix="pass the same batches on every rank (no DistributedSampler, and the same seed), or "
            "this rank's: trainer.local_batch(batch)",
            location="evaluate",
        )
