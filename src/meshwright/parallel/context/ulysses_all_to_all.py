"""The all-to-all of Ulysses: ranks that have some tokens of every head get all tokens of some heads; and
back.

    6 heads, 3 ranks, one all_to_all        heads 0 1 | 2 3 | 4 5                  heads 0 1     2 3     4 5
        rank 0, tokens 0..3                 to 0      to 1  to 2        tokens 0..3  from 0     from 0  from 0
        rank 1, tokens 4..6                 to 0      to 1  to 2   -->  tokens 4..6  from 1     from 1  from 1
        rank 2, tokens 7..9                 to 0      to 1  to 2        tokens 7..9  from 2     from 2  from 2

A head of keys and values goes to every rank whose query heads share it, so it may travel several times, and
its gradients are summed on the rank it came from. Each rank receives as many:

    6 heads share 3, 2 ranks                rank 0 needs 0 1, rank 1 needs 1 2             4 travel
    6 heads share 2, 3 ranks                0 | 0 1 | 1                           2 per rank, one of them idle

Sequence shards are padded to the longest; the padding is dropped on arrival. Of a mask every rank needs the
rows of all queries. A mask that glue makes is on every rank, so it is not sent. Of one that a block computes
from its tokens, or learns, the rows of other ranks are sent: by head, with an all_to_all; else with an
all_gather.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.comm.collectives.comm_volume import DTYPE_NBYTES
from meshwright.model.context_parallel.attention_call import ShardedAttentionCall, combine_bias_and_mask
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.parallel.context.attention_args_to_4d import AttentionInputs
from meshwright.parallel.context.context_parallel_strategy import local_heads
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.sequence_info import AttentionSpec
from meshwright.plan.sharding.mesh import axes_with
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import Placement, R, S
from meshwright.plan.step.program import Transfer
from meshwright.plan.strategy_interface import ActivationName, Runtime

MAX_REPORTED = 3  # block calls in a message
UNEVEN_HEADS = "attention has {} heads on a rank, and they go to {} ranks in equal number"
HEAD_SHARD, TOKEN_SHARD = S(1), S(2)  # of [rows, heads, tokens, width]

ExchangeFn = Callable[[torch.Tensor, Placement, Placement, ActivationName | None], torch.Tensor]


@dataclass(frozen=True)
class KVHeadAssignment:
    """The key/value heads that each rank receives, equally many; `used_heads` are those that each of its
    query heads uses.

    Without `used_heads`, consecutive query heads share one, equally many on every rank.
    """

    sent_heads: tuple[tuple[int, ...], ...]
    used_heads: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def for_heads(cls, heads: int, groups: int, num_ranks: int) -> "KVHeadAssignment":
        """Returns the assignment of `heads` query heads, which share `groups` key/value heads, to `num_ranks`
        ranks; they divide evenly.
        """
        each, shared = heads // num_ranks, heads // groups
        found = [
            tuple(dict.fromkeys(head // shared for head in _head_indices(rank, each)))
            for rank in range(num_ranks)
        ]
        most = max(map(len, found))
        sent = tuple((*own, *own[-1:] * (most - len(own))) for own in found)
        uses = tuple(
            tuple(own.index(head // shared) for head in _head_indices(rank, each))
            for rank, own in enumerate(found)
        )
        even = each % most == 0 and all(
            used == tuple(head * most // each for head in range(each)) for used in uses
        )
        return cls(sent, () if even else uses)

    @property
    def num_sent(self) -> int:
        """The number of key/value heads that each rank receives."""
        return len(self.sent_heads[0])

    @property
    def is_identity(self) -> bool:
        """Whether each head is sent once, in order."""
        return [head for own in self.sent_heads for head in own] == list(
            range(len(self.sent_heads) * self.num_sent)
        )


@dataclass(frozen=True)
class HeadExchange:
    """The exchange of one attention call between the rank at `index` and its `ulysses_degree` neighbours;
    `move` runs it.

    `mask_by_query`: exchanged masks have a row per query; on a rank with one token the shape cannot tell.
    """

    sequence_sharding: SequenceSharding
    index: int
    move: ExchangeFn
    mask_by_query: bool

    @classmethod
    def along_axis(cls, axis: str, sequence_sharding: SequenceSharding, runtime: Runtime) -> "HeadExchange":
        """Returns the exchange along `axis` of the rank of `runtime`."""
        near = (
            sequence_sharding.num_inner_ranks
            if sequence_sharding.num_inner_ranks < sequence_sharding.num_ranks
            else 0
        )

        def move(
            tensor: torch.Tensor, src: Placement, dst: Placement, name: ActivationName | None = None
        ) -> torch.Tensor:
            return (
                runtime.state.collectives.redistribute_uncached(tensor, axis, src, dst, near, name=name)
                if sequence_sharding.num_inner_ranks > 1
                else tensor
            )

        view = runtime.state.plan.view
        return cls(sequence_sharding, view.coordinate[axis], move, has_masks_by_query(view.plan))

    def gather_inputs(
        self, inputs: AttentionInputs, call: ShardedAttentionCall, name: str
    ) -> AttentionInputs:
        """Returns `inputs` with the tokens of all neighbours, and this rank's heads."""
        heads, near = inputs.query.shape[1], self.sequence_sharding.num_inner_ranks
        if heads % near:
            raise PlanError(
                UNEVEN_HEADS.format(heads, near),
                fix="use ring, which does not shard heads",
                location=f"strategies.{name}",
            )
        needs = KVHeadAssignment.for_heads(heads, inputs.key.shape[1], near)
        length = call.query_shard.length
        query = self.to_heads(inputs.query, length, self._name("query", range(heads), heads, length))
        key, value = (
            self._kv_heads(each, call.key_shard, needs, slot)
            for each, slot in ((inputs.key, "key"), (inputs.value, "value"))
        )
        return replace(
            inputs,
            query=query,
            key=key,
            value=value,
            mask=self._exchange_mask(inputs, call.query_shard.length, name),
        )

    def head_range(self, inputs: AttentionInputs) -> tuple[int, int]:
        """Returns the range of the query heads of `inputs` that this rank computes."""
        each, place = (
            inputs.query.shape[1] // self.sequence_sharding.num_inner_ranks,
            self.index % self.sequence_sharding.num_inner_ranks,
        )
        return place * each, (place + 1) * each

    def kv_heads(self, inputs: AttentionInputs, *, is_gradient: bool) -> list[int]:
        """Returns the key/value heads of `inputs` that this rank receives, in order. Of several copies, which
        are the same, all but the first are -1; each has a gradient of its own.
        """
        near = self.sequence_sharding.num_inner_ranks
        needs = KVHeadAssignment.for_heads(inputs.query.shape[1], inputs.key.shape[1], near)
        place, received = self.index % near, list[list[int]]()
        for rank, sent in enumerate(needs.sent_heads):
            used = needs.used_heads[rank] if needs.used_heads else range(len(sent))
            received.append([sent[at] for at in used])
        if is_gradient:
            return received[place]
        known, heads = {head for own in received[:place] for head in own}, list[int]()
        for head in received[place]:
            heads.append(-1 if head in known else head)
            known.add(head)
        return heads

    def to_heads(self, tensor: torch.Tensor, length: int, name: ActivationName | None = None) -> torch.Tensor:
        """[B, h, local tokens, w] -> [B, h / degree, tokens of all neighbours, w], for samples of `length`
        tokens; with a `name` it may travel as codes.
        """
        filled = _pad_tokens(tensor, self._max_tokens(length))
        return self._without_padding(self.move(filled, TOKEN_SHARD, HEAD_SHARD, name), length)

    def to_tokens(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        """[B, h / degree, tokens of all neighbours, w] -> [B, h, local tokens, w]."""
        counts, most = self._token_counts(length), self._max_tokens(length)
        even = min(counts) == most
        filled = (
            tensor if even else torch.cat([_pad_tokens(piece, most) for piece in tensor.split(counts, 2)], 2)
        )
        heads = tensor.shape[1] * self.sequence_sharding.num_inner_ranks
        name = self._name("output", range(heads), heads, length)
        return _first_tokens(
            self.move(filled, HEAD_SHARD, TOKEN_SHARD, name),
            counts[self.index % self.sequence_sharding.num_inner_ranks],
        )

    def _kv_heads(
        self, tensor: torch.Tensor, shard: TokenShard, needs: KVHeadAssignment, slot: str
    ) -> torch.Tensor:
        sent, num_heads = tuple(head for own in needs.sent_heads for head in own), tensor.shape[1]
        if not needs.is_identity:
            tensor = shard.selector.select(tensor, 1, sent)
        moved = self.to_heads(tensor, shard.length, self._name(slot, sent, num_heads, shard.length))
        if not needs.used_heads:
            return moved
        used = needs.used_heads[self.index % self.sequence_sharding.num_inner_ranks]
        return shard.selector.select(moved, 1, used)

    def _name(self, slot: str, sent_heads: Sequence[int], num_heads: int, length: int) -> ActivationName:
        """Returns the name of an argument of attention, or its output, of `num_heads` heads on this rank, of
        which `sent_heads` travel; codes of a head are the same wherever it goes.
        """
        side = "output" if slot == "output" else "input"

        def places(is_backward: bool) -> dict[int, tuple[int, list[int]]]:
            heads, near = list(sent_heads), self.sequence_sharding.num_inner_ranks
            ranks, place = [self.index], self.index % near
            if (side == "input") == is_backward:  # this rank has some heads of all tokens
                each = len(heads) // near
                heads = heads[place * each : (place + 1) * each]
                ranks = list(range(self.index - place, self.index - place + near))
            elif not is_backward:  # all copies lose the same
                heads = [head if head not in heads[:at] else -1 for at, head in enumerate(heads)]
            return {1: (num_heads, heads), 2: (length, self._padded_positions(length, ranks))}

        return ActivationName("", side, slot, places=places, part_dim=HEAD_SHARD.dim)

    def _padded_positions(self, length: int, ranks: Iterable[int]) -> list[int]:
        """Returns the positions of the tokens of `ranks`, each filled up with -1 to the most of any rank."""
        found, most = list[int](), self._max_tokens(length)
        for rank in ranks:
            spans = self.sequence_sharding.token_ranges(length, rank)
            own = [position for begin, end in spans for position in range(begin, end)]
            found += [*own, *[-1] * (most - len(own))]
        return found

    def _exchange_mask(self, given: AttentionInputs, length: int, name: str) -> torch.Tensor | None:
        if given.mask is None or self.sequence_sharding.num_inner_ranks == 1:
            return given.mask
        if given.gathered_mask is None:
            return self._send_mask(_mask_in_dtype(given.mask, given.query), given, length, name)
        known = _mask_in_dtype(given.gathered_mask, given.query)
        if given.bias is None:
            return known
        return combine_bias_and_mask(
            self._send_mask(_mask_in_dtype(given.bias, given.query), given, length, name), known
        )

    def _send_mask(self, mask: torch.Tensor, given: AttentionInputs, length: int, name: str) -> torch.Tensor:
        if not self.mask_by_query:
            if mask.shape[2] > 1:
                text = (
                    f"attention takes a mask of shape {list(mask.shape)}, made in a block, and in the "
                    f"trial there was none"
                )
                fix = (
                    "make the plan from an example batch that needs one; or make the mask "
                    "outside of the block"
                )
                raise PlanError(text, fix=fix, location=f"strategies.{name}")
            first, end = self.head_range(given)
            return mask if mask.shape[1] == 1 else mask.narrow(1, first, end - first)
        mask = mask.expand(-1, -1, given.query.shape[2], -1)
        if mask.shape[1] > 1:
            return self.to_heads(mask, length)
        return self._without_padding(
            self.move(_pad_tokens(mask, self._max_tokens(length)), TOKEN_SHARD, R, None), length
        )

    def _without_padding(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        counts, most = self._token_counts(length), self._max_tokens(length)
        if min(counts) == most or len(counts) == 1:
            return _first_tokens(tensor, sum(counts))
        return torch.cat([tensor.narrow(2, place * most, count) for place, count in enumerate(counts)], 2)

    def _token_counts(self, length: int) -> tuple[int, ...]:
        first = self.index - self.index % self.sequence_sharding.num_inner_ranks
        return self.sequence_sharding.num_tokens_by_rank(length)[
            first : first + self.sequence_sharding.num_inner_ranks
        ]

    def _max_tokens(self, length: int) -> int:
        return max(self.sequence_sharding.num_tokens_by_rank(length))


def has_masks_by_query(sharding: ShardingPlan) -> bool:
    """Returns whether any exchanged mask has a row per query: then all are exchanged as if they had."""
    tokens = sharding.model_spec.sequence_info
    masks = [each.mask for each in (tokens.attention_calls if tokens else ()) if each.mask is not None]
    return any(mask.per_query and not mask.is_replicated for mask in masks)


def exchange_transfers(
    view: RankView,
    job: Job,
    axis: str,
    sequence_sharding: SequenceSharding,
    attend: AttentionSpec,
    num_samples: int,
) -> tuple[list[Transfer], list[Transfer], list[Transfer], list[Transfer]]:
    """Returns the collectives of one attention call: of inputs and outputs in forward, of outputs and inputs
    in backward.
    """
    if sequence_sharding.num_inner_ranks == 1:
        return [], [], [], []
    heads, groups = local_heads(view, attend)
    dtype, near = job.precision.compute, sequence_sharding.num_inner_ranks
    near = near if near < sequence_sharding.num_ranks else 0
    queries, keys = (
        num_samples * max(sequence_sharding.num_tokens_by_rank(length))
        for length in (attend.query_len, attend.key_len)
    )
    sent = (
        sequence_sharding.num_inner_ranks
        * KVHeadAssignment.for_heads(heads, groups, sequence_sharding.num_inner_ranks).num_sent
    )

    def swap(numel: int, dtype: str = dtype, collective: str = "all_to_all", num_heads: int = 0) -> Transfer:
        return Transfer(
            collective,
            (axis,),
            numel * DTYPE_NBYTES[dtype],
            dtype=dtype,
            num_neighbours=near,
            code_parts=num_heads,
        )

    taken = [
        swap(queries * heads * attend.head_dim, num_heads=heads),
        swap(keys * sent * attend.head_dim, num_heads=sent),
        swap(keys * sent * attend.value_head_dim, num_heads=sent),
    ]
    given, mask = [swap(queries * heads * attend.value_head_dim, num_heads=heads)], attend.mask
    back = [each for each, learns in zip(taken, attend.qkv_need_grad, strict=True) if learns][::-1]
    if mask is not None and not mask.is_replicated and has_masks_by_query(view.plan):
        numel = (
            queries
            // (1 if mask.per_sample else num_samples)
            * attend.key_len
            * (heads if mask.per_head else 1)
        )
        kind = dtype if mask.is_additive else "bool"
        taken.append(swap(numel, kind, "all_to_all" if mask.per_head else "all_gather"))
        of_mask = (
            swap(numel, kind)
            if mask.per_head
            else swap(numel * sequence_sharding.num_inner_ranks, kind, "reduce_scatter")
        )
        back = [of_mask, *back] if mask.needs_grad else back
    return taken, given, given, back


def check_heads(
    sharding: ShardingPlan, name: str, num_ranks: int, where: str, sizes: Iterable[int] = ()
) -> Iterator[Diagnostic]:
    """Yields the attention calls whose heads do not divide by `num_ranks`, on any tensor-parallel rank.

    `where` is the key of that number of ranks; `sizes` are its other possible values.
    """
    tokens, found = sharding.model_spec.sequence_info, dict[int, dict[str, None]]()
    axes = axes_with("features")
    views = [
        RankView(sharding, {"pp": stage, **dict(zip(axes, indices, strict=True))})
        for stage in range(len(sharding.block_calls_by_pp_rank) or 1)
        for indices in product(*(sorted({0, sharding.mesh.size(axis) - 1}) for axis in axes))
    ]
    for attention_call in tokens.attention_calls if tokens else ():
        for view in views:
            if attention_call.block_call in view.model_spec.block_calls:
                heads, _ = local_heads(view, attention_call)
                found.setdefault(heads, {})[attention_call.block_call] = None
    good = [size for size in sizes if all(heads % size == 0 for heads in found)]
    fix = "use ring, which does not shard heads" + (
        f"; or set {where} to {' or '.join(map(str, good))}" if good else ""
    )
    for heads, block_calls in sorted(found.items()):
        if heads % num_ranks:
            more = f" and {len(block_calls) - MAX_REPORTED} more" if len(block_calls) > MAX_REPORTED else ""
            yield Diagnostic(
                f"{', '.join([*block_calls][:MAX_REPORTED])}{more}: {UNEVEN_HEADS.format(heads, num_ranks)}",
                fix,
                f"strategies.{name}",
            )


def _mask_in_dtype(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return mask.to(query.dtype) if mask.is_floating_point() else mask


def _head_indices(rank: int, each: int) -> range:
    return range(rank * each, (rank + 1) * each)


def _first_tokens(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return tensor if tensor.shape[2] == count else tensor.narrow(2, 0, count)


def _pad_tokens(tensor: torch.Tensor, most: int) -> torch.Tensor:
    short = most - tensor.shape[2]
    return F.pad(tensor, (0, 0, 0, short)) if short else tensor
