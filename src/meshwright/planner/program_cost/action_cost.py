"""Predicts the seconds of each action of a program from its operations and the speed of the device.

    F, B, I, W      the operations of a block call (plan/model_spec/op_sizes_and_memory.py), as much of each
                    as the rank computes: its tokens, heads and features; then the collectives inside the
                    block, and the copies that lay out slices for them. W has the matmuls that sum over
                    samples, I has all other operations of a backward
    RECOMPUTE, RECOMPUTE_OUTPUT
                    one more forward
    LOSS            the forward and the backward of the loss
    PACK, UNPACK, ACCUMULATE, CLIP, LOCAL_NORM, STEP
                    the bytes of gradients, weights and optimizer states that they read and write
    RESHARD         a copy of the shard that it keeps, if it keeps one (hpz)
    REDUCE, UNSHARD, SEND ...
                    seconds on the network (network_time.py), and those to code what travels as codes
    copy_in, copy_out, disk, host
                    bytes over the rate of what the stream occupies (plan/hardware/streams.py)

    one operation                  max(call,  2 m n k / FLOP/s for that shape)   or   max(call,  bytes / rate)
    block, asynchronous launches   max(sum of all calls,  sum of all operations)

The first microbatch creates gradients; each later one also adds to them. If the operations of the blocks are
not known, a block counts as one square matmul with as many FLOPs, and what it saves passes through memory a
few times; the prediction then has a note about it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from meshwright.plan.hardware.streams import STREAMS
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.model_spec.op_sizes_and_memory import AttentionOp, MatmulOp, MemoryOp, ModelOps, OpCounts
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.param_sharding import ParamGroup
from meshwright.plan.step.chunked_loss_cost import MAX_CHUNK_NUMEL, num_local_logit_tokens
from meshwright.plan.step.memory.kept_outputs import kept_ops
from meshwright.plan.step.memory.memory_names import grad_name, kept_op_name
from meshwright.plan.step.program import Action, Transfer
from meshwright.plan.step.single_device_program import FORWARD_KINDS, RECOMPUTE_KINDS, WEIGHT_GRAD_KINDS
from meshwright.planner.program_cost.device_time import ExecutionTarget
from meshwright.planner.program_cost.network_time import full_nbytes
from meshwright.planner.program_cost.rank_memory import optimizer_work

# much larger operations were measured with newly allocated memory
WARM_MEMORY_NBYTES = 16 << 20
# how often the saved bytes of a block pass through memory if its operations are not known
UNSEEN_MEMORY_PASSES = 3
# how often a vocabulary-sharded logit is read or written beside its exp, and the operations on each chunk
LOGITS_MEMORY_PASSES, LOGITS_CALLS_PER_CHUNK = 14, 20
# copies of the tensor that a collective inside a block sends
LAYOUT_COPIES = {"all_to_all": 2, "all_gather": 1, "reduce_scatter": 1}
COPY_KINDS = ("PACK", "UNPACK", "STASH", "LOAD_STASHED", "LOAD_LATEST")


@dataclass(frozen=True)
class ActionCost:
    """Seconds of an action: computation, communication inside it, and the delay of its start.

    `comm_delay_s` is how much later a collective starts because the rank waits for the slowest member.
    """

    compute_s: float = 0.0
    comm_s: float = 0.0
    comm_delay_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The duration of the action, without the delay of its start."""
        return self.compute_s + self.comm_s


@dataclass(frozen=True)
class RankFraction:
    """Fractions of a block call that one rank computes."""

    tokens: float = 1.0
    features: float = 1.0
    memory: float = 1.0


