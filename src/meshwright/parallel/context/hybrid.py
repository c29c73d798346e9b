"""Hybrid context parallelism (USP): Ulysses between neighbouring ranks, ring attention between their groups.

Why it works: Ulysses turns some tokens of all heads into more tokens of some heads, and a ring needs only
that each rank has some tokens of the heads that it computes. So one nests in the other, each at its best
place: the exposed exchange between the ranks of a host; the ring, whose messages overlap with computation,
between hosts. The exchange gives the ring more tokens per rank; the ring allows more ranks than there are
heads.

    6 ranks, ulysses_degree = 2, zigzag    chunks 0 .. 5    ranks 0 1: 0 5    ranks 2 3: 1 4    ranks 4 5: 2 3
    exchange                 0 with 1, 2 with 3, 4 with 5: each half of the heads, of all tokens of both
    ring                     0 -> 2 -> 4 -> 0 with the first half of the heads, 1 -> 3 -> 5 -> 1 the others

    layouts: tokens S(1), weights R, their gradients P: summed with those of other samples, in one collective
    sent per rank, microbatch and layer, in elements; k of a heads have keys, B samples, N tokens of width h,
    P = u r, u = ulysses_degree:
      exchange    (2 + 2 k/a) B N h / P x (u-1)/u     forward, if u divides k; backward as much
      ring        2 B N h / P x (k/a) (r-1)           forward; backward twice that (gradients float32)
    activations: 1/P of one rank's, and two travelling blocks

`load_balance` is that of the ring: chunks, or with "striped" single tokens, go to the groups, and the tokens
of a group are contiguous on its ranks. `ulysses_degree` neighbours in mesh order are one group of the
exchange: on one host, if hosts have a multiple of that many ranks.
Cost: the exchange is exposed; the messages of the ring overlap, but for the last of a backward. Of a mask
that a block makes for its own queries those of neighbours are gathered: B N N / r x (u-1)/u elements in
every layer; of others nothing is sent.
Limits: `ulysses_degree` divides the heads of a rank, and the ranks along the axis. Attention is a call of
F.scaled_dot_product_attention within a block; with dropout, it runs as matmuls.
Paper: Fang and Zhao 2024, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI",
arXiv 2405.07719 (section 3); Gu et al. 2024, "LoongTrain", arXiv 2406.18485.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from meshwright.model.context_parallel.attention_call import ShardedAttentionCall
from meshwright.parallel.context.attention_args_to_4d import attention_inputs, dropout_keep_mask
from meshwright.parallel.context.block_mask import MaskCache
from meshwright.parallel.context.context_parallel_strategy import (
    CP_AXIS,
    ContextParallel,
    add_attention_comm,
    check_sequence_sharding,
    local_heads,
)
from meshwright.parallel.context.conv_halo import convolve_with_halo
from meshwright.parallel.context.memory_model import add_attention_memory, exchange_memory, ring_memory
from meshwright.parallel.context.output_merge.decode_attention import decode_attention
from meshwright.parallel.context.ring import (
    REMOVED_KEYS,
    LoadBalance,
    in_flight_nbytes,
    ring_codes,
    ring_sharding,
    ring_transfers,
)
from meshwright.parallel.context.ring_attention import ring_attention
from meshwright.parallel.context.ring_geometry import AttentionRing
from meshwright.parallel.context.ulysses_all_to_all import (
    HeadExchange,
    KVHeadAssignment,
    check_heads,
    exchange_transfers,
)
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.sequence_info import AttentionSpec
from meshwright.plan.sharding.mesh import divisors
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Program, Transfer
from meshwright.plan.step.single_device_program import reduce_totals_along, step_total_nbytes
from meshwright.plan.strategy_interface import Handler, Runtime


@dataclass(frozen=True)
class HybridContextParallel(ContextParallel):
    """Shards the tokens of each sample along `axis`: an all-to-all between `ulysses_degree` neighbours, a
    ring between groups.

    `load_balance` is that of the ring.
    """

    name: ClassVar[str] = "hybrid_context_parallel"
    removed_keys: ClassVar[Mapping[str, str]] = REMOVED_KEYS
    ulysses_degree: int = 2
    load_balance: LoadBalance = "zigzag"

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from check_sequence_sharding(self.name, self.axis, sharding, self.sequence_sharding)
        if not self._is_divisible(sharding):
            ranks = sharding.mesh.size(CP_AXIS)
            sizes = " or ".join(map(str, divisors(ranks)))
            text = (
                f"ulysses_degree = {self.ulysses_degree}, and {CP_AXIS} has {ranks} ranks, which are to be "
                f"groups of so many neighbours"
            )
            yield Diagnostic(text, f"set ulysses_degree to {sizes}", f"strategies.{self.name}.ulysses_degree")

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if self._is_divisible(sharding):
            yield from check_heads(
                sharding,
                self.name,
                self.ulysses_degree,
                "ulysses_degree",
                divisors(sharding.mesh.size(CP_AXIS)),
            )

    def sequence_sharding(self, num_ranks: int) -> SequenceSharding:
        return ring_sharding(
            self.load_balance,
            num_ranks,
            self.ulysses_degree if self.ulysses_degree > 0 and num_ranks % self.ulysses_degree == 0 else 1,
        )

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        sequence_sharding = self.sequence_sharding(view.plan.mesh.size(self.axis))

        def forward_transfers(attention_call: AttentionSpec, num_samples: int) -> list[Transfer]:
            taken, given, *_ = exchange_transfers(
                view, job, self.axis, sequence_sharding, attention_call, num_samples
            )
            return taken + self._ring_transfers(view, job, attention_call, num_samples)[0] + given

        def backward_transfers(attention_call: AttentionSpec, num_samples: int) -> list[Transfer]:
            *_, of_given, of_taken = exchange_transfers(
                view, job, self.axis, sequence_sharding, attention_call, num_samples
            )
            return of_given + self._ring_transfers(view, job, attention_call, num_samples)[1] + of_taken

        program = add_attention_comm(program, view, job, forward_transfers, backward_transfers)
        program = reduce_totals_along(program, self.axis, step_total_nbytes(view.plan))
        of = partial(
            exchange_memory if sequence_sharding.num_inner_ranks > 1 else ring_memory,
            view,
            job,
            sequence_sharding,
        )  # groups of one exchange nothing
        return add_attention_memory(
            program,
            view,
            job,
            partial(in_flight_nbytes, sequence_sharding.num_ranks // sequence_sharding.num_inner_ranks),
            of,
        )

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        exchange = HeadExchange.along_axis(
            self.axis, self.sequence_sharding(runtime.state.plan.sharding.mesh.size(self.axis)), runtime
        )
        runtime.state.sequence_runner.set_convolution(partial(convolve_with_halo, runtime, self.axis))
        runtime.state.sequence_runner.set_decode_attention(partial(decode_attention, runtime, self.axis))
        runtime.state.sequence_runner.set_attention(partial(self._attention, runtime, exchange, MaskCache()))
        return {}

    def _attention(
        self, runtime: Runtime, exchange: HeadExchange, recent: MaskCache, call: ShardedAttentionCall
    ) -> torch.Tensor:
        given, sequence_sharding = attention_inputs(call, self.name), exchange.sequence_sharding
        mine = exchange.gather_inputs(given, call, self.name)
        kwargs = {"scale": call.scale, "causal": call.is_causal, "dropout_p": given.dropout_p}
        ring = recent.ring(
            (call.query_shard.length, call.key_shard.length, *kwargs.values()),
            lambda: AttentionRing(
                index=exchange.index // sequence_sharding.num_inner_ranks,
                query_spans=sequence_sharding.inner_group_ranges(call.query_shard.length, exchange.index),
                key_spans=tuple(
                    sequence_sharding.inner_group_ranges(call.key_shard.length, first)
                    for first in range(0, sequence_sharding.num_ranks, sequence_sharding.num_inner_ranks)
                ),
                shift=lambda output, tensor: runtime.state.collectives.shift(
                    output, tensor, self.axis, offset=sequence_sharding.num_inner_ranks
                ),
                **kwargs,
            ),
        )
        length, near = call.key_shard.length, sequence_sharding.num_inner_ranks
        codes = ring_codes(
            *(runtime, self.axis, ring),
            lambda rank, is_backward: {
                1: (given.key.shape[1], exchange.kv_heads(given, is_gradient=is_backward)),
                2: (length, ring.key_positions[rank].tolist()),
            },
            near,
            is_recoded=near > 1,
        )
        keep = dropout_keep_mask(call, ring.query_spans, exchange.head_range(given))
        view = recent.block_mask(
            ring, mine.mask, mine.query.device, call.mask, cacheable=call.query_shard.caches_slices
        )
        out = ring_attention(ring, mine.query, mine.key, mine.value, mine.mask, keep, view, codes)
        return given.restore_shape(exchange.to_tokens(out, call.query_shard.length))

    def _ring_transfers(
        self, view: RankView, job: Job, attention_call: AttentionSpec, num_samples: int
    ) -> tuple[list[Transfer], list[Transfer]]:
        sequence_sharding = self.sequence_sharding(view.plan.mesh.size(self.axis))
        heads, groups = local_heads(view, attention_call)
        needs, counts = (
            KVHeadAssignment.for_heads(heads, groups, sequence_sharding.num_inner_ranks),
            sequence_sharding.num_tokens_by_rank(attention_call.key_len),
        )
        most = max(
            sum(counts[first : first + sequence_sharding.num_inner_ranks])
            for first in range(0, sequence_sharding.num_ranks, sequence_sharding.num_inner_ranks)
        )
        travelling = heads // sequence_sharding.num_inner_ranks if needs.used_heads else needs.num_sent
        numel = num_samples * travelling * most * (attention_call.head_dim + attention_call.value_head_dim)
        return ring_transfers(
            numel,
            sequence_sharding.num_ranks // sequence_sharding.num_inner_ranks - 1,
            self.axis,
            travelling,
            job,
        )

    def _is_divisible(self, sharding: ShardingPlan) -> bool:
        return self.ulysses_degree > 0 and sharding.mesh.size(CP_AXIS) % self.ulysses_degree == 0
