"""Operations that look at all rows of a batch, and forwards that write parameters; what a plan does to them.

    max_norm              what a batch looks up is scaled down in the table, by the forward, before it is given out
    scale_grad_by_freq    the gradient of an entry is divided by how often the batch looks it up
    F.batch_norm          takes mean and variance of all rows (model/norms.py knows the layers that do)
    a write               a forward may write a parameter by what it holds already: w.copy_(normalize(w))

A rank, or a micro-batch, has some of the rows: copies of a table that scales itself would come apart, gradients be divided by
other numbers. A write is the same on all ranks, if they have all of the weight and keep it: a master in another dtype would undo
it, and so would shards that are brought together for a use and then let go.

Layers whose result for one row depends on the other rows: batch norms, and what a split of the batch does to them.

A batch norm in training takes mean and variance of the rows that it sees. A rank, or a micro-batch, sees a part of the
global batch, so it would compute something else than one device. Frozen ones are harmless: in eval mode, with running
statistics, every row is scaled alike. One that tracks no running statistics uses those of its rows in eval mode too.

A spectral norm divides by a number that every forward in training brings nearer to what it estimates: micro-batches are as many
forwards, and one device has one.

Buffers that a training forward writes, where the parts of a model lie on several ranks: each must belong to one of them.

A block's own buffers are written where the block runs, and saved from there. What the glue between blocks writes (a counter, a
running mean) every rank would write for the glue that it runs, and each would have another value of it. A buffer that is not
saved with the model (persistent=False) is nobody's state: each rank may have its own.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.model.tensors.pytree import storage_id
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.plan import Plan


def batch_coupled_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms of `module`, by name, that use the statistics of their rows when it is trained.

    A module that comes in eval mode is trained as a whole; one in training mode keeps the parts that it has in eval mode.
    """
    return {
        name: norm
        for name, norm in module.named_modules()
        if isinstance(norm, _BatchNorm)
        and (norm.training or not module.training or norm.running_mean is None)
    }


def norm_diagnostics(plan: Plan, module: nn.Module) -> Iterator[Diagnostic]:
    """What is wrong with splitting the rows of `plan` for `module`, as its factory returns it."""
    yield from _spectral_norm_diagnostics(plan, module)
    norms, ranks = batch_coupled_norms(module), plan.mesh.group_size(plan.sharding.grad_sum_axes)
    if not norms or (ranks == 1 and plan.num_microbatches == 1):
        return
    parts = f"{ranks} ranks x {plan.num_microbatches} micro-batches"
    text = f"{len(norms)} batch norms ({next(iter(norms))}...) would take statistics of a part of the global batch ({parts})"
    if any(isinstance(norm, nn.SyncBatchNorm) for norm in norms.values()):
        text += "; SyncBatchNorm joins ranks behind the plan's back, and not micro-batches"
    if all(norm.running_mean is not None for norm in norms.values()):
        fix = "use group or layer norm, freeze them in the factory (model.train(), then norm.eval()), or train on one device "
    else:
        fix = "use group or layer norm (without running statistics they cannot be frozen), or train on one device "
    yield Diagnostic(text, fix + "with micro_batch = 0", "model")


def _spectral_norm_diagnostics(plan: Plan, module: nn.Module) -> Iterator[Diagnostic]:
    """What is wrong with `plan` for the spectral norms of `module`."""
    found = {name: part for name, part in module.named_modules() if _is_training_spectral_norm(part)}
    if found and plan.num_microbatches > 1:
        text = f"{len(found)} spectral norms ({next(iter(found))}...) go on in every forward: {plan.num_microbatches} micro-batches"
        text += " go as many steps of their power iteration, and one device goes one"
        fix = "take the rows of a rank at once (micro_batch = 0), freeze them (norm.eval() in the factory), or use weight norm"
        yield Diagnostic(text, fix, "model")
    old = [name for name, part in found.items() if not isinstance(part, _SpectralNorm)]
    if old and "UNSHARD" in plan.program.kinds:
        text = f"torch.nn.utils.spectral_norm ({old[0]}...) computes a weight before shards are brought together for its block"
        yield Diagnostic(text, "use torch.nn.utils.parametrizations.spectral_norm", "model")


def _is_training_spectral_norm(part: nn.Module) -> bool:
    """Whether a module is a spectral norm, of either kind, in training."""
    hooked = any(isinstance(hook, SpectralNorm) for hook in part._forward_pre_hooks.values())
    return part.training and (hooked or isinstance(part, _SpectralNorm))


MAX_NORM, GRAD_BY_FREQ, BATCH_NORM, PARAM_WRITE, SPARSE_GRAD = (
    "max_norm",
    "scale_grad_by_freq",
    "F.batch_norm",
    "write",
    "sparse = True",
)
TableUse = tuple[str, str]  # where, and by which of the five
_LOOKUP_OPS = {  # and where it stands among the arguments whether gradients are sparse
    torch.ops.aten.embedding: 4,
    torch.ops.aten._embedding_bag: 5,
    torch.ops.aten._embedding_bag_forward_only: 5,
}
_BATCH_NORM_OPS = frozenset((torch.ops.aten.native_batch_norm, torch.ops.aten._native_batch_norm_legit))
_FIX = {
    MAX_NORM: "leave it out, and scale what comes out of it row by row: x * (max_norm / x.norm(dim=-1, keepdim=True)).clamp(max=1)",
    GRAD_BY_FREQ: "leave it out",
    BATCH_NORM: "use group or layer norm",
}


