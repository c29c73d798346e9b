"""What the plan needs to know of a model: its blocks in the order in which they run, and its logical parameters.

A *block* is the grain of the engine: the embedding, each layer, the final norm, the head. A *visit* is one call of a
block in one forward; a block that is called twice (a shared embedding in an encoder-decoder) has two visits, the
second named `block#2`. A *logical parameter* is a parameter of the unmodified model under its first name; tied names
are its aliases.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.model_spec.dim_split import DimSplit
from meshwright.plan.model_spec.layer_calls import (
    LayerCall,
    LogitsSpec,
    PerHeadInput,
    ResidualFlow,
    SizeAttribute,
)
from meshwright.plan.model_spec.op_costs import ModelMemory
from meshwright.plan.model_spec.sequence_info import SequenceInfo
from meshwright.plan.model_spec.stage_boundaries import StageBoundaries

ROOT = "(root)"  # parameters that glue between blocks uses directly: complete after the last backward
FLOAT_NBYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
INTEGER_NBYTES = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
PARAM_DTYPE_NBYTES = {
    **FLOAT_NBYTES,
    **INTEGER_NBYTES,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}  # what a frozen weight may be kept in


def block_of(block_call: str) -> str:
    """The block that `visit` is a call of: its second call is "layer#2"."""
    return block_call.partition("#")[0]


def block_call_name(block: str, call_number: int) -> str:
    """The visit that the call number `count` of `block` in a forward is, from 1 up."""
    return block if call_number == 1 else f"{block}#{call_number}"


@dataclass(frozen=True)
class ParamSpec:
    """One logical parameter: its first name, its shape, the visits that use it, and its tied names.

    `dtype` is its own, where that is not the job's: of a parameter that is not floating, and of a frozen one that was made
    in another dtype than those that are trained (a bfloat16 base under float32 adapters). Empty: the job's.
    `hidden` says that it is the matrix of a linear layer between the embedding and the head. `role` is that of the layer that
    it belongs to (see `Call`; empty: none that can be divided), `cuts` are how its dims may be divided without a change of the
    numbers, one per side. `why` says, where it has no role, why nobody can divide it; `declared` is the role that the user has
    declared for its layer.
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

    def dim_split(self, dim: int) -> DimSplit:
        """How `dim` is divided; one of which nothing is known may be cut anywhere."""
        return next(
            (cut for cut in self.dim_splits if cut.dim == dim),
            DimSplit(dim, self.shape[dim], (self.shape[dim],)),
        )

    def split_of_side(self, side: str) -> DimSplit | None:
        """How the "in" or the "out" side of the layer is divided in this weight; None where it has no such side."""
        return next((cut for cut in self.dim_splits if cut.side == side), None)

    @property
    def names(self) -> tuple[str, ...]:
        """All its names, the first one first."""
        return (self.name, *self.aliases)

    @property
    def layers(self) -> tuple[str, ...]:
        """The modules that hold it, that of its first name first."""
        return tuple(name.rpartition(".")[0] for name in self.names)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def dtype_for(self, param_dtype: str) -> str:
        """The dtype it has in a job whose parameters are `parameters`; beside float64, all floats are that."""
        widened = param_dtype == "float64" and self.dtype.startswith(("float", "bfloat"))
        return self.dtype if self.dtype and not widened else param_dtype

    def itemsize(self, param_dtype: str) -> int:
        """Bytes per element in such a job; 0 for a dtype of which nothing is known here."""
        return PARAM_DTYPE_NBYTES.get(self.dtype_for(param_dtype), 0)


@dataclass(frozen=True)
class PretrainedSource:
    """Stored initial values: where they are, a `digest` of their contents, their size, and what reading one of them holds.

    `held` is in bytes and comes on top of the parameter itself.
    """

    source: str
    digest: str
    nbytes: int
    read_buffer_nbytes: int


