"""Sequence parallelism (Megatron): between pairs of divided matrices, each rank has a slice of the tokens.

Why it works: norms, dropout and additions treat each token by itself, so what 1-D tensor parallelism does over and over on all
ranks can be done once, by slices. An all-reduce is a reduce-scatter and an all-gather: with work on slices between the two,
the same bytes travel.

    line        x(I) norm ----I -> R---- A_0 f B_0 ----P -> I---- + norm              all_reduce ahead, all_reduce back, per pair
    sequence    x(S) norm ----S -> R---- A_0 f B_0 ----P -> S---- + norm              all_gather, reduce_scatter; and back
                     [0 1 2 3 4 5] tokens of a sample, 3 ranks: rank 1 has 2 3; A_0, f, B_0 and attention within them see 0 .. 5

    layouts: stream S(tokens) from the first block with a pair to the last, and on through norms behind it; weights as in line.py
    norms and the biases of rows layers: used on slices, so I -> R while they are; backward sums their gradients (P -> I)
    sent per rank, micro-batch and layer = 4 k b s h (t-1)/t elements, k = (m + d)/2 as in line.py: m + d gathers and scatters
    either way; with `again` d gathers more, 5 k b s h (t-1)/t where m = d
    kept for backward: what norms, additions and dropout keep is 1/t; what columns layers take in is whole, with `again` 1/t too

With `again` backward gathers the input of columns layers once more, as the paper does, and keeps the slice alone.
Cost besides: the stream is put together once where it leaves the last block (forward) and once where it was cut (backward), b s h
(t-1)/t each, unless a head that is divided by words takes slices; one sum per norm, block and micro-batch.
Limits: all blocks with pairs must treat tokens one by one outside of their pairs, and be called once per forward; the tokens must
divide by t. A module that asks a slice for its length is given all tokens where it starts, if all its layers take the same.
Paper: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198 (section 4.2.2).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from meshwright.parallel.tensor.comm_accounting import booked
from meshwright.parallel.tensor.layer_sharding import Move, Way, Ways, filled, moved, own
from meshwright.parallel.tensor.validation import axis_fault
from meshwright.plan.job.errors import Fault
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.layer_calls import Passage
from meshwright.plan.model_spec.model_spec import Anatomy
from meshwright.plan.sharding.placement import I, S
from meshwright.plan.sharding.rank_share import own_share
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Program, Transfer
from meshwright.plan.step.single_device import BACKWARDS, FORWARDS, micro_rows
from meshwright.plan.strategy import Handler, Phase, Runtime, Strategy

TOKENS = S(1)  # the place of a stream [rows, tokens, width] of which each rank has a slice of the tokens


@dataclass(frozen=True)
class Sequence(Strategy):
    """The stream between pairs divided by tokens along `axis`. With `again`, gathered inputs are not kept for backward."""

    name: ClassVar[str] = "sequence"
    phase: ClassVar[Phase] = "shard"
    axis: str = "tp"
    again: bool = False

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        where = "strategies.sequence"
        if self.axis != "tp":
            yield axis_fault(self.axis, "tokens", where)
            return
        yield from _mixing(space.anatomy, where)
        yield from _both(self.place(space), where)
        ranks, through = space.mesh.size(self.axis), _through(space.anatomy)
        for tokens in sorted({each.tokens for each in space.anatomy.passages if each.visit in through}):
            if tokens % ranks:
                lower = tokens - tokens % ranks
                near = f"{lower} or {lower + ranks}" if lower else str(ranks)
                asked = tokens == job.data.sequence
                fix = f"set data.sequence = {near}" if asked else f"have the model make {near} tokens of a sample"
                text = f"{tokens} tokens do not divide by the {ranks} ranks of {self.axis}"
                yield Fault(text, f"{fix}, or change mesh.{self.axis}", "data.sequence" if asked else where)

    def partners(self, space: Space) -> Iterator[Fault]:
        yield from self._apart_faults(space)
        rows = [(home.cut.get(self.axis), home.weight.side("in")) for home in space.homes if home.weight.role == "rows"]
        if not any(side is not None and dim == side.dim for dim, side in rows):
            text = (
                f"tokens are divided between pairs of matrices; no strategy divides those by columns and rows along {self.axis}"
            )
            yield Fault(text, 'write [[strategies]] name = "line" beside it, or leave it out', "strategies.sequence")

    def _apart_faults(self, space: Space) -> Iterator[Fault]:
        """Where tokens are dealt to other ranks too, what each has must divide."""
        ranks, deal = space.mesh.size(self.axis), space.deal
        if deal is None:
            return
        for passage in (each for each in space.anatomy.passages if each.visit in space.through):
            counts = [deal.run(passage.tokens, index) for index in range(deal.ranks)]
            if any(count % ranks for count in counts):
                text = f"{passage.tokens} tokens are dealt to {' x '.join(space.token_axes)} as {', '.join(map(str, counts))}"
                fix = f"make them a multiple of {2 * deal.ranks * ranks}"
                yield Fault(f"{text}, which do not divide by the {ranks} ranks of {self.axis}", fix, "data.sequence")
                return

    def ways(self, space: Space) -> Ways:
        """How norms on slices compute, by name."""
        norms = [call for call in space.anatomy.calls if call.role == "norm" and call.visit in space.through and call.streams]
        return {call.name: Way({}, shared=(self.axis,), compute=own) for call in norms}

    def place(self, space: Space) -> Space:
        return space.with_stream(self.axis, TOKENS, _through(space.anatomy), anew=self.again)

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        program = booked(program, self.ways(space), space, job)
        return program.edit(lambda actions: self._crossed(actions, space, job))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        space = runtime.plan.space
        filled(runtime, self.ways(space))
        for passage, first, last in self._borders(space):
            runtime.wrap(passage.visit, partial(_crossed, runtime, passage, first, last))
        return {}

    def _borders(self, space: Space) -> Iterator[tuple[Passage, Move | None, Move | None]]:
        """What becomes of the stream where visits begin or end its slices: where it is taken in, and where it is given out.

        Nothing casts it there.
        """
        cut, joined = Move(self.axis, I, TOKENS, wide=True), Move(self.axis, TOKENS, I, wide=True)
        borders = space.borders()
        for passage in space.anatomy.passages:
            first, last = borders.get(passage.visit, (False, False))
            if first or last:
                yield passage, cut if first else None, joined if last else None

    def _crossed(self, actions: list[Action], space: Space, job: Job) -> list[Action]:
        """`actions`, with the stream put together at the end of forwards, and its gradient at the end of backwards."""
        rows, met = micro_rows(actions, space, job), dict[tuple[str, bool], list[Transfer]]()
        for passage, first, last in self._borders(space):
            numel = rows * int(passage.tokens * own_share(space, passage.visit)) * passage.width
            if first is not None and passage.needed:
                met[passage.visit, True] = [*first.back.transfer(numel, space, job, at=1)]
            if last is not None:
                met[passage.visit, False] = [*last.transfer(numel, space, job, at=len(space.anatomy.calls))]

        def crossed(action: Action) -> Action:
            back = action.kind in BACKWARDS
            more = met.get((action.subject, back), []) if back or action.kind in FORWARDS else []
            return replace(action, inner=tuple(sorted((*action.inner, *more), key=lambda each: each.at))) if more else action

        return [crossed(action) for action in actions]


def _crossed(
    runtime: Runtime,
    passage: Passage,
    first: Move | None,
    last: Move | None,
    inner: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What a block computes, with the stream cut where it takes it in, put together where it gives it out."""
    if isinstance(passage.slot, int):
        args = (*args[: passage.slot], moved(runtime, args[passage.slot], first), *args[passage.slot + 1 :])
    else:
        kwargs[passage.slot] = moved(runtime, kwargs[passage.slot], first)
    given = inner(*args, **kwargs)
    if passage.place is None:
        return moved(runtime, given, last)
    several = list(given)
    several[passage.place] = moved(runtime, several[passage.place], last)
    return type(given)(several)


