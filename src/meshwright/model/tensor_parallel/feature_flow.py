"""Who takes in what whom gives out: the features of linear layers are followed through a trial run of the
model.

While the model runs, a mode below all of torch's Python follows the numbers of features (model/carried.py).
Layers are met at their own calls: a linear layer notes what the tensor carries that it takes in, and what it
gives out carries features of its own.

    q k v -> heads, norms, rope, softmax -> o     o takes in features of q, tied by heads to those of k and v
    gate_up -> split -> act, times -> down        down takes in features of gate_up, tied two by two

What is handed from block to block, or to a head, counts as needed whole (`escaped`), but for tables by head,
which are passed from the layer that has them to those that use them. A tensor by head that a block is given
(a bias of the attention that the glue computes) is a source too, by the name of the block's argument.
`model/pairing.py` reads the layers off from what is found here.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.model.hf.peft import is_adapted
from meshwright.model.tensor_parallel.feature_rules import (
    NO_FEATURE,
    CarriedFeatures,
    FeatureIds,
    output_features,
    propagate_features,
)
from meshwright.model.tensor_parallel.layer_roles import find_layer_roles
from meshwright.model.tensors.pytree import tree_tensors

FeatureSourceKind = Literal["linear", "table", "argument"]
PER_HEAD_NDIM = 4  # a table per head: [samples, heads, queries, keys]


# by kind of layer role
FEATURE_KINDS = {
    "linear": "linear",
    "embedding": "table",
    "head": "head",
}
DROPOUT_FUNCTIONS = (F.dropout, torch.dropout, torch.dropout_)
ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask")


@dataclass(frozen=True, eq=False)
class FeatureNode:
    """One call of a layer that gives out features: its kind, the visit, the number of the first feature and
    how many there are.

    `into` are the numbers of the features that it takes in, along its last dim; None where that carries none.
    Of an argument of a block, `name` is the block and `slot` the argument, cut along dim 1.
    """

    name: str
    kind: FeatureSourceKind
    block_call: str
    first_feature: int
    width: int
    input_features: FeatureIds | None = None
    arg: int | str = 0


@dataclass(eq=False)
class FeatureFlow(TorchDispatchMode):
    """Follows features (`following`).

    `met` are the parameters that stood beside features outside of layers, by name, each with the numbers that
    it met; `apart_too` are those that were used apart from features.
    """

    features: CarriedFeatures = field(default_factory=CarriedFeatures)
    nodes: list[FeatureNode] = field(default_factory=list)
    unsplit_features: list[FeatureIds] = field(default_factory=list)
    param_features: dict[str, list[FeatureIds]] = field(default_factory=dict)
    params_without_features: set[str] = field(default_factory=set)
    block_call: str = ""
    num_features: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._num_open_layers = 0
        self._parameters: Mapping[int, str] = {}
        # by tensor computed from parameters only: the names of these
        self._params_behind: MutableMapping[torch.Tensor, set[str]] = WeakIdKeyDictionary()
        self._in_glue: Callable[[], bool] = lambda: False
        # by feature id: whether it belongs to a per-head table
        self._is_table_feature = np.zeros(0, dtype=bool)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._num_open_layers:
            propagate_features(self.features, func, args, kwargs, out)
            self._note_params(tree_tensors((args, kwargs)), out)
        return out

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Meanwhile nothing is followed: the caller says itself what comes out."""
        self._num_open_layers += 1
        try:
            yield
        finally:
            self._num_open_layers -= 1

    @contextmanager
    def follow_forward(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        layers: Mapping[str, str],
        in_glue: Callable[[], bool],
    ) -> Iterator[None]:
        """Meanwhile, what `module` computes is followed: its `blocks`, and `layers` by name with their kinds.

        `in_glue` tells whether a layer that begins is called between blocks: it takes in all, and gives out
        nothing.
        """
        handles = []
        self._in_glue = in_glue
        for name, block in blocks.items():
            handles.append(
                block.register_forward_pre_hook(partial(self._before_block, name), with_kwargs=True)
            )
            handles.append(block.register_forward_hook(lambda block, args, out: self._after_block(out)))
        for name, kind in layers.items():
            layer = module.get_submodule(name)
            handles.append(layer.register_forward_pre_hook(lambda layer, args: self.enter_layer()))
            handles.append(layer.register_forward_hook(partial(self._after_layer, name, kind)))
        self._parameters = {id(parameter): name for name, parameter in module.named_parameters()}
        try:
            with self, _FunctionCalls(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_block_call(self, block_call: str) -> None:
        """Another block runs."""
        self.block_call = block_call

    def _after_layer(
        self, name: str, kind: str, layer: nn.Module, args: tuple[Any, ...], out: object
    ) -> None:
        self.leave_layer(name, "" if self._in_glue() else kind, args[0] if args else None, out)

    def _before_block(
        self, block: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """A block is given these: those by head are sources."""
        if not self._in_glue():
            return
        for slot, value in (*enumerate(args), *kwargs.items()):
            if not isinstance(value, torch.Tensor) or value.ndim != PER_HEAD_NDIM or value.requires_grad:
                continue
            if self.features.get(value) is None and self.features.varying_dims(value)[1]:
                self._add_node(block, "argument", value.shape[1], slot=slot)
                numbers = np.arange(self.nodes[-1].first_feature, self.num_features).reshape(1, -1, 1, 1)
                self.features.record(value, numbers)

    def _after_block(self, outputs: object) -> None:
        """A block gives these out; of all else that it has computed, only tables are still known."""
        if not self._in_glue():  # a block inside another block
            return
        for tensor in tree_tensors(outputs):
            numbers = self.features.get(tensor)
            if numbers is not None and not self._are_table_features(numbers):
                self.unsplit_features.append(numbers)
        self.features.forget(self._are_table_features)

    def enter_layer(self) -> None:
        """A layer begins: what it does within is its own."""
        self._num_open_layers += 1

    def leave_layer(self, name: str, kind: str, layer_input: object, out: object) -> None:
        """A layer ends: `kind` is "linear", "table", or another, which takes in all and gives out nothing."""
        self._num_open_layers -= 1
        if (
            self._num_open_layers
            or not isinstance(layer_input, torch.Tensor)
            or not isinstance(out, torch.Tensor)
        ):
            return
        self.params_without_features |= self._params_of(layer_input)
        carried = None if kind == "table" else self.features.get(layer_input)
        if kind not in ("linear", "table"):
            self.unsplit_features += [] if carried is None else [carried]
            self.features.record(out, None)
            return
        into = None
        if carried is not None:
            into = (
                carried.reshape(-1)
                if carried.size == carried.shape[-1] == layer_input.shape[-1] > 1
                else None
            )
            into = None if into is None or (into == NO_FEATURE).any() else into
            self.unsplit_features += [carried] if into is None else []
        self._add_node(name, "linear" if kind == "linear" else "table", out.shape[-1], into)
        self.features.record(out, output_features(self.nodes[-1].first_feature, out.shape[-1], out.ndim))

    def copy_features(self, source: object, out: object) -> None:
        """`out` carries what `given` does."""
        if isinstance(source, torch.Tensor) and isinstance(out, torch.Tensor):
            self.features.record(out, self.features.get(source))

    def follow_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, out: torch.Tensor
    ) -> None:
        """Attention by heads, which stand along the third dim from behind: every one uses a key, a value, and
        its table.
        """
        carried, ties = self.features, self.features.ties
        found = [carried.get(tensor) for tensor in (query, key, value)]
        met = [None if each is None else self._one_per_head(each) for each in found]
        asking = met[0]
        if asking is None:
            self._tie_all([each for each in met if each is not None])
            carried.record(out, None)
            return
        for tensor, numbers in zip((key, value), met[1:], strict=True):
            if numbers is None:
                asking = ties.tie_along(
                    asking, [asking.ndim - 3] if tensor.ndim >= 3 and tensor.shape[-3] > 1 else []
                )
        for numbers in met[1:]:
            if numbers is not None:
                shared = query.shape[-3] // numbers.shape[-3] if numbers.shape[-3] > 1 else 1
                ties.tie_reader(asking, np.repeat(numbers, shared, axis=-3))
        if isinstance(mask, torch.Tensor):
            table = carried.get(mask)
            if table is None:
                by_head = mask.ndim >= 3 and carried.varying_dims(mask)[mask.ndim - 3]
                asking = ties.tie_along(asking, [asking.ndim - 3] if by_head else [])
            else:
                ties.tie(asking, ties.tie_along(table, [table.ndim - 2, table.ndim - 1]))
        carried.record(out, asking)
        self._note_params(tree_tensors((query, key, value, mask)), out)

    def _one_per_head(self, numbers: FeatureIds) -> FeatureIds:
        """One number per head."""
        return self.features.ties.tie_along(
            numbers, [dim for dim in range(numbers.ndim) if dim != numbers.ndim - 3]
        )

    def _tie_all(self, found: list[FeatureIds]) -> None:
        for numbers in found:
            self.features.ties.tie_along(numbers, range(numbers.ndim))

    def _add_node(
        self,
        name: str,
        kind: FeatureSourceKind,
        width: int,
        into: FeatureIds | None = None,
        slot: int | str = 0,
    ) -> None:
        self.nodes.append(FeatureNode(name, kind, self.block_call, self.num_features, width, into, slot))
        self._is_table_feature = np.concatenate([self._is_table_feature, np.full(width, kind == "table")])
        self.num_features += width

    def _are_table_features(self, numbers: FeatureIds) -> bool:
        """Whether these are numbers of tables only."""
        return bool(self._is_table_feature[numbers[numbers != NO_FEATURE]].all())

    def _note_params(self, given: list[torch.Tensor], out: object) -> None:
        """Parameters that are used beside features, they or what is made of them alone (1 + weight): all
        ranks use them.

        Features beside which stands something else that needs a gradient (a gate of the stream) are needed
        whole: a rank has a summand of that gradient only.
        """
        names = set[str]().union(*(self._params_of(each) for each in given))
        carry = [self.features.get(each) is not None for each in given]
        others = any(
            each.requires_grad and not (known or self._params_of(each))
            for each, known in zip(given, carry, strict=True)
        )
        for made in tree_tensors(out) if names or others else ():
            numbers = self.features.get(made)
            if numbers is not None:
                self.unsplit_features += [numbers] if others else []
                for name in names:
                    self.param_features.setdefault(name, []).append(numbers)
            elif others or any(carry):
                self.params_without_features |= names
            else:
                self._params_behind[made] = names

    def _params_of(self, tensor: torch.Tensor) -> set[str]:
        """The parameters of which `tensor` is made, if it is made of such alone."""
        name = self._parameters.get(id(tensor))
        return self._params_behind.get(tensor, set()) if name is None else {name}


def traced_layer_kinds(module: nn.Module) -> dict[str, str]:
    """The layers of `module` that are met in a flow, and their kinds; of one with adapters, whose layers are
    two, none.
    """
    if is_adapted(module):
        return {}
    return {
        socket.name: FEATURE_KINDS[socket.kind]
        for socket in find_layer_roles(module)
        if socket.kind in FEATURE_KINDS
    }


class _FunctionCalls(TorchFunctionMode):
    """Attention and dropout, met as they are called: what they do within differs from plan to plan."""

    def __init__(self, flow: FeatureFlow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (*DROPOUT_FUNCTIONS, F.scaled_dot_product_attention):
            return func(*args, **kwargs)
        with self._flow.pause():
            out = func(*args, **kwargs)
        if func in DROPOUT_FUNCTIONS:
            self._flow.copy_features(args[0] if args else kwargs.get("input"), out)
        else:
            given = {**dict(zip(ATTENTION_ARGUMENTS, args, strict=False)), **kwargs}
            self._flow.follow_attention(
                given["query"], given["key"], given["value"], given.get("attn_mask"), out
            )
        return out
