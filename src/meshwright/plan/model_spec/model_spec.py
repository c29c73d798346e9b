"""Describes a model for the plan: its blocks in execution order and its logical parameters.

A *block* is the unit of execution: the embedding, each layer, the final norm, the head. A *block call* is one
call of a block in one forward. A block that is called twice (a shared embedding in an encoder-decoder) has
two block calls, the second named `block#2`. *Glue* is the model's code between blocks. A *logical parameter*
is a parameter of the unmodified model under its first name; the names of tied copies are its aliases.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.model_spec.op_sizes_and_memory import KeptOutputs, ModelMemory, UnreadProduct
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.model_spec.sequence_info import SequenceInfo
from meshwright.plan.model_spec.stage_transfers import StageBoundaries
from meshwright.plan.model_spec.tensor_parallel_layers import (
    LayerCall,
    LogitsSpec,
    PerHeadInput,
    ResidualFlow,
    SizeAttribute,
)

# The block call of parameters that glue uses directly: their gradients are complete after the last backward.
ROOT = "(root)"
FLOAT_NBYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
INTEGER_NBYTES = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
# A frozen parameter may keep any of these.
PARAM_DTYPE_NBYTES = {
    **FLOAT_NBYTES,
    **INTEGER_NBYTES,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


def block_of(block_call: str) -> str:
    """Returns the block of a block call: "layer" for its second call "layer#2"."""
    return block_call.partition("#")[0]


def block_call_name(block: str, call_number: int) -> str:
    """Returns the name of call number `call_number` (from 1) of `block` in a forward."""
    return block if call_number == 1 else f"{block}#{call_number}"


@dataclass(frozen=True)
class ParamSpec:
    """One logical parameter: name, shape, the block calls that use it, and the names of its tied copies.

    `dtype` differs from the job's for a parameter that is not floating point, and for a frozen one that was
    created in another dtype than the trained ones (a bfloat16 base under float32 adapters); "" means the
    job's dtype. `is_hidden_matrix`: the matrix of a linear layer between the embedding and the head, or
    those of experts, one behind the other along dim 0. `role` is the role of its layer (see `LayerCall`; ""
    if the layer cannot be sharded), `dim_splits` how its dims may be split without a change of the results,
    one per side. `not_shardable_reason` says why a parameter without a role cannot be sharded.
    `declared_role` is the role that the user declared for the layer. `not_plain_lookup` says why an embedding
    is more than a lookup of rows of this weight, or who reads it besides ("": nothing of that).
    """

    name: str
    shape: tuple[int, ...]
    block_calls: tuple[str, ...]
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    dtype: str = ""
    is_hidden_matrix: bool = False
    role: str = ""
    dim_splits: tuple[DimSplit, ...] = ()
    not_shardable_reason: str = ""
    declared_role: str = ""
    not_plain_lookup: str = ""

    def dim_split(self, dim: int) -> DimSplit:
        """Returns the units into which `dim` is split; a dim about which nothing is known may be split
        anywhere.
        """
        return next(
            (split for split in self.dim_splits if split.dim == dim),
            DimSplit(dim, self.shape[dim], (self.shape[dim],)),
        )

    def split_of_side(self, side: str) -> DimSplit | None:
        """Returns the split of the "in" or "out" side of the layer in this parameter; None without such a
        side.
        """
        return next((split for split in self.dim_splits if split.side == side), None)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the first one first."""
        return (self.name, *self.aliases)

    @property
    def layers(self) -> tuple[str, ...]:
        """The modules that hold the parameter, that of its first name first."""
        return tuple(name.rpartition(".")[0] for name in self.names)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def dtype_for(self, param_dtype: str) -> str:
        """Returns the dtype of this parameter in a job with parameters of `param_dtype`; with float64, all
        floats are float64.
        """
        widened = param_dtype == "float64" and self.dtype.startswith(("float", "bfloat"))
        return self.dtype if self.dtype and not widened else param_dtype

    def itemsize(self, param_dtype: str) -> int:
        """Returns the bytes per element in a job with parameters of `param_dtype`; 0 for an unknown dtype."""
        return PARAM_DTYPE_NBYTES.get(self.dtype_for(param_dtype), 0)


@dataclass(frozen=True)
class PretrainedSource:
    """Stored initial values: their location, a `digest` of the contents, and their size in bytes.

    `read_buffer_nbytes` is the temporary memory for reading one tensor, on top of the parameter itself.
    """

    source: str
    digest: str
    nbytes: int
    read_buffer_nbytes: int


