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

from meshwright.model.blocks.loss_inputs import Judge
from meshwright.model.sequence_analysis.block_trace import Visited
from meshwright.model.sequence_analysis.gathers import settled, taken_of
from meshwright.model.sequence_analysis.lengths import Sizes, unlike
from meshwright.model.sequence_analysis.token_dims import SHORTEST, telling
from meshwright.model.trial.slice_trial import quiet
from meshwright.model.trial.trial import PROBE_BATCH, depends_on_values
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import Passing, Together, Tokens

Example = Mapping[str, torch.Tensor]
TRIED = 3  # numbers of tokens that are tried
ALIKE = "gives out, or takes in, a tensor of which another dim is as large as a row has tokens"


@dataclass(frozen=True)
class Trial:
    """What a trial runs: a module, its blocks, who is told of each visit, rows as the module takes them.

    The parameters are of the `mode`, in which blocks run; the rows are real, and targets are among them.
    """

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    enter: Callable[[str], None]
    rows: Example
    mode: FakeTensorMode


MORE = 4  # rows of a forward that shows what depends on their number; no prime that tokens are cut to divides it
Ready = Callable[[Example, int], AbstractContextManager[Trial]]


def tokens_of(
    inputs: Example, targets: Example, visits: Sequence[str], module: nn.Module, ready: Ready, judge: Judge | None = None
) -> Tokens | None:
    """What a model does with tokens; None where no input is rows of tokens, and no block takes any in.

    `visits` are those of a whole forward; `module` has the model's sizes, and `ready(batch, rows)` gives a trial on so many, on
    MORE of them in float64. `judge` is the loss, where that is known.
    """
    trials = _Trials(inputs, targets, tuple(visits), module, ready, judge)
    rows = _rows(inputs)
    whole, why = None, ""
    for some in dict.fromkeys((rows, rows[:1])):  # of several lengths, the others may be no tokens
        found, reason = trials.first(some)
        if found is not None and (whole is None or not _mixing(found)):
            whole = found
        why = why or reason
        if whole is not None and not _mixing(whole):
            break
    lengths = tuple(dict.fromkeys((*rows[:1], *(whole.sizes.planned.values() if whole is not None else ()))))
    if not lengths:
        return None if not why else Tokens(1, (), (), tuple(Passing(visit, mixes=why) for visit in visits))
    told = {key: value.shape[1] for key, value in {**inputs, **targets}.items() if _has_tokens(value, lengths)}
    found = Tokens(lengths[0], tuple(filter(told.get, inputs)), tuple(filter(told.get, targets)))
    found = replace(found, others=tuple((key, length) for key, length in told.items() if length != found.length))
    if whole is None:
        return replace(found, visits=tuple(Passing(visit, mixes=why) for visit in visits))
    known = _at_any_length(whole, trials.others(whole))
    if len(lengths) == 1:
        known = tuple(replace(passing, takes_of=(), gives_of=()) for passing in known)
    found = replace(found, attends=tuple(whole.attends), convolves=tuple(whole.convolves))
    met, varies = trials.brought(whole)
    return replace(found, visits=known, met=met, varies=varies, looks=whole.looks, unseen=whole.unseen)


@dataclass(frozen=True)
class _Trials:
    """Forwards on rows like `inputs`, cut to several numbers of tokens."""

    inputs: Example
    targets: Example
    visits: tuple[str, ...]
    module: nn.Module
    ready: Ready
    judge: Judge | None

    def first(self, rows: Sequence[int]) -> tuple[Visited | None, str]:
        """What a forward shows where rows of the lengths `rows` are tokens, or why it shows nothing.

        Of several numbers of tokens, the first on which no block mixes them, if another dim may have been taken for them.
        """
        kept, why, floating = None, "", any(value.is_floating_point() for value in self.inputs.values())
        for attempt in range(TRIED if rows else 1):
            found, reason = self._run(rows, attempt)
            if found is not None and found.idle:
                more, reason = self._run(rows, attempt, found.idle)
                found = more if not rows or (more is not None and not _mixing(more)) else found
            elif found is not None and not rows:
                return None, ""  # nobody attends
            kept, why = kept or found, why or reason
            if found is not None and (not floating or not _mixing(found)):
                return found, ""
        return kept, why

    def others(self, whole: Visited) -> Iterator[tuple[Visited | None, str]]:
        """What forwards on other numbers of tokens show than that of `whole`, the smallest ones."""
        yield from (self._run(whole.sizes.given, attempt, whole.begins, apart=whole.sizes.planned) for attempt in range(TRIED))

    def brought(self, whole: Visited) -> tuple[tuple[Together, ...], str]:
        """What ranks bring together, as `whole` and a forward on more rows show it; and why that varies, if it does."""
        if not whole.met.found:
            return (), ""
        others = (self._run(whole.sizes.given, attempt, whole.begins, whole.sizes.planned, MORE)[0] for attempt in range(TRIED))
        other = next(filter(None, others), None)
        return settled(whole.met.found, None if other is None else other.met.found, (PROBE_BATCH, MORE))

    def _run(
        self,
        rows: Sequence[int],
        attempt: int,
        begins: Collection[str] = (),
        apart: Collection[int] = (),
        count: int = PROBE_BATCH,
    ) -> tuple[Visited | None, str]:
        """What a forward shows on `count` rows whose tokens are none of `apart` in number; of any of those, small numbers."""
        sizes = self._sizes(rows, attempt, apart, count)
        primes, told = {planned: prime for prime, planned in sizes.planned.items()}, sizes.rows
        cut, beside = ({key: cut_to(value, primes) for key, value in of.items()} for of in (self.inputs, self.targets))
        targets = [key for key, value in self.targets.items() if _has_tokens(value, primes)]
        try:
            with quiet(), self.ready({**cut, **beside}, count) as run:
                loss = partial(self._loss, run.rows, targets)
                visited = Visited(run.module, run.blocks, run.enter, run.mode, sizes, frozenset(begins))
                with visited.watching():
                    visited.run({key: run.rows[key] for key in cut}, loss)
        except Exception as error:  # whatever it is, it is told in the plan of who needs to know
            return None, _reason(error, sizes.rows)
        if tuple(visited.found) != self.visits:
            return None, f"on rows of {told} tokens it runs other blocks"
        return visited, ""

    def _loss(self, batch: Example, targets: Sequence[str], outputs: Any) -> torch.Tensor | None:
        return None if self.judge is None else taken_of(self.judge, outputs, batch, targets)

    def _sizes(self, rows: Sequence[int], attempt: int, apart: Collection[int], count: int) -> Sizes:
        known = {size for tensor in (*self.module.parameters(), *self.module.buffers()) for size in tensor.shape}
        known |= {size for value in self.inputs.values() if value.is_floating_point() for size in value.shape[1:]} - {*rows}

        def found(length: int, used: Collection[int], others: Iterable[int] = ()) -> Iterator[int]:
            primes = telling(known.union(others), SHORTEST - 1 if apart else length)
            return (prime for prime in primes if prime not in apart and all(each % prime for each in used))

        chosen: dict[int, int] = {}
        for length in rows:
            chosen[next(islice(found(length, chosen), attempt, None))] = length
        return Sizes(chosen, lambda length, used: next(found(length, used, (length,))), count)


