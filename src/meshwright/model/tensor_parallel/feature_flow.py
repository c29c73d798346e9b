"""Follows the output features of linear layers through a recorded forward, to find which layers consume them.

Feature ids go from operation to operation (feature_id_propagation.py). At the call of a linear layer the flow
notes which features its input carries, and gives its output features of its own.

    q k v -> heads, norms, rope, softmax -> o     o consumes features of q, tied by head to those of k and v
    gate_up -> split -> act, mul -> down          down consumes features of gate_up, tied two by two

Features that reach another block or a head count as needed in full (`unsplit_features`), except per-head
tables, which are passed from the layer that computes them to the layers that use them. A per-head tensor
that a block receives (an attention bias computed by glue) is a source too, named by the argument of the
block. colwise_rowwise_groups.py reads the layer groups off this flow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import nn

from meshwright.model.hf.peft_name_map import is_adapted
from meshwright.model.recording.forward_recording import (
    AtenOp,
    BlockStart,
    FunctionCall,
    ModuleEnd,
    ModuleStart,
    Recording,
    TensorRecord,
    tensor_records,
)
from meshwright.model.tensor_parallel.feature_id_propagation import (
    NO_FEATURE,
    CarriedFeatures,
    FeatureIds,
    output_features,
    propagate_features,
)
from meshwright.model.tensor_parallel.layer_roles import find_layer_roles

FeatureSourceKind = Literal["linear", "table", "argument"]
PER_HEAD_NDIM = 4  # a table per head: [samples, heads, queries, keys]


# by kind of layer role
FEATURE_KINDS = {
    "linear": "linear",
    "embedding": "table",
    "head": "head",
}
DROPOUT_FUNCTIONS = ("dropout", "dropout_")
ATTENTION_FUNCTION = "scaled_dot_product_attention"
ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask")


@dataclass(frozen=True, eq=False)
class FeatureNode:
    """One call of a layer that makes features: ids `first_feature` to `first_feature + width`.

    `input_features` are those that it consumes along its last dim; None if it carries none, or not one by
    one. `is_followed` says whether it carries any. For an argument of a block, `name` is the block and `arg`
    the argument, split along dim 1.
    """

    name: str
    kind: FeatureSourceKind
    block_call: str
    first_feature: int
    width: int
    input_features: FeatureIds | None = None
    arg: int | str = 0
    is_followed: bool = False


@dataclass(eq=False)
class FeatureFlow:
    """The flow of features through a forward, which `read` follows.

    `param_features` are the parameters outside of layers that meet features, by name, with the features they
    meet; `params_without_features` are those that are also used without features.
    """

    features: CarriedFeatures = field(default_factory=CarriedFeatures)
    nodes: list[FeatureNode] = field(default_factory=list)
    unsplit_features: list[FeatureIds] = field(default_factory=list)
    param_features: dict[str, list[FeatureIds]] = field(default_factory=dict)
    params_without_features: set[str] = field(default_factory=set)
    block_call: str = ""
    num_features: int = 0

    def __post_init__(self) -> None:
        self._num_open_layers = 0
        self._parameters: Mapping[int, str] = {}
        # by id of a tensor computed from parameters only: the names of these
        self._params_behind: dict[int, set[str]] = {}

    def read(self, recording: Recording) -> "FeatureFlow":
        """Follows a recorded forward, and returns itself.

        A layer that is called between blocks consumes all features and makes none.
        """
        self._parameters = recording.parameter_names
        blocks, kinds, resume_at = frozenset(recording.blocks), recording.layer_kinds, 0
        for place, event in enumerate(recording.events):
            if place < resume_at:  # the inside of attention and dropout differs from plan to plan
                continue
            match event:
                case AtenOp():
                    if not self._num_open_layers:
                        propagate_features(self.features, event)
                        self._note_params(event.inputs, event.results)
                case FunctionCall():
                    if event.name in DROPOUT_FUNCTIONS or event.name == ATTENTION_FUNCTION:
                        resume_at = place + 1 + event.num_inner
                        self._follow_call(event)
                case BlockStart():
                    self.block_call = event.block_call
                case ModuleStart():
                    if event.name in blocks and not event.block_call:
                        self._start_block(event)
                    self._num_open_layers += event.name in kinds
                case ModuleEnd():
                    in_glue = bool(blocks) and not event.block_call
                    if event.name in blocks and in_glue:
                        self._end_block(event.results)
                    if event.name in kinds:
                        self._leave_layer("" if in_glue else kinds[event.name], event)
        return self

    def _follow_call(self, call: FunctionCall) -> None:
        names = ("input",) if call.name in DROPOUT_FUNCTIONS else ATTENTION_ARGUMENTS
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        if call.name == ATTENTION_FUNCTION:
            query, key, value = (given[name] for name in names[:3])
            self._follow_attention(query, key, value, given.get("attn_mask"), call.results)
        elif isinstance(given.get("input"), TensorRecord) and isinstance(call.results, TensorRecord):
            self.features.record(call.results, self.features.get(given["input"]))

    def _start_block(self, event: ModuleStart) -> None:
        """Makes sources of the per-head inputs of a block."""
        for arg, value in (*enumerate(event.args), *event.kwargs.items()):
            if not isinstance(value, TensorRecord) or value.ndim != PER_HEAD_NDIM or value.requires_grad:
                continue
            if self.features.get(value) is None and self.features.varying_dims(value)[1]:
                self._add_node(event.name, "argument", value.shape[1], arg=arg)
                features = np.arange(self.nodes[-1].first_feature, self.num_features).reshape(1, -1, 1, 1)
                self.features.record(value, features)

    def _end_block(self, outputs: object) -> None:
        """Ends a block: its output features are needed in full; only per-head tables stay known."""
        for tensor in tensor_records(outputs):
            features = self.features.get(tensor)
            if features is not None and not self._are_table_features(features):
                self.unsplit_features.append(features)
        self.features.forget(self._are_table_features)

    def _leave_layer(self, kind: str, event: ModuleEnd) -> None:
        """Ends a layer of `kind` "linear", "table" or another one, which consumes all features and makes
        none.
        """
        self._num_open_layers -= 1
        layer_input, out = event.args[0] if event.args else None, event.results
        is_tensors = isinstance(layer_input, TensorRecord) and isinstance(out, TensorRecord)
        if self._num_open_layers or not is_tensors:
            return
        self.params_without_features |= self._params_of(layer_input)
        carried = None if kind == "table" else self.features.get(layer_input)
        if kind not in ("linear", "table"):
            self.unsplit_features += [] if carried is None else [carried]
            self.features.record(out, None)
            return
        input_features = None
        if carried is not None:
            input_features = (
                carried.reshape(-1)
                if carried.size == carried.shape[-1] == layer_input.shape[-1] > 1
                else None
            )
            input_features = (
                None if input_features is None or (input_features == NO_FEATURE).any() else input_features
            )
            self.unsplit_features += [carried] if input_features is None else []
        self._add_node(
            event.name,
            "linear" if kind == "linear" else "table",
            out.shape[-1],
            input_features,
            is_followed=carried is not None,
        )
        self.features.record(out, output_features(self.nodes[-1].first_feature, out.shape[-1], out.ndim))

    def _follow_attention(
        self, query: TensorRecord, key: TensorRecord, value: TensorRecord, mask: object, out: TensorRecord
    ) -> None:
        """Follows attention by head, along the third dim from the end: every query head uses a key, a value,
        and its table.
        """
        carried, ties = self.features, self.features.ties
        operand_features = [carried.get(tensor) for tensor in (query, key, value)]
        head_features = [None if each is None else self._one_per_head(each) for each in operand_features]
        query_features = head_features[0]
        if query_features is None:
            self._tie_all([each for each in head_features if each is not None])
            carried.record(out, None)
            return
        for tensor, features in zip((key, value), head_features[1:], strict=True):
            if features is None:
                query_features = ties.tie_along(
                    query_features,
                    [query_features.ndim - 3] if tensor.ndim >= 3 and tensor.shape[-3] > 1 else [],
                )
        for features in head_features[1:]:
            if features is not None:
                heads_per_kv = query.shape[-3] // features.shape[-3] if features.shape[-3] > 1 else 1
                ties.tie_reader(query_features, np.repeat(features, heads_per_kv, axis=-3))
        if isinstance(mask, TensorRecord):
            table = carried.get(mask)
            if table is None:
                by_head = mask.ndim >= 3 and carried.varying_dims(mask)[mask.ndim - 3]
                query_features = ties.tie_along(query_features, [query_features.ndim - 3] if by_head else [])
            else:
                ties.tie(query_features, ties.tie_along(table, [table.ndim - 2, table.ndim - 1]))
        carried.record(out, query_features)
        self._note_params(tensor_records((query, key, value, mask)), out)

    def _one_per_head(self, features: FeatureIds) -> FeatureIds:
        return self.features.ties.tie_along(
            features, [dim for dim in range(features.ndim) if dim != features.ndim - 3]
        )

    def _tie_all(self, operand_features: list[FeatureIds]) -> None:
        for features in operand_features:
            self.features.ties.tie_along(features, range(features.ndim))

    def _add_node(
        self,
        name: str,
        kind: FeatureSourceKind,
        width: int,
        input_features: FeatureIds | None = None,
        arg: int | str = 0,
        *,
        is_followed: bool = False,
    ) -> None:
        first = self.num_features
        self.nodes.append(
            FeatureNode(name, kind, self.block_call, first, width, input_features, arg, is_followed)
        )
        self.num_features += width

    def _are_table_features(self, features: FeatureIds) -> bool:
        starts = [node.first_feature for node in self.nodes]
        indices = np.searchsorted(starts, features[features != NO_FEATURE], side="right") - 1
        return all(self.nodes[index].kind == "table" for index in np.unique(indices))

    def _note_params(self, inputs: list[TensorRecord], out: object) -> None:
        """Notes parameters that meet features, directly or through tensors made of them alone (1 + weight):
        all ranks use them.

        Features that meet another tensor with a gradient (a gate of the residual stream) are needed in full:
        a rank has only a summand of that gradient.
        """
        names = set[str]().union(*(self._params_of(each) for each in inputs))
        carries_features = [self.features.get(each) is not None for each in inputs]
        has_other_grads = any(
            each.requires_grad and not (known or self._params_of(each))
            for each, known in zip(inputs, carries_features, strict=True)
        )
        for result in tensor_records(out) if names or has_other_grads else ():
            features = self.features.get(result)
            if features is not None:
                self.unsplit_features += [features] if has_other_grads else []
                for name in names:
                    self.param_features.setdefault(name, []).append(features)
            elif has_other_grads or any(carries_features):
                self.params_without_features |= names
            else:
                self._params_behind[result.id] = names

    def _params_of(self, tensor: TensorRecord) -> set[str]:
        """The parameters from which `tensor` is made, if it is made of nothing else."""
        name = self._parameters.get(tensor.id)
        return self._params_behind.get(tensor.id, set()) if name is None else {name}


def traced_layer_kinds(module: nn.Module) -> dict[str, str]:
    """Returns the layers of `module` that the flow follows, with their kinds; none for a model with
    adapters.
    """
    if is_adapted(module):
        return {}
    return {
        layer_role.name: FEATURE_KINDS[layer_role.kind]
        for layer_role in find_layer_roles(module)
        if layer_role.kind in FEATURE_KINDS
    }
