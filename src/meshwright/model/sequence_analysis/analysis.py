"""How tokens go through a model: learnt from one forward on fake tensors, by following them from operation to operation.

Rows are cut to a number of tokens that no size of the model has anything to do with, so that every dim of tokens is known by its
size; rows of unlike lengths to unlike numbers. The forward runs as it will on ranks that have some of the tokens, with all of
them on the only one:

    glue       sees tensors that look whole (model/apart.py); what it needs all tokens of is noted
    a block    takes in this rank's tokens; which dims of what it takes and gives are tokens is noted (model/visited.py)
    within     every operation treats each token by itself (model/bytoken.py), or is attention, or is named

Where a block attends to something else, what it takes in may be tokens all the same, those of an image: then the forward runs
once more, and they begin there (model/sizes.py). A further one, on other numbers, shows what is computed with them
(model/lengths.py).
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

from meshwright.model.blocks.loss_inputs import LossSpec
from meshwright.model.sequence_analysis.block_trace import BlockTrace
from meshwright.model.sequence_analysis.gathers import compare_gathers, rank_loss
from meshwright.model.sequence_analysis.lengths import TrialLengths, length_dependence
from meshwright.model.sequence_analysis.token_dims import MIN_PRIME, distinguishing_primes
from meshwright.model.trial.slice_trial import silence_fake_errors
from meshwright.model.trial.trial import PROBE_BATCH, depends_on_values
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import BlockSequenceInfo, GlueGather, SequenceInfo

Example = Mapping[str, torch.Tensor]
NUM_TRIAL_LENGTHS = 3  # numbers of tokens that are tried
AMBIGUOUS_DIM = "gives out, or takes in, a tensor of which another dim is as large as a row has tokens"


@dataclass(frozen=True)
class SequenceTrial:
    """What a trial runs: a module, its blocks, who is told of each visit, rows as the module takes them.

    The parameters are of the `mode`, in which blocks run; the rows are real, and targets are among them.
    """

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    on_block_call: Callable[[str], None]
    batch: Example
    fake_mode: FakeTensorMode


LARGER_BATCH_SIZE = (
    4  # rows of a forward that shows what depends on their number; no prime that tokens are cut to divides it
)
TrialFactory = Callable[[Example, int], AbstractContextManager[SequenceTrial]]


def analyze_sequence(
    inputs: Example,
    targets: Example,
    block_calls: Sequence[str],
    module: nn.Module,
    make_trial: TrialFactory,
    loss_spec: LossSpec | None = None,
) -> SequenceInfo | None:
    """What a model does with tokens; None where no input is rows of tokens, and no block takes any in.

    `visits` are those of a whole forward; `module` has the model's sizes, and `ready(batch, rows)` gives a trial on so many, on
    MORE of them in float64. `judge` is the loss, where that is known.
    """
    trials = _SequenceTrials(inputs, targets, tuple(block_calls), module, make_trial, loss_spec)
    rows = _sequence_lengths(inputs)
    whole, why = None, ""
    for some in dict.fromkeys((rows, rows[:1])):  # of several lengths, the others may be no tokens
        found, reason = trials.first_trace(some)
        if found is not None and (whole is None or not _mixes_tokens(found)):
            whole = found
        why = why or reason
        if whole is not None and not _mixes_tokens(whole):
            break
    lengths = tuple(
        dict.fromkeys(
            (*rows[:1], *(whole.trial_lengths.planned_lengths.values() if whole is not None else ()))
        )
    )
    if not lengths:
        return (
            None
            if not why
            else SequenceInfo(
                1, (), (), tuple(BlockSequenceInfo(visit, not_sequence_parallel=why) for visit in block_calls)
            )
        )
    told = {
        key: value.shape[1] for key, value in {**inputs, **targets}.items() if _has_tokens(value, lengths)
    }
    found = SequenceInfo(lengths[0], tuple(filter(told.get, inputs)), tuple(filter(told.get, targets)))
    found = replace(
        found, other_lengths=tuple((key, length) for key, length in told.items() if length != found.length)
    )
    if whole is None:
        return replace(
            found,
            block_calls=tuple(BlockSequenceInfo(visit, not_sequence_parallel=why) for visit in block_calls),
        )
    known = _check_other_lengths(whole, trials.other_traces(whole))
    if len(lengths) == 1:
        known = tuple(replace(passing, input_num_tokens=(), output_num_tokens=()) for passing in known)
    found = replace(found, attention_calls=tuple(whole.attention_calls), conv_calls=tuple(whole.conv_calls))
    met, varies = trials.find_gathers(whole)
    return replace(
        found,
        block_calls=known,
        gathers=met,
        batch_dependent_reason=varies,
        reads_values=whole.reads_values,
        has_untracked_writes=whole.has_untracked_writes,
    )


@dataclass(frozen=True)
class _SequenceTrials:
    """Forwards on rows like `inputs`, cut to several numbers of tokens."""

    inputs: Example
    targets: Example
    block_calls: tuple[str, ...]
    module: nn.Module
    make_trial: TrialFactory
    loss_spec: LossSpec | None

    def first_trace(self, rows: Sequence[int]) -> tuple[BlockTrace | None, str]:
        """What a forward shows where rows of the lengths `rows` are tokens, or why it shows nothing.

        Of several numbers of tokens, the first on which no block mixes them, if another dim may have been taken for them.
        """
        kept, why, floating = None, "", any(value.is_floating_point() for value in self.inputs.values())
        for attempt in range(NUM_TRIAL_LENGTHS if rows else 1):
            found, reason = self._run(rows, attempt)
            if found is not None and found.calls_attending_elsewhere:
                more, reason = self._run(rows, attempt, found.calls_attending_elsewhere)
                found = more if not rows or (more is not None and not _mixes_tokens(more)) else found
            elif found is not None and not rows:
                return None, ""  # nobody attends
            kept, why = kept or found, why or reason
            if found is not None and (not floating or not _mixes_tokens(found)):
                return found, ""
        return kept, why

    def other_traces(self, whole: BlockTrace) -> Iterator[tuple[BlockTrace | None, str]]:
        """What forwards on other numbers of tokens show than that of `whole`, the smallest ones."""
        yield from (
            self._run(
                whole.trial_lengths.input_lengths,
                attempt,
                whole.starting_calls,
                apart=whole.trial_lengths.planned_lengths,
            )
            for attempt in range(NUM_TRIAL_LENGTHS)
        )

    def find_gathers(self, whole: BlockTrace) -> tuple[tuple[GlueGather, ...], str]:
        """What ranks bring together, as `whole` and a forward on more rows show it; and why that varies, if it does."""
        if not whole.gathers.gathers:
            return (), ""
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
        other = next(filter(None, others), None)
        return compare_gathers(
            whole.gathers.gathers,
            None if other is None else other.gathers.gathers,
            (PROBE_BATCH, LARGER_BATCH_SIZE),
        )

    def _run(
        self,
        rows: Sequence[int],
        attempt: int,
        begins: Collection[str] = (),
        apart: Collection[int] = (),
        count: int = PROBE_BATCH,
    ) -> tuple[BlockTrace | None, str]:
        """What a forward shows on `count` rows whose tokens are none of `apart` in number; of any of those, small numbers."""
        sizes = self._choose_lengths(rows, attempt, apart, count)
        primes, told = {planned: prime for prime, planned in sizes.planned_lengths.items()}, sizes.description
        cut, beside = (
            {key: resize_sequence(value, primes) for key, value in of.items()}
            for of in (self.inputs, self.targets)
        )
        targets = [key for key, value in self.targets.items() if _has_tokens(value, primes)]
        try:
            with silence_fake_errors(), self.make_trial({**cut, **beside}, count) as run:
                loss = partial(self._loss, run.batch, targets)
                visited = BlockTrace(
                    run.module, run.blocks, run.on_block_call, run.fake_mode, sizes, frozenset(begins)
                )
                with visited.trace_blocks():
                    visited.run({key: run.batch[key] for key in cut}, loss)
        except Exception as error:  # whatever it is, it is told in the plan of who needs to know
            return None, _error_reason(error, sizes.description)
        if tuple(visited.block_calls) != self.block_calls:
            return None, f"on rows of {told} tokens it runs other blocks"
        return visited, ""

    def _loss(self, batch: Example, targets: Sequence[str], outputs: Any) -> torch.Tensor | None:
        return None if self.loss_spec is None else rank_loss(self.loss_spec, outputs, batch, targets)

    def _choose_lengths(
        self, rows: Sequence[int], attempt: int, apart: Collection[int], count: int
    ) -> TrialLengths:
        known = {
            size for tensor in (*self.module.parameters(), *self.module.buffers()) for size in tensor.shape
        }
        known |= {
            size for value in self.inputs.values() if value.is_floating_point() for size in value.shape[1:]
        } - {*rows}

        def found(length: int, used: Collection[int], others: Iterable[int] = ()) -> Iterator[int]:
            primes = distinguishing_primes(known.union(others), MIN_PRIME - 1 if apart else length)
            return (prime for prime in primes if prime not in apart and all(each % prime for each in used))

        chosen: dict[int, int] = {}
        for length in rows:
            chosen[next(islice(found(length, chosen), attempt, None))] = length
        return TrialLengths(chosen, lambda length, used: next(found(length, used, (length,))), count)


def _sequence_lengths(inputs: Example) -> tuple[int, ...]:
    """How long the rows of tokens are that inputs have, that of the first one first."""
    found = (value.shape[1] for value in inputs.values() if value.ndim == 2 and not value.is_floating_point())
    return tuple(dict.fromkeys(filter(None, found)))


def _has_tokens(value: torch.Tensor, lengths: Collection[int]) -> bool:
    """Whether a tensor of a batch has tokens along dim 1."""
    return value.ndim > 1 and value.shape[1] in lengths and not (value.is_floating_point() and value.ndim > 3)


def _mixes_tokens(visited: BlockTrace) -> bool:
    return any(passing.not_sequence_parallel for passing in visited.block_calls.values())


def _check_other_lengths(
    whole: BlockTrace, others: Iterable[tuple[BlockTrace | None, str]]
) -> tuple[BlockSequenceInfo, ...]:
    """The visits of `whole`, with what keeps them from running on fewer tokens, as the first of the `others` shows that ran."""
    reason = ""
    for other, why in others:
        if other is not None:
            return tuple(_compare_block_call(passing, whole, other) for passing in whole.block_calls.values())
        reason = why
    return tuple(
        replace(passing, not_sequence_parallel=passing.not_sequence_parallel or reason)
        for passing in whole.block_calls.values()
    )


def _compare_block_call(
    passing: BlockSequenceInfo, whole: BlockTrace, other: BlockTrace
) -> BlockSequenceInfo:
    if passing.not_sequence_parallel or passing.is_replicated or not passing.num_sharded_tokens(1):
        return passing
    theirs = other.block_calls[passing.block_call]
    if (
        passing.arg_paths == theirs.arg_paths
        and not theirs.not_sequence_parallel
        and (passing.input_token_dims, passing.output_token_dims)
        != (theirs.input_token_dims, theirs.output_token_dims)
    ):
        return replace(passing, not_sequence_parallel=f"{passing.block_call} {AMBIGUOUS_DIM}")
    if (
        passing.arg_paths == theirs.arg_paths
        and not theirs.not_sequence_parallel
        and (passing.input_num_tokens, passing.output_num_tokens)
        != (theirs.input_num_tokens, theirs.output_num_tokens)
    ):
        return replace(
            passing,
            not_sequence_parallel=f"{passing.block_call} joins tokens that begin within with those of its rows",
        )
    one, two = (
        [each for each in run.conv_calls if each.block_call == passing.block_call] for run in (whole, other)
    )
    if one != two:
        return replace(
            passing,
            not_sequence_parallel=f"{passing.block_call} convolves tokens, or pads them, by their number",
        )
    mine, found = (each.ops.get(passing.block_call, []) for each in (whole, other))
    return replace(
        passing, not_sequence_parallel=length_dependence(mine, found, other.trial_lengths.description)
    )


def _error_reason(error: Exception, rows: str) -> str:
    if depends_on_values(error):
        return "its forward looks at values, so nobody can say beforehand what it does with tokens"
    text = str(error).partition("\n")[0]
    return (
        text
        if isinstance(error, PlanError)
        else f"it does not run on rows of {rows} tokens: {type(error).__name__}: {text}"
    )


def resize_sequence(value: torch.Tensor, new_lengths: Mapping[int, int]) -> torch.Tensor:
    """A tensor of a batch with as many tokens as `primes` says for those that it has; a mask has them along two dims.

    Of what has two values, as masks have, the ends stay: rows that are padded there are padded then too.
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
    late = trial // 2 if ends else 0
    early = repeated.narrow(dim, 0, trial - late)
    return torch.cat([early, repeated.narrow(dim, length - late, late)], dim) if late else early
