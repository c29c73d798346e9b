"""Layers that couple the samples of a batch, and what a plan does to them: one diagnostic for each conflict.

    max_norm              a lookup scales down entries of the table, in the forward, before it returns them
    scale_grad_by_freq    the gradient of an entry is divided by how often the batch looks it up
    batch norm            takes mean and variance over all samples that it sees
    spectral norm         every training forward does one step of power iteration
    parameter write       a forward may write a parameter: w.copy_(normalize(w))
    buffer write          a forward may write a buffer: a counter, a running mean

A rank, or a microbatch, has some of the samples. Copies of a table that scales itself would diverge,
gradients would be divided by other counts, and statistics would be those of a part of the batch. Frozen
batch norms are harmless: in eval mode, with running statistics, every sample is scaled alike; one without
running statistics uses those of its samples in eval mode too. The strategy sync_batch_norm joins the
statistics of ranks; it cannot join those of microbatches. Microbatches are several forwards, so several steps
of power iteration, where one device does one.

A parameter write is the same on all ranks if they have the whole weight and keep it. A master copy in another
dtype would undo it, and so would shards that are gathered for a use and freed afterwards.

A block's own buffers are written where the block runs, and saved from there. A buffer that glue writes would
get another value on each pipeline stage. One that is not saved with the model (persistent=False) may differ
between ranks.
"""

from collections.abc import Collection, Iterator, Sequence
from types import MethodType

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from meshwright.model.recording.forward_recording import AtenOp, Recording, TensorRecord
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.model_spec.model_spec import BatchNormCall, block_of
from meshwright.plan.plan import Plan


def localize_sync_batch_norm(module: nn.Module) -> None:
    """Makes each `torch.nn.SyncBatchNorm` of `module` compute as a batch norm of one process: it would
    communicate by itself, with all ranks, as soon as torch.distributed is initialized.
    """
    for each in module.modules():
        if isinstance(each, nn.SyncBatchNorm):
            each.forward = MethodType(_BatchNorm.forward, each)


def norm_diagnostics(plan: Plan, module: nn.Module) -> Iterator[Diagnostic]:
    """Yields diagnostics of splitting the batch of `plan` for the norms of `module`, as its factory returns
    it.
    """
    yield from _spectral_norm_diagnostics(plan, module)
    yield from _batch_norm_diagnostics(plan)


def _batch_norm_diagnostics(plan: Plan) -> Iterator[Diagnostic]:
    calls = plan.model_spec.batch_norm_calls
    ranks = plan.sharding.num_workers_along(plan.sharding.grad_sum_axes)
    data_ranks = plan.num_data
    if not calls or (ranks == 1 and plan.num_microbatches == 1):
        return
    text = (
        f"{len(calls)} batch norms ({calls[0].name}...) would take statistics of a part of the global batch "
        f"({ranks} ranks x {plan.num_microbatches} microbatches)"
    )
    repairs = ["run all samples of a rank at once (micro_batch = 0)"] if plan.num_microbatches > 1 else []
    if ranks > data_ranks:
        repairs.append("set mesh.cp = 1")
    untracked = [call.name for call in calls if not call.has_running_stats]
    in_glue = [call.name for call in calls if not call.block_call]
    if ranks > 1 and untracked:
        text += f"; {untracked[0]} has no running statistics, and an evaluation takes those of its batch"
        repairs.append("set track_running_stats=True")
    if ranks > 1 and in_glue:
        text += f"; {in_glue[0]} runs between blocks, where nothing can be sent"
        repairs.append("declare a block around it (Model(blocks=[...]))")
    if data_ranks > 1 and not plan.sharding.syncs_batch_norm:
        repairs.append('add [[strategies]] name = "sync_batch_norm"')
    if repairs:
        others = "use group or layer norm"
        if not untracked:
            others += ", or freeze them in the factory (model.train(), then norm.eval())"
        yield Diagnostic(text, f"{', and '.join(repairs)}; or {others}", "model")


