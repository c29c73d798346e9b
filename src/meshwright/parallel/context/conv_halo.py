"""Halo exchange: a convolution along the sequence gets the tokens of other ranks that its kernel reaches.

Why it works: output i of a convolution reads tokens i - l to i + r, for a kernel of k with dilation d: l + r
= (k - 1) d. A rank has its tokens in one span or two; the missing tokens stand right before and behind
these. A token that stands at most l before the begin of a span is among the last l of a span on its own
rank, however short spans are. So every rank sends the first r and the last l tokens of each of its spans to
all, once; pads its own spans with the neighbours in the sample, and zeros at the ends of the sequence; and
convolves each span without padding. In backward, each edge gets the sum over all ranks.

    kernel of 3, causal, l = 2, 2 ranks, zigzag
      rank 0     1 2 3 | 10 11 12     sends 2 3 | 11 12     convolves 0 0 1 2 3 | 8 9 10 11 12
      rank 1     4 5 6 7 8 9          sends 8 9 | - -       convolves 2 3 4 5 6 7 8 9

    layouts: tokens S(1); edges S, and R for the convolution; weights R, their gradients P like all others
    sent per rank, microbatch and convolution, in elements: c channels, b samples, s spans (zigzag: 2):
      forward     s b c (l + r) (P-1)     one all_gather
      backward    as much                 one reduce_scatter, of gradients

It works with ring, ulysses and hybrid alike, and is no strategy of its own: with a sharded sequence,
convolutions are replaced so (model/context_parallel/conv_call.py). A convolution that is made causal by
padding both sides and slicing the output (y[..., :n]) still has elements to slice. The model analysis finds
those calls.
Cost: memory for P s (l + r) tokens during the convolution, and an exposed wait. With kernels of 3 or 4 that
is negligible beside attention; a neighbour alone would do if spans are longer than the kernel, and this
sends P-1 times that.
Limits: F.conv1d with tokens last, stride 1, zero padding. A kernel that reaches over more than 256 tokens,
and over more than a rank has, is refused: every rank would have all tokens. So are strides, transposed and
two-dimensional convolutions, pooling, and recurrences and scans. Ranks with single tokens (`load_balance =
"striped"`) have no neighbours, and are refused. A cache of convolution states is not kept: use_cache =
False.
Paper: Dryden et al. 2019, "Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained
Parallelism", IPDPS, arXiv 1903.06681 (halo exchange); Ku et al. 2025, "Systems and Algorithms for
Convolutional Multi-Hybrid Language Models at Scale", arXiv 2503.01868 (along the tokens of long sequences).
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.model.context_parallel.conv_call import ShardedConv1dCall
from meshwright.model.tensor_parallel.layer_roles import LAYER_NUMBER
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.model_spec.sequence_info import ConvSpec
from meshwright.plan.sharding.sequence_sharding import SequenceSharding, TokenRange, with_padding
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import R, S
from meshwright.plan.step.program import Transfer
from meshwright.plan.strategy_interface import Runtime

MAX_KERNEL_REACH = 256  # a kernel that reaches over no more tokens is taken with shares of any length


def convolve_with_halo(runtime: Runtime, axis: str, call: ShardedConv1dCall) -> torch.Tensor:
    """Returns the convolution of this rank's tokens, [.., channels, tokens], with the neighbours from the
    ranks of `axis`.
    """
    sequence_sharding = runtime.state.plan.sharding.sequence_sharding
    if sequence_sharding is None:
        raise RuntimeError("a convolution needs the tokens of neighbours, and the plan shards no sequence")
    known, share = call.conv_spec, call.token_shard
    edges = _edges(call.local_input, share.spans, known, sequence_sharding.max_ranges)
    dim, spans = edges.ndim - 1, with_padding(share.spans)
    met = F.pad(
        runtime.state.collectives.redistribute(edges, axis, S(dim), R), (0, 1)
    )  # behind all, a zero for what is not in the row
    columns = _halo_columns(sequence_sharding, share.length, spans, (known.left_halo, known.right_halo))
    halos = share.selector.select(met, dim, columns)
    around, made, at = halos.split([known.left_halo, known.right_halo] * len(spans), dim), [], 0
    for number, (begin, end) in enumerate(spans):
        whole = torch.cat(
            [around[2 * number], call.local_input.narrow(dim, at, end - begin), around[2 * number + 1]], dim
        )
        made.append(
            F.conv1d(
                whole,
                call.arguments.weight,
                call.arguments.bias,
                1,
                0,
                call.arguments.dilation,
                call.arguments.groups,
            )
        )
        at += end - begin
    return torch.cat(made, dim)


def halo_transfers(
    sharding: ShardingPlan, job: Job, axis: str, convolve: ConvSpec, num_samples: int
) -> tuple[list[Transfer], list[Transfer]]:
    """Returns the collectives of one convolution of `num_samples` samples: of a forward, and of a
    backward.
    """
    ranks = sharding.mesh.size(axis)
    if sharding.sequence_sharding is None or ranks == 1 or not convolve.halo:
        return [], []
    dtype = job.precision.compute
    nbytes = (
        num_samples
        * convolve.token_numel
        * convolve.halo
        * sharding.sequence_sharding.max_ranges
        * FLOAT_NBYTES[dtype]
    )
    gather, scatter = (("all_gather", nbytes), ("reduce_scatter", nbytes * ranks))
    forth, back = (Transfer(collective, (axis,), size, dtype=dtype) for collective, size in (gather, scatter))
    return [forth], [back] if convolve.needs_grad else []


def check_convolutions(
    name: str, axis: str, sharding: ShardingPlan, sequence_sharding: SequenceSharding
) -> Iterator[Diagnostic]:
    """Yields why convolutions of this model cannot run on tokens that the strategy `name` shards so."""
    tokens, ranks = sharding.model_spec.sequence_info, sharding.mesh.size(axis)
    found, striped = (
        dict[str, list[str]](),
        sequence_sharding.striped and sequence_sharding.num_ranks > sequence_sharding.num_inner_ranks,
    )
    for each in tokens.conv_calls if tokens is not None and ranks > 1 else ():
        if each.halo and striped:
            why = "convolves tokens, and a rank that gets them one by one has no neighbours"
        elif each.halo > MAX_KERNEL_REACH and each.halo > (
            least := min(sequence_sharding.num_tokens_by_rank(each.num_tokens))
        ):
            why = f"convolves tokens with a kernel that reaches over {each.halo}, and a rank has {least}"
        else:
            continue
        found.setdefault(f"{LAYER_NUMBER.sub('*', each.module)} {why}", []).append(each.module)
    other = f"mesh.{axis} = 1 and mesh.dp_shard = {ranks} are as many ranks"
    for why, modules in found.items():
        more = f" (and {len(modules) - 1} more)" if len(modules) > 1 else ""
        fix = (
            f"use another load_balance than 'striped'; or {other}"
            if striped
            else f"shard tokens over fewer ranks; or {other}"
        )
        yield Diagnostic(f"{why}{more}", fix, f"strategies.{name}")


def _edges(own: torch.Tensor, spans: tuple[TokenRange, ...], known: ConvSpec, chunks: int) -> torch.Tensor:
    parts, at = [own.narrow(-1, 0, 0)], 0  # so that a rank that has no tokens takes part in backward
    for begin, end in spans:
        mine = own.narrow(-1, at, end - begin)
        late, early = min(known.left_halo, end - begin), min(known.right_halo, end - begin)
        parts.append(F.pad(mine.narrow(-1, end - begin - late, late), (known.left_halo - late, 0)))
        parts.append(F.pad(mine.narrow(-1, 0, early), (0, known.right_halo - early)))
        at += end - begin
    parts.append(own.new_zeros((*own.shape[:-1], (chunks - len(spans)) * known.halo)))
    return torch.cat(parts, -1)


@lru_cache(maxsize=256)  # every convolution asks for it in every forward
def _halo_columns(
    sequence_sharding: SequenceSharding, length: int, spans: tuple[TokenRange, ...], around: tuple[int, int]
) -> tuple[int, ...]:
    left, right = around
    starts = [
        (span, (rank * sequence_sharding.max_ranges + number) * (left + right))
        for rank in range(sequence_sharding.num_ranks)
        for number, span in enumerate(sequence_sharding.token_ranges(length, rank))
    ]

    def left_row(position: int) -> int:
        return next(at + left - (end - position) for (begin, end), at in starts if begin <= position < end)

    def right_row(position: int) -> int:
        return next(at + left + position - begin for (begin, end), at in starts if begin <= position < end)

    found, nowhere = list[int](), sequence_sharding.num_ranks * sequence_sharding.max_ranges * (left + right)
    for begin, end in spans:
        found += [left_row(each) if each >= 0 else nowhere for each in range(begin - left, begin)]
        found += [right_row(each) if each < length else nowhere for each in range(end, end + right)]
    return tuple(found)
