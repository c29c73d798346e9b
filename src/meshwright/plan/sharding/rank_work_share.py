"""Computes the fraction of work and memory of one rank: operations, saved activations and outputs of each
block call.

    sharded with a layer         the rank's fraction of the layer's weight       q k v -> o, gate up -> down
    operations of experts        the rank's fraction of the features of each     slices of experts
    the rest of the block call   all; a slice if the residual stream is sharded  norms, residuals
    logits of an LM head         as the LM head, if they reach the loss unchanged   the local vocabulary

Fractions follow the rank's own sizes: of three groups of heads on two ranks, the first has two thirds. With
sequence sharding they are multiplied by the rank's fraction of the tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from meshwright.plan.model_spec.model_spec import ExpertsCall, ModelSpec
from meshwright.plan.model_spec.op_sizes_and_memory import KeptOutputs
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall
from meshwright.plan.sharding.sharding_plan import ShardingPlan

FULL = Fraction(1)
MATMUL_ROLES = ("colwise", "rowwise", "colwise_gather_output")  # roles of layers that multiply with a matrix


@dataclass(frozen=True)
class BlockShare:
    """One block call on one rank, per sample: forward operations, saved activations and output, in elements.

    `deferred_grad_numel` are the output gradients that a later weight-gradient pass needs (as many as are
    saved if the layers are unknown). `weight_grad_flops` are the operations for the gradients of parameters.
    """

    flops: int
    saved_numel: int
    output_numel: int
    deferred_grad_numel: int
    weight_grad_flops: int


@dataclass(frozen=True)
class LayerFraction:
    """A rank's fraction of the weight of a layer, and the axes along which the weight is sliced."""

    fraction: Fraction
    axes: frozenset[str]


FULL_LAYER = LayerFraction(FULL, frozenset())


