"""Who takes in what whom gives out: the features of linear layers are followed through a trial run of the model.

While the model runs, a mode below all of torch's Python follows the numbers of features (model/carried.py). Layers are met at
their own calls: a linear layer notes what the tensor carries that it takes in, and what it gives out carries features of its own.

    q k v -> heads, norms, rope, softmax -> o     o takes in features of q, tied by heads to those of k and v
    gate_up -> split -> act, times -> down        down takes in features of gate_up, tied two by two

What is handed from block to block, or to a head, counts as needed whole (`escaped`), but for tables by head, which are passed
from the layer that has them to those that use them. A tensor by head that a block is given (a bias of the attention that the glue
computes) is a source too, by the name of the block's argument. `model/pairing.py` reads the layers off from what is found here.
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
from meshwright.model.tensor_parallel.feature_rules import NONE, Carried, Numbers, follow, given_out
from meshwright.model.tensor_parallel.layer_roles import find_sockets
from meshwright.model.tensors.pytree import tensors

Kind = Literal["linear", "table", "argument"]
BY_HEAD = 4  # dims of a tensor that is one table per head: rows, heads, queries, keys


KINDS = {"linear": "linear", "embedding": "table", "head": "head"}  # what a layer is to a flow, by the kind of its socket
DROPOUTS = (F.dropout, torch.dropout, torch.dropout_)
ATTENTION = ("query", "key", "value", "attn_mask")


@dataclass(frozen=True, eq=False)
class Node:
    """One call of a layer that gives out features: its kind, the visit, the number of the first feature and how many there are.

    `into` are the numbers of the features that it takes in, along its last dim; None where that carries none. Of an argument of a
    block, `name` is the block and `slot` the argument, cut along dim 1.
    """

    name: str
    kind: Kind
    visit: str
    first: int
    width: int
    into: Numbers | None = None
    slot: int | str = 0


@dataclass(eq=False)
class Flow(TorchDispatchMode):
    """Follows features (`following`).

    `met` are the parameters that stood beside features outside of layers, by name, each with the numbers that it met; `apart_too`
    are those that were used apart from features.
    """

    carried: Carried = field(default_factory=Carried)
    nodes: list[Node] = field(default_factory=list)
    escaped: list[Numbers] = field(default_factory=list)
    met: dict[str, list[Numbers]] = field(default_factory=dict)
    apart_too: set[str] = field(default_factory=set)
    visit: str = ""
    count: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._parameters: Mapping[int, str] = {}
        self._made: MutableMapping[torch.Tensor, set[str]] = WeakIdKeyDictionary()  # of what is made of parameters alone, those
        self._in_glue: Callable[[], bool] = lambda: False
        self._lasting = np.zeros(0, dtype=bool)  # by number: whether it is of a table

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._depth:
            follow(self.carried, func, args, kwargs, out)
            self._meet(tensors((args, kwargs)), out)
        return out

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Meanwhile nothing is followed: the caller says itself what comes out."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextmanager
    def following(
        self, module: nn.Module, blocks: Mapping[str, nn.Module], layers: Mapping[str, str], in_glue: Callable[[], bool]
    ) -> Iterator[None]:
        """Meanwhile, what `module` computes is followed: its `blocks`, and `layers` by name with their kinds.

        `in_glue` tells whether a layer that begins is called between blocks: it takes in all, and gives out nothing.
        """
        handles = []
        self._in_glue = in_glue
        for name, block in blocks.items():
            handles.append(block.register_forward_pre_hook(partial(self._given, name), with_kwargs=True))
            handles.append(block.register_forward_hook(lambda block, args, out: self._handed_on(out)))
        for name, kind in layers.items():
            layer = module.get_submodule(name)
            handles.append(layer.register_forward_pre_hook(lambda layer, args: self.enter()))
            handles.append(layer.register_forward_hook(partial(self._left, name, kind)))
        self._parameters = {id(parameter): name for name, parameter in module.named_parameters()}
        try:
            with self, _Calls(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, visit: str) -> None:
        """Another block runs."""
        self.visit = visit

    def _left(self, name: str, kind: str, layer: nn.Module, args: tuple[Any, ...], out: object) -> None:
        self.leave(name, "" if self._in_glue() else kind, args[0] if args else None, out)

    def _given(self, block: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A block is given these: those by head are sources."""
        if not self._in_glue():
            return
        for slot, value in (*enumerate(args), *kwargs.items()):
            if not isinstance(value, torch.Tensor) or value.ndim != BY_HEAD or value.requires_grad:
                continue
            if self.carried.of(value) is None and self.carried.loose(value)[1]:
                self._node(block, "argument", value.shape[1], slot=slot)
                numbers = np.arange(self.nodes[-1].first, self.count).reshape(1, -1, 1, 1)
                self.carried.put(value, numbers)

    def _handed_on(self, outputs: object) -> None:
        """A block gives these out; of all else that it has computed, only tables are still known."""
        if not self._in_glue():  # it is a part of another
            return
        for tensor in tensors(outputs):
            numbers = self.carried.of(tensor)
            if numbers is not None and not self._tables(numbers):
                self.escaped.append(numbers)
        self.carried.forget(self._tables)

    def enter(self) -> None:
        """A layer begins: what it does within is its own."""
        self._depth += 1

    def leave(self, name: str, kind: str, given: object, out: object) -> None:
        """A layer ends: `kind` is "linear", "table", or another, which takes in all and gives out nothing."""
        self._depth -= 1
        if self._depth or not isinstance(given, torch.Tensor) or not isinstance(out, torch.Tensor):
            return
        self.apart_too |= self._made_of(given)
        carried = None if kind == "table" else self.carried.of(given)
        if kind not in ("linear", "table"):
            self.escaped += [] if carried is None else [carried]
            self.carried.put(out, None)
            return
        into = None
        if carried is not None:
            into = carried.reshape(-1) if carried.size == carried.shape[-1] == given.shape[-1] > 1 else None
            into = None if into is None or (into == NONE).any() else into
            self.escaped += [carried] if into is None else []
        self._node(name, "linear" if kind == "linear" else "table", out.shape[-1], into)
        self.carried.put(out, given_out(self.nodes[-1].first, out.shape[-1], out.ndim))

    def passes(self, given: object, out: object) -> None:
        """`out` carries what `given` does."""
        if isinstance(given, torch.Tensor) and isinstance(out, torch.Tensor):
            self.carried.put(out, self.carried.of(given))

    def attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, out: torch.Tensor) -> None:
        """Attention by heads, which stand along the third dim from behind: every one uses a key, a value, and its table."""
        carried, ties = self.carried, self.carried.ties
        found = [carried.of(tensor) for tensor in (query, key, value)]
        met = [None if each is None else self._by_head(each) for each in found]
        asking = met[0]
        if asking is None:
            self._whole([each for each in met if each is not None])
            carried.put(out, None)
            return
        for tensor, numbers in zip((key, value), met[1:], strict=True):
            if numbers is None:
                asking = ties.along(asking, [asking.ndim - 3] if tensor.ndim >= 3 and tensor.shape[-3] > 1 else [])
        for numbers in met[1:]:
            if numbers is not None:
                shared = query.shape[-3] // numbers.shape[-3] if numbers.shape[-3] > 1 else 1
                ties.use(asking, np.repeat(numbers, shared, axis=-3))
        if isinstance(mask, torch.Tensor):
            table = carried.of(mask)
            if table is None:
                by_head = mask.ndim >= 3 and carried.loose(mask)[mask.ndim - 3]
                asking = ties.along(asking, [asking.ndim - 3] if by_head else [])
            else:
                ties.unite(asking, ties.along(table, [table.ndim - 2, table.ndim - 1]))
        carried.put(out, asking)
        self._meet(tensors((query, key, value, mask)), out)

    def _by_head(self, numbers: Numbers) -> Numbers:
        """One number per head."""
        return self.carried.ties.along(numbers, [dim for dim in range(numbers.ndim) if dim != numbers.ndim - 3])

    def _whole(self, found: list[Numbers]) -> None:
        for numbers in found:
            self.carried.ties.along(numbers, range(numbers.ndim))

    def _node(self, name: str, kind: Kind, width: int, into: Numbers | None = None, slot: int | str = 0) -> None:
        self.nodes.append(Node(name, kind, self.visit, self.count, width, into, slot))
        self._lasting = np.concatenate([self._lasting, np.full(width, kind == "table")])
        self.count += width

    def _tables(self, numbers: Numbers) -> bool:
        """Whether these are numbers of tables only."""
        return bool(self._lasting[numbers[numbers != NONE]].all())

    def _meet(self, given: list[torch.Tensor], out: object) -> None:
        """Parameters that are used beside features, they or what is made of them alone (1 + weight): all ranks use them.

        Features beside which stands something else that needs a gradient (a gate of the stream) are needed whole: a rank has a
        summand of that gradient only.
        """
        names = set[str]().union(*(self._made_of(each) for each in given))
        carry = [self.carried.of(each) is not None for each in given]
        others = any(each.requires_grad and not (known or self._made_of(each)) for each, known in zip(given, carry, strict=True))
        for made in tensors(out) if names or others else ():
            numbers = self.carried.of(made)
            if numbers is not None:
                self.escaped += [numbers] if others else []
                for name in names:
                    self.met.setdefault(name, []).append(numbers)
            elif others or any(carry):
                self.apart_too |= names
            else:
                self._made[made] = names

    def _made_of(self, tensor: torch.Tensor) -> set[str]:
        """The parameters of which `tensor` is made, if it is made of such alone."""
        name = self._parameters.get(id(tensor))
        return self._made.get(tensor, set()) if name is None else {name}


def kinds_of(module: nn.Module) -> dict[str, str]:
    """The layers of `module` that are met in a flow, and their kinds; of one with adapters, whose layers are two, none."""
    if is_adapted(module):
        return {}
    return {socket.name: KINDS[socket.kind] for socket in find_sockets(module) if socket.kind in KINDS}


class _Calls(TorchFunctionMode):
    """Attention and dropout, met as they are called: what they do within differs from plan to plan."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (*DROPOUTS, F.scaled_dot_product_attention):
            return func(*args, **kwargs)
        with self._flow.apart():
            out = func(*args, **kwargs)
        if func in DROPOUTS:
            self._flow.passes(args[0] if args else kwargs.get("input"), out)
        else:
            given = {**dict(zip(ATTENTION, args, strict=False)), **kwargs}
            self._flow.attended(given["query"], given["key"], given["value"], given.get("attn_mask"), out)
        return out
