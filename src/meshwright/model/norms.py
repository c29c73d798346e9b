"""Layers whose result for one row depends on the other rows: batch norms, and what a split of the batch does to them.

A batch norm in training takes mean and variance of the rows that it sees. A rank, or a micro-batch, sees a part of the
global batch, so it would compute something else than one device. Frozen ones are harmless: in eval mode, with running
statistics, every row is scaled alike. One that tracks no running statistics uses those of its rows in eval mode too.

A spectral norm divides by a number that every forward in training brings nearer to what it estimates: micro-batches are as many
forwards, and one device has one.
"""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

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
    yield from _power_faults(plan, module)
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


def _power_faults(plan: Plan, module: nn.Module) -> Iterator[Fault]:
    """What is wrong with `plan` for the spectral norms of `module`."""
    found = {name: part for name, part in module.named_modules() if _iterates(part)}
    if found and plan.num_micro > 1:
        text = f"{len(found)} spectral norms ({next(iter(found))}...) go on in every forward: {plan.num_micro} micro-batches"
        text += " go as many steps of their power iteration, and one device goes one"
        fix = "take the rows of a rank at once (micro_batch = 0), freeze them (norm.eval() in the factory), or use weight norm"
        yield Fault(text, fix, "model")
    old = [name for name, part in found.items() if not isinstance(part, _SpectralNorm)]
    if old and "UNSHARD" in plan.program.kinds:
        text = f"torch.nn.utils.spectral_norm ({old[0]}...) computes a weight before shards are brought together for its block"
        yield Fault(text, "use torch.nn.utils.parametrizations.spectral_norm", "model")


def _iterates(part: nn.Module) -> bool:
    """Whether a module is a spectral norm, of either kind, in training."""
    hooked = any(isinstance(hook, SpectralNorm) for hook in part._forward_pre_hooks.values())
    return part.training and (hooked or isinstance(part, _SpectralNorm))
