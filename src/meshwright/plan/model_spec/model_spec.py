"""What the plan needs to know of a model: its blocks in the order in which they run, and its logical parameters.

A *block* is the grain of the engine: the embedding, each layer, the final norm, the head. A *visit* is one call of a
block in one forward; a block that is called twice (a shared embedding in an encoder-decoder) has two visits, the
second named `block#2`. A *logical parameter* is a parameter of the unmodified model under its first name; tied names
are its aliases.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from meshwright.plan.job.errors import Fault
from meshwright.plan.model_spec.dim_split import Cut
from meshwright.plan.model_spec.layer_calls import Call, Logits, Number, Passage, Portion
from meshwright.plan.model_spec.op_costs import Weighed
from meshwright.plan.model_spec.sequence_info import Tokens
from meshwright.plan.model_spec.stage_boundaries import Borders

ROOT = "(root)"  # parameters that glue between blocks uses directly: complete after the last backward
NBYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
NBYTES_WHOLE = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
NBYTES_OWN = {**NBYTES, **NBYTES_WHOLE, "float8_e4m3fn": 1, "float8_e5m2": 1}  # what a frozen weight may be kept in


def block_of(visit: str) -> str:
    """The block that `visit` is a call of: its second call is "layer#2"."""
    return visit.partition("#")[0]


def visit_of(block: str, count: int) -> str:
    """The visit that the call number `count` of `block` in a forward is, from 1 up."""
    return block if count == 1 else f"{block}#{count}"


@dataclass(frozen=True)
class Weight:
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
    visits: tuple[str, ...]
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    dtype: str = ""
    hidden: bool = False
    role: str = ""
    cuts: tuple[Cut, ...] = ()
    why: str = ""
    declared: str = ""

    def cut(self, dim: int) -> Cut:
        """How `dim` is divided; one of which nothing is known may be cut anywhere."""
        return next((cut for cut in self.cuts if cut.dim == dim), Cut(dim, self.shape[dim], (self.shape[dim],)))

    def side(self, side: str) -> Cut | None:
        """How the "in" or the "out" side of the layer is divided in this weight; None where it has no such side."""
        return next((cut for cut in self.cuts if cut.side == side), None)

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

    def held_in(self, parameters: str) -> str:
        """The dtype it has in a job whose parameters are `parameters`; beside float64, all floats are that."""
        widened = parameters == "float64" and self.dtype.startswith(("float", "bfloat"))
        return self.dtype if self.dtype and not widened else parameters

    def width(self, parameters: str) -> int:
        """Bytes per element in such a job; 0 for a dtype of which nothing is known here."""
        return NBYTES_OWN.get(self.held_in(parameters), 0)


@dataclass(frozen=True)
class Origin:
    """Stored initial values: where they are, a `digest` of their contents, their size, and what reading one of them holds.

    `held` is in bytes and comes on top of the parameter itself.
    """

    source: str
    digest: str
    nbytes: int
    held: int


@dataclass(frozen=True)
class Column:
    """One tensor of a batch, or of what a forward hands to the loss: its name, the shape of one row, and its dtype.

    `rows` is False for a tensor that is not per row of the batch (a logit scale): `shape` is then all of it. `used`
    tells whether the loss takes it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: bool = True
    used: bool = True

    def wire_dtype(self, parameters: str) -> str:
        """What it travels in: floats as float32, or as float64 beside parameters of that; all else as it is."""
        floating = self.dtype in NBYTES
        return ("float64" if parameters == "float64" else "float32") if floating else self.dtype

    def nbytes(self, parameters: str) -> int:
        """Bytes of one row on the wire; 0 for a dtype that cannot travel, which `faults` tells."""
        return prod(self.shape) * {**NBYTES, **NBYTES_WHOLE}.get(self.wire_dtype(parameters), 0)

    def faults(self, where: str) -> Iterator[Fault]:
        """What keeps it from travelling between ranks."""
        known = (*NBYTES, *NBYTES_WHOLE)
        if self.dtype not in known:
            text = f"{self.name} is of {self.dtype}, which does not travel between ranks"
            yield Fault(text, f"make it one of {', '.join(known)}", where)


