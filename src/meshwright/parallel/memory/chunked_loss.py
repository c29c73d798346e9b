"""Chunked loss: LM head and loss run on one chunk of tokens at a time; full logits are never materialized.

Why it works: logits are the widest tensor of a language model, and a loss that is a sum over tokens needs
those of one token at a time. The LM head returns its input. The loss multiplies one chunk of tokens by the
weight of the LM head, computes the loss and its gradient at once, adds both up, and frees the chunk.

    before   F(norm) F(head)  LOSS  B(head) B(norm)       in memory: logits of all tokens, what the loss
                                                          saves, their gradient
    after    F(norm) F(head)  LOSS  B(head) B(norm)       in memory: hidden states of all tokens, their
                                                          gradient, one chunk x 3
                     nothing  3 products per chunk

    logits in float32, b samples of s tokens, vocabulary V, n chunks:
    bytes = 3 x 4 b s V / n    instead of 3 x 4 b s V

Sums over tokens are taken chunk by chunk, so the last bits may differ. The technique combines with context
parallelism (each rank chunks its own tokens), with a sharded vocabulary (ranks then exchange the numbers of
one chunk at a time), and with evaluations, which never hold more than one chunk of logits either.
Cost: no additional operation and no additional bytes sent. The products have fewer rows: below some hundred
tokens per chunk they slow down.
Limits: the LM head is an nn.Linear that is called once, in the last block, and returns the input of the loss:
logits that the model scales, caps or slices are refused. The loss is a sum over tokens, and every rank
computes its own. Chunks split the tokens of each sample, so a sample of one token has one chunk.
Paper: Hsu et al. 2024, "Liger Kernel" (fused linear cross-entropy), arXiv 2410.10989; Bekman et al. 2025,
"Arctic Long Sequence Training" (tiled logits and loss), arXiv 2506.13996.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.rank_work_share import lm_head_call
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.strategy_interface import Strategy, StrategyPhase

LOCATION = "strategies.chunked_loss"
UNCHUNKED_FIX = "remove the strategy chunked_loss: the loss then takes all logits at once"


@dataclass(frozen=True)
class ChunkedLoss(Strategy):
    """Takes the loss in `num_chunks` chunks of a rank's tokens; at most one chunk per token."""

    name: ClassVar[str] = "chunked_loss"
    phase: ClassVar[StrategyPhase] = "memory"
    num_chunks: int = field(default=8, metadata=at_least(2, "write 8, say; or remove the strategy"))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if sharding.num_loss_chunks > 1:
            text = "another strategy computes the loss in chunks already"
            yield Diagnostic(text, "keep one of the two", LOCATION)
        if sharding.model_spec.needs_global_batch:
            text = "the loss compares all samples of a batch, so it needs all logits at once"
            yield Diagnostic(text, UNCHUNKED_FIX, LOCATION)
        yield from _check_head(sharding)

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        call = lm_head_call(sharding.model_spec) if sharding.num_loss_chunks > 1 else None
        sliced = {
            name: each for each in sharding.param_shardings if each.sliced_dims for name in each.param.names
        }
        head = None if call is None else sliced.get(f"{call.name}.weight")
        if head is not None and set(head.sliced_dims) != set(sharding.logits_layout.axes_with("S")):
            text = (
                f"the LM head {head.param.name} is sharded along "
                f"{' and '.join(head.sliced_dims)}, "
                f"which needs a collective per product"
            )
            fix = f"shard it by vocabulary alone (tensor_parallel and vocab_parallel), or {UNCHUNKED_FIX}"
            yield Diagnostic(text, fix, LOCATION)
        if sharding.primary_rank_axes:
            axes = " and ".join(sharding.primary_rank_axes)
            text = (
                f"one rank along {axes} computes the loss of all ranks, from full logits that the others send"
            )
            yield Diagnostic(
                text, "remove chunked_loss, or let every rank compute its own loss (ddp, zero)", LOCATION
            )

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        return replace(sharding, num_loss_chunks=max(1, self.num_chunks))


def _check_head(sharding: ShardingPlan) -> Iterator[Diagnostic]:
    model_spec, logits = sharding.model_spec, sharding.model_spec.logits
    if logits is None:
        heads = (
            each
            for each in model_spec.params
            if each.role == "lm_head_unsharded" and each.not_shardable_reason
        )
        reason = next((f" ({each.name}: {each.not_shardable_reason})" for each in heads), "")
        text = f"{model_spec.name} has no LM head whose logits go to the loss unchanged{reason}"
        yield Diagnostic(text, UNCHUNKED_FIX, LOCATION)
        return
    call = lm_head_call(model_spec)
    vocab_shape = (logits.num_tokens, logits.vocab_size)
    if call is None or call.block_call != model_spec.block_calls[-1]:
        text = f"the LM head {logits.layer} is not in the last block that runs, {model_spec.block_calls[-1]}"
        yield Diagnostic(text, UNCHUNKED_FIX, LOCATION)
    elif logits.modified_by:
        text = (
            f"the model changes the logits between the LM head {logits.layer} and the loss "
            f"({logits.modified_by}); a chunk would not be changed"
        )
        fix = f"return the LM head's output unchanged and change it in a loss of your own, or {UNCHUNKED_FIX}"
        yield Diagnostic(text, fix, LOCATION)
    elif not any(each.per_sample and each.shape == vocab_shape for each in model_spec.outputs):
        text = (
            f"the logits do not have the shape [samples, tokens, vocabulary]: there are "
            f"{logits.num_tokens} of a sample"
        )
        yield Diagnostic(text, UNCHUNKED_FIX, LOCATION)
    elif logits.num_tokens < 2:
        text = "a sample has the logits of one token, so there is nothing to split into chunks"
        yield Diagnostic(text, UNCHUNKED_FIX, LOCATION)
