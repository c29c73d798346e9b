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

`blocks` selects block calls by patterns ("model.layers.*"); a user who declares parts of a layer as blocks
(attention, mlp) selects among those. `keep_mb` is how much of the intermediate activations is saved all the
same: the blocks that cost most operations per byte are saved first, as many as fit; of equals, the later
ones. Blocks without intermediate activations are never recomputed.

Cost: no bytes sent, but for weights that ZeRO shards: RECOMPUTE and B share one gathering. Time: at most
that of the forward. A clone of the residual stream per block if the model writes in place.
Limits: the size of the intermediate activations is measured in a trial on one number of samples, in elements
of the compute dtype: it is an estimate. Parts of one block are not recomputed separately. A block that passes
tensors on in objects of its own, writes into a cache argument, or whose input is overwritten, is refused by
name; one that appends to its own list does so twice. Kernels that add in no fixed order (sums by index on a
GPU) give other last bits the second time.
Paper: Griewank and Walther 2000, "Algorithm 799: revolve" (TOMS); Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost", arXiv 1604.06174; Korthikanti et al. 2022, arXiv 2205.05198 (section 5, selective
recomputation).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar

from meshwright.parallel.memory.block_patterns import matches_any, unmatched_patterns
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.memory.block_call_memory import activation_memory
from meshwright.plan.step.memory.memory_names import output_name
from meshwright.plan.step.program import Action, Allocation, Program, with_extra_memory, with_waits
from meshwright.plan.step.single_device_program import (
    FORWARD_KINDS,
    INPUT_GRAD_KINDS,
    WEIGHT_GRAD_KINDS,
    samples_per_microbatch,
)
from meshwright.plan.strategy_interface import Strategy, StrategyPhase


@dataclass(frozen=True)
class ActivationCheckpointing(Strategy):
    """Recomputes the block calls that match one of `blocks` before their backward; without `blocks`, all but
    the last.

    `keep_mb` MiB of activations are saved all the same; 0: none.
    """

    name: ClassVar[str] = "activation_checkpointing"
    phase: ClassVar[StrategyPhase] = "memory"
    blocks: tuple[str, ...] = ()
    keep_mb: float = field(default=0.0, metadata=at_least(0, "write a number from 0 up; 0 keeps nothing"))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        block_calls, location = sharding.model_spec.block_calls, "strategies.activation_checkpointing"
        yield from unmatched_patterns(self.blocks, sharding.model_spec, f"{location}.blocks")
        if not self.blocks and len(block_calls) == 1:
            text = (
                f"the model runs as one block, '{block_calls[0]}', whose backward follows its forward at "
                f"once: no memory is saved"
            )
            yield Diagnostic(text, "declare its layers as blocks: Model(blocks=[...])", f"{location}.blocks")

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return program.edit(lambda actions: self._checkpoint(actions, view, job))

    def _checkpoint(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        chosen = self._choose_block_calls(actions, view, job)
        edited, forwards = [], {}
        for action in actions:
            action = replace(
                action,
                waits=tuple(forwards[wait].name if wait in forwards else wait for wait in action.waits),
            )
            if action.kind == "F" and action.subject in chosen:
                within = _saved_holds(action)
                kept = tuple(hold for hold in action.allocations if hold not in within)
                forward = Action(
                    "F_CHECKPOINTED",
                    action.subject,
                    action.microbatch,
                    action.stream,
                    action.waits,
                    action.tensors,
                    allocations=kept,
                )
                forward = replace(
                    forward,
                    transfer=action.transfer,
                    flops=action.flops,
                    frees=action.frees,
                    inner_transfers=action.inner_transfers,
                )
                forwards[action.name] = forward
                recompute = Action(
                    "RECOMPUTE",
                    action.subject,
                    action.microbatch,
                    waits=(forward.name,),
                    flops=action.flops,
                    allocations=within,
                )
                recompute = replace(
                    recompute,
                    inner_transfers=tuple(move for move in action.inner_transfers if not move.in_glue),
                )
                chosen[action.subject][action.microbatch] = recompute
                action = forwards[action.name]
            elif action.kind in INPUT_GRAD_KINDS and action.subject in chosen:
                recompute = chosen[action.subject][action.microbatch]
                edited.append(recompute)
                action = with_waits(action, (recompute.name,))
            edited.append(action)
        return _with_kept_inputs(edited, view, job) if chosen else edited

    def _choose_block_calls(
        self, actions: Sequence[Action], view: RankView, job: Job
    ) -> dict[str, dict[int | None, Action]]:
        model_spec, largest = view.model_spec, _largest_rank_view(view)
        sizes, held = (
            largest.work_share.block_shares,
            activation_memory(largest, job, samples_per_microbatch(actions, view.plan, job)),
        )
        forwards = {
            action.subject: action
            for action in actions
            if action.kind == "F" and self._is_selected(action.subject, model_spec)
        }
        order = list(model_spec.block_calls)
        alive = {block_call: _max_in_flight(actions, block_call) for block_call in forwards}
        known = bool(model_spec.saved_numel)  # else what it hands on stands for it
        nbytes = {
            block_call: alive[block_call]
            * (held[block_call].saved_nbytes if known else held[block_call].output_nbytes)
            for block_call in forwards
        }
        left = self.keep_mb * 2**20
        worth = {
            block_call: sizes[block_call].flops * alive[block_call] / each if each else inf
            for block_call, each in nbytes.items()
        }
        for block_call in sorted(
            forwards, key=lambda block_call: (-worth[block_call], -order.index(block_call))
        ):
            if nbytes[block_call] <= left:
                left -= nbytes[block_call]
                del forwards[block_call]
        return {block_call: {} for block_call in forwards}

    def _is_selected(self, block_call: str, model_spec: ModelSpec) -> bool:
        if not self.blocks:
            return block_call != model_spec.block_calls[-1]
        return matches_any(block_call, self.blocks)


def _with_kept_inputs(actions: list[Action], view: RankView, job: Job) -> list[Action]:
    weighed, first = view.model_spec.memory, view.model_spec.block_calls[0]
    if weighed is None:
        return actions
    more = (weighed.glue_outputs - weighed.glue).total(samples_per_microbatch(actions, view.plan, job))

    def holding(action: Action) -> Action:
        if action.kind not in FORWARD_KINDS or action.subject != first:
            return action
        return with_extra_memory(action, output_name(first, action.microbatch or 0), more)

    return [holding(action) for action in actions]


def _saved_holds(forward: Action) -> tuple[Allocation, ...]:
    return tuple(
        hold
        for hold in forward.allocations
        if hold.name != output_name(forward.subject, forward.microbatch or 0)
    )


def _largest_rank_view(view: RankView) -> RankView:
    location = {
        **view.coordinate,
        **dict.fromkeys(view.plan.param_slice_axes, 0),
    }  # units are dealt out larger first
    if view.plan.sequence_sharding is not None and view.model_spec.sequence_info is not None:
        counts = view.plan.sequence_sharding.num_tokens_by_rank(view.model_spec.sequence_info.length)
        peers = view.plan.mesh.peers(view.plan.mesh.rank(location), view.plan.token_axes)
        location = view.plan.mesh.coordinate(peers[counts.index(max(counts))])
    return RankView(view.plan, location)


def _max_in_flight(actions: Sequence[Action], block_call: str) -> int:
    now = most = 0
    for action in actions:
        if action.subject == block_call:
            now += (action.kind == "F") - (action.kind in WEIGHT_GRAD_KINDS)
            most = max(most, now)
    return most
