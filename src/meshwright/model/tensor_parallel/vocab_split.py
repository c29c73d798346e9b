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

from meshwright.model.blocks.loss_inputs import LossSpec
from meshwright.model.tensors.pytree import storage_id, tree_tensors
from meshwright.plan.model_spec.layer_calls import LogitsSpec

aten = torch.ops.aten
SHAPE_OPS = (
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
ALIAS_OPS = (aten.detach, aten.alias, aten.view, aten._unsafe_view, aten.lift_fresh)
SCALE_OPS = (aten.mul, aten.div, aten.mul_, aten.div_)
LOOKUP_OPS = (aten.embedding, *SCALE_OPS, *SHAPE_OPS)


UNSHARDED_ROLES = {"embedding": "embedding_unsharded", "lm_head": "lm_head_unsharded"}  # the roles of those that cannot be divided by words


class VocabFlow(TorchDispatchMode):
    """Notes, while active, who uses the weights of `layers`, roles by name, and what becomes of the outputs of heads.

    `elsewhere` are the layers whose weights are used beside them, `spoiled` says of a layer what cannot be done in parts,
    `changed` of a head by what its logits are changed first, each by itself.
    """

    def __init__(self, module: nn.Module, layers: Mapping[str, str]) -> None:
        super().__init__()
        self._roles = dict(layers)
        self._open_layers: list[str] = []
        self._logits: dict[
            int, tuple[torch.Tensor, str]
        ] = {}  # by storage; the tensor keeps its address its own
        self._owners: dict[int, set[str]] = {}
        self.used_elsewhere: set[str] = set()
        self.not_shardable: dict[str, str] = {}
        self.logits_modified_by: dict[str, str] = {}
        for name in layers:
            for weight in module.get_submodule(name).parameters(recurse=False):
                self._owners.setdefault(storage_id(weight), set()).add(name)

    def enter_layer(self, name: str) -> None:
        """The layer `name` begins."""
        self._open_layers.append(name)

    def leave_layer(self, name: str, output: Any) -> None:
        """It has given `output`."""
        self._open_layers.remove(name)
        if self._roles[name] == "lm_head" and isinstance(output, torch.Tensor):
            self._logits[storage_id(output)] = output, name

    def find_head(self, tensor: torch.Tensor) -> str:
        """The head whose words are along the last dim of `tensor`; "" where it is of none."""
        return self._logits[storage_id(tensor)][1] if storage_id(tensor) in self._logits else ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not tree_tensors(out):
            return out
        given = [tensor for tensor in tree_tensors((args, kwargs or {})) if tensor.layout == torch.strided]
        self._note_weight_use(given)
        name = func._overloadpacket.__name__
        if self._open_layers and self._roles[self._open_layers[-1]] == "embedding":
            alone = func._overloadpacket in LOOKUP_OPS and sum(tensor.requires_grad for tensor in given) < 2
            self.not_shardable |= {} if alone else {self._open_layers[-1]: f"{name} follows the look-up"}
        heads = {self.find_head(tensor) for tensor in given} - {""}
        if heads and not self._is_elementwise(func, args, given, out):
            self.not_shardable |= dict.fromkeys(
                heads - set(self.not_shardable), f"{name} looks at all words of a token at once"
            )
        elif heads:
            if func._overloadpacket not in ALIAS_OPS or any(
                each.shape != given[0].shape for each in tree_tensors(out)
            ):
                self.logits_modified_by = dict.fromkeys(heads, name) | self.logits_modified_by
            self._logits |= {storage_id(each): (each, min(heads)) for each in tree_tensors(out)}
        return out

    def _note_weight_use(self, given: Sequence[torch.Tensor]) -> None:
        for tensor in given:
            owners = self._owners.get(storage_id(tensor), set())
            if owners and owners.isdisjoint(self._open_layers):
                self.used_elsewhere |= owners

    def _is_elementwise(
        self, func: Any, args: tuple[Any, ...], given: Sequence[torch.Tensor], out: Any
    ) -> bool:
        """Whether every logit among `given` is changed by itself, and words stay along the last dim.

        What is trained would get a gradient that adds up over words.
        """
        marked = [tensor for tensor in given if self.find_head(tensor)]
        widths = {tensor.shape[-1] for tensor in marked if tensor.ndim}
        if len(widths) != 1 or any(
            each.ndim == 0 or each.shape[-1] not in widths for each in tree_tensors(out)
        ):
            return False
        if func._overloadpacket in SHAPE_OPS:
            return True
        others = [tensor for tensor in given if not self.find_head(tensor)]
        alike = all((each.ndim == 0 or each.shape[-1] == 1) and not each.requires_grad for each in others)
        return torch.Tag.pointwise in func.tags and alike


@dataclass(frozen=True)
class VocabSplit:
    """The `roles` of layers; of the weights of tables and heads that cannot be divided by words, why; and the logits."""

    roles: dict[str, str]
    not_shardable: dict[str, str]
    logits: LogitsSpec | None


def find_vocab_splits(
    module: nn.Module,
    roles: Mapping[str, str],
    loss_spec: LossSpec | None,
    vocab_flow: VocabFlow,
    called_layers: Sequence[str],
    outputs: Any,
) -> VocabSplit:
    """What is left of `roles`, by layer, when tables and heads stay whole that cannot be divided.

    `followed` is what the trial showed, `uses` are the layers that it called, in order, `outputs` what it gave.
    """
    taken = None if loss_spec is None or loss_spec.logits is None else _loss_logits(loss_spec, outputs)
    heads = [name for name, role in roles.items() if role == "lm_head"]
    tables = [name for name, role in roles.items() if role == "embedding"]
    whys = {
        name: why
        for name in heads
        if (why := _why_head_unsharded(module, vocab_flow, called_layers, name, taken))
    }
    widths = {len(weight) for name in heads if (weight := _weight(module, name)) is not None}
    whys |= {name: why for name in tables if (why := _why_table_unsharded(module, vocab_flow, name, widths))}
    whys |= {
        name: f"tied to {other}: {whys[other]}"
        for name, other in _tied_to_unsharded(module, (*tables, *heads), whys)
    }
    kept = {
        **roles,
        **{name: "" if "max_norm" in why else UNSHARDED_ROLES[roles[name]] for name, why in whys.items()},
    }
    whole = {
        f"{name}.{leaf}": why for name, why in whys.items() for leaf in module.get_submodule(name)._parameters
    }
    head = next((name for name in heads if name not in whys), None)
    if head is None or taken is None or loss_spec is None:
        return VocabSplit(kept, whole, None)
    words, rows, changed = taken.shape[-1], len(taken), vocab_flow.logits_modified_by.get(head, "")
    weight = next(name for name, each in module.named_parameters() if each is _weight(module, head))
    return VocabSplit(
        kept,
        whole,
        LogitsSpec(head, weight, words, taken.numel() // words // rows, loss_spec.num_token_stats, changed),
    )


def _loss_logits(judge: LossSpec, outputs: Any) -> torch.Tensor | None:
    """What the loss takes of `outputs`; None where there is none in them."""
    try:
        found = judge.logits(outputs) if judge.logits is not None else None
    except (KeyError, IndexError, TypeError):
        return None
    return found if isinstance(found, torch.Tensor) and found.ndim > 1 and found.numel() else None


def _why_head_unsharded(
    module: nn.Module, followed: VocabFlow, uses: Sequence[str], name: str, taken: torch.Tensor | None
) -> str:
    """Why the head stays whole; "" if it need not."""
    layer = module.get_submodule(name)
    if taken is None:
        return "the loss needs the logits of all words"
    if uses.count(name) != 1:
        return f"a forward calls it {uses.count(name)} times"
    if type(layer).forward is not nn.Linear.forward:
        return f"{type(layer).__name__} computes in a way of its own"
    if name in followed.not_shardable or followed.find_head(taken) != name:
        return followed.not_shardable.get(name, "the loss takes other tensors than what it gives out")
    return "its weight is used elsewhere too" if name in followed.used_elsewhere else ""


def _why_table_unsharded(module: nn.Module, followed: VocabFlow, name: str, words: set[int]) -> str:
    """Why the table stays whole; "" if it need not."""
    layer = module.get_submodule(name)
    if not isinstance(layer, nn.Embedding) or layer.num_embeddings not in words:
        return "its rows are not the words of a head"
    asked = [key for key in ("max_norm", "scale_grad_by_freq", "sparse") if vars(layer)[key]]
    if asked:
        return f"{asked[0]} looks at more than the rows of one rank"
    if name in followed.not_shardable:
        return followed.not_shardable[name]
    return "its weight is used elsewhere too" if name in followed.used_elsewhere else ""


def _tied_to_unsharded(
    module: nn.Module, names: Sequence[str], whole: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Of `names` those that share a weight with one that stays whole, and which."""
    stays = {id(weight): name for name in whole if (weight := _weight(module, name)) is not None}
    for name in names:
        other = stays.get(id(_weight(module, name)))
        if other is not None and name not in whole:
            yield name, other


def _weight(module: nn.Module, name: str) -> torch.Tensor | None:
    return module.get_submodule(name)._parameters.get("weight")
