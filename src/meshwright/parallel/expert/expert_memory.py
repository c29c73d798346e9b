"""Memory of experts that lie on several ranks: what is expected if all are chosen alike, and the most.

    saved                    pairs of a token and an expert x bytes of one, as the trial of the model measured
    scratch of a backward    the largest of its moments: rows arrive, experts compute, gradients return

    T tokens on each of n ranks, k of E experts chosen, e of them on the rank:
      pairs     expected n T k e / E      at most n T min(k, e)
      rows      expected (n-1) T p        at most (n-1) T         p: share of tokens with an expert there

A row that arrives lies in the message and in each of its pairs. Pairs that are computed in chunks
(chunked_experts.py) save nothing but the rows. Sums that return are saved.
In the dense form (Llama 4) an expert computes as many rows as the one with the most: at most all pairs for
each. Where ranks along tp have the same tokens no row travels, and n is 1.
Limits: where the trial could not measure experts (in float64, which is for comparisons), a plan counts what
one device saves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from meshwright.comm.collectives.comm_volume import DTYPE_NBYTES
from meshwright.parallel.expert.chunked_experts import chunk_size, expected_pairs, pair_counts
from meshwright.parallel.expert.dispatch import ExpertPlaces, count_names
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ExpertsCall
from meshwright.plan.model_spec.op_sizes_and_memory import AroundExperts, ExpertsMemory, LinearInSamples
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.memory.block_call_memory import (
    block_memories,
    expert_rows_fraction,
    local_param_fractions,
    saved_fraction,
)
from meshwright.plan.step.memory.memory_names import (
    EXPERTS_SCRATCH,
    SCRATCH,
    saved_activations_name,
    saved_pairs_name,
    saved_rows_name,
    saved_sums_name,
)
from meshwright.plan.step.program import Action, Allocation, RuntimeSize, with_extra_memory
from meshwright.plan.step.single_device_program import WEIGHT_GRAD_KINDS, samples_per_microbatch

POSITION_NBYTES = 8  # of the number of a row or of an expert: int64
WHOLE = Fraction(1)


@dataclass(frozen=True)
class RoutedCall:
    """The `number`-th call of experts in its block call on a rank with `num_local` of the experts.

    It has `tokens`, as each rank of `places` has. `sent` and `received` are each the rows that are expected,
    and the most.
    """

    call: ExpertsCall
    number: int
    places: ExpertPlaces
    num_local: int
    tokens: int
    sent: tuple[int, int]
    received: tuple[int, int]

    @property
    def expected_pairs(self) -> float:
        """The pairs that are expected if all experts are chosen alike."""
        return expected_pairs(self.call.routed, self.tokens, self.places.num_ranks, self.num_local)

    @property
    def most_per_pair(self) -> int:
        """The most rows that experts compute for a pair: in the dense form, one for each expert here."""
        return self.num_local if self.call.form == "dense" else 1

    @property
    def max_pairs(self) -> int:
        """The most pairs: all tokens choose as many experts of the rank as they can."""
        rows = max(self.tokens, self.received[1] // max(1, self.places.num_ranks - 1)) + self.received[1]
        return max(int(self.expected_pairs), rows * min(self.call.routed.top_k, self.num_local))


@dataclass(frozen=True)
class _Load:
    """The load of one call on a rank: its tokens, the rows that it sends and receives, and pairs, in the
    dense form with the rows that pad them.
    """

    tokens: int
    sent: int
    received: int
    pairs: int


@dataclass(frozen=True)
class _CallMemory:
    """The memory of the `number`-th call of its block call on a rank, which computes `chunk` pairs at once.

    The rank has `weight_fraction` of the parameters of the experts, and their gradients take `grad_nbytes`. A
    row travels with `sent_nbytes`. With `is_summed` other ranks have the same tokens, and what each computes
    is summed.
    """

    call: ExpertsCall
    number: int
    memory: ExpertsMemory
    chunk: int
    weight_fraction: Fraction
    grad_nbytes: int
    sent_nbytes: int
    is_summed: bool

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row with the indices and weights of its experts."""
        return max(self.memory.row_nbytes, self.sent_nbytes) + self.call.top_k * 2 * POSITION_NBYTES

    @property
    def pair_nbytes(self) -> int:
        """Bytes that a pair saves, with its positions."""
        return ceil(self.memory.saved_activations.per_sample) + 2 * POSITION_NBYTES

    @property
    def sum_nbytes(self) -> int:
        """Bytes of a row of sums, which are in float32 at least."""
        return max(self.memory.row_nbytes, self.call.hidden_size * DTYPE_NBYTES["float32"])

    def saved_rows(self, load: _Load) -> int:
        """Returns the rows that are kept to compute pairs once more."""
        return load.tokens + load.received if load.pairs > self.chunk else 0

    def saved_pairs(self, load: _Load) -> int:
        """Returns how many pairs are saved, at most: none if they are computed once more."""
        return min(load.pairs, self.chunk)

    def saved_nbytes(self, load: _Load) -> int:
        """Returns the bytes that are allocated for what is saved under `load`."""
        rows = self.saved_rows(load) * self.row_nbytes + load.sent * self.sum_nbytes
        return self.saved_pairs(load) * self.pair_nbytes + rows

    def peaks(self, load: _Load, *, with_grads: bool) -> Iterator[tuple[bool, int]]:
        """Yields the bytes beside those saved at each moment, and whether it is in a forward.

        With `with_grads` they include the gradients of parameters of the experts that exist by then.
        """
        row, sent, sums = self.memory.row_nbytes, self.row_nbytes, self.sum_nbytes
        saved, pairs, is_chunked = self.saved_nbytes(load), self.saved_pairs(load), load.pairs > self.chunk
        rows = load.tokens + load.received
        kept = 0 if is_chunked else load.received * sent  # else it is among what is saved
        forward = self._part(self.memory.forward, pairs)
        backward = self._part(self.memory.backward_with_grads if with_grads else self.memory.backward, pairs)
        grads = self.grad_nbytes if with_grads else 0
        yield True, load.sent * (row + sent) + load.received * sent - saved  # rows arrive
        if is_chunked:  # a chunk runs, in backward once more, and adds to the gradients of others
            forward -= pairs * self.pair_nbytes
            yield True, forward + rows * sums
            yield False, max(0, forward, backward) + rows * (sums + 2 * row) + self.grad_nbytes
        else:
            yield True, kept + forward - saved
        yield True, kept + (pairs + rows) * sums  # results are added, and return
        if self.is_summed:  # sums of this rank, in the dtype of the tokens, and of all ranks
            yield True, kept + load.tokens * (sums + 2 * row)
            yield False, 2 * load.tokens * row - saved + grads  # so with their gradients
        yield (
            False,
            load.received * (self.sent_nbytes + sums) + max(load.sent, pairs) * sums,
        )  # gradients come
        yield False, backward
        yield False, (pairs + rows) * row - saved + grads  # gradients of rows are added, and return
        yield False, (rows + load.tokens) * row + (load.received + load.sent) * sent - saved + grads

    def saved_weight_nbytes(self) -> int:
        """Returns the bytes of copies of weights that are saved."""
        return self._part(self.memory.saved_activations, 0)

    def _part(self, quantity: LinearInSamples, pairs: int) -> int:
        return quantity.signed_local_total(pairs, WHOLE, self.weight_fraction)


