"""The table of torch operations: what kind each is, and how the dims of its operands become those of its
result.

    constant      values that no operand decides: zeros, ones_like, fill
    pointwise     each element depends on the elements at its position
    view          the same elements, arranged in another way
    reduction     elements along some dims are combined: sum, softmax, norms, sort
    contraction   products that are summed over a paired dim: matmul, convolution
    lookup        elements at given places: embedding, gather
    update        elements are written at given places: scatter, index_add
    random        drawn
    read          the value is read into Python
    metadata      the shape or the dtype is read, and no value
    opaque        anything else: all operands may mix

Every analysis asks `find_op`; what follows from a kind is a matter of the analysis. Names are those of torch
functions and of aten operations, without underscores at their ends, since both levels name alike: `softmax`
is F.softmax and aten._softmax, `add` also `__add__` and `add_`. A name with underscores is looked up first,
because `__float__` reads a value where `float` casts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

OpKind = Literal[
    "constant",
    "pointwise",
    "view",
    "reduction",
    "contraction",
    "lookup",
    "update",
    "random",
    "read",
    "metadata",
    "opaque",
]
DimMap = Literal[
    "same",  # as the operands, which broadcast
    "shape",  # as a shape among the arguments says
    "like",  # as the first operand, of which nothing else is used
    "data",  # as the given Python numbers
    "broadcast",  # new leading dims, and repeated elements
    "reshape",  # other dims of the same elements in the same order
    "ones",  # dims of size 1 come or go
    "transpose",  # two dims change places, or all as given
    "reverse",  # all dims change places
    "move",  # in some other way
    "slice",  # a range of one dim, in steps
    "narrow",  # a range of one dim
    "select",  # one index of a dim
    "split",  # ranges of one dim, as several results
    "unbind",  # all indices of one dim, as several results
    "join",  # operands behind one another along a dim
    "stack",  # operands behind one another along a new dim
    "rearrange",  # other places along a dim
    "reduce",  # dims of size 1, or none, where elements are combined
    "along",  # the dim stays, and each element depends on all along it
    "search",  # places, or elements that are chosen by their values
    "trailing",  # the last dims stay, and each element depends on all of them
    "halves",  # half of the dim
    "window",  # neighbours along the last dims
    "batch",  # combined over samples, or over groups of channels
    "product",  # a matrix product
    "letters",  # as the letters of an einsum say
    "index",  # one dim is that of the indices
    "table",  # a row for each index
    "steps",  # one step follows the other
    "none",
]
ALL_DIMS: Any = None


@dataclass(frozen=True)
class Op:
    """An operation: its kind, and how its dims map.

    `dim` is the position and the default of the argument that names the dims it works on; None if there is
    none. `position` is that of the value of a constant, or of the first factor of a product. `arithmetic` is
    the operation of basic arithmetic that it is.

    `is_tokenwise`: it treats each token of a residual stream [samples, tokens, ...] by itself (a reduction:
    along the last dim), so what holds for all tokens holds for a slice of them. `is_copy`: of the first
    operand, perhaps in another dtype. `is_alias`: the result has the memory of the first operand.
    `cuts_graph`: no gradient passes. `is_idempotent`: of equal values, it gives that value for any number of
    them. `is_split`: a view of a part. `writes_first`: the name alone says that it writes into its first
    operand. `is_uninitialized`: it makes memory without values. `shape_operand` is the last operand of
    which no more than the shape and dtype is used, counted from 1; 0 if values of all are.
    """

    kind: OpKind = "opaque"
    dims: DimMap = "none"
    dim: tuple[int, Any] | None = None
    position: int | None = None
    arithmetic: str = ""
    is_tokenwise: bool = False
    is_copy: bool = False
    is_alias: bool = False
    cuts_graph: bool = False
    is_idempotent: bool = False
    is_split: bool = False
    writes_first: bool = False
    is_uninitialized: bool = False
    shape_operand: int = 0

    @property
    def is_elementwise(self) -> bool:
        """Whether each element of the result depends on the elements at its position, if on any."""
        if self.kind == "constant":
            return self.dims in ("same", "like")
        return self.kind == "pointwise" or (self.kind == "random" and self.dims in ("same", "like"))

    @property
    def moves_dims(self) -> bool:
        """Whether dims change places, are added or removed, and elements stay together."""
        return self.kind == "view" and self.dims in ("broadcast", "ones", "transpose", "reverse", "move")

    @property
    def is_constant_tensor(self) -> bool:
        """Whether all elements of the result are one number, or none."""
        return self.kind == "constant" and self.dims != "data"


OPAQUE = Op()


def _arithmetic(name: str, *, tokenwise: bool = True, in_place: bool = False) -> Op:
    return Op("pointwise", "same", arithmetic=name, is_tokenwise=tokenwise, writes_first=in_place)


def _reduction(
    dims: DimMap, dim: tuple[int, Any] | None = None, *, tokenwise: bool = False, idempotent: bool = False
) -> Op:
    return Op("reduction", dims, dim, is_tokenwise=tokenwise, is_idempotent=idempotent)


_EVERYWHERE, _LAST = (1, ALL_DIMS), (1, -1)
_CONSTANTS = (
    (Op("constant", "shape"), "zeros ones"),
    (Op("constant", "shape", position=0), "scalar_tensor"),
    (Op("constant", "shape", position=1), "full"),
    (Op("constant", "shape", is_uninitialized=True), "empty empty_strided empty_permuted"),
    (Op("constant", "like", shape_operand=1), "zeros_like ones_like new_zeros new_ones"),
    (Op("constant", "like", position=1, shape_operand=1), "full_like"),
    (Op("constant", "like", position=2, shape_operand=1), "new_full"),
    (
        Op("constant", "like", is_uninitialized=True, shape_operand=1),
        "empty_like new_empty new_empty_strided",
    ),
    (Op("constant", "same"), "zero"),
    (Op("constant", "same", position=1), "fill"),
    (Op("constant", "data"), "tensor as_tensor asarray"),
    (Op("constant", "data", shape_operand=1), "new_tensor"),
    (Op("random", "like"), "rand_like randn_like"),
    (Op("random", "same", is_tokenwise=True), "dropout"),
)
_POINTWISE = (
    (_arithmetic("add"), "add radd"),
    (_arithmetic("add", in_place=True), "iadd"),
    (_arithmetic("sub"), "sub"),
    (_arithmetic("sub", in_place=True), "isub"),
    (_arithmetic("rsub"), "rsub"),
    (_arithmetic("mul"), "mul rmul"),
    (_arithmetic("mul", in_place=True), "imul"),
    (_arithmetic("div"), "div truediv"),
    (_arithmetic("div", in_place=True), "itruediv"),
    (_arithmetic("rdiv"), "rdiv rtruediv"),
    (_arithmetic("pow"), "pow"),
    (_arithmetic("pow", in_place=True), "ipow"),
    (_arithmetic("rpow"), "rpow"),
    (_arithmetic("sub", tokenwise=False), "subtract"),
    (_arithmetic("mul", tokenwise=False), "multiply"),
    (_arithmetic("div", tokenwise=False), "true_divide divide"),
    (_arithmetic("floordiv", tokenwise=False), "floordiv"),
    (_arithmetic("floordiv", tokenwise=False, in_place=True), "ifloordiv"),
    (
        Op("pointwise", "same", is_tokenwise=True),
        "lerp addcmul where maximum minimum square sqrt rsqrt reciprocal neg abs exp log tanh sigmoid relu "
        "gelu silu softplus clamp clip erf mish elu sin cos masked_fill",
    ),
    (
        Op("pointwise", "same", is_tokenwise=True, is_copy=True),
        "contiguous clone to float double half bfloat16 type type_as",
    ),
    (
        Op("pointwise", "same", is_tokenwise=True, is_copy=True, is_alias=True, cuts_graph=True),
        "detach",
    ),
    (Op("pointwise", "same", is_copy=True), "to_copy"),
    (Op("pointwise", "same", is_copy=True, is_alias=True), "alias lift_fresh"),
    (
        Op("pointwise", "same"),
        "eq ne lt le gt ge logical_and logical_or logical_not logical_xor isnan isinf isfinite heaviside "
        "sign sgn and or xor invert rand ror rxor bitwise_and bitwise_or bitwise_xor bitwise_not floor ceil "
        "round trunc fmod remainder mod rfloordiv int long bool short byte exp2 expm1 log1p log2 log10 logit "
        "erfc tan sinh cosh atan atan2 hardtanh relu6 leaky_relu prelu celu selu hardswish hardsigmoid "
        "logsigmoid hardshrink softsign threshold addcdiv nan_to_num float_power positive negative pos "
        "absolute copy requires_grad data real imag conj bucketize polar",
    ),
    (Op("pointwise", "same", writes_first=True), "iand ior ixor imod"),
)
_VIEWS = (
    (Op("view", "reshape"), "view reshape flatten unflatten ravel unsafe_view reshape_alias"),
    (Op("view", "reshape", shape_operand=2), "view_as reshape_as"),
    (Op("view", "broadcast"), "expand broadcast_to"),
    (Op("view", "broadcast", shape_operand=2), "expand_as"),
    (Op("view", "ones"), "squeeze unsqueeze"),
    (Op("view", "transpose"), "transpose permute swapaxes swapdims mT"),
    (Op("view", "reverse"), "t T"),
    (Op("view", "move"), "movedim moveaxis view_as_complex view_as_real"),
    (Op("view", "slice"), "slice"),
    (Op("view", "select", _EVERYWHERE, is_split=True), "select"),
    (Op("view", "narrow", _EVERYWHERE, is_split=True), "narrow"),
    (Op("view", "split", (2, 0), is_split=True), "chunk split split_with_sizes tensor_split"),
    (Op("view", "unbind", (1, 0), is_split=True), "unbind"),
    (Op("view", "unbind", (9, 0), is_split=True), "iter"),
    (Op("view", "join", (1, 0)), "cat concat"),
    (Op("view", "stack", (1, 0)), "stack"),
    (Op("view", "rearrange", _EVERYWHERE), "flip"),
    (Op("view", "rearrange", (2, ALL_DIMS)), "roll repeat_interleave"),
    (Op("view", "window"), "unfold fold"),
)
_REDUCTIONS = (
    (_reduction("reduce", _EVERYWHERE, tokenwise=True, idempotent=True), "mean amax"),
    (_reduction("reduce", _EVERYWHERE, tokenwise=True), "sum var std var_mean"),
    (_reduction("reduce", _EVERYWHERE, idempotent=True), "amin"),
    (_reduction("reduce", _EVERYWHERE), "std_mean prod logsumexp"),
    (_reduction("reduce", (2, ALL_DIMS)), "norm vector_norm linalg_norm linalg_vector_norm"),
    (_reduction("along", _LAST, tokenwise=True), "softmax log_softmax"),
    (_reduction("along", _LAST), "softmin"),
    (_reduction("along", _EVERYWHERE), "cumsum cumprod logcumsumexp"),
    (_reduction("along", (2, -1)), "diff"),
    (_reduction("along", (2, 1)), "normalize"),
    (_reduction("halves", _LAST), "glu"),
    (_reduction("search", _EVERYWHERE, idempotent=True), "max min all any median"),
    (_reduction("search", _EVERYWHERE), "argmax argmin count_nonzero"),
    (_reduction("search", _LAST), "sort argsort"),
    (_reduction("search", (2, -1)), "topk"),
    (_reduction("search", (2, ALL_DIMS)), "kthvalue"),
    (_reduction("search", idempotent=True), "mode"),
    (_reduction("trailing", tokenwise=True), "layer_norm rms_norm"),
    (_reduction("trailing"), "native_layer_norm"),
    (_reduction("batch"), "batch_norm instance_norm group_norm"),
    (_reduction("window"), "max_pool1d avg_pool1d"),
)
_PRODUCTS_AND_PLACES = (
    (Op("contraction", "product", position=0), "matmul mm bmm mv rmatmul linear"),
    (Op("contraction", "product", position=1), "addmm baddbmm"),
    (Op("contraction", "letters"), "einsum"),
    (Op("contraction", "window"), "conv1d conv2d conv3d conv_transpose1d conv_transpose2d"),
    (Op("lookup", "index", _EVERYWHERE), "gather index_select"),
    (Op("lookup", "index", (2, ALL_DIMS)), "take_along_dim"),
    (Op("lookup", "index"), "index"),
    (Op("lookup", "table"), "embedding"),
    (Op("update", "same", _EVERYWHERE), "scatter scatter_add scatter_reduce index_add index_fill"),
    (Op("update", "same"), "index_put index_copy masked_scatter"),
    (Op("update", "same", writes_first=True), "setitem"),
    (Op("opaque", "steps"), "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell"),
)
_QUERIES = (
    (
        Op("read"),
        "item tolist numpy is_nonzero equal allclose __bool__ __float__ __int__ __index__ __complex__ "
        "__array__ __contains__",
    ),
    (
        Op("metadata"),
        "size dim len numel is_floating_point is_complex element_size stride ndimension device",
    ),
)
ROWS: tuple[tuple[Op, str], ...] = (
    *(*_CONSTANTS, *_POINTWISE, *_VIEWS),
    *(*_REDUCTIONS, *_PRODUCTS_AND_PLACES, *_QUERIES),
)


def _operations() -> Iterator[tuple[str, Op]]:
    for op, names in ROWS:
        for name in names.split():
            yield name, op


OPS = MappingProxyType(dict(_operations()))


@lru_cache(maxsize=4096)
def find_op(name: str) -> Op:
    """Returns the entry of a torch function or an aten operation; OPAQUE if the table does not have it."""
    return OPS.get(name) or OPS.get(name.strip("_"), OPAQUE)


def reads_values(name: str) -> bool:
    """Returns whether the function `name`, with or without underscores, reads values if it returns no
    tensor.
    """
    return find_op(name).kind == "read" or find_op(f"__{name}__").kind == "read"
