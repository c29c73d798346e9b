"""Layers whose result for one row depends on the other rows: batch norms, and what a split of the batch does to them.

A batch norm in training takes mean and variance of the rows that it sees. A rank, or a micro-batch, sees a part of the
global batch, so it would compute something else than one device. Frozen ones are harmless: in eval mode, with running
statistics, every row is scaled alike. One that tracks no running statistics uses those of its rows in eval mode too.
"""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from meshwright.core.errors import Fault
from meshwright.core.plan import Plan


def mixing_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms of `module`, by name, that use the statistics of their rows when it is trained.

    A module that comes in eval mode is trained as a whole; one in training mode keeps the parts that it has in eval mode.
    """
    return {
        name: norm
        for name, norm in module.named_modules()
        if isinstance(norm, _BatchNorm) and (norm.training or not module.training or norm.running_mean is None)
    }


def split_faults(plan: Plan, module: nn.Module) -> Iterator[Fault]:
    """What is wrong with splitting the rows of `plan` for `module`, as its factory returns it."""
    norms, ranks = mixing_norms(module), plan.mesh.extent(plan.space.summed_axes)
    if not norms or (ranks == 1 and plan.num_micro == 1):
        return
    parts = f"{ranks} ranks x {plan.num_micro} micro-batches"
    text = f"{len(norms)} batch norms ({next(iter(norms))}...) would take statistics of a part of the global batch ({parts})"
    if any(isinstance(norm, nn.SyncBatchNorm) for norm in norms.values()):
        text += "; SyncBatchNorm joins ranks behind the plan's back, and not micro-batches"
    if all(norm.running_mean is not None for norm in norms.values()):
        fix = "use group or layer norm, freeze them in the factory (model.train(), then norm.eval()), or train on one device "
    else:
        fix = "use group or layer norm (without running statistics they cannot be frozen), or train on one device "
    yield Fault(text, fix + "with micro_batch = 0", "model")
