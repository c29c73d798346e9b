"""What a loss costs whose logits are never all there: LOSS multiplies with the head's weight, for some tokens at a time.

    at once      F(head)  logits of all tokens     LOSS  their gradient        B(head)  those of hidden and of the weight
    in pieces    F(head)  nothing                  LOSS  per piece: logits, their loss, their gradient, and both of those

The head's visit hands on what went into the head. The gradient of its weight is there behind LOSS; the visit's backward, which
follows, completes what else it belongs to, as ever.
"""

from dataclasses import dataclass

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.rank_share import chunked_head_call, layer_flops, unpadded_fraction
from meshwright.plan.sharding.sharding_plan import ShardingPlan

MAX_CHUNK_NUMEL = 1 << 20  # elements of divided logits that the loss looks at at once, in float32 at least


@dataclass(frozen=True)
class ChunkedLossCost:
    """Of the LOSS of one micro-batch: the bytes of the gradient that it gives back, those for itself alone, its operations.

    `weights` are the parameters that it multiplies with.
    """

    output_grad_nbytes: int
    scratch_nbytes: int
    flops: int
    param_names: tuple[str, ...]


def chunk_sizes(num_tokens: int, num_chunks: int) -> list[int]:
    """How many of `count` tokens are in each piece: as alike as can be, none empty; the first have one more."""
    num_chunks = max(1, min(num_chunks, num_tokens))
    each, more = divmod(num_tokens, num_chunks)
    return [each + (number < more) for number in range(num_chunks)]


def num_local_logit_tokens(sharding: ShardingPlan) -> int:
    """The rows of logits of a sample on the rank that sees `space`."""
    logits = sharding.model_spec.logits
    return (
        0
        if logits is None
        else int(logits.num_tokens * unpadded_fraction(sharding, sharding.model_spec.block_calls[-1]))
    )


def chunked_loss_cost(sharding: ShardingPlan, job: Job, num_samples: int) -> ChunkedLossCost | None:
    """What LOSS costs on micro-batches of so many `rows`; None where it takes all logits at once.

    A piece is there up to three times: what the loss keeps of it, the gradient of that, and the gradient of the logits.
    Of divided logits two of them are as narrow as products; and while the gradient of the weight is added up, all are.
    """
    call, logits = chunked_head_call(sharding), sharding.model_spec.logits
    if call is None or logits is None:
        return None
    precision, parameters = job.precision, FLOAT_NBYTES[job.precision.parameters]
    width, wide = (
        FLOAT_NBYTES[precision.compute],
        max(FLOAT_NBYTES[precision.compute], FLOAT_NBYTES["float32"]),
    )
    homes = {name: home for home in sharding.param_shardings for name in home.param.names}
    mine = [homes[name] for name in (f"{call.name}.weight", f"{call.name}.bias") if name in homes]
    tokens, weight = num_local_logit_tokens(sharding), mine[0].param
    most = chunk_sizes(tokens, sharding.num_loss_chunks)[0] * num_samples
    piece, taken = most * weight.shape[0], most * (call.in_numel // logits.num_tokens) * width
    learnt = sum(home.param.numel * parameters for home in mine if home.param.trainable)
    cast = weight.numel * width if precision.compute != precision.parameters else 0
    looking = (
        2 * piece * width + min(piece, MAX_CHUNK_NUMEL) * wide
        if sharding.logits_layout.axes_with("S")
        else 3 * piece * wide
    )
    adding = (
        2 * piece * width + cast if weight.trainable else 0
    )  # a product in another dtype than what it is added to
    return ChunkedLossCost(
        output_grad_nbytes=tokens * num_samples * (call.in_numel // logits.num_tokens) * width,
        scratch_nbytes=max(looking, adding) + taken + learnt + cast,
        flops=3 * layer_flops(sharding, call) * num_samples,
        param_names=tuple(home.param.name for home in mine),
    )