@dataclass(frozen=True)
class _BlockExperts:
    """The calls of experts in one block call, each with the load that is expected, and the largest one.

    `fractions` are those that the rank has of the saved activations, of the tokens, and of the parameters;
    `rows` that of the rows of experts.
    """

    around: AroundExperts
    num_samples: int
    fractions: tuple[Fraction, Fraction, Fraction]
    rows: Fraction
    calls: tuple[tuple[_CallMemory, _Load, _Load], ...]

    def edit(self, action: Action) -> Action:
        """Returns `action`, of the block call, with what experts save or need."""
        if action.kind == "F":
            extra = sum(memory.saved_weight_nbytes() for memory, _, _ in self.calls)
            extra -= self._part(self.around.saved_by_experts, self.rows)
            name = saved_activations_name(action.subject, action.microbatch)
            action = with_extra_memory(action, name, extra)
            return replace(action, allocations=(*action.allocations, *self._saved(action.microbatch)))
        if action.kind not in WEIGHT_GRAD_KINDS:
            return action
        others = [each for each in action.allocations if each.name != SCRATCH]
        new_grads = sum(each.nbytes for each in others)
        before = sum(each.nbytes for each in action.allocations) - new_grads
        # what one gradient needs that is added to an earlier one
        accumulated = 0 if new_grads else min(before, max(memory.grad_nbytes for memory, _, _ in self.calls))
        expected, most = (
            max(accumulated, self._scratch(new_grads, at_most=at_most)) for at_most in (False, True)
        )
        memory, few, many = self.calls[0]
        more_pairs = many.pairs - few.pairs
        each = ceil(max(0, most - expected) / more_pairs) if more_pairs else 0
        counts = pair_counts(memory.call, memory.number, action.microbatch)
        size = RuntimeSize(counts.more_pairs, each, 0, more_pairs)
        allocations = Allocation(SCRATCH, expected), Allocation(EXPERTS_SCRATCH, 0, size), *others
        names = (each.name for each in self._saved(action.microbatch))
        return replace(action, allocations=allocations, frees=(*action.frees, *names))

    def _saved(self, microbatch: int | None) -> Iterator[Allocation]:
        for memory, expected, most in self.calls:
            counts, subject = pair_counts(memory.call, memory.number, microbatch), memory.call.block_call
            pairs = RuntimeSize(
                counts.saved_pairs, memory.pair_nbytes, expected.pairs, memory.saved_pairs(most)
            )
            rows = RuntimeSize(counts.saved_rows, memory.row_nbytes, 0, memory.saved_rows(most))
            yield Allocation(saved_pairs_name(subject, memory.number, microbatch), pairs.expected, pairs)
            yield Allocation(saved_rows_name(subject, memory.number, microbatch), rows.expected, rows)
            if not most.sent:
                continue
            to_experts, _ = count_names(memory.call, memory.number, microbatch)
            sums = RuntimeSize(to_experts, memory.sum_nbytes, expected.sent, most.sent)
            yield Allocation(saved_sums_name(subject, memory.number, microbatch), sums.expected, sums)

    def _scratch(self, new_grads: int, *, at_most: bool) -> int:
        """Returns the scratch of a backward that makes `new_grads` bytes of gradients."""
        (inside, tokens, _), around = self.fractions, self.around
        loads = [(memory, most if at_most else expected) for memory, expected, most in self.calls]
        late = self._part(around.late_peak_with_grads if new_grads else around.late_peak, inside)
        found = [
            self._part(around.peak, inside),
            late - sum(memory.saved_nbytes(load) for memory, load in loads),
        ]
        at_forward, at_backward = (
            self._part(each, tokens) for each in (around.at_forward, around.at_backward)
        )
        for memory, load in loads:
            for in_forward, nbytes in memory.peaks(load, with_grads=new_grads > 0):
                found.append((at_forward if in_forward else at_backward) + nbytes)
        return max(0, max(found) - new_grads)

    def _part(self, quantity: LinearInSamples, fraction: Fraction) -> int:
        return quantity.signed_local_total(self.num_samples, fraction, self.fractions[2])