class ActionCosts:
    """Computes the cost of each action of one program role, as executed by its first rank."""

    def __init__(self, plan: Plan, rank: int, target: ExecutionTarget) -> None:
        self._plan, self._rank, self.target = plan, rank, target
        self._view = plan.rank_view(rank)
        self._lossy = [each for each in plan.strategies if not each.exact]  # no other one codes anything
        self._num_samples = plan.micro_batch
        memory = plan.model_spec.memory
        self._model_ops: ModelOps | None = None if memory is None else memory.ops
        self._cached_seconds: dict[tuple[str, str], float] = {}
        self._cached_transfers: dict[Transfer, float] = {}
        block_calls = self._view.model_spec.block_calls
        first_calls = [stage.block_calls[0] for stage in self._view.plan.stages] or block_calls[:1]
        self._first_calls = {block_call for block_call in first_calls if block_call in block_calls}

    @property
    def ops_known(self) -> bool:
        """Whether the operations of the blocks are known from a trial."""
        return self._model_ops is not None

    def cost(self, action: Action) -> ActionCost:
        """Returns the cost of `action`."""
        stream = STREAMS[action.stream]
        if not stream.is_priced:
            return ActionCost(0.0, self.coding_seconds(action) or 0.0)
        if stream.copies:
            nbytes = 0 if action.transfer is None else action.transfer.nbytes
            return ActionCost(0.0, nbytes / self.target.copy_rates[stream.resource] if nbytes else 0.0)
        transfer_s = 0.0 if action.transfer is None else self._transfer_seconds(action.transfer)
        if stream.starts_work:
            return ActionCost(0.0, transfer_s + (self.coding_seconds(action) or 0.0))
        compute_s = self.target.slowdown * (self._compute_seconds(action) + self._layout_copy_seconds(action))
        inner_s = self._inner_comm_seconds(action) + (self.coding_seconds(action) or 0.0)
        return ActionCost(compute_s, transfer_s + inner_s)

    def coding_seconds(self, action: Action) -> float | None:
        """Returns the seconds in which the rank codes and decodes what `action` sends; None: unknown."""
        passes = [each.coding_passes(action, self._view) for each in self._lossy]
        found = [
            self.target.device_time.coding_seconds(name, numel)
            for each in passes
            for name, numel in each.items()
        ]
        known = [seconds for seconds in found if seconds is not None]
        return self.target.slowdown * sum(known) if len(known) == len(found) else None

    def _compute_seconds(self, action: Action) -> float:
        kind = action.kind
        if kind in (*FORWARD_KINDS, *RECOMPUTE_KINDS):
            glue = (
                self._glue_seconds if kind in FORWARD_KINDS and action.subject in self._first_calls else 0.0
            )
            return glue + self._forward_seconds(action)
        if kind in ("B", "I", "W"):
            return self._cached_call_seconds(action, kind) + self._accumulate_seconds(action)
        if kind == "LOSS":
            return self._loss_seconds(action)
        if kind == "STEP":
            return self._optimizer_seconds * (self._share_of(action.tensors) if action.subject else 1.0)
        if kind in COPY_KINDS:
            return self._gradient_pass_seconds(action.tensors, 2)
        if kind == "ACCUMULATE":
            return self._gradient_pass_seconds(action.tensors, 3, in_shards=True)
        if kind == "RESHARD":  # a shard that it keeps is copied
            return self._warm_memory_seconds(2 * sum(each.nbytes for each in action.allocations))
        if kind == "LOCAL_NORM" or (kind == "CLIP" and not self._view.plan.grad_norm_axes):
            return self._gradient_pass_seconds(self._numel, 1, in_shards=True)
        return 0.0

    def _forward_seconds(self, action: Action) -> float:
        """Returns the seconds of the forward of a block call, without what a rerun takes as it was kept."""
        kept = kept_ops(action) if action.kind in RECOMPUTE_KINDS else ()
        if not (kept or action.skipped_layers):
            return self._cached_call_seconds(action, "forward")
        if self._model_ops is None:
            saved_nbytes = sum(allocation.nbytes for allocation in action.allocations)
            return self._unseen_seconds(action.flops, saved_nbytes)
        work = self._model_ops.by_block_call[action.subject].forward.subtract(kept)
        for each in self._view.model_spec.unread_products if action.skipped_layers else ():
            work = work.without_product(each.flops) if each.block_call == action.subject else work
        return self._ops_seconds(work, self._rank_fraction(action.subject), backward=False)

    def _cached_call_seconds(self, action: Action, direction: str) -> float:
        key = action.subject, direction
        if key not in self._cached_seconds:
            self._cached_seconds[key] = self._block_call_seconds(action, direction)
        return self._cached_seconds[key]

    def _block_call_seconds(self, action: Action, direction: str) -> float:
        block_call = action.subject
        if self._model_ops is None:
            saved_nbytes = (
                0 if direction == "W" else sum(allocation.nbytes for allocation in action.allocations)
            )
            return self._unseen_seconds(
                action.flops or self._view.work_share.block_shares[block_call].flops * self._num_samples,
                saved_nbytes,
            )
        block_ops = self._model_ops.by_block_call[block_call]
        fraction = self._rank_fraction(block_call)
        work = block_ops.forward if direction == "forward" else block_ops.backward
        if direction in ("I", "W"):
            weight_grads_only = direction == "W"
            matmuls = tuple(each for each in work.matmuls if each.is_weight_grad is weight_grads_only)
            work = (
                OpCounts(matmuls) if weight_grads_only else OpCounts(matmuls, work.attention, work.memory_ops)
            )
        return self._ops_seconds(work, fraction, backward=direction != "forward")

    def _rank_fraction(self, block_call: str) -> RankFraction:
        share, (flops, saved_numel), tokens = (
            self._view.work_share.block_shares[block_call],
            self._full_ops(block_call),
            float(self._view.work_share.token_fraction(block_call)),
        )
        features = share.flops / flops / tokens if flops else 1.0
        return RankFraction(tokens, features, share.saved_numel / saved_numel if saved_numel else tokens)

    def _full_ops(self, block_call: str) -> tuple[int, int]:
        model_spec = self._plan.model_spec
        index = model_spec.block_calls.index(block_call)
        return model_spec.flops[index], model_spec.saved_numel[index] if model_spec.saved_numel else 0

    def _ops_seconds(self, work: OpCounts, fraction: RankFraction, *, backward: bool) -> float:
        target, num_samples = self.target, self._num_samples
        call_s = target.device_time.call_backward_s if backward else target.device_time.call_s
        op_seconds = [
            (operation.count, self._op_seconds(operation, fraction, num_samples))
            for operation in _all_ops(work)
        ]
        if target.async_launch:
            return max(call_s * work.num_ops, sum(count * seconds for count, seconds in op_seconds))
        return sum(count * max(call_s, seconds) for count, seconds in op_seconds)

    def _op_seconds(
        self, work: MatmulOp | AttentionOp | MemoryOp, fraction: RankFraction, num_samples: int
    ) -> float:
        device_time = self.target.device_time
        if isinstance(work, MemoryOp):
            nbytes, output_numel = (
                size.total(num_samples) * fraction.memory for size in (work.nbytes, work.output_numel)
            )
            return device_time.memory_op_seconds(nbytes, work.operation, output_numel) if nbytes else 0.0
        if isinstance(work, AttentionOp):
            keys = (
                min(work.key_len, (work.key_len + self.target.attention_block) / 2)
                if work.is_causal
                else work.key_len
            )
            sizes = (
                work.batch.total(num_samples),
                work.num_heads * fraction.features,
                work.query_len * fraction.tokens,
                keys,
                work.head_dim,
            )
            return device_time.attention_seconds(sizes, work.dtype, backward=work.backward)
        m, n, k, batch = (size.total(num_samples) for size in (work.m, work.n, work.k, work.batch))
        if work.is_weight_grad:
            return device_time.matmul_seconds(
                m, n * fraction.features, k * fraction.tokens, batch, work.dtype
            )
        if work.batch.per_sample:  # one for each head
            return device_time.matmul_seconds(
                m * fraction.tokens, n, k, batch * fraction.features, work.dtype
            )
        return device_time.matmul_seconds(m * fraction.tokens, n * fraction.features, k, batch, work.dtype)

    @cached_property
    def _glue_seconds(self) -> float:
        return (
            0.0
            if self._model_ops is None
            else self._ops_seconds(self._model_ops.glue, RankFraction(), backward=False)
        )

    def _loss_seconds(self, action: Action) -> float:
        view, sharding, block_call = self._view, self._view.plan, self._view.model_spec.block_calls[-1]
        share = self._view.work_share.block_shares[block_call]
        head_call = view.work_share.chunked_head_call
        tokens = float(view.work_share.token_fraction(block_call))
        if self._model_ops is None:
            return self._unseen_seconds(
                action.flops, sum(allocation.nbytes for allocation in action.allocations)
            )
        is_vocab_sharded = bool(sharding.logits_layout.axes_with("S"))
        if head_call is None and is_vocab_sharded:
            return self._vocab_loss_seconds(share.output_numel * self._num_samples)
        if head_call is None:
            return self._ops_seconds(self._model_ops.loss, RankFraction(memory=tokens), backward=False)
        chunk_flops, chunk_tokens = (
            action.flops / (3 * sharding.num_loss_chunks),
            max(1, num_local_logit_tokens(view) * self._num_samples / sharding.num_loss_chunks),
        )
        in_features = head_call.in_numel / max(
            1, view.model_spec.logits.num_tokens if view.model_spec.logits is not None else 1
        )
        vocab = chunk_flops / (2 * chunk_tokens * in_features)
        matmul_s = (
            3
            * sharding.num_loss_chunks
            * self.target.device_time.matmul_seconds(chunk_tokens, vocab, in_features, 1, self._dtype)
        )
        if is_vocab_sharded:
            return matmul_s + self._vocab_loss_seconds(vocab * chunk_tokens * sharding.num_loss_chunks)
        loss_s = self._ops_seconds(self._model_ops.loss, RankFraction(memory=tokens), backward=False)
        return matmul_s + loss_s

    def _vocab_loss_seconds(self, logits: float) -> float:
        device_time, width = (
            self.target.device_time,
            max(FLOAT_NBYTES["float32"], FLOAT_NBYTES[self._plan.job.precision.compute]),
        )
        memory_s = self._warm_memory_seconds(LOGITS_MEMORY_PASSES * width * logits) + 2 * max(
            self._warm_memory_seconds(2 * width * logits), device_time.memory_op_seconds(0.0, "exp", logits)
        )
        return max(memory_s, device_time.call_s * LOGITS_CALLS_PER_CHUNK * ceil(logits / MAX_CHUNK_NUMEL))

    def _unseen_seconds(self, flops: float, saved_nbytes: float) -> float:
        side = (flops / 2) ** (1 / 3)
        device_time = self.target.device_time
        return (
            device_time.matmul_seconds(side, side, side, 1, self._dtype) if flops else 0.0
        ) + device_time.memory_op_seconds(UNSEEN_MEMORY_PASSES * saved_nbytes)

    def _accumulate_seconds(self, action: Action) -> float:
        if action.kind not in WEIGHT_GRAD_KINDS:
            return 0.0
        new_gradients = {allocation.name for allocation in action.allocations}
        param_groups = (
            each
            for each in self._param_groups
            if action.subject in each.block_calls and not each.param_shardings[0].flat_shard_axes
        )
        names = [name for each in param_groups if grad_name(each) not in new_gradients for name in each.names]
        return self._gradient_pass_seconds(names, 3)

    def _gradient_pass_seconds(
        self, names: Iterable[str], num_passes: int, *, in_shards: bool = False
    ) -> float:
        width = FLOAT_NBYTES[self._plan.job.precision.effective.gradients]
        numels = (self._numel[name][in_shards] for name in names if name in self._numel)
        return sum(self._warm_memory_seconds(num_passes * width * numel) for numel in numels)

    def _share_of(self, names: Iterable[str]) -> float:
        """The elements of this rank's shards of `names`, of those of all trained parameters."""
        numels = {name: in_shards for name, (_, in_shards) in self._numel.items()}
        return sum(numels[name] for name in names if name in numels) / (sum(numels.values()) or 1.0)

    def _warm_memory_seconds(self, nbytes: float) -> float:
        """Seconds of an operation on memory that is already allocated: no page faults, whatever its size."""
        memory_op_seconds, num_chunks = (
            self.target.device_time.memory_op_seconds,
            max(1.0, nbytes / WARM_MEMORY_NBYTES),
        )
        return num_chunks * memory_op_seconds(nbytes / num_chunks)

    @cached_property
    def _optimizer_seconds(self) -> float:
        precision = self._plan.job.precision.effective
        numel, state_nbytes = optimizer_work(self._plan, self._rank)
        width = FLOAT_NBYTES[precision.gradients] + 2 * FLOAT_NBYTES[precision.master]
        width += FLOAT_NBYTES[precision.parameters] if precision.master != precision.parameters else 0
        count = max(1, len(self._view.model_spec.trainable))
        return count * self._warm_memory_seconds((numel * width + 2 * state_nbytes) / count)

    @cached_property
    def _param_groups(self) -> tuple[ParamGroup, ...]:
        return self._view.param_groups

    @cached_property
    def _numel(self) -> Mapping[str, tuple[float, float]]:
        param_shardings, mesh = (
            (
                param_sharding
                for param_sharding in self._view.param_shardings
                if param_sharding.param.trainable
            ),
            self._plan.mesh,
        )
        return {
            param_sharding.param.name: (
                param_sharding.param.numel,
                param_sharding.param.numel / mesh.group_size(param_sharding.flat_shard_axes),
            )
            for param_sharding in param_shardings
        }

    @property
    def _dtype(self) -> str:
        return self._plan.job.precision.compute

    def _inner_comm_seconds(self, action: Action) -> float:
        """Seconds of the collectives inside an action, without ring shifts that attention hides."""
        ring_s, other_s = 0.0, 0.0
        for message in (message for transfer in action.inner_transfers for message in transfer.messages):
            if message.collective == "shift":
                ring_s += self._transfer_seconds(message)
            else:
                other_s += self._transfer_seconds(message)
        if (
            ring_s
            and self.target.async_launch
            and self._model_ops is not None
            and action.subject in self._model_ops.by_block_call
        ):
            block_ops = self._model_ops.by_block_call[action.subject]
            work = (
                block_ops.forward if action.kind in (*FORWARD_KINDS, *RECOMPUTE_KINDS) else block_ops.backward
            )
            attention = self._ops_seconds(
                OpCounts(attention=work.attention), self._rank_fraction(action.subject), backward=False
            )
            ring_s = max(0.0, ring_s - attention)
        return ring_s + other_s

    def _layout_copy_seconds(self, action: Action) -> float:
        seconds = 0.0
        for message in (message for transfer in action.inner_transfers for message in transfer.messages):
            size = len(self.member_ranks(message))
            if size > 1:
                seconds += LAYOUT_COPIES.get(
                    message.collective, 0
                ) * self.target.device_time.memory_op_seconds(2 * full_nbytes(message, size))
        return seconds

    def _transfer_seconds(self, transfer: Transfer) -> float:
        if transfer not in self._cached_transfers:
            self._cached_transfers[transfer] = sum(
                self.target.network_time.seconds(message, self.member_ranks(message))
                for message in transfer.messages
            )
        return self._cached_transfers[transfer]

    def exact_and_coded_seconds(self, transfer: Transfer) -> tuple[float, float]:
        """Returns the seconds of `transfer` on the network: carried by itself, and as it is carried."""
        exact = replace(transfer, carried_by=(), carried_from=0)
        return self._transfer_seconds(exact), self._transfer_seconds(transfer)

    def member_axes(self, transfer: Transfer) -> frozenset[str]:
        """Returns the mesh axes of `transfer` that have several ranks."""
        return frozenset(axis for axis in transfer.axes if self._plan.mesh.group_size((axis,)) > 1)

    def member_ranks(self, transfer: Transfer) -> tuple[int, ...]:
        """Returns the ranks that take part in `transfer`."""
        return transfer.member_ranks(self._plan.mesh, self._rank)


def _all_ops(work: OpCounts) -> Iterable[MatmulOp | AttentionOp | MemoryOp]:
    return (*work.matmuls, *work.attention, *work.memory_ops)


def forward_seconds(plan: Plan, target: ExecutionTarget, kept_op: str = "") -> dict[str, float]:
    """Returns the seconds of the forward of each block call on `target`, with its collectives; {} where the
    operations of blocks are not known. With `kept_op`, what a rerun saves if what these return is kept.
    """
    found = dict[str, float]()
    for role in plan.program.roles:
        costs = ActionCosts(plan, role.ranks[0], target)
        for action in (each for each in role.actions if costs.ops_known and each.kind in FORWARD_KINDS):
            found[action.subject] = costs.cost(action).seconds
            if kept_op:
                frees = (), (kept_op_name(kept_op, action.subject, action.microbatch),)
                whole, rest = (costs.cost(replace(action, kind="RECOMPUTE", frees=each)) for each in frees)
                found[action.subject] = max(0.0, whole.seconds - rest.seconds)
    return found
