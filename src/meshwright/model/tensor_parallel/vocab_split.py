"""Which tables and heads can be divided by words: by what a trial run does with their weights and their outputs.

A head's logits may be divided when, from there to the loss, each is changed by itself: scaled, capped, cast, reshaped. What looks
at all words of a token at once (a softmax, a bias per word) would see a rank's own words only.

    head --> * scale --> tanh --> [rows, :-1] --> loss      divided
    head --> softmax --> loss                               whole

A table may be divided when it is looked up, and what comes out is at most scaled: rows of other ranks count as zeros, and the sum
over the ranks is the row. Of both, nobody else may use the weight; of weights that are tied all users are divided, or none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.model.blocks.loss_inputs import Judge
from meshwright.model.tensors.pytree import storage_of, tensors
from meshwright.plan.model_spec.layer_calls import Logits

aten = torch.ops.aten
CHANGES_SHAPE = (
    aten.detach,
    aten.alias,
    aten.view,
    aten._unsafe_view,
    aten.reshape,
    aten._to_copy,
    aten.unsqueeze,
    aten.squeeze,
    aten.slice,
    aten.select,
    aten.expand,
    aten.lift_fresh,
)
SAME = (aten.detach, aten.alias, aten.view, aten._unsafe_view, aten.lift_fresh)
SCALES = (aten.mul, aten.div, aten.mul_, aten.div_)
LOOKS_UP = (aten.embedding, *SCALES, *CHANGES_SHAPE)


BY_WIDTH = {"table": "lookup", "head": "logits"}  # the roles of those that cannot be divided by words


class Followed(TorchDispatchMode):
    """Notes, while active, who uses the weights of `layers`, roles by name, and what becomes of the outputs of heads.

    `elsewhere` are the layers whose weights are used beside them, `spoiled` says of a layer what cannot be done in parts,
    `changed` of a head by what its logits are changed first, each by itself.
    """

    def __init__(self, module: nn.Module, layers: Mapping[str, str]) -> None:
        super().__init__()
        self._roles = dict(layers)
        self._inside: list[str] = []
        self._marked: dict[int, tuple[torch.Tensor, str]] = {}  # by storage; the tensor keeps its address its own
        self._owners: dict[int, set[str]] = {}
        self.elsewhere: set[str] = set()
        self.spoiled: dict[str, str] = {}
        self.changed: dict[str, str] = {}
        for name in layers:
            for weight in module.get_submodule(name).parameters(recurse=False):
                self._owners.setdefault(storage_of(weight), set()).add(name)

    def enter(self, name: str) -> None:
        """The layer `name` begins."""
        self._inside.append(name)

    def leave(self, name: str, output: Any) -> None:
        """It has given `output`."""
        self._inside.remove(name)
        if self._roles[name] == "head" and isinstance(output, torch.Tensor):
            self._marked[storage_of(output)] = output, name

    def comes_from(self, tensor: torch.Tensor) -> str:
        """The head whose words are along the last dim of `tensor`; "" where it is of none."""
        return self._marked[storage_of(tensor)][1] if storage_of(tensor) in self._marked else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not tensors(out):
            return out
        given = [tensor for tensor in tensors((args, kwargs or {})) if tensor.layout == torch.strided]
        self._used(given)
        name = func._overloadpacket.__name__
        if self._inside and self._roles[self._inside[-1]] == "table":
            alone = func._overloadpacket in LOOKS_UP and sum(tensor.requires_grad for tensor in given) < 2
            self.spoiled |= {} if alone else {self._inside[-1]: f"{name} follows the look-up"}
        heads = {self.comes_from(tensor) for tensor in given} - {""}
        if heads and not self._by_itself(func, args, given, out):
            self.spoiled |= dict.fromkeys(heads - set(self.spoiled), f"{name} looks at all words of a token at once")
        elif heads:
            if func._overloadpacket not in SAME or any(each.shape != given[0].shape for each in tensors(out)):
                self.changed = dict.fromkeys(heads, name) | self.changed
            self._marked |= {storage_of(each): (each, min(heads)) for each in tensors(out)}
        return out

    def _used(self, given: Sequence[torch.Tensor]) -> None:
        for tensor in given:
            owners = self._owners.get(storage_of(tensor), set())
            if owners and owners.isdisjoint(self._inside):
                self.elsewhere |= owners

    def _by_itself(self, func: Any, args: tuple[Any, ...], given: Sequence[torch.Tensor], out: Any) -> bool:
        """Whether every logit among `given` is changed by itself, and words stay along the last dim.

        What is trained would get a gradient that adds up over words.
        """
        marked = [tensor for tensor in given if self.comes_from(tensor)]
        widths = {tensor.shape[-1] for tensor in marked if tensor.ndim}
        if len(widths) != 1 or any(each.ndim == 0 or each.shape[-1] not in widths for each in tensors(out)):
            return False
        if func._overloadpacket in CHANGES_SHAPE:
            return True
        others = [tensor for tensor in given if not self.comes_from(tensor)]
        alike = all((each.ndim == 0 or each.shape[-1] == 1) and not each.requires_grad for each in others)
        return torch.Tag.pointwise in func.tags and alike


@dataclass(frozen=True)
class Found:
    """The `roles` of layers; of the weights of tables and heads that cannot be divided by words, why; and the logits."""

    roles: dict[str, str]
    whole: dict[str, str]
    logits: Logits | None


def divisible(
    module: nn.Module, roles: Mapping[str, str], judge: Judge | None, followed: Followed, uses: Sequence[str], outputs: Any
) -> Found:
    """What is left of `roles`, by layer, when tables and heads stay whole that cannot be divided.

    `followed` is what the trial showed, `uses` are the layers that it called, in order, `outputs` what it gave.
    """
    taken = None if judge is None or judge.logits is None else _logits(judge, outputs)
    heads = [name for name, role in roles.items() if role == "head"]
    tables = [name for name, role in roles.items() if role == "table"]
    whys = {name: why for name in heads if (why := _head_stays(module, followed, uses, name, taken))}
    widths = {len(weight) for name in heads if (weight := _weight(module, name)) is not None}
    whys |= {name: why for name in tables if (why := _table_stays(module, followed, name, widths))}
    whys |= {name: f"tied to {other}: {whys[other]}" for name, other in _tied(module, (*tables, *heads), whys)}
    kept = {**roles, **{name: "" if "max_norm" in why else BY_WIDTH[roles[name]] for name, why in whys.items()}}
    whole = {f"{name}.{leaf}": why for name, why in whys.items() for leaf in module.get_submodule(name)._parameters}
    head = next((name for name in heads if name not in whys), None)
    if head is None or taken is None or judge is None:
        return Found(kept, whole, None)
    words, rows, changed = taken.shape[-1], len(taken), followed.changed.get(head, "")
    weight = next(name for name, each in module.named_parameters() if each is _weight(module, head))
    return Found(kept, whole, Logits(head, weight, words, taken.numel() // words // rows, judge.numbers, changed))


def _logits(judge: Judge, outputs: Any) -> torch.Tensor | None:
    """What the loss takes of `outputs`; None where there is none in them."""
    try:
        found = judge.logits(outputs) if judge.logits is not None else None
    except (KeyError, IndexError, TypeError):
        return None
    return found if isinstance(found, torch.Tensor) and found.ndim > 1 and found.numel() else None


def _head_stays(module: nn.Module, followed: Followed, uses: Sequence[str], name: str, taken: torch.Tensor | None) -> str:
    """Why the head stays whole; "" if it need not."""
    layer = module.get_submodule(name)
    if taken is None:
        return "the loss needs the logits of all words"
    if uses.count(name) != 1:
        return f"a forward calls it {uses.count(name)} times"
    if type(layer).forward is not nn.Linear.forward:
        return f"{type(layer).__name__} computes in a way of its own"
    if name in followed.spoiled or followed.comes_from(taken) != name:
        return followed.spoiled.get(name, "the loss takes other tensors than what it gives out")
    return "its weight is used elsewhere too" if name in followed.elsewhere else ""


def _table_stays(module: nn.Module, followed: Followed, name: str, words: set[int]) -> str:
    """Why the table stays whole; "" if it need not."""
    layer = module.get_submodule(name)
    if not isinstance(layer, nn.Embedding) or layer.num_embeddings not in words:
        return "its rows are not the words of a head"
    asked = [key for key in ("max_norm", "scale_grad_by_freq", "sparse") if vars(layer)[key]]
    if asked:
        return f"{asked[0]} looks at more than the rows of one rank"
    if name in followed.spoiled:
        return followed.spoiled[name]
    return "its weight is used elsewhere too" if name in followed.elsewhere else ""


def _tied(module: nn.Module, names: Sequence[str], whole: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Of `names` those that share a weight with one that stays whole, and which."""
    stays = {id(weight): name for name in whole if (weight := _weight(module, name)) is not None}
    for name in names:
        other = stays.get(id(_weight(module, name)))
        if other is not None and name not in whole:
            yield name, other


def _weight(module: nn.Module, name: str) -> torch.Tensor | None:
    return module.get_submodule(name)._parameters.get("weight")