def add_experts_memory(
    actions: Sequence[Action],
    calls: Sequence[RoutedCall],
    view: RankView,
    job: Job,
    checkpoint_load: float,
) -> list[Action]:
    """Returns `actions` of the rank of `view` with the memory of experts that lie on several ranks."""
    num_samples = samples_per_microbatch(actions, view.plan, job)
    by_block_call = _block_experts(calls, view, job, checkpoint_load, num_samples)
    found, in_use = list[Action](), False
    for action in actions:
        if in_use and SCRATCH in action.frees:
            action, in_use = replace(action, frees=(*action.frees, EXPERTS_SCRATCH)), False
        if action.subject in by_block_call:
            action = by_block_call[action.subject].edit(action)
            in_use = in_use or any(each.name == EXPERTS_SCRATCH for each in action.allocations)
        found.append(action)
    return found


def _block_experts(
    calls: Sequence[RoutedCall], view: RankView, job: Job, checkpoint_load: float, num_samples: int
) -> dict[str, _BlockExperts]:
    memory, found = view.model_spec.memory, dict[str, _BlockExperts]()
    modules = {} if memory is None else {each.name: each for each in memory.experts}
    weights = local_param_fractions(view) if modules else {}
    for block_call, block in block_memories(view.model_spec).items():
        own = [each for each in calls if each.call.block_call == block_call]
        known = own and view.model_spec.saved_numel and all(each.call.name in modules for each in own)
        if block.around_experts is None or not known:
            continue
        fractions = (
            saved_fraction(view, block_call),
            view.work_share.token_fraction(block_call),
            weights.get(block_call, WHOLE),
        )
        loads = (
            (_call_memory(each, modules[each.call.name], view, job, checkpoint_load), *_loads(each))
            for each in own
        )
        rows = expert_rows_fraction(view, block_call)
        found[block_call] = _BlockExperts(block.around_experts, num_samples, fractions, rows, tuple(loads))
    return found


def _call_memory(
    routed: RoutedCall, memory: ExpertsMemory, view: RankView, job: Job, checkpoint_load: float
) -> _CallMemory:
    call = routed.call
    numel, fraction = _local_weights(call, view)
    return _CallMemory(
        call.routed,
        routed.number,
        memory,
        chunk_size(routed.expected_pairs, checkpoint_load, routed.most_per_pair),
        fraction,
        numel * DTYPE_NBYTES[job.precision.parameters],
        call.hidden_size * DTYPE_NBYTES[job.precision.compute],
        routed.places.num_summed > 1,
    )


def _loads(routed: RoutedCall) -> tuple[_Load, _Load]:
    """Returns the load of a call that is expected, and the largest one."""
    sent, received = routed.sent, routed.received
    return (
        _Load(routed.tokens, sent[0], received[0], int(routed.expected_pairs)),
        _Load(routed.tokens, sent[1], received[1], routed.max_pairs * routed.most_per_pair),
    )


def _local_weights(call: ExpertsCall, view: RankView) -> tuple[int, Fraction]:
    """Returns the elements of the parameters of `call` on the rank, and their fraction of all."""
    local = whole = 0
    for param_sharding, logical in zip(view.param_shardings, view.logical_param_shardings, strict=True):
        if not set(call.params).isdisjoint(param_sharding.param.names):
            local += param_sharding.param.numel
            whole += logical.param.numel
    return local, Fraction(local, whole) if whole else WHOLE
