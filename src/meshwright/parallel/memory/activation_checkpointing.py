"""Activation checkpointing: blocks save only their inputs, and recompute their activations before backward.

Why it works: a backward needs what the forward computed, and the whole rest of the model lies between the
two, so the intermediate activations of all blocks are in memory at once. The input of a block is far smaller,
and they follow from it: the forward is a function of its inputs, its weights and its (stateless) random
numbers. So F becomes F_CHECKPOINTED (the forward of a block that keeps its inputs alone), and RECOMPUTE
precedes B: then the intermediate activations of one block are in memory at any time. The backward of the last
block follows its forward at once, so by default that block is not checkpointed.

    before   F0   F1   F2   LOSS   B2            B1            B0
    after    F_CHECKPOINTED0   F_CHECKPOINTED1   F2   LOSS   B2   RECOMPUTE1   B1   RECOMPUTE0   B0
    memory   x0                x0 x1             x0 x1 [2]        x0 x1 [1]         x0 [0]
                                                                      [i]: intermediate activations of block i

The second run computes the same bits as the first: the same random masks, the same autocast, the same
buffers. It has no side effects twice: batch norm statistics, counters and captured router logits are those
of the first run.

    activations = sum_i x_i + max_i [i]          instead of sum_i (x_i + [i])
    operations <= 4/3 of a step's: forward 1, backward 2, second forward at most 1

A rerun leaves out the last product of a block if no backward reads it, as in a transformer layer, whose last
product is added to the residual stream (early_stop.py).

With `save` a checkpointed block keeps more than its inputs: what operations of these kinds return, below
autograd. In the rerun they do not run; norms, rotations, activation functions and products of elements do,
which cost little beside matrix products and hold most of the bytes.

    save           what is kept                                               runs again
    "matmul"       outputs of mm, addmm, bmm, baddbmm, linear, convolution    attention, elementwise
    "attention"    outputs and log-sum-exp of fused attention kernels         matrix products, elementwise

    both, in a Llama layer: 3 h + 2 k + 2 f + n numbers per token, with h features, f inside of the MLP, k of
    keys and n heads; no matrix product runs again

    F_CHECKPOINTED   the inputs, and the outputs of [q k v] [attend] [o] [gate up]
    RECOMPUTE        norm [.] rotate [.] [.] add norm [.] silu, times    add          [.]: taken in order

Sums and rotations save none of their operands, so what [q k v] and [o] return is held only until the rerun,
and the output of the last product is not kept at all; the rest is a part of what the rerun saves, and is held
until the backward. torchtitan's `selective_ac_option = "op"` keeps every second matrix product; Megatron's
`recompute-granularity selective` recomputes attention alone, which a fused kernel does inside of its
backward. An output that the block overwrites is not kept. Collectives inside blocks run again.

`blocks` selects block calls by patterns ("model.layers.*"); a user who declares parts of a layer as blocks
(attention, mlp) selects among those. Blocks without intermediate activations are never recomputed. To
recompute no more than the memory asks for, give the strategy `memory_budget` a number of bytes instead.

Cost: no bytes sent, but for weights that ZeRO shards: RECOMPUTE and B share one gathering. Time: at most
that of the forward. A clone of the residual stream per block if the model writes in place.
With `save`, time: that of the forward without these operations, and in both runs a call of Python for each
torch function of a block: 8 us on a core, hidden where kernels run behind the host.
Limits: of the parts of one block only operations of the kinds `save` are chosen, all of a kind. Experts are
refused with `save`, since the data decides how many rows they return; so are attention on ranks that share
tokens, and tensor parallelism that shards features of the stream. Bytes of `save` are to the byte those on a
CPU: kernels of accelerators may pad a log-sum-exp, and keep the state of a generator. tiled_mlp computes what
was kept once more. A block that passes tensors on in objects of its own, writes into a cache argument, or
whose input is overwritten, is refused by name; one that appends to its own list does so twice. Kernels that
add in no fixed order (sums by index on a GPU) give other last bits the second time.
Paper: Griewank and Walther 2000, "Algorithm 799: revolve" (TOMS); Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost", arXiv 1604.06174; Korthikanti et al. 2022, arXiv 2205.05198 (section 5, selective
recomputation). The form by operation is that of torch.utils.checkpoint.create_selective_checkpoint_contexts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from meshwright.parallel.memory.early_stop import stop_early
from meshwright.parallel.memory.selective_outputs import keep_in_forwards
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.block_patterns import matches_any, unmatched_patterns
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.model_spec.op_sizes_and_memory import KEPT_OPS
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.memory.block_call_memory import activation_memory
from meshwright.plan.step.memory.early_stop import stop_reruns_early
from meshwright.plan.step.memory.kept_outputs import keep_outputs
from meshwright.plan.step.memory.memory_names import output_name
from meshwright.plan.step.memory.recomputed_segments import RecomputedSegment, recompute_segments
from meshwright.plan.step.program import Action, Program, with_extra_memory
from meshwright.plan.step.single_device_program import FORWARD_KINDS, samples_per_microbatch
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

LOCATION = "strategies.activation_checkpointing"
WITHOUT_SAVE = "remove `save`: everything runs again"


@dataclass(frozen=True)
class ActivationCheckpointing(Strategy):
    """Recomputes the block calls that match one of `blocks` before their backward; without `blocks`, all but
    the last. What operations of the kinds `save` return is kept: "matmul", "attention".
    """

    name: ClassVar[str] = "activation_checkpointing"
    phase: ClassVar[StrategyPhase] = "memory"
    blocks: tuple[str, ...] = ()
    save: tuple[str, ...] = field(default=(), metadata=one_of(*KEPT_OPS))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from checkpointing_diagnostics(self.blocks, sharding.model_spec, LOCATION)
        if self.save:
            yield from self._check_kept_outputs(sharding.model_spec)

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if self.save:
            yield from kept_outputs_diagnostics(sharding, self.save, f"{LOCATION}.save")

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return program.edit(lambda actions: self._checkpoint(actions, view, job))

    def _checkpoint(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        model_spec, num_samples = view.model_spec, samples_per_microbatch(actions, view.plan, job)
        memory = activation_memory(largest_rank_view(view), job, num_samples)
        known = bool(model_spec.saved_numel)  # else what it hands on stands for it
        segments = [
            RecomputedSegment((block_call,))
            for block_call in model_spec.block_calls
            if may_recompute(block_call, self.blocks, model_spec)
            and (memory[block_call].saved_nbytes if known else memory[block_call].output_nbytes)
        ]
        if not segments:
            return actions
        edited = with_kept_inputs(recompute_segments(actions, segments), view, job)
        calls = {block_call for segment in segments for block_call in segment.block_calls}
        edited = keep_outputs(edited, calls, self.save, view, job) if self.save else edited
        return stop_reruns_early(edited, model_spec)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        unread = stop_early(runtime)
        if self.save:
            keep_in_forwards(runtime, unread)
        return {}

    def _check_kept_outputs(self, model_spec: ModelSpec) -> Iterator[Diagnostic]:
        """Yields what stands against keeping outputs of operations in the blocks that run again."""
        chosen = {call for call in model_spec.block_calls if may_recompute(call, self.blocks, model_spec)}
        if not any(each.block_call in chosen and each.op in self.save for each in model_spec.kept_outputs):
            text = f"no block of {model_spec.name} that runs again is known to keep what "
            yield Diagnostic(f"{text}{' or '.join(self.save)} returns", WITHOUT_SAVE, f"{LOCATION}.save")
        experts = [each.block_call for each in model_spec.experts_calls if each.block_call in chosen]
        if experts:
            text = f"'{experts[0]}' calls experts, and the data decides how many rows their products return"
            yield Diagnostic(text, f"leave it out of `blocks`, or {WITHOUT_SAVE}", f"{LOCATION}.save")


def may_recompute(block_call: str, patterns: tuple[str, ...], model_spec: ModelSpec) -> bool:
    """Returns whether `block_call` matches one of `patterns`; without patterns, all but the last call do."""
    return matches_any(block_call, patterns) if patterns else block_call != model_spec.block_calls[-1]


def kept_outputs_diagnostics(
    sharding: ShardingPlan, ops: Sequence[str], location: str
) -> Iterator[Diagnostic]:
    """Yields what of `sharding` stands against keeping the outputs of `ops`, at `location`."""
    if sharding.sequence_sharding is not None and "attention" in ops:
        text = (
            "ranks share the tokens of a sample, and attention returns a part for each rank, not one output"
        )
        yield Diagnostic(text, 'write save = ["matmul"]', location)
    elif sharding.sequence_sharding is not None and sharding.model_spec.has_dropout:
        text = "ranks share the tokens of a sample, and attention with dropout overwrites what its products "
        yield Diagnostic(f"{text}return", f"{WITHOUT_SAVE}, or set the dropout to 0", location)
    if sharding.residual_layout.axes_with("S") and not sharding.sequence_sliced_calls:
        text = "the residual stream is sharded by features, and products run in parts of their own"
        yield Diagnostic(text, f'{WITHOUT_SAVE}; or take mode = "1d" of tensor_parallel', location)


def checkpointing_diagnostics(
    patterns: tuple[str, ...], model_spec: ModelSpec, location: str
) -> Iterator[Diagnostic]:
    """Yields patterns at `location` that match no block, and a model that is a single block."""
    yield from unmatched_patterns(patterns, model_spec, f"{location}.blocks")
    if not patterns and len(model_spec.block_calls) == 1:
        text = (
            f"the model runs as one block, '{model_spec.block_calls[0]}', whose backward follows its forward "
            f"at once: no memory is saved"
        )
        yield Diagnostic(text, "declare its layers as blocks: Model(blocks=[...])", f"{location}.blocks")


def with_kept_inputs(actions: list[Action], view: RankView, job: Job) -> list[Action]:
    """Returns `actions` with the memory of what glue computes for blocks: a checkpointed block call keeps its
    inputs, masks among them.
    """
    weighed, first = view.model_spec.memory, view.model_spec.block_calls[0]
    if weighed is None:
        return actions
    more = (weighed.glue_outputs - weighed.glue).total(samples_per_microbatch(actions, view.plan, job))

    def holding(action: Action) -> Action:
        if action.kind not in FORWARD_KINDS or action.subject != first:
            return action
        return with_extra_memory(action, output_name(first, action.microbatch or 0), more)

    return [holding(action) for action in actions]


def largest_rank_view(view: RankView) -> RankView:
    """Returns the view of the rank whose slices are the largest among those with the role of `view`, so that
    all of them decide alike.
    """
    location = {
        **view.coordinate,
        **dict.fromkeys(view.plan.param_slice_axes, 0),
    }  # units are dealt out larger first
    counts = num_tokens_by_rank(view)
    if counts:
        peers = view.plan.mesh.peers(view.plan.mesh.rank(location), view.plan.token_axes)
        totals = [sum(each) for each in counts]
        location = view.plan.mesh.coordinate(peers[totals.index(max(totals))])
    return RankView(view.plan, location)


def num_tokens_by_rank(view: RankView) -> list[tuple[int, ...]]:
    """Returns for each rank along the token axes the tokens of a sample, one number for each of its lengths;
    nothing where all have whole samples.
    """
    sharding, info = view.plan.sequence_sharding, view.model_spec.sequence_info
    if sharding is None or info is None:
        return []
    lengths = dict.fromkeys((info.length, *(length for _, length in info.other_lengths)))
    return list(zip(*map(sharding.num_tokens_by_rank, lengths), strict=True))
