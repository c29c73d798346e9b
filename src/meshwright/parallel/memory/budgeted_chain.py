"""The block calls of a rank as the chain that `memory_budget` chooses for: their bytes, seconds and options.

All ranks with one role must choose alike, because a block call that runs again communicates again. So the
bytes are those of the rank with the largest slices. If all ranks of the role have as much, they are read off
the program; else they follow from the trial, without the buffers that single techniques add.

    a block call    its output, and what else its F allocates          seconds: given, or from its operations
    its backward    the scratch of B, gradients that wait for W, of the last one that of the loss
    may be dropped  an output that only the next block call reads: what code between blocks reads stays
    selective       an option for every set of kinds of operations whose outputs take less than what is saved;
                    its rerun has the operations that are left, and a call of Python for each of all
    offload         an option where the seconds and the rate of the host link are known; the first block calls
                    wait longest, and have it until the host is full

The peak of a choice is that of the program with it: the one that is planned, with what ends before an action
ends added (what a rerun saves, the gradient of an output).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations, pairwise
from math import inf
from types import MappingProxyType

from meshwright.parallel.memory.activation_checkpointing import (
    kept_outputs_diagnostics,
    largest_rank_view,
    num_tokens_by_rank,
    with_kept_inputs,
)
from meshwright.parallel.memory.gist import encode_memory, freed_and_added_nbytes, local_relu_activations
from meshwright.parallel.memory.tiers.activation_offload import saved_activations
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.model_spec.op_sizes_and_memory import KEPT_OPS, BlockOps
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.chunked_loss_cost import MAX_CHUNK_NUMEL, chunked_loss_cost
from meshwright.plan.step.memory.activation_budget import (
    RECOMPUTE,
    ActivationChoice,
    ActivationOption,
    ChainBlock,
)
from meshwright.plan.step.memory.activation_copies import with_activation_copies
from meshwright.plan.step.memory.block_call_memory import (
    activation_memory,
    loss_scratch_nbytes,
    saved_fraction,
)
from meshwright.plan.step.memory.early_stop import skipped_fraction, stop_reruns_early
from meshwright.plan.step.memory.kept_outputs import keep_outputs, kept_outputs_memory
from meshwright.plan.step.memory.memory_names import (
    SCRATCH,
    deferred_grad_name,
    loss_grad_name,
    output_name,
    saved_activations_name,
)
from meshwright.plan.step.memory.recomputed_segments import recompute_segments
from meshwright.plan.step.program import Action, Allocation
from meshwright.plan.step.single_device_program import (
    ACTIVATION_KINDS,
    FORWARD_KINDS,
    INPUT_DROPPED_FORWARD,
    WEIGHT_GRAD_KINDS,
    samples_per_microbatch,
)

OPS_PER_BYTE = 20  # operations in the time of a byte read or written, where no seconds are given
CALL_S, OPS_PER_CALL = 8e-6, 1_000_000  # a call of Python for a torch function, in seconds and operations
GIST_PASSES = 4  # over each encoded tensor
HIDDEN_SHARE = 0.01  # of the time of copies, which hidden ones cost too: no more leaves than has to
BACKWARD_FORWARDS = 2  # a backward has the products of two forwards
SEGMENT, GIST, SELECTIVE, OFFLOAD = "segment", "gist", "selective", "offload"
SAVED_OPS: Mapping[str, tuple[str, ...]] = MappingProxyType(  # by option: kinds of operations, as in `save`
    {
        f"save {' and '.join(ops)}": ops
        for count in range(1, len(KEPT_OPS) + 1)
        for ops in combinations(KEPT_OPS, count)
    }
)
MAX_TRIED = 64  # choices that are tried on a program


@dataclass(frozen=True)
class BlockTimes:
    """Milliseconds of the forward of each block call of the model, in order, and of the operations of a kind
    in it; empty where they are not known. `link_rate`: bytes per second that the host link moves one way, or
    0; `host_nbytes`: those of host memory that activations may use.
    """

    forward_ms: Sequence[float] = ()
    op_ms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    link_rate: float = 0.0
    host_nbytes: float = inf


@dataclass(frozen=True)
class BudgetedChain:
    """The block calls of the rank of `view` as a chain, and the `actions` of its step with their bytes of
    activations alone. `view` is the rank with the largest slices.
    """

    blocks: tuple[ChainBlock, ...]
    loss_nbytes: int
    actions: tuple[Action, ...]
    view: RankView
    job: Job

    def with_peaks(self, choices: Sequence[ActivationChoice]) -> list[tuple[int, ActivationChoice]]:
        """Returns `choices`, in order of bytes, each with its peak.

        One microbatch after the other has the peak that the choice states. For others so many of the choices
        are tried that it takes no more than a second.
        """
        kinds = {action.kind for action in self.actions}
        if "I" not in kinds and all(block.in_flight == 1 for block in self.blocks):
            more = self.peak_nbytes(choices[-1]) - choices[-1].peak_nbytes  # received values
            return [(choice.peak_nbytes + more, choice) for choice in choices]
        tried = choices[:: -(-len(choices) // MAX_TRIED)]
        return [(self.peak_nbytes(choice), choice) for choice in tried]

    def peak_nbytes(self, choice: ActivationChoice | None) -> int:
        """Returns the most bytes of activations at any time with `choice`; None: everything is kept."""
        actions, ends = list(self.actions), dict[str, str]()
        if choice is not None:
            actions = apply_choice(actions, choice, self.view, self.job)
            ends = {call: each.block_calls[-1] for each in choice.segments for call in each.block_calls}
        outputs = {block.block_call: block.output_nbytes for block in self.blocks}
        saved = {block.block_call: block.saved_nbytes for block in self.blocks}
        stages = self.view.plan.stages
        stage_end = {call: each.block_calls[-1] for each in stages for call in each.block_calls}
        live, peak, dropped = dict[str, int](), 0, dict[tuple[str, int | None], list[str]]()
        for action in actions:
            live |= {each.name: each.nbytes for each in action.allocations if each.tier == "device"}
            more = 0
            if action.kind == "RECOMPUTE":
                more = outputs[action.subject]
            elif action.kind == "RECOMPUTE_OUTPUT":
                more = saved[action.subject] + outputs[ends[action.subject]]
            peak = max(peak, sum(live.values()) + more)
            if action.kind == INPUT_DROPPED_FORWARD and action.subject in stage_end:  # the stage holds them
                key = stage_end[action.subject], action.microbatch
                dropped.setdefault(key, []).extend(action.frees)
            else:
                for name in action.frees:
                    live.pop(name, None)
            if action.kind in FORWARD_KINDS:
                for name in dropped.pop((action.subject, action.microbatch), ()):
                    live.pop(name, None)
        return peak


def apply_choice(actions: list[Action], choice: ActivationChoice, view: RankView, job: Job) -> list[Action]:
    """Returns `actions` with what `choice` does for each block call."""
    relu = view.model_spec.relu_activations
    encoded = [each for each in relu if choice.options[each.block_call] == GIST]
    edited = encode_memory(actions, encoded, view, job) if encoded else actions
    if choice.segments:
        edited = with_kept_inputs(recompute_segments(edited, choice.segments), view, job)
    for name, ops in SAVED_OPS.items():
        calls = [block_call for block_call, option in choice.options.items() if option == name]
        edited = keep_outputs(edited, calls, ops, view, job) if calls else edited
    edited = stop_reruns_early(edited, view.model_spec)
    offloaded = {block_call for block_call, option in choice.options.items() if option == OFFLOAD}
    return with_activation_copies(edited, saved_activations(edited, offloaded)) if offloaded else edited


def budgeted_chain(
    actions: Sequence[Action],
    view: RankView,
    job: Job,
    times: BlockTimes,
    may_rerun: Callable[[str], bool],
    choices: Collection[str],
) -> BudgetedChain:
    """Returns the chain of the rank of `view`, which executes `actions`, with what `choices` offer for the
    block calls that `may_rerun`.
    """
    largest = largest_rank_view(view)
    sized = list(_largest_actions(actions, view, largest, job))
    outputs, saved, scratch, loss_nbytes = _block_nbytes(sized, view)
    first, last = view.model_spec.block_calls[0], view.plan.model_spec.block_calls[-1]
    weighed, num_samples = view.model_spec.memory, samples_per_microbatch(actions, view.plan, job)
    if weighed is not None:  # as `with_kept_inputs` has it
        outputs[first] += max(0, (weighed.glue_outputs - weighed.glue).total(num_samples))
    operations = _operations(largest, job, num_samples)
    seconds, per_operation = operations, 1.0
    if times.forward_ms:
        given = dict(zip(view.plan.model_spec.block_calls, times.forward_ms, strict=True))
        seconds = {block_call: given[block_call] / 1e3 for block_call in operations}
        per_operation = sum(seconds.values()) / (sum(operations.values()) or 1)
    droppable, in_flight = _droppable_outputs(view), _max_in_flight(actions)
    may_rerun_alone = {call for call in outputs if may_rerun(call) and call != last}  # B of the last follows
    options: dict[str, list[ActivationOption]] = {block_call: [] for block_call in outputs}
    for block_call, option in _gist_options(largest, job, num_samples, saved, per_operation):
        options[block_call] += [option] if GIST in choices else []
    for block_call, option in _selective_options(largest, job, num_samples, saved, seconds, times):
        options[block_call] += [option] if SELECTIVE in choices and block_call in may_rerun_alone else []
    if OFFLOAD in choices and times.forward_ms and times.link_rate:
        for block_call, option in _offload_options(sized, view, saved, seconds, times):
            options[block_call].append(option)
    blocks = (
        ChainBlock(
            block_call,
            seconds[block_call],
            outputs[block_call],
            saved[block_call],
            scratch[block_call],
            tuple(options[block_call]),
            RECOMPUTE in choices and block_call in may_rerun_alone,
            block_call in droppable,
            in_flight[block_call],
            OPS_PER_BYTE * saved[block_call] * per_operation,
            seconds[block_call] * float(skipped_fraction(view.model_spec, block_call)),
        )
        for block_call in view.model_spec.block_calls
    )
    return BudgetedChain(tuple(blocks), loss_nbytes, tuple(sized), largest, job)


def _largest_actions(
    actions: Sequence[Action], view: RankView, largest: RankView, job: Job
) -> Iterator[Action]:
    """Yields `actions` with the bytes of activations of the rank of `largest` alone."""
    num_samples = samples_per_microbatch(actions, view.plan, job)
    even = _is_even(largest, job, num_samples)
    sizes = None if even else _UnevenSizes(view, largest, job, num_samples)
    for action in actions:
        keeps = action.kind in ACTIVATION_KINDS or action.stream == "recv"
        allocations = tuple(
            Allocation(each.name, each.nbytes if sizes is None else sizes.nbytes(action, each))
            for each in action.allocations
            if keeps and each.tier == "device" and not each.name.startswith("gradient(")
        )
        yield replace(action, allocations=allocations)


def _is_even(largest: RankView, job: Job, num_samples: int) -> bool:
    """Returns whether all ranks with the role of `largest` have slices as large."""
    ends = {axis: largest.plan.mesh.size(axis) - 1 for axis in largest.plan.param_slice_axes}
    smallest = RankView(largest.plan, {**largest.coordinate, **ends})
    numels = [[each.param.numel for each in view.param_shardings] for view in (largest, smallest)]
    memory = [activation_memory(view, job, num_samples) for view in (largest, smallest)]
    same_tokens = len(set(num_tokens_by_rank(largest))) <= 1
    return same_tokens and numels[0] == numels[1] and memory[0] == memory[1]


class _UnevenSizes:
    """The bytes of the rank of `largest`, where ranks with one role have slices of other sizes."""

    def __init__(self, view: RankView, largest: RankView, job: Job, num_samples: int) -> None:
        self._view, self._largest, self._job, self._num_samples = view, largest, job, num_samples
        self._memory = activation_memory(largest, job, num_samples)
        self._width = FLOAT_NBYTES[job.precision.compute]

    def nbytes(self, action: Action, allocation: Allocation) -> int:
        """Returns the bytes of `allocation` of `action`; experts count as on one device."""
        block_call, microbatch, name = action.subject, action.microbatch or 0, allocation.name
        if action.kind == "LOSS":
            return self._loss_nbytes(name)
        if action.stream == "recv" or action.kind in ("CONCAT", "CONCAT_GRAD"):
            last = self._view.model_spec.block_calls[-1]
            fractions = [view.work_share.token_fraction(last) for view in (self._largest, self._view)]
            return round(allocation.nbytes * Fraction(fractions[0]) / Fraction(fractions[1]))
        memory = self._memory[block_call]
        if name == SCRATCH:
            return max(0, memory.backward_nbytes, memory.backward_with_grads_nbytes)
        if name == deferred_grad_name(block_call, microbatch):
            share = self._largest.work_share.block_shares[block_call]
            return share.deferred_grad_numel * self._num_samples * self._width
        if name == output_name(block_call, microbatch):
            return memory.output_nbytes
        if name == saved_activations_name(block_call, action.microbatch):
            return memory.saved_nbytes
        return 0  # of experts: what one device saves of them, and needs, is in the sizes above

    def _loss_nbytes(self, name: str) -> int:
        view, last = self._largest, self._largest.model_spec.block_calls[-1]
        chunked = chunked_loss_cost(view, self._job, self._num_samples)
        if chunked is not None:
            return chunked.scratch_nbytes if name == SCRATCH else chunked.output_grad_nbytes
        logits = view.work_share.block_shares[last].output_numel * self._num_samples
        if name != SCRATCH:
            return logits * self._width
        saved = view.model_spec.loss_saved_numel * self._num_samples
        if view.plan.logits_layout.axes_with("S"):
            saved = min(logits, MAX_CHUNK_NUMEL)
        return loss_scratch_nbytes(view, self._job, saved, self._num_samples)


def _block_nbytes(
    actions: Sequence[Action], view: RankView
) -> tuple[dict[str, int], dict[str, int], dict[str, int], int]:
    """Returns, by block call, the bytes of its output, of what it saves, and of the scratch of its backward;
    and the bytes of the loss.
    """
    calls, loss_nbytes = view.model_spec.block_calls, 0
    outputs, saved, scratch = (dict.fromkeys(calls, 0) for _ in range(3))
    for action in actions:
        nbytes = sum(each.nbytes for each in action.allocations)
        if action.kind == "F":
            name = output_name(action.subject, action.microbatch or 0)
            output = sum(each.nbytes for each in action.allocations if each.name == name)
            outputs[action.subject] = max(outputs[action.subject], output)
            saved[action.subject] = max(saved[action.subject], nbytes - output)
        elif action.kind == "LOSS":
            loss_nbytes = max(loss_nbytes, nbytes)
            grad = loss_grad_name(calls[-1], action.microbatch or 0)
            of_loss = sum(each.nbytes for each in action.allocations if each.name == grad)
            scratch[calls[-1]] = max(scratch[calls[-1]], of_loss)
    last_grad = scratch[calls[-1]]
    for action in actions:
        if action.kind in (*WEIGHT_GRAD_KINDS, "I"):
            nbytes = sum(each.nbytes for each in action.allocations)
            nbytes += last_grad if action.subject == calls[-1] else 0
            scratch[action.subject] = max(scratch[action.subject], nbytes)
    return outputs, saved, scratch, loss_nbytes


def _operations(view: RankView, job: Job, num_samples: int) -> dict[str, float]:
    """Returns the operations of the forward of each block call, with bytes read and written as operations."""
    by_call, found = _ops_by_call(view), {}
    for block_call, share in view.work_share.block_shares.items():
        nbytes = share.saved_numel * num_samples * FLOAT_NBYTES[job.precision.compute] * 2.0
        if block_call in by_call:
            moved = by_call[block_call].forward.memory_op_nbytes(num_samples)
            nbytes = float(moved * saved_fraction(view, block_call))
        found[block_call] = share.flops * num_samples + OPS_PER_BYTE * nbytes
    return found


def _ops_by_call(view: RankView) -> Mapping[str, BlockOps]:
    memory = view.model_spec.memory
    return {} if memory is None or memory.ops is None else memory.ops.by_block_call


def _gist_options(
    view: RankView, job: Job, num_samples: int, saved: Mapping[str, int], per_operation: float
) -> Iterator[tuple[str, ActivationOption]]:
    """Yields the block calls for which `gist` takes fewer bytes, and what it takes."""
    width = FLOAT_NBYTES[job.precision.compute]
    for each in view.model_spec.relu_activations:
        local = local_relu_activations(each, view, num_samples)
        freed, added = freed_and_added_nbytes(local, width)
        held = max(0, saved[each.block_call] - freed) + added + local.value_numel // 2 * width
        seconds = GIST_PASSES * local.mask_numel * width * OPS_PER_BYTE * per_operation
        if held < saved[each.block_call]:
            yield each.block_call, ActivationOption(GIST, seconds, held, held + local.largest_numel * width)


def _selective_options(
    view: RankView,
    job: Job,
    num_samples: int,
    saved: Mapping[str, int],
    seconds: Mapping[str, float],
    times: BlockTimes,
) -> Iterator[tuple[str, ActivationOption]]:
    """Yields the block calls for which outputs of some kinds of operations take less than what they save, and
    what keeping those takes. `seconds` are those of whole forwards.
    """
    spec, whole, by_call = view.model_spec, _operations(view, job, num_samples), _ops_by_call(view)
    numbers = {block_call: number for number, block_call in enumerate(view.plan.model_spec.block_calls)}
    known = {(each.block_call, each.op) for each in spec.kept_outputs}
    experts = {each.block_call for each in spec.experts_calls}  # data decides how many rows they return
    for name, ops in SAVED_OPS.items():
        if any(kept_outputs_diagnostics(view.plan, ops, "")):
            continue
        for block_call, kept in kept_outputs_memory(view, job, num_samples, ops).items():
            is_whole = all((block_call, op) in known for op in ops)  # else another option is the same
            if not is_whole or block_call in experts or kept.nbytes >= saved[block_call]:
                continue
            per_operation = seconds[block_call] / (whole[block_call] or 1)
            flops, unread = view.work_share.block_shares[block_call].flops, skipped_fraction(spec, block_call)
            left_out_s = float(flops * num_samples * (kept.flops_fraction + unread)) * per_operation
            if all(op in times.op_ms for op in ops):
                left_out_s = sum(times.op_ms[op][numbers[block_call]] for op in ops) / 1e3
                left_out_s += 0.0 if "matmul" in ops else float(unread) * seconds[block_call]
            call_s = OPS_PER_CALL * per_operation
            call_s = min(call_s, CALL_S) if times.forward_ms else call_s  # less where kernels hide it
            num_calls = 2 * by_call[block_call].forward.num_ops if block_call in by_call else 0
            added = max(0.0, seconds[block_call] - left_out_s) + num_calls * call_s
            rerun = saved[block_call] + kept.nbytes - kept.saved_nbytes
            yield block_call, ActivationOption(name, added, kept.nbytes, saved[block_call], rerun)


def _offload_options(
    actions: Sequence[Action],
    view: RankView,
    saved: Mapping[str, int],
    seconds: Mapping[str, float],
    times: BlockTimes,
) -> Iterator[tuple[str, ActivationOption]]:
    """Yields the block calls whose saved activations may rest on the host, and what that takes: what is seen
    of copies beside the forward and the backward of the next block call.
    """
    calls, free = view.model_spec.block_calls, times.host_nbytes
    out, in_flight = dict[str, int](), _max_in_flight(actions)
    last = view.plan.model_spec.block_calls[-1]  # its backward follows at once
    for each in saved_activations(actions, {*calls} - {last, *view.plan.encoded_calls}):
        call = each.forward.subject
        out[call] = max(out.get(call, 0), each.nbytes)
    for call, behind in zip(calls, (*calls[1:], calls[-1]), strict=True):
        nbytes = out.get(call, 0)
        free -= nbytes * in_flight[call]
        if nbytes and free >= 0:
            copy_s, beside_s = nbytes / times.link_rate, seconds[behind]
            added = max(0.0, copy_s - beside_s) + max(0.0, copy_s - BACKWARD_FORWARDS * beside_s)
            added += 2 * copy_s * HIDDEN_SHARE
            yield call, ActivationOption(OFFLOAD, added, saved[call] - nbytes, saved[call], 0, nbytes)


def _droppable_outputs(view: RankView) -> frozenset[str]:
    """Returns the block calls whose outputs only the next block call of the rank reads.

    An output of the first one holds what code between blocks computes, and is kept.
    """
    boundaries, calls = view.plan.model_spec.stage_boundaries, view.model_spec.block_calls
    if boundaries is None or view.model_spec.writes_in_place:
        return frozenset()
    stage_of = {call: number for number, each in enumerate(view.plan.stages) for call in each.block_calls}
    by_producer: dict[str, list[str]] = {}
    others = set[str]()  # block calls whose values glue makes, or no gradient flows back to
    for value in boundaries.values:
        by_producer.setdefault(value.producer, []).extend(value.consumers)
        if value.op or not value.needs_grad:
            others.add(value.producer)
    return frozenset(
        call
        for call, behind in pairwise(calls[1:])
        if set(by_producer.get(call, ())) == {behind}
        and stage_of.get(call) == stage_of.get(behind)
        and behind != view.plan.model_spec.block_calls[-1]  # which also stands for what the model returns
        and others.isdisjoint((call, behind))  # glue behind it may read what came before it
    )


def _max_in_flight(actions: Iterable[Action]) -> dict[str, int]:
    """Returns, by block call, the most microbatches between its forward and the end of its backward."""
    now, most = dict[str, int](), dict[str, int]()
    for action in actions:
        if action.kind == "F" or action.kind in WEIGHT_GRAD_KINDS:
            now[action.subject] = now.get(action.subject, 0) + (1 if action.kind == "F" else -1)
            most[action.subject] = max(most.get(action.subject, 1), now[action.subject])
    return most