def _spectral_norm_diagnostics(plan: Plan, module: nn.Module) -> Iterator[Diagnostic]:
    norms = {
        name: submodule for name, submodule in module.named_modules() if _is_training_spectral_norm(submodule)
    }
    if norms and plan.num_microbatches > 1:
        text = (
            f"{len(norms)} spectral norms ({next(iter(norms))}...) iterate in every forward: "
            f"{plan.num_microbatches} microbatches"
        )
        text += " do as many steps of power iteration, and one device does one"
        fix = (
            "run all samples of a rank at once (micro_batch = 0), freeze them (norm.eval() in the factory), "
            "or use weight norm"
        )
        yield Diagnostic(text, fix, "model")
    hook_based = [name for name, submodule in norms.items() if not isinstance(submodule, _SpectralNorm)]
    if hook_based and "UNSHARD" in plan.program.kinds:
        text = (
            f"torch.nn.utils.spectral_norm ({hook_based[0]}...) computes a weight before its block is "
            "unsharded"
        )
        yield Diagnostic(text, "use torch.nn.utils.parametrizations.spectral_norm", "model")


def _is_training_spectral_norm(submodule: nn.Module) -> bool:
    hooked = any(isinstance(hook, SpectralNorm) for hook in submodule._forward_pre_hooks.values())
    return submodule.training and (hooked or isinstance(submodule, _SpectralNorm))


MAX_NORM, GRAD_BY_FREQ, PARAM_WRITE, SPARSE_GRAD = (
    "max_norm",
    "scale_grad_by_freq",
    "write",
    "sparse = True",
)
TableUse = tuple[str, str]  # (parameter or location, one of the four kinds)
_LOOKUP_OPS = {  # op -> index of its argument `sparse`
    torch.ops.aten.embedding: 4,
    torch.ops.aten._embedding_bag: 5,
    torch.ops.aten._embedding_bag_forward_only: 5,
}
_BATCH_NORM_OPS = frozenset((torch.ops.aten.native_batch_norm, torch.ops.aten._native_batch_norm_legit))
_FIX = {
    MAX_NORM: (
        "remove it, and scale each looked-up vector: "
        "x * (max_norm / x.norm(dim=-1, keepdim=True)).clamp(max=1)"
    ),
    GRAD_BY_FREQ: "remove it",
}


class BatchCoupling:
    """The uses of such tables in a recorded forward (parameters by name, other tensors by their block call),
    and its calls of batch norms.
    """

    def __init__(self, recording: Recording) -> None:
        self.uses: list[TableUse] = []
        self.batch_norm_calls: list[BatchNormCall] = []
        names = recording.parameter_names
        self._names = {
            each.storage: names[each.id] for each in recording.parameters.values() if each.is_strided
        }
        for event in recording.events:
            if type(event) is AtenOp:
                self._note_op(event)

    def _note_op(self, op: AtenOp) -> None:
        packet, args = op.packet, op.args
        if packet is torch.ops.aten.embedding_renorm_:
            self._note(op, MAX_NORM)
        elif packet in _LOOKUP_OPS:
            for how, key, at in (
                (GRAD_BY_FREQ, GRAD_BY_FREQ, 3),
                (SPARSE_GRAD, "sparse", _LOOKUP_OPS[packet]),
            ):
                if args[at] if len(args) > at else op.kwargs.get(key, False):
                    self._note(op, how)
        elif (
            packet in _BATCH_NORM_OPS and args[5] and args[0].shape[0] > 1
        ):  # instance norm calls it with one sample, whose rows are channels
            self._note_batch_norm(op, args[0], args[1], args[3])
        elif packet.__name__.endswith("_") and args and self._name(args[0]):
            self._note(op, PARAM_WRITE)

    def _note(self, op: AtenOp, how: str) -> None:
        use = self._name(op.args[0]) or f"in {op.block_call or 'glue'}", how
        self.uses += [] if use in self.uses else [use]

    def _note_batch_norm(
        self, op: AtenOp, x: TensorRecord, weight: TensorRecord | None, running_mean: TensorRecord | None
    ) -> None:
        name = self._name(weight).rpartition(".")[0]
        self.batch_norm_calls.append(
            BatchNormCall(
                name or f"F.batch_norm in {op.block_call or 'glue'}",
                op.block_call,
                x.shape[1],
                running_mean is not None,
                x.requires_grad,
            )
        )

    def _name(self, value: object) -> str:
        return self._names.get(value.storage, "") if isinstance(value, TensorRecord) else ""


