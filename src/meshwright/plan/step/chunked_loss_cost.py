"""Computes the cost of a chunked loss: LOSS multiplies with the LM head's weight for some tokens at a time.

    at once    F(head)  logits of all tokens   LOSS  their gradient      B(head)  gradients of hidden, weight
    chunked    F(head)  nothing                LOSS  per chunk: logits, loss, gradient, and both of those

The full logits are never materialized. The LM head's block call returns the input of the LM head. The
gradient of its weight is complete after LOSS; the backward of the block call completes the rest of the block.
"""

from dataclasses import dataclass

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.rank_view import RankView

MAX_CHUNK_NUMEL = 1 << 20  # elements of sharded logits that the loss reads at once, in float32 at least


@dataclass(frozen=True)
class ChunkedLossCost:
    """The LOSS of one microbatch: bytes of the gradient it returns, bytes of its scratch memory, operations.

    `param_names` are the parameters it multiplies with.
    """

    output_grad_nbytes: int
    scratch_nbytes: int
    flops: int
    param_names: tuple[str, ...]


def chunk_sizes(num_tokens: int, num_chunks: int) -> list[int]:
    """Returns the tokens of each chunk: as equal as possible, none empty; the first chunks have one more."""
    num_chunks = max(1, min(num_chunks, num_tokens))
    base, remainder = divmod(num_tokens, num_chunks)
    return [base + (number < remainder) for number in range(num_chunks)]


def num_local_logit_tokens(view: RankView) -> int:
    """Returns the logit rows per sample on this rank."""
    logits = view.model_spec.logits
    return (
        0
        if logits is None
        else int(logits.num_tokens * view.work_share.unpadded_token_fraction(view.model_spec.block_calls[-1]))
    )


def chunked_loss_cost(view: RankView, job: Job, num_samples: int) -> ChunkedLossCost | None:
    """Returns the cost of LOSS on microbatches of `num_samples`; None if it takes all logits at once.

    A chunk exists up to three times: what the loss saves, the gradient of that, and the gradient of the
    logits. Of sharded logits two of them have the dtype of the products; while the gradient of the weight is
    accumulated, all have.
    """
    call, logits = view.work_share.chunked_head_call, view.model_spec.logits
    if call is None or logits is None:
        return None
    precision, param_itemsize = job.precision, FLOAT_NBYTES[job.precision.parameters]
    itemsize = FLOAT_NBYTES[precision.compute]
    loss_itemsize = max(FLOAT_NBYTES[precision.compute], FLOAT_NBYTES["float32"])
    by_name = {
        name: param_sharding for param_sharding in view.param_shardings for name in param_sharding.param.names
    }
    head_params = [by_name[name] for name in (f"{call.name}.weight", f"{call.name}.bias") if name in by_name]
    num_tokens, param = num_local_logit_tokens(view), head_params[0].param
    largest_chunk = chunk_sizes(num_tokens, view.plan.num_loss_chunks)[0] * num_samples
    chunk_numel = largest_chunk * param.shape[0]
    hidden_nbytes = largest_chunk * (call.in_numel // logits.num_tokens) * itemsize
    grad_nbytes = sum(
        param_sharding.param.numel * param_itemsize
        for param_sharding in head_params
        if param_sharding.param.trainable
    )
    cast_nbytes = param.numel * itemsize if precision.compute != precision.parameters else 0
    loss_nbytes = (
        2 * chunk_numel * itemsize + min(chunk_numel, MAX_CHUNK_NUMEL) * loss_itemsize
        if view.plan.logits_layout.axes_with("S")
        else 3 * chunk_numel * loss_itemsize
    )
    # A product whose dtype differs from the accumulator's.
    accumulate_nbytes = 2 * chunk_numel * itemsize + cast_nbytes if param.trainable else 0
    return ChunkedLossCost(
        output_grad_nbytes=num_tokens * num_samples * (call.in_numel // logits.num_tokens) * itemsize,
        scratch_nbytes=max(loss_nbytes, accumulate_nbytes) + hidden_nbytes + grad_nbytes + cast_nbytes,
        flops=3 * view.work_share.layer_flops(call) * num_samples,
        param_names=tuple(param_sharding.param.name for param_sharding in head_params),
    )