@dataclass(frozen=True)
class RankWorkShare:
    """The fraction of the work of `plan` that one rank does.

    `model_spec` is what the rank runs, `layer_fractions` its fractions of the weights of sliced layers, by
    layer. `token_shard` is its index among the ranks that share the tokens of a sample.
    """

    plan: ShardingPlan
    model_spec: ModelSpec
    layer_fractions: Mapping[str, LayerFraction]
    token_shard: int

    @property
    def sample_fraction(self) -> Fraction:
        """The fraction of the tokens of a sample."""
        sequence_info = self.plan.model_spec.sequence_info
        return FULL if sequence_info is None else self._padded_fraction(sequence_info.length)

    @property
    def fractions_by_length(self) -> tuple[tuple[Fraction, Fraction], ...]:
        """The fraction with and without padding tokens, per token count in a sample."""
        sequence_info = self.plan.model_spec.sequence_info
        lengths = () if sequence_info is None else sequence_info.lengths
        return tuple((self._padded_fraction(length), self._unpadded_fraction(length)) for length in lengths)

    def token_fraction(self, block_call: str, module: str = "") -> Fraction:
        """Returns the fraction of the tokens through `block_call`, or its `module`."""
        sequence_info = self.plan.model_spec.sequence_info
        return (
            FULL
            if sequence_info is None
            else self._padded_fraction(sequence_info.num_sharded_tokens(block_call, module))
        )

    def unpadded_token_fraction(self, block_call: str) -> Fraction:
        """Returns the fraction of the tokens that `block_call` returns, without padding tokens."""
        sequence_info = self.plan.model_spec.sequence_info
        return (
            FULL
            if sequence_info is None
            else self._unpadded_fraction(sequence_info.num_sharded_tokens(block_call))
        )

    def expert_rows(self, call: ExpertsCall) -> int:
        """Returns the rows per sample that the rank gives to the experts of `call`, which it has memory for.

        Experts that choose tokens get a row for each choice. A rank does not know beforehand how many of
        these are its own tokens, so it has rows for all; or for each of its tokens with each expert, if that
        is fewer.
        """
        sequence_info, place = self.plan.model_spec.sequence_info, (call.block_call, call.name)
        num_sharded, fraction = 0, self.token_fraction(*place)
        if sequence_info is not None and call.form == "choice":
            num_sharded = sequence_info.num_sharded_tokens(*place)
        if num_sharded in (0, call.num_tokens):
            return int(call.num_tokens * fraction)
        return min(call.num_tokens, int(num_sharded * fraction) * call.num_experts)

    @property
    def chunked_head_call(self) -> LayerCall | None:
        """The LM head's call that a chunked LOSS computes instead of its block call; None if the loss is not
        chunked.
        """
        return lm_head_call(self.model_spec) if self.plan.num_loss_chunks > 1 else None

    @cached_property
    def block_shares(self) -> Mapping[str, BlockShare]:
        """The share of every block call."""
        model_spec, plan = self.model_spec, self.plan
        calls, weight_grads = _layer_calls(model_spec), list(weight_grad_flops(model_spec))
        head = (
            model_spec.logits.layer
            if model_spec.logits is not None and plan.logits_layout.axes_with("S")
            else None
        )
        chunked_head = self.chunked_head_call
        saved = model_spec.saved_numel or (0,) * len(model_spec.block_calls)
        found = {}
        for i, block_call in enumerate(model_spec.block_calls):
            flops, numel = model_spec.flops[i], model_spec.output_numel[i]
            if chunked_head is not None and chunked_head in calls[block_call]:  # LOSS does it
                flops, numel = flops - chunked_head.flops, numel - chunked_head.out_numel
                weight_grads[i] = min(weight_grads[i], flops)
            local_calls = [call for call in calls[block_call] if call is not chunked_head]
            found[block_call] = self._block_share(
                block_call, local_calls, head, (flops, saved[i], numel), weight_grads[i]
            )
        return found

    def kept_fraction(self, kept: KeptOutputs) -> Fraction:
        """Returns the rank's fraction of the elements of `kept`."""
        head = self.chunked_head_call
        if head is not None and (head.block_call, head.name) == (kept.block_call, kept.layer):
            return Fraction(0)  # LOSS computes it
        layer = self.layer_fractions.get(kept.layer, FULL_LAYER)
        if kept.is_sum and layer.axes:
            return self.token_fraction(kept.block_call)
        return layer.fraction * self._residual_fraction(kept.block_call, layer.axes)

    def layer_flops(self, call: LayerCall) -> int:
        """Returns the forward operations of `call` per sample."""
        return self._local_amount(call.block_call, call.flops, [(call, call.flops)])

    def _block_share(
        self,
        block_call: str,
        calls: list[LayerCall],
        head: str | None,
        totals: tuple[int, int, int],
        weight_grads: int,
    ) -> BlockShare:
        flops, saved_numel, numel = totals
        local_saved = self._local_amount(
            block_call, saved_numel, [(call, call.saved_numel) for call in calls]
        )
        local_output = self._local_amount(
            block_call, numel, [(call, call.out_numel) for call in calls if call.name == head]
        )
        sharded_outputs = [(call, call.out_numel) for call in calls if call.role not in ("rowwise", "norm")]
        deferred = (
            self._local_amount(block_call, sum(call.out_numel for call in calls), sharded_outputs)
            if calls
            else local_saved
        )
        experts = (call for call in self.model_spec.experts_calls if call.block_call == block_call)
        local_flops = self._local_amount(
            block_call,
            flops,
            [
                *((call, call.flops) for call in calls),
                *((call, self._experts_flops(call)) for call in experts),
            ],
        )
        return BlockShare(
            local_flops,
            local_saved,
            local_output,
            max(local_output, deferred),
            round(Fraction(weight_grads, flops or 1) * local_flops),
        )

    def _experts_flops(self, call: ExpertsCall) -> int:
        """The forward operations per sample of experts whose features are sliced; 0 for whole ones."""
        if call.name not in self.layer_fractions:
            return 0
        params = (each for each in self.model_spec.params if each.name in call.params)
        matrices = (param.numel for param in params if len(param.shape) == 3)
        return 2 * sum(matrices) // call.num_experts * call.num_tokens * call.top_k

    def _local_amount(
        self, block_call: str, total: int, sharded: Sequence[tuple[LayerCall | ExpertsCall, int]]
    ) -> int:
        local = Fraction(0)
        for call, amount in sharded:
            layer = self.layer_fractions.get(call.name, FULL_LAYER)
            local += layer.fraction * self._residual_fraction(block_call, layer.axes) * amount
        rest = total - sum(amount for _, amount in sharded)
        return round(local + self._residual_fraction(block_call) * rest)

    def _residual_fraction(self, block_call: str, excluded_axes: frozenset[str] = frozenset()) -> Fraction:
        plan = self.plan
        if plan.sequence_sliced_calls and block_call not in plan.sequence_sliced_calls:
            return self.token_fraction(block_call)
        return self.token_fraction(block_call) / plan.mesh.group_size(
            axis for axis in plan.residual_layout.axes_with("S") if axis not in excluded_axes
        )

    def _padded_fraction(self, num_tokens: int) -> Fraction:
        sharding = self.plan.sequence_sharding
        if sharding is None or not num_tokens:
            return FULL
        return Fraction(sharding.num_padded_tokens(num_tokens, self.token_shard), num_tokens)

    def _unpadded_fraction(self, num_tokens: int) -> Fraction:
        sharding = self.plan.sequence_sharding
        if sharding is None or not num_tokens:
            return FULL
        return Fraction(sharding.num_tokens(num_tokens, self.token_shard), num_tokens)


def lm_head_call(model_spec: ModelSpec) -> LayerCall | None:
    """Returns the LM head's call that computes the logits of the loss; None if another layer does, or a rank
    with another part of the model.
    """
    logits = model_spec.logits
    return next(
        (
            call
            for call in model_spec.layer_calls
            if logits is not None and call.name == logits.layer and call.role == "lm_head"
        ),
        None,
    )


def weight_grad_flops(model_spec: ModelSpec) -> tuple[int, ...]:
    """Returns, per block call and sample, the operations for gradients of parameters; the rest of two
    forwards is for input gradients.

    Only matrix products with trained weights count: attention has none. All operations, if the layers are
    unknown.
    """
    num_tokens = {flow.block_call: flow.num_tokens for flow in model_spec.residual_flows}
    trained = {layer for param in model_spec.trainable for layer in param.layers}
    found = []
    for flops, (block_call, calls) in zip(model_spec.flops, _layer_calls(model_spec).items(), strict=True):
        local_calls = (
            [call for call in calls if call.role in MATMUL_ROLES] if num_tokens.get(block_call) else []
        )
        each = [2 * call.in_numel * call.out_numel // num_tokens[block_call] for call in local_calls]
        weight_grads = sum(
            product for call, product in zip(local_calls, each, strict=True) if call.name in trained
        )
        found.append(weight_grads if local_calls and sum(each) <= flops else flops)
    return tuple(found)


def _layer_calls(model_spec: ModelSpec) -> dict[str, list[LayerCall]]:
    calls: dict[str, list[LayerCall]] = {block_call: [] for block_call in model_spec.block_calls}
    for call in model_spec.layer_calls:
        calls[call.block_call].append(call)
    return calls
