"""Seconds of each action of a program, from what its block does and how fast the device is.

    F, B, I, W      the operations of the visit (core/work.py), as much of each as falls to the rank: tokens, heads, features;
                    the collectives within it on top, and the copies that put slices in order for them. W has the products
                    that sum over rows, I all others of a backward
    RECOMPUTE           a forward once more                  LOSS     what the loss does, forward and backward
    PACK, UNPACK, ACCUMULATE, CLIP, LOCAL_NORM, STEP                bytes that they read and write: gradients, weights, moments
    REDUCE, UNSHARD, SEND ...                            the links (planner/wire.py)

    one operation of a block       the longer of a call and of       2 m n k at the speed of its shape       bytes at the memory's
    where the host asks ahead      the longer of all calls together, and of all operations together

A first micro-batch leaves gradients; each later one also adds to them. Where nobody has seen a block's operations, they are
one square product with as many operations, and what the block holds passes through memory: that is said.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.model_spec.op_costs import AttentionOp, MatmulOp, MemoryOp, ModelOps, OpCounts
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.param_sharding import ParamGroup
from meshwright.plan.sharding.rank_share import block_shares, chunked_head_call, local_fraction
from meshwright.plan.step.action import Action, Transfer
from meshwright.plan.step.chunked_loss import MAX_CHUNK_NUMEL, num_local_logit_tokens
from meshwright.plan.step.single_device import FORWARD_KINDS, WEIGHT_GRAD_KINDS, grad_name
from meshwright.planner.program_cost.device_time import Ground
from meshwright.planner.program_cost.memory import stepped
from meshwright.planner.program_cost.network_time import GATHERING

WARM = 16 << 20  # bytes: what is much larger was measured with memory that is new each time
PASSES = 3  # what a block holds passes through memory so often, where nobody has seen its operations
THROUGH, CALLS = (
    14,
    20,
)  # times that a logit of divided words is read or written beside its exp; operations on each PIECE of them
TURNED = {
    "all_to_all": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
}  # times that what is met within a block is copied to be sent
COPIED = ("PACK", "UNPACK", "STASH", "LOAD_STASHED", "LOAD_LATEST")


@dataclass(frozen=True)
class Cost:
    """Seconds of an action: what it computes, what its rank waits within it for messages, and how late these start."""

    computing: float = 0.0
    meeting: float = 0.0
    late: float = 0.0

    @property
    def seconds(self) -> float:
        """What it takes itself: all but `late`."""
        return self.computing + self.meeting


@dataclass(frozen=True)
class _Part:
    """What of a visit falls to a rank: of its tokens, of its features or heads, and of what passes through memory."""

    tokens: float = 1.0
    features: float = 1.0
    passed: float = 1.0


class Prices:
    """What the actions of one role cost, as its first rank plays them."""

    def __init__(self, plan: Plan, rank: int, ground: Ground) -> None:
        self._plan, self._rank, self.ground = plan, rank, ground
        self._space = plan.sharding.at_coordinate(plan.mesh.coordinate(rank))
        self._shares = block_shares(self._space)
        self._rows = plan.micro_batch
        weighed = plan.model_spec.memory
        self._works: ModelOps | None = None if weighed is None else weighed.ops
        self._known: dict[tuple[str, str], float] = {}
        self._sent: dict[Transfer, float] = {}
        parts = [part.block_calls[0] for part in self._space.stages] or [
            self._space.model_spec.block_calls[0]
        ]
        self._begins = {visit for visit in parts if visit in self._space.model_spec.block_calls}

    @property
    def seen(self) -> bool:
        """Whether what blocks do was seen."""
        return self._works is not None

    def cost(self, action: Action) -> Cost:
        """What `action` costs."""
        if action.stream == "recv":  # a message is counted where it is sent
            return Cost()
        own = 0.0 if action.transfer is None else self._moved(action.transfer)
        if action.stream != "compute":
            return Cost(0.0, own)
        computing = self.ground.slower * (self._computing(action) + self._turned(action))
        return Cost(computing, own + self._meeting(action))

    def _computing(self, action: Action) -> float:
        kind = action.kind
        if kind in (*FORWARD_KINDS, "RECOMPUTE"):
            glue = self._glue if kind in FORWARD_KINDS and action.subject in self._begins else 0.0
            return glue + self._of(action, "forward")
        if kind in ("B", "I", "W"):
            return self._of(action, kind) + self._added(action)
        if kind == "LOSS":
            return self._loss(action)
        if kind == "STEP":
            return self._stepped
        if kind in COPIED:
            return self._passing(action.tensors, 2)
        if kind == "ACCUMULATE":
            return self._passing(action.tensors, 3, in_shards=True)
        if kind == "LOCAL_NORM" or (kind == "CLIP" and not self._space.grad_norm_axes):
            return self._passing(self._numel, 1, in_shards=True)
        return 0.0

    def _of(self, action: Action, way: str) -> float:
        """What the forward of a visit takes, or its backward, or one half of that."""
        key = action.subject, way
        if key not in self._known:
            self._known[key] = self._visit(action, way)
        return self._known[key]

    def _visit(self, action: Action, way: str) -> float:
        visit = action.subject
        if self._works is None:
            held = 0 if way == "W" else sum(hold.nbytes for hold in action.allocations)
            return self._guessed(action.flops or self._shares[visit].flops * self._rows, held)
        done = self._works.by_block_call[visit]
        part = self._part(visit)
        work = done.forward if way == "forward" else done.backward
        if way in ("I", "W"):
            late = way == "W"
            kept = tuple(each for each in work.matmuls if each.is_weight_grad is late)
            work = OpCounts(kept) if late else OpCounts(kept, work.attention, work.memory_ops)
        return self._seconds(work, part, back=way != "forward")

    def _part(self, visit: str) -> _Part:
        """What of a visit falls to the rank."""
        share, (flops, inside), tokens = (
            self._shares[visit],
            self._whole(visit),
            float(local_fraction(self._space, visit)),
        )
        features = share.flops / flops / tokens if flops else 1.0
        return _Part(tokens, features, share.saved_numel / inside if inside else tokens)

    def _whole(self, visit: str) -> tuple[int, int]:
        """The operations of a forward of `visit` per sample, and the elements that it keeps inside, on one device."""
        anatomy = self._plan.model_spec
        at = anatomy.block_calls.index(visit)
        return anatomy.flops[at], anatomy.saved_numel[at] if anatomy.saved_numel else 0

    def _seconds(self, work: OpCounts, part: _Part, *, back: bool) -> float:
        ground, rows = self.ground, self._rows
        call = ground.pace.call_backward_s if back else ground.pace.call_s
        each = [(operation.count, self._one(operation, part, rows)) for operation in _all(work)]
        if ground.ahead:
            return max(call * work.num_ops, sum(count * seconds for count, seconds in each))
        return sum(count * max(call, seconds) for count, seconds in each)

    def _one(self, work: MatmulOp | AttentionOp | MemoryOp, part: _Part, rows: int) -> float:
        """Seconds of one of the operations."""
        pace = self.ground.pace
        if isinstance(work, MemoryOp):
            nbytes, numbers = (line.total(rows) * part.passed for line in (work.nbytes, work.output_numel))
            return pace.moved_seconds(nbytes, work.operation, numbers) if nbytes else 0.0
        if isinstance(work, AttentionOp):
            keys = (
                min(work.key_len, (work.key_len + self.ground.block) / 2) if work.is_causal else work.key_len
            )
            sizes = (
                work.batch.total(rows),
                work.num_heads * part.features,
                work.query_len * part.tokens,
                keys,
                work.head_dim,
            )
            return pace.attention_seconds(sizes, work.dtype, backward=work.backward)
        m, n, k, batch = (line.total(rows) for line in (work.m, work.n, work.k, work.batch))
        if work.is_weight_grad:
            return pace.product_seconds(m, n * part.features, k * part.tokens, batch, work.dtype)
        if work.batch.per_sample:  # one for each head
            return pace.product_seconds(m * part.tokens, n, k, batch * part.features, work.dtype)
        return pace.product_seconds(m * part.tokens, n * part.features, k, batch, work.dtype)

    @cached_property
    def _glue(self) -> float:
        return 0.0 if self._works is None else self._seconds(self._works.glue, _Part(), back=False)

    def _loss(self, action: Action) -> float:
        space, visit = self._space, self._space.model_spec.block_calls[-1]
        share = self._shares[visit]
        call = chunked_head_call(space)
        tokens = float(local_fraction(space, visit))
        if self._works is None:
            return self._guessed(action.flops, sum(hold.nbytes for hold in action.allocations))
        divided = bool(space.logits_layout.axes_with("S"))
        if call is None and divided:
            return self._of_words(share.output_numel * self._rows)
        if call is None:
            return self._seconds(self._works.loss, _Part(passed=tokens), back=False)
        times, count = (
            action.flops / (3 * space.num_loss_chunks),
            max(1, num_local_logit_tokens(space) * self._rows / space.num_loss_chunks),
        )
        into = call.in_numel / max(
            1, space.model_spec.logits.num_tokens if space.model_spec.logits is not None else 1
        )
        words = times / (2 * count * into)
        products = (
            3 * space.num_loss_chunks * self.ground.pace.product_seconds(count, words, into, 1, self._dtype)
        )
        if divided:
            return products + self._of_words(words * count * space.num_loss_chunks)
        return products + self._seconds(self._works.loss, _Part(passed=tokens), back=False)

    def _of_words(self, logits: float) -> float:
        """The loss of so many logits of the words that are here, and its gradient, some tokens at a time (engine/logits.py)."""
        pace, width = (
            self.ground.pace,
            max(FLOAT_NBYTES["float32"], FLOAT_NBYTES[self._plan.job.precision.compute]),
        )
        passing = self._there(THROUGH * width * logits) + 2 * max(
            self._there(2 * width * logits), pace.moved_seconds(0.0, "exp", logits)
        )
        return max(passing, pace.call_s * CALLS * ceil(logits / MAX_CHUNK_NUMEL))

    def _guessed(self, flops: float, held: float) -> float:
        side = (flops / 2) ** (1 / 3)
        pace = self.ground.pace
        return (
            pace.product_seconds(side, side, side, 1, self._dtype) if flops else 0.0
        ) + pace.moved_seconds(PASSES * held)

    def _added(self, action: Action) -> float:
        """What a backward adds to gradients that others have left."""
        if action.kind not in WEIGHT_GRAD_KINDS:
            return 0.0
        new = {hold.name for hold in action.allocations}
        using = (
            each
            for each in self._bundles
            if action.subject in each.block_calls and not each.param_shardings[0].flat_shard_axes
        )
        names = [name for each in using if grad_name(each) not in new for name in each.names]
        return self._passing(names, 3)

    def _passing(self, names: Iterable[str], times: int, *, in_shards: bool = False) -> float:
        """Reading or writing the gradients of these weights, or their shards, so many times, each by an operation of its own."""
        width = FLOAT_NBYTES[self._plan.job.precision.effective.gradients]
        own = (self._numel[name][in_shards] for name in names if name in self._numel)
        return sum(self._there(times * width * numel) for numel in own)

    def _there(self, nbytes: float) -> float:
        """Seconds of an operation on memory that is there already: however large, it brings none that is new."""
        moved, pieces = self.ground.pace.moved_seconds, max(1.0, nbytes / WARM)
        return pieces * moved(nbytes / pieces)

    @cached_property
    def _stepped(self) -> float:
        """The optimizer reads gradients, and reads and writes what it steps and what it remembers."""
        precision = self._plan.job.precision.effective
        numel, moments = stepped(self._plan, self._rank)
        width = FLOAT_NBYTES[precision.gradients] + 2 * FLOAT_NBYTES[precision.master]
        width += FLOAT_NBYTES[precision.parameters] if precision.master != precision.parameters else 0
        count = max(1, len(self._space.model_spec.trainable))
        return count * self._there((numel * width + 2 * moments) / count)

    @cached_property
    def _bundles(self) -> tuple[ParamGroup, ...]:
        return self._space.param_groups()

    @cached_property
    def _numel(self) -> Mapping[str, tuple[float, float]]:
        """The elements of each trained weight that this rank has, and those of its shard."""
        homes, mesh = (home for home in self._space.param_shardings if home.param.trainable), self._plan.mesh
        return {
            home.param.name: (home.param.numel, home.param.numel / mesh.group_size(home.flat_shard_axes))
            for home in homes
        }

    @property
    def _dtype(self) -> str:
        return self._plan.job.precision.compute

    def _meeting(self, action: Action) -> float:
        """Seconds of the collectives within an action; what goes round while attention runs is hidden, where it can be."""
        round_, others = 0.0, 0.0
        for move in action.inner_transfers:
            if move.collective == "shift":
                round_ += self._moved(move)
            else:
                others += self._moved(move)
        if (
            round_
            and self.ground.ahead
            and self._works is not None
            and action.subject in self._works.by_block_call
        ):
            done = self._works.by_block_call[action.subject]
            work = done.forward if action.kind in (*FORWARD_KINDS, "RECOMPUTE") else done.backward
            attention = self._seconds(
                OpCounts(attention=work.attention), self._part(action.subject), back=False
            )
            round_ = max(0.0, round_ - attention)
        return round_ + others

    def _turned(self, action: Action) -> float:
        """Seconds in which slices are put in order, to be sent and as they come."""
        found = 0.0
        for move in action.inner_transfers:
            size = len(self.meet(move))
            if size > 1:
                whole = move.nbytes * (size if move.collective in GATHERING else 1)
                found += TURNED.get(move.collective, 0) * self.ground.pace.moved_seconds(2 * whole)
        return found

    def _moved(self, move: Transfer) -> float:
        """Seconds of a transfer."""
        if move not in self._sent:
            self._sent[move] = self.ground.wire.seconds(move, self.meet(move))
        return self._sent[move]

    def axes(self, move: Transfer) -> frozenset[str]:
        """The axes along which ranks meet in it."""
        return frozenset(axis for axis in move.axes if self._plan.mesh.group_size((axis,)) > 1)

    def meet(self, move: Transfer) -> tuple[int, ...]:
        """The ranks that meet in it."""
        ranks = self._plan.mesh.peers(self._rank, move.axes)
        if move.peer is not None:
            return self._rank, ranks[move.peer]
        if move.num_neighbours:
            at = ranks.index(self._rank) // move.num_neighbours * move.num_neighbours
            return ranks[at : at + move.num_neighbours]
        return tuple(ranks[index] for index in move.member_indices) or ranks


def _all(work: OpCounts) -> Iterable[MatmulOp | AttentionOp | MemoryOp]:
    return (*work.matmuls, *work.attention, *work.memory_ops)
