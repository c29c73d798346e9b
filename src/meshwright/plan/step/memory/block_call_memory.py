"""Computes the activation memory of each block call on one rank, from the bytes measured on a trial.

    F(v)     its output and its saved activations            held until its B
    LOSS     the gradient of the logits; scratch             logits in wider floats, loss, gradient
    B(v)     the gradients of its parameters; scratch        gradients of saved activations

Scratch is the peak of the additional memory, which may occur early in a backward, with all saved activations
still there, or late, with the gradients of parameters. Scratch memory inside one operation is not visible.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ModelSpec
from meshwright.plan.model_spec.op_sizes_and_memory import BlockMemory, LinearInSamples
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.rank_work_share import BlockShare


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of one block call on one rank: its output, its saved activations, and the scratch of its
    backward.

    `backward_with_grads_nbytes` includes gradients of parameters. `attention_backward_nbytes` is the scratch
    while the backward of attention runs: it may be negative, and is None if unknown.
    """

    output_nbytes: int
    saved_nbytes: int
    backward_nbytes: int = 0
    backward_with_grads_nbytes: int = 0
    attention_backward_nbytes: int | None = None

    def scratch_nbytes(self, accumulated: int, new_grads: int) -> int:
        """Returns the scratch of a backward with `new_grads` bytes of gradients, if the largest one that it
        accumulates has `accumulated`.
        """
        return max(
            accumulated,
            max(self.backward_nbytes, self.backward_with_grads_nbytes if new_grads else 0) - new_grads,
        )


def activation_memory(view: RankView, job: Job, num_samples: int) -> dict[str, ActivationMemory]:
    """Returns the activation memory of every block call on this rank, in microbatches of `num_samples`."""
    model_spec = view.model_spec
    width = FLOAT_NBYTES[job.precision.compute]
    loads = block_memories(view.model_spec)
    saved_numels = model_spec.saved_numel or (0,) * len(model_spec.block_calls)
    full_numels = dict(
        zip(model_spec.block_calls, zip(saved_numels, model_spec.output_numel, strict=True), strict=True)
    )
    param_fractions = local_param_fractions(view) if loads else {}
    found = {}
    for block_call, share in view.work_share.block_shares.items():
        found[block_call] = ActivationMemory(
            share.output_numel * num_samples * width, share.saved_numel * num_samples * width
        )
        if block_call in loads:
            fractions = (
                view.work_share.token_fraction(block_call),
                param_fractions.get(block_call, Fraction(1)),
            )
            found[block_call] = _local_memory(
                loads[block_call], share, full_numels[block_call], *fractions, num_samples
            )
            less = _mask_numel(view, block_call, num_samples) * width
            around = loads[block_call].around_experts
            if around is not None:
                more = expert_rows_fraction(view, block_call) - fractions[0]
                less -= around.saved_by_experts.local_total(num_samples, more, Fraction(0))
            saved_nbytes = max(0, found[block_call].saved_nbytes - less)
            found[block_call] = replace(found[block_call], saved_nbytes=saved_nbytes)
    if model_spec.memory is not None and found:
        first = next(iter(found))  # glue is held from the first forward to the last backward
        found[first] = replace(
            found[first], output_nbytes=found[first].output_nbytes + model_spec.memory.glue.total(num_samples)
        )
    return found


def loss_scratch_nbytes(view: RankView, job: Job, saved_numel: int, num_samples: int) -> int:
    """Returns the scratch of LOSS; if it was not measured, the bytes of `saved_numel` elements."""
    model_spec = view.model_spec
    if model_spec.memory is None or view.plan.logits_layout.axes_with("S"):
        # Float32 at least.
        return saved_numel * max(FLOAT_NBYTES[job.precision.compute], FLOAT_NBYTES["float32"])
    return round(
        model_spec.memory.loss.total(num_samples) * view.work_share.token_fraction(model_spec.block_calls[-1])
    )


def _mask_numel(view: RankView, block_call: str, num_samples: int) -> int:
    sequence_info = view.plan.model_spec.sequence_info
    if view.plan.sequence_sharding is None or sequence_info is None:
        return 0
    found = 0
    for call in sequence_info.attention_calls:
        if call.block_call == block_call and call.mask is not None and not call.mask.is_additive:
            mask_numel = call.key_len * (call.query_len if call.mask.per_query else 1)
            found += (
                mask_numel
                * (num_samples if call.mask.per_sample else 1)
                * (call.num_heads if call.mask.per_head else 1)
            )
    return round(found * view.work_share.token_fraction(block_call))


def local_param_fractions(view: RankView) -> dict[str, Fraction]:
    """Returns the fraction of the parameters of each block call that a rank has."""
    local_numel, full_numel = Counter[str](), Counter[str]()
    head = view.work_share.chunked_head_call
    for param_sharding, logical in zip(view.param_shardings, view.logical_param_shardings, strict=True):
        for block_call in param_sharding.param.block_calls:
            in_loss = (
                head is not None
                and block_call == head.block_call
                and head.name in param_sharding.param.layers
            )
            local_numel[block_call] += 0 if in_loss else param_sharding.param.numel
            full_numel[block_call] += logical.param.numel
    return {
        block_call: Fraction(local_numel[block_call], numel)
        for block_call, numel in full_numel.items()
        if numel
    }


def saved_fraction(view: RankView, block_call: str) -> Fraction:
    """Returns the fraction of the saved activations of `block_call` that a rank has."""
    saved = dict(zip(view.model_spec.block_calls, view.model_spec.saved_numel, strict=False)).get(block_call)
    local = view.work_share.block_shares[block_call].saved_numel
    return Fraction(local, saved) if saved else view.work_share.token_fraction(block_call)


def expert_rows_fraction(view: RankView, block_call: str) -> Fraction:
    """Returns the fraction of the rows of experts in `block_call` that a rank gives to them."""
    calls = [call for call in view.model_spec.experts_calls if call.block_call == block_call]
    rows, local = sum(call.num_tokens for call in calls), sum(map(view.work_share.expert_rows, calls))
    return Fraction(local, rows) if rows else view.work_share.token_fraction(block_call)


def block_memories(model_spec: ModelSpec) -> Mapping[str, BlockMemory]:
    """Returns the measured memory by block call."""
    return (
        {}
        if model_spec.memory is None
        else {memory.block_call: memory for memory in model_spec.memory.block_calls}
    )


def _local_memory(
    memory: BlockMemory,
    share: BlockShare,
    full: tuple[int, int],
    fractions: Fraction,
    params: Fraction,
    num_samples: int,
) -> ActivationMemory:
    inside = Fraction(share.saved_numel, full[0]) if full[0] else fractions
    stream = Fraction(share.output_numel, full[1]) if full[1] else fractions

    def part(quantity: LinearInSamples, fraction: Fraction) -> int:
        return quantity.local_total(num_samples, fraction, params)

    attention_backward = (
        None
        if memory.attention_backward is None
        else memory.attention_backward.signed_local_total(num_samples, inside, params)
    )
    backward = part(memory.backward, inside), part(memory.backward_with_grads, inside), attention_backward
    return ActivationMemory(part(memory.output, stream), part(memory.saved_activations, inside), *backward)
