"""What the visits of a forward hold in memory, weighed on a trial: bytes in the dtypes of a job, by the number of rows.

    F(v)     what it hands on, what it keeps inside                               until its B
    LOSS     the gradient of what came to it; on top, for itself                  logits in wider floats, their loss, its gradient
    B(v)     the gradients of its weights; on top, for itself                     gradients of what lies within

What comes on top is the most that is there at any moment, which may be the first of a backward, with all of the inside still
there, or a late one, with the gradients of weights. Scratch memory within one operation is not seen.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ModelSpec
from meshwright.plan.model_spec.op_costs import BlockMemory, LinearInSamples
from meshwright.plan.sharding.rank_share import BlockShare, block_shares, chunked_head_call, local_fraction
from meshwright.plan.sharding.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of one visit on one rank: handed on, kept inside, and on top in its backward, weights' gradients apart or not.

    `attending` is on top while attention's own backward runs, may be below 0, and is None where that is not known.
    """

    output_nbytes: int
    saved_nbytes: int
    backward_nbytes: int = 0
    backward_with_grads_nbytes: int = 0
    attention_backward_nbytes: int | None = None

    def scratch_nbytes(self, accumulated: int, new_grads: int) -> int:
        """What a backward has for itself beside `new` bytes of gradients, if the largest that it adds to others has `added`."""
        return max(
            accumulated,
            max(self.backward_nbytes, self.backward_with_grads_nbytes if new_grads else 0) - new_grads,
        )


def activation_memory(sharding: ShardingPlan, job: Job, num_samples: int) -> dict[str, ActivationMemory]:
    """What each visit takes on the rank that sees `space`, in micro-batches of so many rows."""
    anatomy, width, loads = (
        sharding.model_spec,
        FLOAT_NBYTES[job.precision.compute],
        block_memories(sharding.model_spec),
    )
    insides = anatomy.saved_numel or (0,) * len(anatomy.block_calls)
    known = dict(zip(anatomy.block_calls, zip(insides, anatomy.output_numel, strict=True), strict=True))
    weights = _local_param_fractions(sharding) if loads else {}
    found = {}
    for visit, share in block_shares(sharding).items():
        found[visit] = ActivationMemory(
            share.output_numel * num_samples * width, share.saved_numel * num_samples * width
        )
        if visit in loads:
            own = local_fraction(sharding, visit), weights.get(visit, Fraction(1))
            found[visit] = _local_memory(loads[visit], share, known[visit], *own, num_samples)
            found[visit] = replace(
                found[visit],
                saved_nbytes=max(
                    0, found[visit].saved_nbytes - _mask_numel(sharding, visit, num_samples) * width
                ),
            )
    if anatomy.memory is not None and found:
        first = next(iter(found))  # from its forward to its backward all the others run
        found[first] = replace(
            found[first], output_nbytes=found[first].output_nbytes + anatomy.memory.glue.total(num_samples)
        )
    return found


def loss_scratch_nbytes(sharding: ShardingPlan, job: Job, saved_numel: int, num_samples: int) -> int:
    """The bytes that LOSS has for itself; where that was not weighed, those of so many elements that are `kept`."""
    anatomy = sharding.model_spec
    if anatomy.memory is None or sharding.logits_layout.axes_with("S"):
        return saved_numel * max(
            FLOAT_NBYTES[job.precision.compute], FLOAT_NBYTES["float32"]
        )  # in that at least
    return round(anatomy.memory.loss.total(num_samples) * local_fraction(sharding, anatomy.block_calls[-1]))


def _mask_numel(sharding: ShardingPlan, block_call: str, num_samples: int) -> int:
    """The elements of masks that a kernel makes of bools and keeps, on one device: where tokens are dealt nobody does."""
    tokens = (sharding.all_ranks or sharding).model_spec.sequence_info
    if sharding.sequence_sharding is None or tokens is None:
        return 0
    found = 0
    for attend in tokens.attention_calls:
        if attend.block_call == block_call and attend.mask is not None and not attend.mask.is_additive:
            each = attend.key_len * (attend.query_len if attend.mask.per_query else 1)
            found += (
                each
                * (num_samples if attend.mask.per_sample else 1)
                * (attend.num_heads if attend.mask.per_head else 1)
            )
    return round(found * local_fraction(sharding, block_call))


def _local_param_fractions(sharding: ShardingPlan) -> dict[str, Fraction]:
    """The share that the rank has of the elements of the weights that visits use, by visit; what LOSS multiplies with is its."""
    mine, all_of_them = Counter[str](), Counter[str]()
    head = chunked_head_call(sharding)
    for home, logical in zip(sharding.param_shardings, sharding.logical_param_shardings, strict=True):
        for visit in home.param.block_calls:
            later = head is not None and visit == head.block_call and head.name in home.param.layers
            mine[visit] += 0 if later else home.param.numel
            all_of_them[visit] += logical.param.numel
    return {visit: Fraction(mine[visit], numel) for visit, numel in all_of_them.items() if numel}


def block_memories(model_spec: ModelSpec) -> Mapping[str, BlockMemory]:
    """What was weighed, by visit."""
    return (
        {} if model_spec.memory is None else {load.block_call: load for load in model_spec.memory.block_calls}
    )


def _local_memory(
    load: BlockMemory,
    share: BlockShare,
    whole: tuple[int, int],
    own: Fraction,
    params: Fraction,
    num_samples: int,
) -> ActivationMemory:
    """What falls to a rank of the bytes of a visit: as much as of its elements, and of those of its `weights`."""
    inside = Fraction(share.saved_numel, whole[0]) if whole[0] else own
    stream = Fraction(share.output_numel, whole[1]) if whole[1] else own

    def part(line: LinearInSamples, of: Fraction) -> int:
        return line.local_total(num_samples, of, params)

    late = (
        None
        if load.attention_backward is None
        else load.attention_backward.signed_local_total(num_samples, inside, params)
    )
    on_top = part(load.backward, inside), part(load.backward_with_grads, inside), late
    return ActivationMemory(part(load.output, stream), part(load.saved_activations, inside), *on_top)