def _rows(inputs: Example) -> tuple[int, ...]:
    """How long the rows of tokens are that inputs have, that of the first one first."""
    found = (value.shape[1] for value in inputs.values() if value.ndim == 2 and not value.is_floating_point())
    return tuple(dict.fromkeys(filter(None, found)))


def _has_tokens(value: torch.Tensor, lengths: Collection[int]) -> bool:
    """Whether a tensor of a batch has tokens along dim 1."""
    return value.ndim > 1 and value.shape[1] in lengths and not (value.is_floating_point() and value.ndim > 3)


def _mixing(visited: Visited) -> bool:
    return any(passing.mixes for passing in visited.found.values())


def _at_any_length(whole: Visited, others: Iterable[tuple[Visited | None, str]]) -> tuple[Passing, ...]:
    """The visits of `whole`, with what keeps them from running on fewer tokens, as the first of the `others` shows that ran."""
    reason = ""
    for other, why in others:
        if other is not None:
            return tuple(_unlike(passing, whole, other) for passing in whole.found.values())
        reason = why
    return tuple(replace(passing, mixes=passing.mixes or reason) for passing in whole.found.values())


def _unlike(passing: Passing, whole: Visited, other: Visited) -> Passing:
    if passing.mixes or passing.whole or not passing.runs(1):
        return passing
    theirs = other.found[passing.visit]
    if passing.slots == theirs.slots and not theirs.mixes and (passing.takes, passing.gives) != (theirs.takes, theirs.gives):
        return replace(passing, mixes=f"{passing.visit} {ALIKE}")
    if (
        passing.slots == theirs.slots
        and not theirs.mixes
        and (passing.takes_of, passing.gives_of) != (theirs.takes_of, theirs.gives_of)
    ):
        return replace(passing, mixes=f"{passing.visit} joins tokens that begin within with those of its rows")
    one, two = ([each for each in run.convolves if each.visit == passing.visit] for run in (whole, other))
    if one != two:
        return replace(passing, mixes=f"{passing.visit} convolves tokens, or pads them, by their number")
    mine, found = (each.computed.get(passing.visit, []) for each in (whole, other))
    return replace(passing, mixes=unlike(mine, found, other.sizes.rows))


def _reason(error: Exception, rows: str) -> str:
    if depends_on_values(error):
        return "its forward looks at values, so nobody can say beforehand what it does with tokens"
    text = str(error).partition("\n")[0]
    return text if isinstance(error, PlanError) else f"it does not run on rows of {rows} tokens: {type(error).__name__}: {text}"


def cut_to(value: torch.Tensor, primes: Mapping[int, int]) -> torch.Tensor:
    """A tensor of a batch with as many tokens as `primes` says for those that it has; a mask has them along two dims.

    Of what has two values, as masks have, the ends stay: rows that are padded there are padded then too.
    """
    square = value.ndim > 2 and value.shape[-1] == value.shape[-2]
    for dim in range(1, value.ndim):
        length = value.shape[dim]
        if length in primes and (dim == 1 or (square and dim >= value.ndim - 2)):
            value = _with(value, dim, length, primes[length])
    return value


def _with(value: torch.Tensor, dim: int, length: int, trial: int) -> torch.Tensor:
    ends = trial < length and len(value.unique()) <= 2
    repeated = torch.cat([value] * -(-trial // length), dim)
    late = trial // 2 if ends else 0
    early = repeated.narrow(dim, 0, trial - late)
    return torch.cat([early, repeated.narrow(dim, length - late, late)], dim) if late else early