def _through(anatomy: Anatomy) -> tuple[str, ...]:
    """The visits through which the stream goes in slices: those with pairs, and norms that it passes just before or behind."""
    known = {each.visit: each for each in anatomy.passages if not each.mixes and "#" not in each.visit}
    pairs = {call.visit for call in anatomy.calls if call.role == "rows"}
    found = {visit for visit in known if visit in pairs}
    todo = list(found)
    while todo:
        passage = known[todo.pop()]
        for visit in (passage.source, passage.onward):
            if visit in known and visit not in found:
                found.add(visit)
                todo.append(visit)
    return tuple(visit for visit in anatomy.visits if visit in found)


def _both(space: Space, where: str) -> Iterator[Fault]:
    """Layers that take in slices in one call, and whole tensors in another."""
    taken: dict[str, set[bool]] = {}
    for call in space.anatomy.calls:
        if call.role in ("columns", "norm"):
            taken.setdefault(call.name, set()).add(space.takes_slices(call))
    both = [name for name, kinds in taken.items() if len(kinds) > 1]
    if both:
        text = (
            f"{both[0]} is called on the stream between pairs and on something else, and its ranks would add up unlike gradients"
        )
        yield Fault(text, 'leave name = "sequence" out, or give each of the two a layer of its own', where)


def _mixing(anatomy: Anatomy, where: str) -> Iterator[Fault]:
    """Blocks with pairs that cannot run on a slice of the tokens: one fault per reason."""
    known = {each.visit: each for each in anatomy.passages}
    reasons: dict[str, tuple[str, str]] = {}
    for visit in dict.fromkeys(call.visit for call in anatomy.calls if call.role == "rows"):
        why = "what it gives out has another shape than what it takes in, or is not made of it token by token"
        if visit in known:
            why = known[visit].mixes
            why = "it is called more than once" if "#" in visit and not why else why
        if why:
            reasons.setdefault(re.sub(r"\d+", "*", why), (visit, why))
    for visit, why in reasons.values():
        text = f"the block '{visit}' cannot run on a slice of the tokens: {why}"
        yield Fault(text, 'leave name = "sequence" out, or declare the parts of the block as blocks', where)