def table_diagnostics(plan: Plan, table_uses: Sequence[TableUse]) -> Iterator[Diagnostic]:
    """Yields diagnostics of `plan` for `module` with these `table_uses` (parameter or location, kind of
    use).
    """
    tied = {weight.name for weight in plan.model_spec.params if weight.aliases}
    parts = f"{plan.mesh.world_size} ranks x {plan.num_microbatches} microbatches"
    for name, how in table_uses:
        if how == GRAD_BY_FREQ and (plan.mesh.world_size > 1 or plan.num_microbatches > 1):
            text = (
                f"would divide gradients by how often a part of the global batch looks up an entry ({parts})"
            )
        elif how == MAX_NORM and (plan.mesh.world_size > 1 or (plan.num_microbatches > 1 and name in tied)):
            text = f"is written by the forward, for the lookups of a part of the global batch ({parts})"
        elif how == MAX_NORM and _master_dtype(plan):
            text = (
                f"is written by the forward, and its master ({_master_dtype(plan)}) would overwrite it at "
                "the end of a step"
            )
        else:
            if how == PARAM_WRITE:
                yield from _write_diagnostics(plan, name)
            if how == SPARSE_GRAD:
                yield Diagnostic(
                    f"the gradient of the table '{name}' is sparse, and sparse gradients cannot be reduced",
                    f"remove {how}",
                    "model",
                )
            continue
        fix = f"{_FIX[how]}; or train on one device with micro_batch = 0, all in one dtype"
        yield Diagnostic(f"the table '{name}' with {how} {text}", fix, "model")


def _write_diagnostics(plan: Plan, name: str) -> Iterator[Diagnostic]:
    gathered = "UNSHARD" in plan.program.kinds
    reason = ""
    if _master_dtype(plan):
        reason = f"its master ({_master_dtype(plan)}) would overwrite it at the end of a step"
    elif gathered:
        reason = "it is gathered for a use, and freed together with what was written"
    elif any(
        param_sharding.sliced_dims
        for param_sharding in plan.sharding.param_shardings
        if param_sharding.param.name == name
    ):
        reason = "a rank has a shard of it"
    if reason:
        fix = (
            "compute it on the fly (a parametrization), or write between steps; or keep weights unsharded, "
            "in one dtype"
        )
        yield Diagnostic(f"the forward writes into the parameter '{name}', and {reason}", fix, "model")


def _master_dtype(plan: Plan) -> str:
    precision = plan.job.precision.effective
    return precision.master if precision.master != precision.parameters else ""


def buffer_diagnostics(
    plan: Plan, module: nn.Module, written_buffers: Collection[str]
) -> Iterator[Diagnostic]:
    """Yields diagnostics for saved buffers among `written_buffers` that no stage of `plan` has to itself."""
    if not plan.sharding.block_calls_by_pp_rank:
        return
    blocks = tuple(f"{block_of(block_call)}." for block_call in plan.model_spec.block_calls)
    saved = module.state_dict().keys()
    for name in written_buffers:
        if name in saved and not name.startswith(blocks):
            text = (
                f"the buffer '{name}' is written between blocks, and each pipeline stage would get its own "
                "value"
            )
            fix = (
                "write it inside one block, declare a larger block around it (Model(blocks=[...])), or, if "
                "it need not be "
            )
            yield Diagnostic(text, fix + "saved, register it with persistent=False", "model")