@dataclass(frozen=True)
class BatchStatistic:
    """An output that the model computes over all samples of a forward, such as an auxiliary loss, and that is
    not a sum over them: its values on parts of a batch do not add up to its value on the batch.

    `path` is its place, such as "outputs.aux_loss"; `side_channels` are those of what it is computed from.
    """

    path: str
    side_channels: tuple[str, ...] = ()


@dataclass(frozen=True)
class BatchNormCall:
    """One call of a batch norm that takes the statistics of its batch, in the forward of `block_call` ("":
    between blocks).

    `name` is the module, or the block call if it has no weight.
    """

    name: str
    block_call: str
    num_channels: int
    has_running_stats: bool = True
    input_needs_grad: bool = True


@dataclass(frozen=True)
class ReluActivations:
    """What autograd saves of ReLU and max pooling in the forward of `block_call`, in elements per sample.

    `mask_numel` are results of ReLU, of which its backward needs the sign, and squares of such results;
    `saved_numel` are those of them that nothing but autograd holds; `value_numel` those whose values other
    operations need; `largest_numel` the largest tensor among them. `index_numel` are positions of maxima.
    """

    block_call: str
    mask_numel: int
    saved_numel: int
    value_numel: int
    largest_numel: int
    index_numel: int = 0


OUTPUT_BIAS = "output bias"


@dataclass(frozen=True)
class ExpertsCall:
    """One call of the experts of a mixture of experts, in the forward of `block_call`.

    `name` is the module with the weights `params` of all `num_experts`, their dim 0. It is called with the
    rows of `num_tokens` tokens per sample, of `hidden_size` features, and with the index and the weight of
    `top_k` experts for each; it returns the weighted sum of what these compute. `input_needs_grad` and
    `weights_need_grad` are about the rows, and the weights of the choice. `prior_layers` are the modules that
    have ended before it in the block call. `shared_experts` is the module that is called between it and the
    first operation on what it returns, if there is one. `inner_splits` are the splits of `params` along the
    features between the first and the last product of an expert: what ranks compute on such slices adds up.
    The side of a bias that is added behind the last product is OUTPUT_BIAS: each rank adds other elements of
    it. It is empty if no splits are known.

    In the form "dense" it is called with every token for expert 0, then for expert 1, and so on. Rows of
    zeros make zeros; those of the `top_k` chosen experts are others.
    """

    name: str
    block_call: str
    params: tuple[str, ...]
    num_experts: int
    top_k: int
    num_tokens: int
    hidden_size: int
    input_needs_grad: bool = True
    weights_need_grad: bool = True
    prior_layers: tuple[str, ...] = ()
    shared_experts: str = ""
    inner_splits: tuple[tuple[str, DimSplit], ...] = ()
    form: Literal["choice", "dense"] = "choice"

    @property
    def routed(self) -> "ExpertsCall":
        """The call as ranks route it: in the form "dense", with one expert for each row that is not zeros."""
        if self.form == "choice":
            return self
        return replace(self, num_tokens=self.num_tokens * self.top_k, top_k=1)


@dataclass(frozen=True)
class ChoiceBias:
    """A saved buffer [num_experts] that is added to scores when the module `experts`, in the forward of
    `block_call`, is chosen from; no gradient steps it.
    """

    buffer: str
    experts: str
    block_call: str
    num_experts: int