@dataclass(frozen=True)
class BatchTensor:
    """One tensor of a batch, or of what a forward hands to the loss: its name, the shape of one row, and its dtype.

    `rows` is False for a tensor that is not per row of the batch (a logit scale): `shape` is then all of it. `used`
    tells whether the loss takes it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    per_sample: bool = True
    used_by_loss: bool = True

    def comm_dtype(self, param_dtype: str) -> str:
        """What it travels in: floats as float32, or as float64 beside parameters of that; all else as it is."""
        floating = self.dtype in FLOAT_NBYTES
        return ("float64" if param_dtype == "float64" else "float32") if floating else self.dtype

    def nbytes(self, param_dtype: str) -> int:
        """Bytes of one row on the wire; 0 for a dtype that cannot travel, which `faults` tells."""
        return prod(self.shape) * {**FLOAT_NBYTES, **INTEGER_NBYTES}.get(self.comm_dtype(param_dtype), 0)

    def diagnostics(self, location: str) -> Iterator[Diagnostic]:
        """What keeps it from travelling between ranks."""
        known = (*FLOAT_NBYTES, *INTEGER_NBYTES)
        if self.dtype not in known:
            text = f"{self.name} is of {self.dtype}, which does not travel between ranks"
            yield Diagnostic(text, f"make it one of {', '.join(known)}", location)


@dataclass(frozen=True)
class ModelSpec:
    """The blocks of one forward, in order of their visits, and the logical parameters of the whole model.

    Per visit, `stream_numel` is the elements per sample that the visit hands on to what follows, and `flops` the
    floating-point operations of its matrix products, per sample and forward. `inside_numel`: the elements per sample that it
    computes within and its backward needs, weights apart; empty where that is not known. `reruns` are the visits that the model
    itself runs again in backward (torch.utils.checkpoint).
    `random` tells whether training draws dropout, `in_place` whether the model writes into a block's output in place;
    `notes` are what was not understood, in words. `inputs` and `targets` are the batch, as the forward and the loss take
    it, `outputs` what the one hands to the other; `whole_batch` says that the loss is no sum over rows, but needs the
    outputs of the whole global batch at once. `origin` is where initial values are stored; None: drawn from the seed.
    `calls` are those of layers that can be divided, in order. `logits` are those of a head that can be; None where there is none.
    `numbers` and `portions` are what modules hold and blocks are given of what lies between columns and rows. `passages` are
    those of the stream, in the order of the visits that it goes through. `loss_numel`: the elements per sample that the loss
    keeps of its own, until its backward. `borders` are the values between blocks; None where nobody has asked for them. `tokens`
    are how those of a sample go through it; likewise. `weighed` is what visits hold in bytes, in the dtypes of a job; likewise.
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
    pretrained_source: PretrainedSource | None = None
    saved_numel: tuple[int, ...] = ()
    user_checkpointed_calls: tuple[str, ...] = ()
    layer_calls: tuple[LayerCall, ...] = ()
    logits: LogitsSpec | None = None
    size_attributes: tuple[SizeAttribute, ...] = ()
    per_head_inputs: tuple[PerHeadInput, ...] = ()
    residual_flows: tuple[ResidualFlow, ...] = ()
    loss_saved_numel: int = 0
    stage_boundaries: StageBoundaries | None = None
    sequence_info: SequenceInfo | None = None
    memory: ModelMemory | None = None

    @property
    def train_flops(self) -> int:
        """The operations of a forward and a backward per sample: a backward costs two forwards, what is rerun does not count."""
        return 3 * sum(self.flops)

    @property
    def trainable(self) -> tuple[ParamSpec, ...]:
        """The parameters that receive gradients."""
        return tuple(weight for weight in self.params if weight.trainable)

    @property
    def numel(self) -> int:
        """The number of elements of all logical parameters, tied ones counted once."""
        return sum(weight.numel for weight in self.params)

    def nbytes(self, param_dtype: str) -> int:
        """The bytes of all logical parameters in a job whose parameters are `parameters`."""
        return sum(weight.numel * weight.itemsize(param_dtype) for weight in self.params)

    def params_of(self, block_call: str) -> tuple[ParamSpec, ...]:
        """The parameters used by `visit`."""
        return tuple(weight for weight in self.params if block_call in weight.block_calls)

    def block_calls_needing(self, param: ParamSpec) -> tuple[str, ...]:
        """The visits that need `weight`: that use it themselves, or by whose time glue does; all where that is not known."""
        if ROOT not in param.block_calls:
            return param.block_calls
        roots = {} if self.stage_boundaries is None else dict(self.stage_boundaries.root_params)
        return (*param.block_calls, *roots.get(param.name, self.block_calls))

    def restricted_to(self, block_calls: Collection[str]) -> "ModelSpec":
        """What a rank sees of the model that runs these `visits` alone: their weights, calls, numbers and sizes."""
        kept = [i for i, visit in enumerate(self.block_calls) if visit in block_calls]
        own = {
            weight.name: tuple(visit for visit in weight.block_calls if visit in block_calls or visit == ROOT)
            for weight in self.params
            if not set(self.block_calls_needing(weight)).isdisjoint(block_calls)
        }
        calls = tuple(call for call in self.layer_calls if call.block_call in block_calls)
        blocks, mine = (
            {block_of(visit) for visit in self.block_calls},
            {block_of(visit) for visit in block_calls},
        )
        mine |= {
            _block_with(call.name, blocks) for call in calls
        }  # a module of two blocks bears its name in the first
        elsewhere = blocks - mine
        divided = self.logits is not None and any(
            call.name == self.logits.layer and call.role == "lm_head" for call in calls
        )
        return replace(
            self,
            block_calls=tuple(self.block_calls[i] for i in kept),
            params=tuple(
                replace(weight, block_calls=own[weight.name]) for weight in self.params if weight.name in own
            ),
            output_numel=tuple(self.output_numel[i] for i in kept),
            flops=tuple(self.flops[i] for i in kept),
            saved_numel=tuple(self.saved_numel[i] for i in kept) if self.saved_numel else (),
            layer_calls=calls,
            logits=self.logits if divided else None,
            size_attributes=tuple(
                number
                for number in self.size_attributes
                if _block_with(number.module, blocks) not in elsewhere
            ),
            per_head_inputs=tuple(
                portion for portion in self.per_head_inputs if portion.block not in elsewhere
            ),
            residual_flows=tuple(
                passage for passage in self.residual_flows if passage.block_call in block_calls
            ),
        )

    def last_backward(self, params: Iterable[ParamSpec]) -> str | None:
        """The visit whose backward completes the gradients of all `weights`: the earliest one in the forward.

        None when the root uses one of them directly: complete after the last backward of the step.
        """
        used = {visit for weight in params for visit in weight.block_calls}
        return None if ROOT in used else min(used, key=self.block_calls.index)


def _block_with(module: str, blocks: Collection[str]) -> str:
    """The one of `blocks` that `module` lies in; empty where it lies in none."""
    while module and module not in blocks:
        module = module.rpartition(".")[0]
    return module