@dataclass(frozen=True)
class Anatomy:
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
    visits: tuple[str, ...]
    weights: tuple[Weight, ...]
    stream_numel: tuple[int, ...]
    flops: tuple[int, ...]
    random: bool = False
    in_place: bool = False
    notes: tuple[str, ...] = ()
    inputs: tuple[Column, ...] = ()
    targets: tuple[Column, ...] = ()
    outputs: tuple[Column, ...] = ()
    whole_batch: bool = False
    origin: Origin | None = None
    inside_numel: tuple[int, ...] = ()
    reruns: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    logits: Logits | None = None
    numbers: tuple[Number, ...] = ()
    portions: tuple[Portion, ...] = ()
    passages: tuple[Passage, ...] = ()
    loss_numel: int = 0
    borders: Borders | None = None
    tokens: Tokens | None = None
    weighed: Weighed | None = None

    @property
    def learning_flops(self) -> int:
        """The operations of a forward and a backward per sample: a backward costs two forwards, what is rerun does not count."""
        return 3 * sum(self.flops)

    @property
    def trainable(self) -> tuple[Weight, ...]:
        """The parameters that receive gradients."""
        return tuple(weight for weight in self.weights if weight.trainable)

    @property
    def numel(self) -> int:
        """The number of elements of all logical parameters, tied ones counted once."""
        return sum(weight.numel for weight in self.weights)

    def nbytes(self, parameters: str) -> int:
        """The bytes of all logical parameters in a job whose parameters are `parameters`."""
        return sum(weight.numel * weight.width(parameters) for weight in self.weights)

    def of(self, visit: str) -> tuple[Weight, ...]:
        """The parameters used by `visit`."""
        return tuple(weight for weight in self.weights if visit in weight.visits)

    def needing(self, weight: Weight) -> tuple[str, ...]:
        """The visits that need `weight`: that use it themselves, or by whose time glue does; all where that is not known."""
        if ROOT not in weight.visits:
            return weight.visits
        roots = {} if self.borders is None else dict(self.borders.roots)
        return (*weight.visits, *roots.get(weight.name, self.visits))

    def within(self, visits: Collection[str]) -> "Anatomy":
        """What a rank sees of the model that runs these `visits` alone: their weights, calls, numbers and sizes."""
        kept = [i for i, visit in enumerate(self.visits) if visit in visits]
        own = {
            weight.name: tuple(visit for visit in weight.visits if visit in visits or visit == ROOT)
            for weight in self.weights
            if not set(self.needing(weight)).isdisjoint(visits)
        }
        calls = tuple(call for call in self.calls if call.visit in visits)
        blocks, mine = {block_of(visit) for visit in self.visits}, {block_of(visit) for visit in visits}
        mine |= {_block_with(call.name, blocks) for call in calls}  # a module of two blocks bears its name in the first
        elsewhere = blocks - mine
        divided = self.logits is not None and any(call.name == self.logits.layer and call.role == "head" for call in calls)
        return replace(
            self,
            visits=tuple(self.visits[i] for i in kept),
            weights=tuple(replace(weight, visits=own[weight.name]) for weight in self.weights if weight.name in own),
            stream_numel=tuple(self.stream_numel[i] for i in kept),
            flops=tuple(self.flops[i] for i in kept),
            inside_numel=tuple(self.inside_numel[i] for i in kept) if self.inside_numel else (),
            calls=calls,
            logits=self.logits if divided else None,
            numbers=tuple(number for number in self.numbers if _block_with(number.module, blocks) not in elsewhere),
            portions=tuple(portion for portion in self.portions if portion.block not in elsewhere),
            passages=tuple(passage for passage in self.passages if passage.visit in visits),
        )

    def last_backward(self, weights: Iterable[Weight]) -> str | None:
        """The visit whose backward completes the gradients of all `weights`: the earliest one in the forward.

        None when the root uses one of them directly: complete after the last backward of the step.
        """
        used = {visit for weight in weights for visit in weight.visits}
        return None if ROOT in used else min(used, key=self.visits.index)


def _block_with(module: str, blocks: Collection[str]) -> str:
    """The one of `blocks` that `module` lies in; empty where it lies in none."""
    while module and module not in blocks:
        module = module.rpartition(".")[0]
    return module
