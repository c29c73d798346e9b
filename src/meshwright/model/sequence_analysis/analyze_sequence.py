"""Analyzes how a model treats the sequence dim, from one forward on fake tensors followed operation by
operation.

Sequences are cut to a length that divides no size of the model, so every token dim is known by its size;
inputs of different lengths are cut to different primes. The forward runs as on ranks with sequence shards,
with all tokens on a single rank:

    glue        sees full-length tensors (sharded_activation.py); operations that need all tokens are recorded
    a block     takes local tokens; the token dims of its inputs and outputs are recorded (block_trace.py)
    in a block  every operation treats each token by itself (token_rules.py), is attention, or is reported

If a block attends to something else, its inputs may still be tokens, such as image patches: the forward then
runs once more and tokens start there (trial_lengths.py). What is computed from the length is told by
two forwards that ran before, if they had two lengths; otherwise, or if they differ, a further forward with
other lengths finds it. If glue gathers what no block call takes, or what may be cast, that forward has more
samples too, in another dtype, and tells which gathered tensors grow with them; a difference that it finds is
looked for with other lengths only.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.context_parallel.patch_hf_attention import UnsupportedAttention
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.sequence_analysis.block_trace import BlockTrace
from meshwright.model.sequence_analysis.glue_gather_trace import compare_gathers, rank_loss
from meshwright.model.sequence_analysis.token_dims import MIN_PRIME, distinguishing_primes
from meshwright.model.sequence_analysis.trial_lengths import (
    BlockOnTwoLengths,
    TrialLengths,
    length_dependence,
)
from meshwright.model.tensors.fake_tensor_limits import depends_on_values
from meshwright.model.trial.fake_tensor_forward import PROBE_BATCH
from meshwright.model.trial.weight_slice_trial import silence_fake_errors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import BlockSequenceInfo, GlueGather, SequenceInfo

Example = Mapping[str, torch.Tensor]
NUM_TRIAL_LENGTHS = 3  # lengths to try
AMBIGUOUS_DIM = "has an input or output with another dim as large as its sequences"


@dataclass(frozen=True)
class SequenceTrial:
    """One trial forward: a module, its blocks, a callback for block calls, and a batch with targets.

    Parameters are fake tensors of `fake_mode`, in which blocks run; the batch is real.
    """

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    on_block_call: Callable[[str], None]
    batch: Example
    fake_mode: FakeTensorMode


LARGER_BATCH_SIZE = 4  # a second batch size; divisible by no prime that is used as a length
TrialFactory = Callable[[Example, int], AbstractContextManager[SequenceTrial]]


def analyze_sequence(
    inputs: Example,
    targets: Example,
    block_calls: Sequence[str],
    model_sizes: frozenset[int],
    make_trial: TrialFactory,
    loss: Loss,
    equal_calls: Mapping[str, str],
    on_two_lengths: Mapping[str, BlockOnTwoLengths],
) -> SequenceInfo | None:
    """Returns how a model treats the sequence dim; None if no input is a sequence of tokens and no block
    takes any.

    `block_calls` are those of a full forward; `model_sizes` the sizes of all parameters and buffers, and
    `make_trial(batch, num_samples)` returns a trial, in float64 if `num_samples` is LARGER_BATCH_SIZE.
    `loss` is the loss; `equal_calls` names the first equal block call of some; `on_two_lengths` holds the
    block calls that compute the same on two lengths.
    """
    trials = _SequenceTrials(inputs, targets, tuple(block_calls), model_sizes, make_trial, loss, equal_calls)
    input_lengths = sequence_lengths(inputs)
    whole, reason = trials.best_trace(input_lengths)
    planned_lengths = () if whole is None else whole.trial_lengths.planned_lengths.values()
    lengths = tuple(dict.fromkeys((*input_lengths[:1], *planned_lengths)))
    without_trace = tuple(BlockSequenceInfo(name, not_sequence_parallel=reason) for name in block_calls)
    if not lengths:
        return SequenceInfo(1, (), (), without_trace) if reason else None
    num_tokens_by_key = {
        key: value.shape[1] for key, value in {**inputs, **targets}.items() if _has_tokens(value, lengths)
    }
    found = SequenceInfo(
        lengths[0],
        tuple(filter(num_tokens_by_key.get, inputs)),
        tuple(filter(num_tokens_by_key.get, targets)),
        without_trace,
        other_lengths=tuple(
            (key, length) for key, length in num_tokens_by_key.items() if length != lengths[0]
        ),
    )
    if whole is None:
        return found
    larger, block_infos = None, tuple(whole.block_calls.values())
    if not _keeps_to_lengths(whole, on_two_lengths):
        larger = trials.larger_trace(whole)
        block_infos = _check_other_lengths(whole, [(larger, "")])
        if larger is None or _reasons(block_infos) != _reasons(whole.block_calls.values()):
            block_infos = _check_other_lengths(whole, trials.other_traces(whole))
    if len(lengths) == 1:
        block_infos = tuple(replace(each, input_num_tokens=(), output_num_tokens=()) for each in block_infos)
    gathers, varying_reason = _find_gathers(whole, larger)
    with_grad = {each.block_call for each in gathers if each.backward_calls}
    block_infos = tuple(
        each if each.block_call in with_grad else each.without_captured_grad() for each in block_infos
    )
    return replace(
        found,
        block_calls=block_infos,
        attention_calls=tuple(whole.attention_calls),
        conv_calls=tuple(whole.conv_calls),
        sample_gathers=tuple(whole.sample_gathers),
        gathers=gathers,
        batch_dependent_reason=varying_reason,
        reads_values=whole.reads_values,
        has_untracked_writes=whole.has_untracked_writes,
    )


@dataclass(frozen=True)
class _SequenceTrials:
    inputs: Example
    targets: Example
    block_calls: tuple[str, ...]
    model_sizes: frozenset[int]
    make_trial: TrialFactory
    loss: Loss
    equal_calls: Mapping[str, str]

    def best_trace(self, input_lengths: Sequence[int]) -> tuple[BlockTrace | None, str]:
        """Returns the trace of a forward on sequences of all `input_lengths`, or why there is none.

        If blocks mix tokens there, only the first length may be one of sequences: the trace with that one
        counts if in it no block does.
        """
        best, first_reason = None, ""
        for lengths_tried in dict.fromkeys((tuple(input_lengths), tuple(input_lengths[:1]))):
            try:
                found, reason = self.first_trace(lengths_tried)
            except UnsupportedAttention as error:
                return None, first_reason or _error_reason(error, "")
            first_reason = first_reason or reason
            if found is not None and (best is None or not _mixes_tokens(found)):
                best = found
            if best is not None and not _mixes_tokens(best):
                break
        return best, first_reason

    def first_trace(self, input_lengths: Sequence[int]) -> tuple[BlockTrace | None, str]:
        """Returns the trace of a forward on sequences of `input_lengths` tokens, or why there is none.

        Of several lengths it takes the first at which no block mixes tokens, since another dim may equal the
        length. What keeps two lengths from running alike is not tried with a third.
        """
        first_found, first_reason, floating = (
            None,
            "",
            any(value.is_floating_point() for value in self.inputs.values()),
        )
        for attempt in range(NUM_TRIAL_LENGTHS if input_lengths else 1):
            found, reason = self._run(input_lengths, attempt)
            if found is not None and found.calls_attending_elsewhere:
                more, reason = self._run(input_lengths, attempt, found.calls_attending_elsewhere)
                found = more if not input_lengths or (more is not None and not _mixes_tokens(more)) else found
            elif found is not None and not input_lengths:
                return None, ""  # no attention in the model
            if attempt and reason and reason == first_reason:
                break  # it names no length, and holds for all
            first_found, first_reason = first_found or found, first_reason or reason
            if found is not None and (not floating or not _mixes_tokens(found)):
                return found, ""
        return first_found, first_reason

    def other_traces(self, whole: BlockTrace) -> Iterator[tuple[BlockTrace | None, str]]:
        """Yields traces of forwards on other, small lengths."""
        yield from (
            self._run(
                whole.trial_lengths.input_lengths,
                attempt,
                whole.starting_calls,
                excluded=whole.trial_lengths.planned_lengths,
            )
            for attempt in range(NUM_TRIAL_LENGTHS)
        )

    def larger_trace(self, whole: BlockTrace) -> BlockTrace | None:
        """Returns the trace of a forward on more samples of other lengths, in float64; None if glue gathers
        nothing.
        """
        if not whole.gathers.gathers:
            return None
        others = (
            self._run(
                whole.trial_lengths.input_lengths,
                attempt,
                whole.starting_calls,
                whole.trial_lengths.planned_lengths,
                LARGER_BATCH_SIZE,
            )[0]
            for attempt in range(NUM_TRIAL_LENGTHS)
        )
        return next(filter(None, others), None)

    def _run(
        self,
        input_lengths: Sequence[int],
        attempt: int,
        begins: Collection[str] = (),
        excluded: Collection[int] = (),
        count: int = PROBE_BATCH,
    ) -> tuple[BlockTrace | None, str]:
        """Runs a trial on `count` samples with other lengths than `excluded` (small if there are any)."""
        sizes = self._choose_lengths(input_lengths, attempt, excluded, count)
        prime_of, num_tokens_by_key = (
            {planned: prime for prime, planned in sizes.planned_lengths.items()},
            sizes.description,
        )
        inputs, targets_cut = (
            {key: resize_sequence(value, prime_of) for key, value in of.items()}
            for of in (self.inputs, self.targets)
        )
        targets = [key for key, value in self.targets.items() if _has_tokens(value, prime_of)]
        try:
            with silence_fake_errors(), self.make_trial({**inputs, **targets_cut}, count) as run:
                loss = partial(self._loss, run.batch, targets)
                trace = BlockTrace(
                    run.module,
                    run.blocks,
                    run.on_block_call,
                    run.fake_mode,
                    sizes,
                    frozenset(begins),
                    self.equal_calls,
                )
                with trace.trace_blocks():
                    trace.run({key: run.batch[key] for key in inputs}, loss)
        except UnsupportedAttention:
            raise
        except Exception as error:  # the reason is reported when a plan needs the result
            return None, _error_reason(error, sizes.description)
        if tuple(trace.block_calls) != self.block_calls:
            return None, f"on sequences of {num_tokens_by_key} tokens it runs other blocks"
        return trace, ""

    def _loss(self, batch: Example, targets: Sequence[str], outputs: Any) -> torch.Tensor | None:
        return rank_loss(self.loss, outputs, batch, targets)

    def _choose_lengths(
        self, input_lengths: Sequence[int], attempt: int, excluded: Collection[int], count: int
    ) -> TrialLengths:
        sizes = self.model_sizes | {
            size for value in self.inputs.values() if value.is_floating_point() for size in value.shape[1:]
        }.difference(input_lengths)

        def usable_primes(length: int, used: Collection[int], others: Iterable[int] = ()) -> Iterator[int]:
            prime_of = distinguishing_primes(sizes.union(others), MIN_PRIME - 1 if excluded else length)
            return (
                prime for prime in prime_of if prime not in excluded and all(each % prime for each in used)
            )

        chosen: dict[int, int] = {}
        for length in input_lengths:
            chosen[next(islice(usable_primes(length, chosen), attempt, None))] = length
        return TrialLengths(chosen, lambda length, used: next(usable_primes(length, used, (length,))), count)


def sequence_lengths(inputs: Example) -> tuple[int, ...]:
    """Returns the lengths of the integer inputs [samples, tokens], that of the first input first."""
    found = (value.shape[1] for value in inputs.values() if value.ndim == 2 and not value.is_floating_point())
    return tuple(dict.fromkeys(filter(None, found)))


def _has_tokens(value: torch.Tensor, lengths: Collection[int]) -> bool:
    return value.ndim > 1 and value.shape[1] in lengths and not (value.is_floating_point() and value.ndim > 3)


def _mixes_tokens(trace: BlockTrace) -> bool:
    return any(passing.not_sequence_parallel for passing in trace.block_calls.values())


def _find_gathers(whole: BlockTrace, larger: BlockTrace | None) -> tuple[tuple[GlueGather, ...], str]:
    """Returns the tensors that ranks gather, and why they vary if they do."""
    if not whole.gathers.gathers:
        return (), ""
    other = None if larger is None else larger.gathers.gathers
    return compare_gathers(whole.gathers.gathers, other, (PROBE_BATCH, LARGER_BATCH_SIZE))


def _keeps_to_lengths(whole: BlockTrace, on_two_lengths: Mapping[str, BlockOnTwoLengths]) -> bool:
    """Returns whether two other forwards show that all block calls of `whole` treat any length alike, and
    that what glue gathers grows with the samples.
    """
    if whole.conv_calls or whole.starting_calls:
        return False
    for gather in whole.gathers.gathers:
        known = on_two_lengths.get(gather.consumer)
        if known is None or not known.is_per_sample(gather.path, gather.numel):
            return False
    for info in whole.block_calls.values():
        is_sharded = not info.not_sequence_parallel and info.num_sharded_tokens(1)
        known = on_two_lengths.get(info.block_call)
        if is_sharded and (known is None or not known.has_tokens_as(info)):
            return False
    return True


def _reasons(block_infos: Iterable[BlockSequenceInfo]) -> list[str]:
    return [each.not_sequence_parallel for each in block_infos]


def _check_other_lengths(
    whole: BlockTrace, others: Iterable[tuple[BlockTrace | None, str]]
) -> tuple[BlockSequenceInfo, ...]:
    """Returns the block calls of `whole`, with what keeps them from running on a shard, as the first other
    trace shows it.
    """
    last_reason = ""
    for other, reason in others:
        if other is not None:
            return tuple(_compare_block_call(passing, whole, other) for passing in whole.block_calls.values())
        last_reason = reason
    return tuple(
        replace(passing, not_sequence_parallel=passing.not_sequence_parallel or last_reason)
        for passing in whole.block_calls.values()
    )


def _compare_block_call(
    passing: BlockSequenceInfo, whole: BlockTrace, other: BlockTrace
) -> BlockSequenceInfo:
    if passing.not_sequence_parallel or passing.is_replicated or not passing.num_sharded_tokens(1):
        return passing
    other_info = other.block_calls[passing.block_call]
    if (
        passing.arg_paths == other_info.arg_paths
        and not other_info.not_sequence_parallel
        and (passing.input_token_dims, passing.output_token_dims)
        != (other_info.input_token_dims, other_info.output_token_dims)
    ):
        return replace(passing, not_sequence_parallel=f"{passing.block_call} {AMBIGUOUS_DIM}")
    if (
        passing.arg_paths == other_info.arg_paths
        and not other_info.not_sequence_parallel
        and (passing.input_num_tokens, passing.output_num_tokens)
        != (other_info.input_num_tokens, other_info.output_num_tokens)
    ):
        return replace(
            passing,
            not_sequence_parallel=(
                f"{passing.block_call} joins tokens that start inside the model with those of its inputs"
            ),
        )
    first_convs, second_convs = (
        [each for each in run.conv_calls if each.block_call == passing.block_call] for run in (whole, other)
    )
    if first_convs != second_convs:
        return replace(
            passing,
            not_sequence_parallel=f"{passing.block_call} convolves tokens, or pads them, by their number",
        )
    ops, found = (each.ops.get(passing.block_call, []) for each in (whole, other))
    return replace(
        passing, not_sequence_parallel=length_dependence(ops, found, other.trial_lengths.description)
    )


def _error_reason(error: Exception, input_lengths: str) -> str:
    if depends_on_values(error):
        return "its forward reads tensor values, so its operations on tokens cannot be determined in advance"
    text = str(error).partition("\n")[0]
    return (
        text
        if isinstance(error, PlanError)
        else f"it does not run on sequences of {input_lengths} tokens: {type(error).__name__}: {text}"
    )


def resize_sequence(value: torch.Tensor, new_lengths: Mapping[int, int]) -> torch.Tensor:
    """Returns a tensor of a batch with the `new_lengths` of its sequences; a mask has them along two dims.

    A tensor with two values, such as a padding mask, keeps both ends, so padded sequences stay padded.
    """
    square = value.ndim > 2 and value.shape[-1] == value.shape[-2]
    for dim in range(1, value.ndim):
        length = value.shape[dim]
        if length in new_lengths and (dim == 1 or (square and dim >= value.ndim - 2)):
            value = _resize_dim(value, dim, length, new_lengths[length])
    return value


def _resize_dim(value: torch.Tensor, dim: int, length: int, trial: int) -> torch.Tensor:
    ends = trial < length and len(value.unique()) <= 2
    repeated = torch.cat([value] * -(-trial // length), dim)
    num_from_end = trial // 2 if ends else 0
    head = repeated.narrow(dim, 0, trial - num_from_end)
    return (
        torch.cat([head, repeated.narrow(dim, length - num_from_end, num_from_end)], dim)
        if num_from_end
        else head
    )
