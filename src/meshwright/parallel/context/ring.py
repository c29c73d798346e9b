"""Ring attention: each rank has some tokens; keys and values are passed around the ring, queries stay.

Why it works: every part of a block but attention treats each token by itself, so a rank runs it on the
tokens that it has. Attention is a softmax over all keys, which follows from softmaxes over some of them if
each also returns its log-sum-exp (attention_kernel.py). So a rank merges the results of its queries with the
keys that it receives, one rank's after the other, and never holds those of more than two ranks.

    tokens, zigzag, 4 ranks     chunks 0 .. 7     rank 0: 0 7   rank 1: 1 6   rank 2: 2 5   rank 3: 3 4
    step s                      rank r computes with the keys of rank r - s, while those of r - s - 1 are sent
    causal                      every step but the first attends to half of all pairs, on every rank: balanced

    layouts: tokens S(1), weights R, their gradients P: summed with those of other samples, in one collective
    sent per rank, microbatch and layer, in elements; k of a heads have keys, b samples, N tokens of width h:
      forward     2 b (N/P) h (k/a) (P-1)     P-1 shifts of keys and values, one message each
      backward    4 b (N/P) h (k/a) (P-1)     the same, and P-1 shifts of their gradients, in float32 at least
    activations: 1/P of those of one device, and two blocks being sent; backward four more, of gradients

N/P is the number of tokens of the rank with most tokens: all send as much. `load_balance` assigns the
tokens:

    zigzag        an early chunk and a late one each: balanced under a causal mask
    striped       every P-th token: a rank has its share of each window and each packed document, wherever it
                  begins, so all masks are balanced; in a step a document of L tokens is a square of L/P
    contiguous    neighbouring tokens: under a causal mask the last computes (2 P - 1) / P times the mean

With `compress_activations` along cp (activation_compression.py) keys, values and their gradients travel as
codes, each c bytes for a message: every rank computes with k' = code(k) and v' = code(v), which the rank that
has the tokens codes once. Of a gradient each rank sends the codes of its summand to the rank that has the
keys, over s hops in step s: on a ring with several ranks on each host more of that crosses hosts than of a
sum that travels round; with the hybrid, as much. Sent: c (P-1) forward, 2 c (P-1) backward.
Cost: the transfer of a step overlaps with its computation if that takes longer: from some thousands of
tokens per rank on. If each query attends to neighbouring keys (causal, window, packed documents, padding,
prefix), fully masked blocks are not computed (block_mask.py); their messages are sent all the same. Layers
that share a mask tensor analyze it once.
Limits: attention is a call of F.scaled_dot_product_attention within a block; with dropout, it runs as
matmuls. A mask has rows of the rank's queries and columns of all keys: n x N elements per rank. A row that a
float mask hides with a large number is a mean of all keys, as on one device, computed by matmuls. With few
tokens per rank messages are exposed: if there are enough heads, ulysses sends fewer bytes.
Paper: Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv 2310.01889; Brandon et al. 2023,
"Striped Attention", arXiv 2311.09431 (balance under causal masks); Grattafiori et al. 2024, "The Llama 3
Herd of Models", arXiv 2407.21783, section 3.3.2 (2 P chunks, an early and a late one each).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Literal

import torch

from meshwright.model.context_parallel.attention_call import ShardedAttentionCall
from meshwright.parallel.context.attention_args_to_4d import attention_inputs, dropout_keep_mask
from meshwright.parallel.context.block_mask import MaskCache
from meshwright.parallel.context.context_parallel_strategy import (
    ContextParallel,
    add_attention_comm,
    check_sequence_sharding,
    local_heads,
)
from meshwright.parallel.context.conv_halo import convolve_with_halo
from meshwright.parallel.context.memory_model import add_attention_memory, ring_memory
from meshwright.parallel.context.output_merge.decode_attention import decode_attention
from meshwright.parallel.context.ring_attention import ring_attention
from meshwright.parallel.context.ring_geometry import AttentionRing, KeyPlaces, RingCodes
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.model_spec.sequence_info import AttentionSpec
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Program, Transfer
from meshwright.plan.step.single_device_program import reduce_totals_along, step_total_nbytes
from meshwright.plan.strategy_interface import ActivationName, Handler, Runtime

LoadBalance = Literal["zigzag", "contiguous", "striped"]
REMOVED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "comm_dtype": "remove it; to send keys and values in fewer bytes add [[strategies]] name = "
        '"compress_activations", axis = "cp", codec = "bfloat16" (or "int8")'
    }
)


@dataclass(frozen=True)
class RingAttention(ContextParallel):
    """Shards the tokens of each sample along `axis`; keys and values travel round it.

    `load_balance` gives all ranks equal work under a causal mask, except "contiguous".
    """

    name: ClassVar[str] = "ring"
    removed_keys: ClassVar[Mapping[str, str]] = REMOVED_KEYS
    load_balance: LoadBalance = "zigzag"

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from check_sequence_sharding(self.name, self.axis, sharding, self.sequence_sharding)

    def sequence_sharding(self, num_ranks: int) -> SequenceSharding:
        return ring_sharding(self.load_balance, num_ranks)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        forth, back = (
            partial(moves, view, job) for moves in (self._forward_transfers, self._backward_transfers)
        )
        program = add_attention_comm(program, view, job, forth, back)
        program = reduce_totals_along(program, self.axis, step_total_nbytes(view.plan))
        ranks = view.plan.mesh.size(self.axis)
        return add_attention_memory(
            program,
            view,
            job,
            partial(in_flight_nbytes, ranks),
            partial(ring_memory, view, job, self.sequence_sharding(ranks)),
        )

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        runtime.state.sequence_runner.set_convolution(partial(convolve_with_halo, runtime, self.axis))
        runtime.state.sequence_runner.set_decode_attention(partial(decode_attention, runtime, self.axis))
        runtime.state.sequence_runner.set_attention(partial(self._attention, runtime, MaskCache()))
        return {}

    def _forward_transfers(
        self, view: RankView, job: Job, attention_call: AttentionSpec, num_samples: int
    ) -> list[Transfer]:
        return self._ring_transfers(view, job, attention_call, num_samples)[0]

    def _backward_transfers(
        self, view: RankView, job: Job, attention_call: AttentionSpec, num_samples: int
    ) -> list[Transfer]:
        return self._ring_transfers(view, job, attention_call, num_samples)[1]

    def _ring_transfers(
        self, view: RankView, job: Job, attention_call: AttentionSpec, num_samples: int
    ) -> tuple[list[Transfer], list[Transfer]]:
        ranks = view.plan.mesh.size(self.axis)
        most = max(self.sequence_sharding(ranks).num_tokens_by_rank(attention_call.key_len))
        _, groups = local_heads(view, attention_call)
        return ring_transfers(
            num_samples * groups * most * (attention_call.head_dim + attention_call.value_head_dim),
            ranks - 1,
            self.axis,
            groups,
            job,
        )

    def _attention(self, runtime: Runtime, recent: MaskCache, call: ShardedAttentionCall) -> torch.Tensor:
        given, view = attention_inputs(call, self.name), runtime.state.plan.view
        sequence_sharding = self.sequence_sharding(view.plan.mesh.size(self.axis))
        kwargs = {"scale": call.scale, "causal": call.is_causal, "dropout_p": given.dropout_p}
        ring = recent.ring(
            (call.query_shard.length, call.key_shard.length, *kwargs.values()),
            lambda: AttentionRing(
                index=view.coordinate[self.axis],
                query_spans=call.query_shard.spans,
                key_spans=tuple(
                    sequence_sharding.token_ranges(call.key_shard.length, index)
                    for index in range(sequence_sharding.num_ranks)
                ),
                shift=lambda output, tensor: runtime.state.collectives.shift(output, tensor, self.axis),
                **kwargs,
            ),
        )
        length, heads = call.key_shard.length, list(range(given.key.shape[1]))
        codes = ring_codes(
            *(runtime, self.axis, ring),
            lambda rank, _: {1: (len(heads), heads), 2: (length, ring.key_positions[rank].tolist())},
        )
        keep, keeps = dropout_keep_mask(call, ring.query_spans), call.query_shard.caches_slices
        view = recent.block_mask(ring, given.mask, given.query.device, call.mask, cacheable=keeps)
        return given.restore_shape(
            ring_attention(ring, given.query, given.key, given.value, given.mask, keep, view, codes)
        )


def ring_sharding(load_balance: str, num_ranks: int, ulysses_degree: int = 1) -> SequenceSharding:
    """Returns the sequence sharding of that load balancing."""
    return SequenceSharding(
        num_ranks, ulysses_degree, zigzag=load_balance == "zigzag", striped=load_balance == "striped"
    )


def ring_codes(
    runtime: Runtime,
    axis: str,
    ring: AttentionRing,
    places: KeyPlaces,
    stride: int = 1,
    *,
    is_recoded: bool = False,
) -> RingCodes | None:
    """Returns how keys and values of the next attention call travel round `ring`, of every `stride`-th rank
    along `axis`, as codes; None: they travel as they are. `is_recoded`: codes have carried them before.
    """
    num_ranks, collectives = len(ring.key_spans), runtime.state.collectives
    if num_ranks == 1:
        return None
    names = (ActivationName("", "input", slot, is_recoded=is_recoded) for slot in ("key", "value"))
    (codec, use), (_, use_of_value) = (collectives.codes(axis, name) or (None, None) for name in names)
    if codec is None:
        return None
    return RingCodes(
        codec,
        lambda output, tensor, steps: collectives.shift(
            output, tensor, axis, offset=(num_ranks - steps) * stride
        ),
        places,
        tuple(each.note_part for each in (use, use_of_value) if each is not None),
    )


def ring_transfers(
    numel: int, num_steps: int, axis: str, num_heads: int, job: Job
) -> tuple[list[Transfer], list[Transfer]]:
    """Returns the collectives of a forward and of a backward around a ring of `num_steps` steps, `numel`
    elements of `num_heads` heads per message.

    In backward each message of gradients stands behind the next one of keys and values.
    """
    wide = "float64" if job.precision.compute == "float64" else "float32"
    keys, gradients = (
        [Transfer("shift", (axis,), numel * FLOAT_NBYTES[dtype], dtype=dtype, code_parts=num_heads)]
        * num_steps
        for dtype in (job.precision.compute, wide)
    )
    return keys, [
        *keys[:1],
        *(each for pair in zip(keys[1:], gradients, strict=False) for each in pair),
        *gradients[:1],
    ]


def in_flight_nbytes(num_ranks: int, action: Action) -> int:
    """Returns the bytes of the messages of a backward in a ring of `num_ranks`: keys, the gradients on the
    owning rank, and travelling gradients.
    """
    sent = [move.nbytes for move in action.inner_transfers if move.collective == "shift"]
    return 2 * sent[0] + min(num_ranks + 1, 4) * sent[-1] if sent else 0
