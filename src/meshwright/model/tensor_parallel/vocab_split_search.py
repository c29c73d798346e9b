"""Finds embeddings and LM heads that can be split along the vocabulary, from the uses of their weights and
outputs in a trial.

Logits may be split if each is changed by itself up to the loss: scaled, capped, cast, reshaped. An operation
over the vocabulary (a softmax, a bias per entry) would see only the entries of a rank.

    head --> * scale --> tanh --> [samples, :-1] --> loss      split
    head --> softmax --> loss                                  not split

An embedding may be split if it is only looked up and its output at most scaled: entries of other ranks give
zeros, and the sum over the ranks is the embedding. In both cases no other code may use the weight; of tied
weights all users are split, or none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.model.loss.loss_definition import Loss, VocabParallelLoss
from meshwright.model.recording.forward_recording import (
    AtenOp,
    ModuleEnd,
    ModuleStart,
    Recording,
    TensorRecord,
    tensor_records,
)
from meshwright.model.recording.op_table import Op, find_op
from meshwright.plan.model_spec.tensor_parallel_layers import LogitsSpec

# the roles of those that cannot be divided by words
UNSHARDED_ROLES = {"embedding": "embedding_unsharded", "lm_head": "lm_head_unsharded"}


class VocabFlow:
    """The uses of the weights of layers (roles by name) in a recorded forward, and what happens to the
    outputs of heads.

    `used_elsewhere` are layers whose weights other code uses, `not_shardable` gives the reason by layer,
    `logits_modified_by` the first operation that changes the logits of an LM head, `first_dims` the sizes of
    dim 0 of what layers are called with.
    """

    def __init__(self, recording: Recording) -> None:
        self._roles = recording.layer_roles
        self._open_layers: list[str] = []
        self._logits: dict[int, str] = {}  # by storage: the head
        self._owners: dict[int, set[str]] = {}
        self.used_elsewhere: set[str] = set()
        self.not_shardable: dict[str, str] = {}
        self.logits_modified_by: dict[str, str] = {}
        self.first_dims: dict[str, set[int]] = {}
        for name, weight in recording.parameters.items():
            if (layer := name.rpartition(".")[0]) in self._roles:
                self._owners.setdefault(weight.storage, set()).add(layer)
        for event in recording.events:
            match event:
                case AtenOp():
                    self._note_op(event)
                case ModuleStart(name=name) if name in self._roles:
                    self._open_layers.append(name)
                    sizes = {each.shape[0] for each in tensor_records(event.args[:1]) if each.ndim}
                    self.first_dims.setdefault(name, set()).update(sizes)
                case ModuleEnd(name=name, results=results) if name in self._roles:
                    self._open_layers.remove(name)
                    if self._roles[name] == "lm_head" and isinstance(results, TensorRecord):
                        self._logits[results.storage] = name

    def find_head(self, storage: int) -> str:
        """Returns the LM head whose logits are in this storage, along its last dim; "" if there is none."""
        return self._logits.get(storage, "")

    def _note_op(self, op: AtenOp) -> None:
        outputs = op.outputs
        if not outputs:
            return
        inputs, name = [tensor for tensor in op.inputs if tensor.is_strided], op.packet.__name__
        self._note_weight_use(inputs)
        entry = find_op(name)
        if self._open_layers and self._roles[self._open_layers[-1]] == "embedding":
            is_scaled = entry.arithmetic in ("mul", "div")
            is_lookup = entry.dims == "table" or is_scaled or _keeps_vocabulary(entry)
            is_lookup = is_lookup and sum(tensor.requires_grad for tensor in inputs) < 2
            self.not_shardable |= {} if is_lookup else {self._open_layers[-1]: f"{name} follows the look-up"}
        heads_of_inputs = {self.find_head(tensor.storage) for tensor in inputs} - {""}
        if heads_of_inputs and not self._is_elementwise(op, inputs, outputs):
            self.not_shardable |= dict.fromkeys(
                heads_of_inputs - set(self.not_shardable), f"{name} needs all logits of a token at once"
            )
        elif heads_of_inputs:
            keeps_logits = entry.is_alias or entry.dims == "reshape"
            if not keeps_logits or any(each.shape != inputs[0].shape for each in outputs):
                self.logits_modified_by = dict.fromkeys(heads_of_inputs, name) | self.logits_modified_by
            self._logits |= {each.storage: min(heads_of_inputs) for each in outputs}

    def _note_weight_use(self, inputs: Sequence[TensorRecord]) -> None:
        for tensor in inputs:
            owners = self._owners.get(tensor.storage, set())
            if owners and owners.isdisjoint(self._open_layers):
                self.used_elsewhere |= owners

    def _is_elementwise(
        self, op: AtenOp, inputs: Sequence[TensorRecord], outputs: Sequence[TensorRecord]
    ) -> bool:
        """Whether each logit is changed by itself, and the vocabulary stays the last dim.

        A trained operand would get a gradient summed over the vocabulary, so it is excluded.
        """
        logits_inputs = [tensor for tensor in inputs if self.find_head(tensor.storage)]
        vocab_sizes = {tensor.shape[-1] for tensor in logits_inputs if tensor.ndim}
        if len(vocab_sizes) != 1 or any(
            each.ndim == 0 or each.shape[-1] not in vocab_sizes for each in outputs
        ):
            return False
        if _keeps_vocabulary(find_op(op.packet.__name__)):
            return True
        other_inputs = [tensor for tensor in inputs if not self.find_head(tensor.storage)]
        are_scalars = all(
            (each.ndim == 0 or each.shape[-1] == 1) and not each.requires_grad for each in other_inputs
        )
        return torch.Tag.pointwise in op.overload.tags and are_scalars


def _keeps_vocabulary(op: Op) -> bool:
    """Returns whether the operation only copies elements, or arranges those of other dims."""
    return op.is_copy or op.dims in ("reshape", "ones", "broadcast", "slice", "select")


@dataclass(frozen=True)
class VocabSplit:
    """Layer roles, the reasons why layers cannot be split along the vocabulary, and the logits."""

    roles: dict[str, str]
    not_shardable: dict[str, str]
    logits: LogitsSpec | None


def find_vocab_splits(
    module: nn.Module,
    roles: Mapping[str, str],
    loss: Loss,
    vocab_flow: VocabFlow,
    called_layers: Sequence[str],
    outputs: Any,
    num_samples: int,
    storage_number: Callable[[torch.Tensor], int],
) -> VocabSplit:
    """Returns `roles` by layer, with embeddings and LM heads that cannot be split along the vocabulary marked
    as unsharded.

    `vocab_flow` is what the trial of `num_samples` recorded, `called_layers` are the layers it called, in
    order, `outputs` its outputs; `storage_number` returns the number that a storage has in it.
    """
    split_loss = loss.vocab_parallel
    loss_logits = None if split_loss is None else _loss_logits(split_loss, outputs)
    heads_of_inputs = [name for name, role in roles.items() if role == "lm_head"]
    embeddings = [name for name, role in roles.items() if role == "embedding"]
    head = "" if loss_logits is None else vocab_flow.find_head(storage_number(loss_logits))
    reasons = {
        name: reason
        for name in heads_of_inputs
        if (reason := _why_head_unsharded(module, vocab_flow, called_layers, name, loss_logits, head))
    }
    vocab_sizes = {len(weight) for name in heads_of_inputs if (weight := _weight(module, name)) is not None}
    reasons |= {
        name: reason
        for name in embeddings
        if (reason := _why_table_unsharded(module, vocab_flow, name, vocab_sizes, num_samples))
    }
    reasons |= {
        name: f"tied to {other}: {reasons[other]}"
        for name, other in _tied_to_unsharded(module, (*embeddings, *heads_of_inputs), reasons)
    }
    kept_roles = {
        **roles,
        **{
            name: "" if "max_norm" in reason else UNSHARDED_ROLES[roles[name]]
            for name, reason in reasons.items()
        },
    }
    param_reasons = {
        f"{name}.{leaf}": reason
        for name, reason in reasons.items()
        for leaf in module.get_submodule(name)._parameters
    }
    head = next((name for name in heads_of_inputs if name not in reasons), None)
    if head is None or loss_logits is None or split_loss is None:
        return VocabSplit(kept_roles, param_reasons, None)
    vocab_size = loss_logits.shape[-1]
    weight = next(name for name, each in module.named_parameters() if each is _weight(module, head))
    return VocabSplit(
        kept_roles,
        param_reasons,
        LogitsSpec(
            head,
            weight,
            vocab_size,
            loss_logits.numel() // vocab_size // len(loss_logits),
            split_loss.num_token_stats,
            vocab_flow.logits_modified_by.get(head, ""),
        ),
    )


def _loss_logits(split_loss: VocabParallelLoss, outputs: Any) -> torch.Tensor | None:
    try:
        found = split_loss.logits(outputs)
    except (KeyError, IndexError, TypeError):
        return None
    return found if isinstance(found, torch.Tensor) and found.ndim > 1 and found.numel() else None


def _why_head_unsharded(
    module: nn.Module,
    vocab_flow: VocabFlow,
    called_layers: Sequence[str],
    name: str,
    loss_logits: torch.Tensor | None,
    head_of_loss: str,
) -> str:
    layer = module.get_submodule(name)
    if loss_logits is None:
        return "the loss needs the logits of the whole vocabulary"
    if called_layers.count(name) != 1:
        return f"a forward calls it {called_layers.count(name)} times"
    if type(layer).forward is not nn.Linear.forward:
        return f"{type(layer).__name__} overrides the forward of nn.Linear"
    if name in vocab_flow.not_shardable or head_of_loss != name:
        return vocab_flow.not_shardable.get(name, "the loss takes other tensors than its output")
    return "its weight is used elsewhere too" if name in vocab_flow.used_elsewhere else ""


def _why_table_unsharded(
    module: nn.Module, vocab_flow: VocabFlow, name: str, vocab_sizes: set[int], num_samples: int
) -> str:
    layer = module.get_submodule(name)
    if not isinstance(layer, nn.Embedding) or layer.num_embeddings not in vocab_sizes:
        return "its rows are not the vocabulary of an LM head"
    # a table of positions may have as many rows as the vocabulary
    if any(size % num_samples for size in vocab_flow.first_dims.get(name, ())):
        return "it is looked up once for all samples"
    unsupported = [key for key in ("max_norm", "scale_grad_by_freq", "sparse") if vars(layer)[key]]
    if unsupported:
        return f"{unsupported[0]} needs more than the rows of one rank"
    if name in vocab_flow.not_shardable:
        return vocab_flow.not_shardable[name]
    return "its weight is used elsewhere too" if name in vocab_flow.used_elsewhere else ""


def _tied_to_unsharded(
    module: nn.Module, names: Sequence[str], param_reasons: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yields those of `names` that share a weight with an unsharded layer, and that layer."""
    unsharded_by_weight = {
        id(weight): name for name in param_reasons if (weight := _weight(module, name)) is not None
    }
    for name in names:
        other = unsharded_by_weight.get(id(_weight(module, name)))
        if other is not None and name not in param_reasons:
            yield name, other


def _weight(module: nn.Module, name: str) -> torch.Tensor | None:
    return module.get_submodule(name)._parameters.get("weight")