@dataclass(frozen=True)
class BatchTensor:
    """One tensor of a batch, or one that the forward returns to the loss: name, shape of one sample, and
    dtype.

    `per_sample` is False for a tensor without a batch dim (a logit scale); `shape` is then its full shape.
    `used_by_loss` tells whether the loss reads it. `rows_per_sample` is above 1 where samples are merged with
    another dim (tokens) into dim 0, and `shape` is then that of a row; it is 0 where samples are not along
    dim 0. `statistic` is set for an output that is computed over all samples.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    per_sample: bool = True
    used_by_loss: bool = True
    rows_per_sample: int = 1
    statistic: BatchStatistic | None = None

    def comm_dtype(self, param_dtype: str) -> str:
        """Returns the dtype in which it is sent: floats as float32 (float64 in a float64 job), everything
        else unchanged.
        """
        is_float = self.dtype in FLOAT_NBYTES
        return ("float64" if param_dtype == "float64" else "float32") if is_float else self.dtype

    def nbytes(self, param_dtype: str) -> int:
        """Returns the bytes of one sample when it is sent; 0 for a dtype that cannot be sent, which
        `diagnostics` reports.
        """
        return prod(self.shape) * {**FLOAT_NBYTES, **INTEGER_NBYTES}.get(self.comm_dtype(param_dtype), 0)

    def diagnostics(self, location: str) -> Iterator[Diagnostic]:
        """Yields a diagnostic if ranks cannot send each other its samples."""
        dtypes = (*FLOAT_NBYTES, *INTEGER_NBYTES)
        if self.rows_per_sample != 1:
            text = (
                f"{self.name} of the model has {self.rows_per_sample} rows of shape {list(self.shape)} along "
                "dim 0 for each sample, in an order that is not known"
                if self.rows_per_sample
                else f"{self.name} of the model does not have samples along dim 0"
            )
            text = f"{text}; ranks send each other samples"
            fix = (
                "return it with samples along dim 0: x.unflatten(0, (num_samples, -1)) if the rows of a "
                "sample are adjacent; or set mesh.dp_replicate = 1 and mesh.dp_shard = 1"
            )
            yield Diagnostic(text, fix, location)
        if self.dtype not in dtypes:
            text = f"{self.name} has dtype {self.dtype}, which cannot be sent between ranks"
            yield Diagnostic(text, f"use one of {', '.join(dtypes)}", location)


@dataclass(frozen=True)
class ModelSpec:
    """The block calls of one forward in order, and the logical parameters of the whole model.

    Per block call: `output_numel` (elements per sample of its output), `flops` (floating-point operations of
    its matrix products, per sample and forward) and `saved_numel` (elements per sample of the activations
    that its backward needs, without parameters; empty if unknown). `user_checkpointed_calls` are block calls
    that the model itself recomputes in backward (torch.utils.checkpoint); `requests_checkpointing`: its
    setting for that was on, and was turned off, because the strategy does the same. `has_dropout`: training
    draws random numbers; `writes_in_place`: the model writes into the output of a block; `notes`: what the
    analysis changed or could not decide, as text.

    `inputs` and `targets` are the batch, `outputs` what the forward returns to the loss.
    `needs_global_batch`: the loss is not a sum over samples and needs the outputs of the whole global batch.
    `num_batch_sums`: the numbers, summed over the global batch, that the loss reads before its backward.
    `pretrained_source`: where the initial values are stored; None means that they are drawn from the seed.

    For sharding: `layer_calls` are the calls of layers that can be sharded, in order; `logits` describes a
    vocabulary that can be sharded (None: none); `size_attributes` and `per_head_inputs` are module attributes
    and block arguments between colwise and rowwise layers that must be made local; `residual_flows` are the
    paths of the residual stream, in order. `batch_norm_calls` are those that take the statistics of their
    batch, `experts_calls` those of mixtures of experts, in order; `choice_biases` are buffers that move their
    choice; `relu_activations` are results of ReLU and max pooling that autograd saves, `kept_outputs` what
    matrix products and attention return, `unread_products` those that no backward reads; `linear_layers` are
    modules of the class nn.Linear whose weights nothing but their own calls reads. `loss_saved_numel`:
    elements per sample that the loss keeps until its backward.
    `stage_boundaries`, `sequence_info` and `memory` (bytes per block call in the dtypes of a
    job) are None if they were not analyzed.
    """

    name: str
    block_calls: tuple[str, ...]
    params: tuple[ParamSpec, ...]
    output_numel: tuple[int, ...]
    flops: tuple[int, ...]
    has_dropout: bool = False
    writes_in_place: bool = False
    notes: tuple[str, ...] = ()
    inputs: tuple[BatchTensor, ...] = ()
    targets: tuple[BatchTensor, ...] = ()
    outputs: tuple[BatchTensor, ...] = ()
    needs_global_batch: bool = False
    num_batch_sums: int = 0
    pretrained_source: PretrainedSource | None = None
    saved_numel: tuple[int, ...] = ()
    user_checkpointed_calls: tuple[str, ...] = ()
    requests_checkpointing: bool = False
    layer_calls: tuple[LayerCall, ...] = ()
    logits: LogitsSpec | None = None
    size_attributes: tuple[SizeAttribute, ...] = ()
    per_head_inputs: tuple[PerHeadInput, ...] = ()
    residual_flows: tuple[ResidualFlow, ...] = ()
    batch_norm_calls: tuple[BatchNormCall, ...] = ()
    experts_calls: tuple[ExpertsCall, ...] = ()
    choice_biases: tuple[ChoiceBias, ...] = ()
    relu_activations: tuple[ReluActivations, ...] = ()
    kept_outputs: tuple[KeptOutputs, ...] = ()
    unread_products: tuple[UnreadProduct, ...] = ()
    linear_layers: tuple[str, ...] = ()
    loss_saved_numel: int = 0
    stage_boundaries: StageBoundaries | None = None
    sequence_info: SequenceInfo | None = None
    memory: ModelMemory | None = None

    @property
    def train_flops(self) -> int:
        """Operations of a forward and a backward per sample; a backward costs two forwards, recomputation is
        not counted.
        """
        return 3 * sum(self.flops)

    @property
    def trainable(self) -> tuple[ParamSpec, ...]:
        """The parameters that receive gradients."""
        return tuple(param for param in self.params if param.trainable)

    @property
    def numel(self) -> int:
        """The number of elements of all logical parameters; tied parameters count once."""
        return sum(param.numel for param in self.params)

    def nbytes(self, param_dtype: str) -> int:
        """Returns the bytes of all logical parameters in a job with parameters of `param_dtype`."""
        return sum(param.numel * param.itemsize(param_dtype) for param in self.params)

    def params_of(self, block_call: str) -> tuple[ParamSpec, ...]:
        """Returns the parameters that `block_call` uses."""
        return tuple(param for param in self.params if block_call in param.block_calls)

    def block_calls_needing(self, param: ParamSpec) -> tuple[str, ...]:
        """Returns the block calls that need `param`: those that use it, and those where glue does; all if
        that is unknown.
        """
        if ROOT not in param.block_calls:
            return param.block_calls
        root_params = {} if self.stage_boundaries is None else dict(self.stage_boundaries.root_params)
        return (*param.block_calls, *root_params.get(param.name, self.block_calls))

    def restricted_to(self, block_calls: Collection[str]) -> "ModelSpec":
        """Returns the part of the model that a rank with only these block calls runs: their parameters, layer
        calls and sizes.
        """
        indices = [i for i, block_call in enumerate(self.block_calls) if block_call in block_calls]
        used_calls = {
            param.name: tuple(
                block_call
                for block_call in param.block_calls
                if block_call in block_calls or block_call == ROOT
            )
            for param in self.params
            if not set(self.block_calls_needing(param)).isdisjoint(block_calls)
        }
        calls = tuple(call for call in self.layer_calls if call.block_call in block_calls)
        blocks = {block_of(block_call) for block_call in self.block_calls}
        local_blocks = {block_of(block_call) for block_call in block_calls}
        # A module that two blocks share has its name in the first of them.
        local_blocks |= {_block_with(call.name, blocks) for call in calls}
        remote_blocks = blocks - local_blocks
        divided = self.logits is not None and any(
            call.name == self.logits.layer and call.role == "lm_head" for call in calls
        )
        return replace(
            self,
            block_calls=tuple(self.block_calls[i] for i in indices),
            params=tuple(
                replace(param, block_calls=used_calls[param.name])
                for param in self.params
                if param.name in used_calls
            ),
            output_numel=tuple(self.output_numel[i] for i in indices),
            flops=tuple(self.flops[i] for i in indices),
            saved_numel=tuple(self.saved_numel[i] for i in indices) if self.saved_numel else (),
            layer_calls=calls,
            logits=self.logits if divided else None,
            size_attributes=tuple(
                attribute
                for attribute in self.size_attributes
                if _block_with(attribute.module, blocks) not in remote_blocks
            ),
            per_head_inputs=tuple(
                head_input for head_input in self.per_head_inputs if head_input.block not in remote_blocks
            ),
            residual_flows=tuple(flow for flow in self.residual_flows if flow.block_call in block_calls),
            batch_norm_calls=tuple(call for call in self.batch_norm_calls if call.block_call in block_calls),
            experts_calls=tuple(call for call in self.experts_calls if call.block_call in block_calls),
            relu_activations=tuple(each for each in self.relu_activations if each.block_call in block_calls),
            kept_outputs=tuple(each for each in self.kept_outputs if each.block_call in block_calls),
            unread_products=tuple(each for each in self.unread_products if each.block_call in block_calls),
            choice_biases=tuple(bias for bias in self.choice_biases if bias.block_call in block_calls),
        )

    def last_backward(self, params: Iterable[ParamSpec]) -> str | None:
        """Returns the block call whose backward completes the gradients of all `params`: the earliest one in
        the forward.

        None if glue uses one of them directly: they are complete after the last backward of the step.
        """
        used = {block_call for param in params for block_call in param.block_calls}
        return None if ROOT in used else min(used, key=self.block_calls.index)


def _block_with(module: str, blocks: Collection[str]) -> str:
    while module and module not in blocks:
        module = module.rpartition(".")[0]
    return module
