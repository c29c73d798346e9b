"""How tokens go through a model: learnt from one forward on fake tensors, by following them from operation to operation.

Rows are cut to a number of tokens that no size of the model has anything to do with, so that every dim of tokens is known by its
size. The forward runs as it will on ranks that have some of the tokens, with all of them on the only one:

    glue       sees tensors that look whole (model/apart.py); what it needs all tokens of is noted
    a block    takes in this rank's tokens; which dims of what it takes and gives are tokens is noted (model/visited.py)
    within     every operation treats each token by itself (model/bytoken.py), or is attention, or is named

A second forward, on fewer tokens, shows what is computed with their number (model/lengths.py).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import count, islice

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.core.errors import PlanError
from meshwright.core.tokens import Passing, Tokens
from meshwright.model.lengths import unlike
from meshwright.model.trial import depends_on_values
from meshwright.model.visited import Visited

Example = Mapping[str, torch.Tensor]
SHORTEST, TRIED = 5, 3  # a smaller prime divides too much; lengths that are tried
LONGEST = 8192  # masks of glue are real, tokens x tokens


@dataclass(frozen=True)
class Trial:
    """What a trial runs: a module, its blocks, who is told of each visit, rows as the module takes them.

    The parameters are of the `mode`, in which blocks run; the rows are real.
    """

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    enter: Callable[[str], None]
    rows: Example
    mode: FakeTensorMode


Ready = Callable[[Example], AbstractContextManager[Trial]]


def tokens_of(inputs: Example, targets: Example, visits: Sequence[str], module: nn.Module, ready: Ready) -> Tokens | None:
    """What a model does with tokens; None where no input is rows of tokens.

    `visits` are those of a whole forward; `module` has the model's sizes, and `ready(rows)` gives a trial on some rows.
    """
    first = next((value for value in inputs.values() if value.ndim == 2 and not value.is_floating_point()), None)
    if first is None or first.shape[1] == 0:
        return None
    length = first.shape[1]
    found = Tokens(length, _with_tokens(inputs, length), _with_tokens(targets, length))
    why = "nothing in it tells tokens from other dims"
    whole: Visited | None = None
    for trial in islice(_lengths(module, length), TRIED):
        whole, why = _tried(inputs, length, trial, visits, ready)
        if whole is not None:
            break
    if whole is None:
        why = _several(inputs) or why
        return replace(found, visits=tuple(Passing(visit, mixes=why) for visit in visits))
    known = _at_any_length(whole, (_tried(inputs, length, trial, visits, ready) for trial in _shorter(module, whole.trial)))
    return replace(found, visits=known, attends=tuple(whole.attends), met=tuple(whole.met.items()))


def _several(inputs: Example) -> str:
    """That inputs have unlike numbers of tokens; empty: they have not. Only one of them is told from other dims."""
    rows = {key: value.shape[1] for key, value in inputs.items() if value.ndim == 2 and not value.is_floating_point()}
    said = ", ".join(f"{key} {length}" for key, length in rows.items())
    return f"it takes in rows of several lengths ({said} tokens)" if len(set(rows.values())) > 1 else ""


def _tried(inputs: Example, length: int, trial: int, visits: Sequence[str], ready: Ready) -> tuple[Visited | None, str]:
    """What a forward on rows of `trial` tokens shows; or why it shows nothing."""
    rows = {key: _cut(value, length, trial) for key, value in inputs.items()}
    try:
        with ready(rows) as run:
            visited = Visited(run.module, run.blocks, run.enter, run.mode, trial, length)
            with visited.watching():
                visited.run(run.rows)
    except Exception as error:  # whatever it is, it is told in the plan of who needs to know
        return None, _reason(error, trial)
    if tuple(visited.found) != tuple(visits):
        return None, f"on rows of {trial} tokens it runs other blocks"
    return visited, ""


def _at_any_length(whole: Visited, others: Iterable[tuple[Visited | None, str]]) -> tuple[Passing, ...]:
    """The visits of `whole`, with what keeps them from running on fewer tokens, as the first of the `others` shows that ran."""
    reason = ""
    for other, why in others:
        if other is not None:
            return tuple(_unlike(passing, whole, other) for passing in whole.found.values())
        reason = why
    return tuple(replace(passing, mixes=passing.mixes or reason) for passing in whole.found.values())


def _unlike(passing: Passing, whole: Visited, other: Visited) -> Passing:
    if passing.mixes or passing.whole:
        return passing
    mine, theirs = (each.computed.get(passing.visit, []) for each in (whole, other))
    return replace(passing, mixes=unlike(mine, theirs, other.trial))


def _with_tokens(batch: Example, length: int) -> tuple[str, ...]:
    return tuple(key for key, value in batch.items() if value.ndim > 1 and value.shape[1] == length)


def _reason(error: Exception, trial: int) -> str:
    if depends_on_values(error):
        return "its forward looks at values, so nobody can say beforehand what it does with tokens"
    text = str(error).partition("\n")[0]
    return text if isinstance(error, PlanError) else f"it does not run on rows of {trial} tokens: {type(error).__name__}: {text}"


def _lengths(module: nn.Module, length: int) -> Iterable[int]:
    """Numbers of tokens that tell dims of them from all others: primes that divide no size of the model, the next below first."""
    sizes = {size for tensor in (*module.parameters(), *module.buffers()) for size in tensor.shape if size}

    def tells(number: int) -> bool:
        return all(number % each for each in range(2, int(number**0.5) + 1)) and all(size % number for size in sizes)

    below = filter(tells, range(min(length, LONGEST), SHORTEST - 1, -1))
    yield from islice(below, 1)
    yield from filter(tells, count(max(length + 1, SHORTEST)))


def _shorter(module: nn.Module, trial: int) -> Iterator[int]:
    """Other numbers of tokens that tell as much, the smallest ones."""
    yield from islice((each for each in _lengths(module, SHORTEST - 1) if each != trial), TRIED)


def _cut(value: torch.Tensor, length: int, trial: int) -> torch.Tensor:
    """A tensor of a batch with `trial` tokens where it has `length`; a mask has them along two dims.

    Of what has two values, as masks have, the ends stay: rows that are padded there are padded then too.
    """
    ends = trial < length and len(value.unique()) <= 2
    square = value.ndim > 2 and value.shape[-1] == value.shape[-2] == length
    for dim in range(1, value.ndim):
        if value.shape[dim] == length and (dim == 1 or square):
            repeated = torch.cat([value] * -(-trial // length), dim)
            late = trial // 2 if ends else 0
            early = repeated.narrow(dim, 0, trial - late)
            value = torch.cat([early, repeated.narrow(dim, length - late, late)], dim) if late else early
    return value