@dataclass(eq=False)
class TableUseMode(TorchDispatchMode):
    """Notes, while active, which of the parameters are used in such a way, by name; of other tensors, `here()`."""

    parameters: Mapping[str, torch.Tensor]
    current_call: Callable[[], str]
    uses: list[TableUse] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._names = {storage_id(each): name for name, each in self.parameters.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        packet = func._overloadpacket
        if packet is torch.ops.aten.embedding_renorm_:
            self._note(args[0], MAX_NORM)
        elif packet in _LOOKUP_OPS:
            for how, key, at in (
                (GRAD_BY_FREQ, GRAD_BY_FREQ, 3),
                (SPARSE_GRAD, "sparse", _LOOKUP_OPS[packet]),
            ):
                if args[at] if len(args) > at else (kwargs or {}).get(key, False):
                    self._note(args[0], how)
        elif (
            packet in _BATCH_NORM_OPS and args[5] and args[0].shape[0] > 1
        ):  # as instance norm calls it, rows are channels
            self._note(args[0], BATCH_NORM)
        elif (
            packet.__name__.endswith("_")
            and args
            and isinstance(args[0], torch.Tensor)
            and self._name(args[0])
        ):
            self._note(args[0], PARAM_WRITE)
        return func(*args, **(kwargs or {}))

    def _note(self, table: torch.Tensor, how: str) -> None:
        said = self._name(table) or f"in {self.current_call() or 'glue'}", how
        self.uses += [] if said in self.uses else [said]

    def _name(self, tensor: torch.Tensor) -> str:
        return self._names.get(storage_id(tensor), "") if tensor.layout == torch.strided else ""


def table_diagnostics(plan: Plan, module: nn.Module, table_uses: Sequence[TableUse]) -> Iterator[Diagnostic]:
    """What is wrong with `plan` for `module`, of which that was `found`: parameters by name, or where."""
    tied = {weight.name for weight in plan.model_spec.params if weight.aliases}
    batched = plan.mesh.group_size(plan.sharding.grad_sum_axes) > 1 or plan.num_microbatches > 1
    parts = f"{plan.mesh.world_size} ranks x {plan.num_microbatches} micro-batches"
    for name, how in table_uses:
        if how == GRAD_BY_FREQ and (plan.mesh.world_size > 1 or plan.num_microbatches > 1):
            text = (
                f"would divide gradients by how often a part of the global batch looks up an entry ({parts})"
            )
        elif how == MAX_NORM and (plan.mesh.world_size > 1 or (plan.num_microbatches > 1 and name in tied)):
            text = f"is written by the forward, where a part of the global batch looks it up ({parts})"
        elif how == MAX_NORM and _master_dtype(plan):
            text = f"is written by the forward, and its master ({_master_dtype(plan)}) would take its place at the end of a step"
        elif how == BATCH_NORM and batched and not batch_coupled_norms(module):
            text = f"{BATCH_NORM} {name} would take statistics of a part of the global batch ({parts})"
            yield Diagnostic(text, f"{_FIX[how]}; or train on one device with micro_batch = 0", "model")
            continue
        else:
            if how == PARAM_WRITE:
                yield from _write_diagnostics(plan, name)
            if how == SPARSE_GRAD:
                yield Diagnostic(
                    f"the gradient of the table '{name}' is sparse, and no sum of those is made",
                    f"leave {how} out",
                    "model",
                )
            continue
        fix = f"{_FIX[how]}; or train on one device with micro_batch = 0, all in one dtype"
        yield Diagnostic(f"the table '{name}' with {how} {text}", fix, "model")


def _write_diagnostics(plan: Plan, name: str) -> Iterator[Diagnostic]:
    """What is wrong with `plan` for a forward that writes the parameter `name`."""
    gathered = "UNSHARD" in plan.program.kinds
    why = ""
    if _master_dtype(plan):
        why = f"its master ({_master_dtype(plan)}) would take its place at the end of a step"
    elif gathered:
        why = "it is brought together for a use, and let go of with what was written"
    elif any(home.sliced_dims for home in plan.sharding.param_shardings if home.param.name == name):
        why = "a rank has a part of it"
    if why:
        fix = "compute that on the way (a parametrization), or write between steps; or keep weights whole, in one dtype"
        yield Diagnostic(f"the forward writes into the parameter '{name}', and {why}", fix, "model")


def _master_dtype(plan: Plan) -> str:
    precision = plan.job.precision.effective
    return precision.master if precision.master != precision.parameters else ""


def buffer_diagnostics(
    plan: Plan, module: nn.Module, written_buffers: Collection[str]
) -> Iterator[Diagnostic]:
    """The buffers of `module` among those `written` by its forward that no part of `plan` has to itself."""
    if not plan.sharding.block_calls_by_pp_rank:
        return
    blocks = tuple(f"{block_of(visit)}." for visit in plan.model_spec.block_calls)
    saved = module.state_dict().keys()
    for name in written_buffers:
        if name in saved and not name.startswith(blocks):
            text = f"the buffer '{name}' is written between blocks, and each rank with a part of the model would get its own"
            fix = "write it inside of one block, declare a larger block around it (Model(blocks=[...])), or, if it need not be "
            yield Diagnostic(text, fix + "saved, register it with persistent=False", "model")
