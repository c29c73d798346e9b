"""Seconds of each action of a program, from what its block does and how fast the device is.

    F, B, I, W                 the operations of the block call (operations.py), as much of each as falls to
                               the rank: tokens, heads, features; the collectives within it on top, and the
                               copies that put slices in order for them. W has the products that sum over
                               rows, I all others of a backward
    RECOMPUTE                  a forward once more
    LOSS                       what the loss does, forward and backward
    PACK, UNPACK, ACCUMULATE,  bytes that they read and write: gradients, weights, optimizer states
      CLIP, LOCAL_NORM, STEP
    REDUCE, UNSHARD, SEND ...  the links (network_time.py)

    one operation of a block   the longer of a call, of 2 m n k at the speed of its shape, and of its bytes
                               at the speed of the memory
    where the host asks ahead  the longer of all calls together, and of all operations together

A first micro-batch leaves gradients; each later one also adds to them. Where nobody has seen a block's
operations, they are one square product with as many operations, and what the block holds passes through
memory: that is said.
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
from meshwright.planner.program_cost.device_time import ExecutionTarget
from meshwright.planner.program_cost.memory import optimizer_work
from meshwright.planner.program_cost.network_time import GATHERING_COLLECTIVES

WARM_MEMORY_NBYTES = 16 << 20  # bytes: what is much larger was measured with memory that is new each time
UNSEEN_MEMORY_PASSES = (
    3  # what a block holds passes through memory so often, where nobody has seen its operations
)
LOGITS_MEMORY_PASSES, LOGITS_CALLS_PER_CHUNK = (
    14,
    20,
)  # times that a logit of divided words is read or written beside its exp; operations on each PIECE of them
LAYOUT_COPIES = {
    "all_to_all": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
}  # times that what is met within a block is copied to be sent
COPY_KINDS = ("PACK", "UNPACK", "STASH", "LOAD_STASHED", "LOAD_LATEST")


@dataclass(frozen=True)
class ActionCost:
    """Seconds of an action: what it computes, what its rank waits within it for messages, and how late these
    start.
    """

    compute_s: float = 0.0
    comm_s: float = 0.0
    comm_delay_s: float = 0.0

    @property
    def seconds(self) -> float:
        """What it takes itself: all but `late`."""
        return self.compute_s + self.comm_s


@dataclass(frozen=True)
class _RankFraction:
    """What of a visit falls to a rank: of its tokens, of its features or heads, and of what passes through
    memory.
    """

    tokens: float = 1.0
    features: float = 1.0
    memory: float = 1.0


class ActionCosts:
    """What the actions of one role cost, as its first rank plays them."""

    def __init__(self, plan: Plan, rank: int, target: ExecutionTarget) -> None:
        self._plan, self._rank, self.target = plan, rank, target
        self._sharding = plan.sharding.at_coordinate(plan.mesh.coordinate(rank))
        self._block_shares = block_shares(self._sharding)
        self._num_samples = plan.micro_batch
        weighed = plan.model_spec.memory
        self._model_ops: ModelOps | None = None if weighed is None else weighed.ops
        self._cached_seconds: dict[tuple[str, str], float] = {}
        self._cached_transfers: dict[Transfer, float] = {}
        parts = [part.block_calls[0] for part in self._sharding.stages] or [
            self._sharding.model_spec.block_calls[0]
        ]
        self._first_calls = {visit for visit in parts if visit in self._sharding.model_spec.block_calls}

    @property
    def ops_known(self) -> bool:
        """Whether what blocks do was seen."""
        return self._model_ops is not None

    def cost(self, action: Action) -> ActionCost:
        """What `action` costs."""
        if action.stream == "recv":  # a message is counted where it is sent
            return ActionCost()
        own = 0.0 if action.transfer is None else self._transfer_seconds(action.transfer)
        if action.stream != "compute":
            return ActionCost(0.0, own)
        computing = self.target.slowdown * (self._compute_seconds(action) + self._layout_copy_seconds(action))
        return ActionCost(computing, own + self._inner_comm_seconds(action))

    def _compute_seconds(self, action: Action) -> float:
        kind = action.kind
        if kind in (*FORWARD_KINDS, "RECOMPUTE"):
            glue = (
                self._glue_seconds if kind in FORWARD_KINDS and action.subject in self._first_calls else 0.0
            )
            return glue + self._cached_call_seconds(action, "forward")
        if kind in ("B", "I", "W"):
            return self._cached_call_seconds(action, kind) + self._accumulate_seconds(action)
        if kind == "LOSS":
            return self._loss_seconds(action)
        if kind == "STEP":
            return self._optimizer_seconds
        if kind in COPY_KINDS:
            return self._gradient_pass_seconds(action.tensors, 2)
        if kind == "ACCUMULATE":
            return self._gradient_pass_seconds(action.tensors, 3, in_shards=True)
        if kind == "LOCAL_NORM" or (kind == "CLIP" and not self._sharding.grad_norm_axes):
            return self._gradient_pass_seconds(self._numel, 1, in_shards=True)
        return 0.0

    def _cached_call_seconds(self, action: Action, way: str) -> float:
        """What the forward of a visit takes, or its backward, or one half of that."""
        key = action.subject, way
        if key not in self._cached_seconds:
            self._cached_seconds[key] = self._block_call_seconds(action, way)
        return self._cached_seconds[key]

    def _block_call_seconds(self, action: Action, way: str) -> float:
        visit = action.subject
        if self._model_ops is None:
            held = 0 if way == "W" else sum(hold.nbytes for hold in action.allocations)
            return self._unseen_seconds(
                action.flops or self._block_shares[visit].flops * self._num_samples, held
            )
        done = self._model_ops.by_block_call[visit]
        part = self._rank_fraction(visit)
        work = done.forward if way == "forward" else done.backward
        if way in ("I", "W"):
            late = way == "W"
            kept = tuple(each for each in work.matmuls if each.is_weight_grad is late)
            work = OpCounts(kept) if late else OpCounts(kept, work.attention, work.memory_ops)
        return self._ops_seconds(work, part, back=way != "forward")

    def _rank_fraction(self, visit: str) -> _RankFraction:
        """What of a visit falls to the rank."""
        share, (flops, inside), tokens = (
            self._block_shares[visit],
            self._full_ops(visit),
            float(local_fraction(self._sharding, visit)),
        )
        features = share.flops / flops / tokens if flops else 1.0
        return _RankFraction(tokens, features, share.saved_numel / inside if inside else tokens)

    def _full_ops(self, visit: str) -> tuple[int, int]:
        """The operations of a forward of `visit` per sample, and the elements that it keeps inside, on one
        device.
        """
        anatomy = self._plan.model_spec
        at = anatomy.block_calls.index(visit)
        return anatomy.flops[at], anatomy.saved_numel[at] if anatomy.saved_numel else 0

    def _ops_seconds(self, work: OpCounts, part: _RankFraction, *, back: bool) -> float:
        ground, rows = self.target, self._num_samples
        call = ground.device_time.call_backward_s if back else ground.device_time.call_s
        each = [(operation.count, self._op_seconds(operation, part, rows)) for operation in _all_ops(work)]
        if ground.async_launch:
            return max(call * work.num_ops, sum(count * seconds for count, seconds in each))
        return sum(count * max(call, seconds) for count, seconds in each)

    def _op_seconds(self, work: MatmulOp | AttentionOp | MemoryOp, part: _RankFraction, rows: int) -> float:
        """Seconds of one of the operations."""
        pace = self.target.device_time
        if isinstance(work, MemoryOp):
            nbytes, numbers = (line.total(rows) * part.memory for line in (work.nbytes, work.output_numel))
            return pace.memory_op_seconds(nbytes, work.operation, numbers) if nbytes else 0.0
        if isinstance(work, AttentionOp):
            keys = (
                min(work.key_len, (work.key_len + self.target.attention_block) / 2)
                if work.is_causal
                else work.key_len
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
            return pace.matmul_seconds(m, n * part.features, k * part.tokens, batch, work.dtype)
        if work.batch.per_sample:  # one for each head
            return pace.matmul_seconds(m * part.tokens, n, k, batch * part.features, work.dtype)
        return pace.matmul_seconds(m * part.tokens, n * part.features, k, batch, work.dtype)

    @cached_property
    def _glue_seconds(self) -> float:
        return (
            0.0
            if self._model_ops is None
            else self._ops_seconds(self._model_ops.glue, _RankFraction(), back=False)
        )

    def _loss_seconds(self, action: Action) -> float:
        space, visit = self._sharding, self._sharding.model_spec.block_calls[-1]
        share = self._block_shares[visit]
        call = chunked_head_call(space)
        tokens = float(local_fraction(space, visit))
        if self._model_ops is None:
            return self._unseen_seconds(action.flops, sum(hold.nbytes for hold in action.allocations))
        divided = bool(space.logits_layout.axes_with("S"))
        if call is None and divided:
            return self._vocab_loss_seconds(share.output_numel * self._num_samples)
        if call is None:
            return self._ops_seconds(self._model_ops.loss, _RankFraction(memory=tokens), back=False)
        times, count = (
            action.flops / (3 * space.num_loss_chunks),
            max(1, num_local_logit_tokens(space) * self._num_samples / space.num_loss_chunks),
        )
        into = call.in_numel / max(
            1, space.model_spec.logits.num_tokens if space.model_spec.logits is not None else 1
        )
        words = times / (2 * count * into)
        products = (
            3
            * space.num_loss_chunks
            * self.target.device_time.matmul_seconds(count, words, into, 1, self._dtype)
        )
        if divided:
            return products + self._vocab_loss_seconds(words * count * space.num_loss_chunks)
        return products + self._ops_seconds(self._model_ops.loss, _RankFraction(memory=tokens), back=False)

    def _vocab_loss_seconds(self, logits: float) -> float:
        """The loss of so many logits of the words that are here, and its gradient, some tokens at a time
        (engine/logits.py).
        """
        pace, width = (
            self.target.device_time,
            max(FLOAT_NBYTES["float32"], FLOAT_NBYTES[self._plan.job.precision.compute]),
        )
        passing = self._warm_memory_seconds(LOGITS_MEMORY_PASSES * width * logits) + 2 * max(
            self._warm_memory_seconds(2 * width * logits), pace.memory_op_seconds(0.0, "exp", logits)
        )
        return max(passing, pace.call_s * LOGITS_CALLS_PER_CHUNK * ceil(logits / MAX_CHUNK_NUMEL))

    def _unseen_seconds(self, flops: float, held: float) -> float:
        side = (flops / 2) ** (1 / 3)
        pace = self.target.device_time
        return (
            pace.matmul_seconds(side, side, side, 1, self._dtype) if flops else 0.0
        ) + pace.memory_op_seconds(UNSEEN_MEMORY_PASSES * held)

    def _accumulate_seconds(self, action: Action) -> float:
        """What a backward adds to gradients that others have left."""
        if action.kind not in WEIGHT_GRAD_KINDS:
            return 0.0
        new = {hold.name for hold in action.allocations}
        using = (
            each
            for each in self._param_groups
            if action.subject in each.block_calls and not each.param_shardings[0].flat_shard_axes
        )
        names = [name for each in using if grad_name(each) not in new for name in each.names]
        return self._gradient_pass_seconds(names, 3)

    def _gradient_pass_seconds(self, names: Iterable[str], times: int, *, in_shards: bool = False) -> float:
        """Reading or writing the gradients of these weights, or their shards, so many times, each by an
        operation of its own.
        """
        width = FLOAT_NBYTES[self._plan.job.precision.effective.gradients]
        own = (self._numel[name][in_shards] for name in names if name in self._numel)
        return sum(self._warm_memory_seconds(times * width * numel) for numel in own)

    def _warm_memory_seconds(self, nbytes: float) -> float:
        """Seconds of an operation on memory that is there already: however large,
        it brings none that is new.
        """
        moved, pieces = self.target.device_time.memory_op_seconds, max(1.0, nbytes / WARM_MEMORY_NBYTES)
        return pieces * moved(nbytes / pieces)

    @cached_property
    def _optimizer_seconds(self) -> float:
        """The optimizer reads gradients, and reads and writes what it steps and what it remembers."""
        precision = self._plan.job.precision.effective
        numel, moments = optimizer_work(self._plan, self._rank)
        width = FLOAT_NBYTES[precision.gradients] + 2 * FLOAT_NBYTES[precision.master]
        width += FLOAT_NBYTES[precision.parameters] if precision.master != precision.parameters else 0
        count = max(1, len(self._sharding.model_spec.trainable))
        return count * self._warm_memory_seconds((numel * width + 2 * moments) / count)

    @cached_property
    def _param_groups(self) -> tuple[ParamGroup, ...]:
        return self._sharding.param_groups()

    @cached_property
    def _numel(self) -> Mapping[str, tuple[float, float]]:
        """The elements of each trained weight that this rank has, and those of its shard."""
        homes, mesh = (
            (home for home in self._sharding.param_shardings if home.param.trainable),
            self._plan.mesh,
        )
        return {
            home.param.name: (home.param.numel, home.param.numel / mesh.group_size(home.flat_shard_axes))
            for home in homes
        }

    @property
    def _dtype(self) -> str:
        return self._plan.job.precision.compute

    def _inner_comm_seconds(self, action: Action) -> float:
        """Seconds of the collectives within an action; what goes round while attention runs is hidden, where
        it can be.
        """
        round_, others = 0.0, 0.0
        for move in action.inner_transfers:
            if move.collective == "shift":
                round_ += self._transfer_seconds(move)
            else:
                others += self._transfer_seconds(move)
        if (
            round_
            and self.target.async_launch
            and self._model_ops is not None
            and action.subject in self._model_ops.by_block_call
        ):
            done = self._model_ops.by_block_call[action.subject]
            work = done.forward if action.kind in (*FORWARD_KINDS, "RECOMPUTE") else done.backward
            attention = self._ops_seconds(
                OpCounts(attention=work.attention), self._rank_fraction(action.subject), back=False
            )
            round_ = max(0.0, round_ - attention)
        return round_ + others

    def _layout_copy_seconds(self, action: Action) -> float:
        """Seconds in which slices are put in order, to be sent and as they come."""
        found = 0.0
        for move in action.inner_transfers:
            size = len(self.member_ranks(move))
            if size > 1:
                whole = move.nbytes * (size if move.collective in GATHERING_COLLECTIVES else 1)
                found += LAYOUT_COPIES.get(move.collective, 0) * self.target.device_time.memory_op_seconds(
                    2 * whole
                )
        return found

    def _transfer_seconds(self, transfer: Transfer) -> float:
        """Seconds of a transfer."""
        if transfer not in self._cached_transfers:
            self._cached_transfers[transfer] = self.target.network_time.seconds(
                transfer, self.member_ranks(transfer)
            )
        return self._cached_transfers[transfer]

    def member_axes(self, transfer: Transfer) -> frozenset[str]:
        """The axes along which ranks meet in it."""
        return frozenset(axis for axis in transfer.axes if self._plan.mesh.group_size((axis,)) > 1)

    def member_ranks(self, transfer: Transfer) -> tuple[int, ...]:
        """The ranks that meet in it."""
        ranks = self._plan.mesh.peers(self._rank, transfer.axes)
        if transfer.peer is not None:
            return self._rank, ranks[transfer.peer]
        if transfer.num_neighbours:
            at = ranks.index(self._rank) // transfer.num_neighbours * transfer.num_neighbours
            return ranks[at : at + transfer.num_neighbours]
        return tuple(ranks[index] for index in transfer.member_indices) or ranks


def _all_ops(work: OpCounts) -> Iterable[MatmulOp | AttentionOp | MemoryOp]:
    return (*work.matmuls, *work.attention, *work.memory_ops)
