"""Ulysses: each rank has some tokens of every sample, but inside attention all tokens of some heads.

Why it works: every part of a block but attention treats each token by itself, and attention treats each head
by itself. So the ranks exchange before and after attention: each sends every other one its tokens of the
heads that are computed there. On the full sequence, in the order of positions, attention is torch's own,
with any mask.

    rank i has      tokens of slice i                 heads of slice i                      tokens of slice i
    q, k, v         [B, a, N/P, w]   --all_to_all-->  [B, a/P, N, w]
                                                      attention  -->  o  --all_to_all-->    [B, a, N/P, w]

    layouts: tokens S(1), contiguous; weights R, their gradients P: summed with those of other samples
    sent per rank, microbatch and layer, in elements; k of a heads have keys, B samples, N tokens, h = a w:
      forward     (2 + 2 k/a) B N h / P x (P-1)/P     four all_to_alls: q and o with a heads, k and v with k
      backward    as much                             (k: if P divides it)
    activations: 1/P of one rank's, everywhere

With fewer key heads than ranks, each goes to all ranks that need it, k = P in the formula (uneven cases:
ulysses_all_to_all.py). N/P is the number of tokens of the rank with most tokens: all send as much.
Cost: the exchange is exposed, so it needs fast links, as inside of a host, or travels as codes
(activation_compression.py); it shrinks with 1/P, the bytes of a ring do not. Masks that the model makes
outside of its blocks are on every rank: nothing is sent of them. Of a mask that a block makes (a relative
bias), each rank has the rows of its own queries, and those of others are exchanged in every layer: by head
like q, else B N N (P-1)/P elements; for long sequences that is more than q, k and v.
Limits: P divides the heads (those of a rank, with tensor parallelism), so P is at most a; a ring and the
hybrid do not have this limit. Attention is a call of F.scaled_dot_product_attention within a block; with
dropout, it runs as matmuls.
Paper: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509 (section 3.1; 3.2 for the bytes).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.model.context_parallel.attention_call import ShardedAttentionCall
from meshwright.parallel.context.attention_args_to_4d import (
    AttentionInputs,
    attention_inputs,
    dropout_keep_mask,
)
from meshwright.parallel.context.block_mask import MaskCache
from meshwright.parallel.context.context_parallel_strategy import (
    CP_AXIS,
    ContextParallel,
    add_attention_comm,
    check_sequence_sharding,
)
from meshwright.parallel.context.conv_halo import convolve_with_halo
from meshwright.parallel.context.memory_model import add_attention_memory, exchange_memory
from meshwright.parallel.context.output_merge.decode_attention import decode_attention
from meshwright.parallel.context.ring_attention import ring_attention
from meshwright.parallel.context.ring_geometry import AttentionRing, PendingTransfer
from meshwright.parallel.context.ulysses_all_to_all import HeadExchange, check_heads, exchange_transfers
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.sequence_info import AttentionSpec
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Program, Transfer
from meshwright.plan.step.single_device_program import reduce_totals_along, step_total_nbytes
from meshwright.plan.strategy_interface import Handler, Runtime


@dataclass(frozen=True)
class Ulysses(ContextParallel):
    """Shards the tokens of each sample along `axis`, and inside attention the heads instead."""

    name: ClassVar[str] = "ulysses"

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from check_sequence_sharding(self.name, self.axis, sharding, self.sequence_sharding)

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        ranks = sharding.mesh.size(CP_AXIS)
        yield from check_heads(sharding, self.name, ranks, f"mesh.{CP_AXIS}", range(1, 2 * ranks))

    def sequence_sharding(self, num_ranks: int) -> SequenceSharding:
        return SequenceSharding(num_ranks, num_inner_ranks=num_ranks, zigzag=False)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        sequence_sharding = self.sequence_sharding(view.plan.mesh.size(self.axis))

        def forward_transfers(attention_call: AttentionSpec, num_samples: int) -> list[Transfer]:
            taken, given, *_ = exchange_transfers(
                view, job, self.axis, sequence_sharding, attention_call, num_samples
            )
            return taken + given

        def backward_transfers(attention_call: AttentionSpec, num_samples: int) -> list[Transfer]:
            *_, of_given, of_taken = exchange_transfers(
                view, job, self.axis, sequence_sharding, attention_call, num_samples
            )
            return of_given + of_taken

        program = add_attention_comm(program, view, job, forward_transfers, backward_transfers)
        program = reduce_totals_along(program, self.axis, step_total_nbytes(view.plan))
        return add_attention_memory(
            program, view, job, memory_of=partial(exchange_memory, view, job, sequence_sharding)
        )

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        sequence_sharding = self.sequence_sharding(runtime.state.plan.sharding.mesh.size(self.axis))
        runtime.state.sequence_runner.set_convolution(partial(convolve_with_halo, runtime, self.axis))
        runtime.state.sequence_runner.set_decode_attention(partial(decode_attention, runtime, self.axis))
        runtime.state.sequence_runner.set_attention(
            partial(
                self._attention, HeadExchange.along_axis(self.axis, sequence_sharding, runtime), MaskCache()
            )
        )
        return {}

    def _attention(
        self, exchange: HeadExchange, recent: MaskCache, call: ShardedAttentionCall
    ) -> torch.Tensor:
        given = attention_inputs(call, self.name)
        if given.dropout_p:
            out = self._attention_with_dropout(exchange, recent, given, call)
            return given.restore_shape(exchange.to_tokens(out, call.query_shard.length))
        mine = exchange.gather_inputs(given, call, self.name)
        grouped = mine.query.shape[1] != mine.key.shape[1]
        out = F.scaled_dot_product_attention(
            *(mine.query, mine.key, mine.value, mine.mask),
            is_causal=call.is_causal,
            scale=call.scale,
            enable_gqa=grouped,
        )
        return given.restore_shape(exchange.to_tokens(out, call.query_shard.length))

    def _attention_with_dropout(
        self, exchange: HeadExchange, recent: MaskCache, given: AttentionInputs, call: ShardedAttentionCall
    ) -> torch.Tensor:
        mine, queries = exchange.gather_inputs(given, call, self.name), ((0, call.query_shard.length),)
        sizes = call.query_shard.length, call.key_shard.length, call.scale, call.is_causal, given.dropout_p
        keys = (((0, call.key_shard.length),),)
        ring = recent.ring(
            sizes,
            lambda: AttentionRing(
                0, queries, keys, call.scale, call.is_causal, _no_shift, dropout_p=given.dropout_p
            ),
        )
        keep = dropout_keep_mask(call, queries, exchange.head_range(given))
        keeps = call.query_shard.caches_slices
        view = recent.block_mask(ring, mine.mask, mine.query.device, call.mask, cacheable=keeps)
        return ring_attention(ring, mine.query, mine.key, mine.value, mine.mask, keep, view)


def _no_shift(output: torch.Tensor, tensor: torch.Tensor) -> PendingTransfer:
    raise RuntimeError("a ring of one rank has nothing to send; this is a bug: report it")
