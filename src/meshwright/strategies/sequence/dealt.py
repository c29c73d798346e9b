"""What techniques that deal the tokens of a sample to ranks say alike: where things live, the sums of a step, refusals, booking.

    batch       every rank along the axis reads the same rows, and runs the model on some of the tokens of each (core/tokens.py)
    weights     each rank's gradient is a summand: R along the axis, gradients P, as where ranks have other samples
    COUNT TALLY summed along the axis: a wish to stop is heard by all, and the loss is that of all tokens
    attention   moves something within the forwards and backwards of the visits that attend: Action.inner
    convolution likewise, at its borders (halo.py)

Among the moves of layers that are divided (tensor parallelism), attention stands before the rows layer that ends it; backwards
behind it. Its heads are then those of the rank.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from meshwright.core.anatomy import Anatomy, Weight
from meshwright.core.calls import Call
from meshwright.core.cut import Side
from meshwright.core.errors import Fault
from meshwright.core.job import Job
from meshwright.core.layout import S
from meshwright.core.program import Action, Program, Transfer
from meshwright.core.space import Space
from meshwright.core.steps import BACKWARDS, FORWARDS, micro_rows
from meshwright.core.strategy import Phase, Strategy
from meshwright.core.tokens import Attend, Convolve, Deal
from meshwright.model.sockets import NUMBERED
from meshwright.strategies.sequence.between import glued
from meshwright.strategies.sequence.halo import convolution_faults, met_beside

AXIS = "cp"
AGAIN = (*FORWARDS, "RERUN")  # kinds that run a visit forward

Moves = Callable[[Attend, int], Sequence[Transfer]]  # of one call of attention on so many rows


@dataclass(frozen=True)
class Deals(Strategy):
    """A technique that deals the tokens of each sample to the ranks along `axis`."""

    phase: ClassVar[Phase] = "shard"
    by_token: ClassVar[bool] = True
    axis: str = AXIS

    @abstractmethod
    def deal(self, ranks: int) -> Deal:
        """Which tokens each of so many ranks has."""

    def place(self, space: Space) -> Space:
        if self.axis != AXIS:
            return space
        dealt = replace(space.with_tokens(AXIS, S(1)), deal=self.deal(space.mesh.size(AXIS)))
        return dealt.with_homes(lambda home: home.used_apart(AXIS))


def met(program: Program, space: Space, job: Job, forth: Moves, back: Moves) -> Program:
    """`program` with what attention moves: `forth` wherever a visit runs forward, `back` where its gradients are made; and glue.

    Where backwards come in halves, that is the one for what went in, unless nobody asks for that. So with convolutions.
    """
    borders = (space.whole or space).anatomy.borders

    def moved(each: Attend | Convolve, rows: int, *, forward: bool) -> Sequence[Transfer]:
        if isinstance(each, Convolve):
            return met_beside(space, job, AXIS, each, rows)[0 if forward else 1]
        return (forth if forward else back)(each, rows)

    def within(action: Action, rows: int) -> Action:
        mine = list(_placed(space, action.subject))
        if action.kind in AGAIN:
            more = [replace(move, at=at) for at, each in mine for move in moved(each, rows, forward=True)]
        else:
            late = borders is not None and not borders.learns(action.subject)
            if action.kind not in ("B", "W" if late else "I"):
                return action
            needed = [(at, each) for at, each in reversed(mine) if each.needed]
            more = [replace(move, at=-at) for at, each in needed for move in moved(each, rows, forward=False)]
        return replace(action, inner=tuple(sorted((*action.inner, *more), key=lambda each: each.at))) if more else action

    def edited(actions: list[Action]) -> list[Action]:
        rows = micro_rows(actions, space, job)
        return [within(action, rows) if action.kind in (*AGAIN, *BACKWARDS, "W") else action for action in actions]

    return glued(program.edit(edited), space, job, AXIS)


def local_heads(space: Space, attend: Attend) -> tuple[int, int]:
    """How many heads of queries, and of keys and values, the rank that sees `space` has of one call of attention.

    Of keys and values that several ranks need it has those of its own heads of queries, as strategies that divide heads have it;
    where the model repeats them for attention, all of these.
    """
    for _, side in _sides(space, attend.visit, "columns", attend):
        (first, end), units = side.cut.units_of(side.index, side.ranks), side.cut.units
        if side.ranks <= units or not side.cut.heads:
            return (end - first) * attend.heads // units, (end - first) * attend.groups // units
        each = attend.heads // units
        alike = attend.groups == units and end > first and first // each == (end - 1) // each
        return end - first, 1 if alike else end - first
    return attend.heads, attend.groups


def token_faults(name: str, axis: str, space: Space, deal: Callable[[int], Deal]) -> Iterator[Fault]:
    """What keeps the tokens of this model's samples from being dealt along `axis`, to so many ranks as `deal` says."""
    where, anatomy = f"strategies.{name}", space.anatomy
    if axis != AXIS:
        yield Fault(f"axis = '{axis}'; tokens are dealt along {AXIS}", f'write axis = "{AXIS}"', f"{where}.axis")
        return
    ranks = space.mesh.size(axis)
    other = f"mesh.{AXIS} = 1 and mesh.dp_shard = {ranks} are as many ranks"
    if space.deal is not None:
        text = f"the tokens of each sample are dealt along {AXIS} already"
        yield Fault(text, "keep one of the strategies that deal them", where)
    if anatomy.tokens is None:
        text = f"nothing is known of tokens in {anatomy.name}: no integer input of its example has them, as [rows, tokens]"
        text += ", and no block takes in [rows, tokens, width] and attends to them by F.scaled_dot_product_attention"
        yield Fault(text, f"give it an example batch that has one (input_ids), or declare smaller blocks; or {other}", where)
        return
    if anatomy.tokens.varies:
        fix = f"compute it for all rows and tokens at once (hidden[rows, last] for a loop over rows); or {other}"
        yield Fault(anatomy.tokens.varies, fix, where)
    for why, visits in _mixing(anatomy).items():
        more = f" (and so in {len(visits) - 1} more blocks)" if len(visits) > 1 else ""
        fix = f"compute what needs all tokens between blocks, or by F.scaled_dot_product_attention; or {other}"
        yield Fault(f"a block cannot run on some of the tokens: {why}{more}", fix, where)
    yield from convolution_faults(name, axis, space, deal(ranks))
    if anatomy.whole_batch:
        text = f"the loss takes the rows of the whole batch at once, and along {AXIS} each rank has some of the tokens of a row"
        yield Fault(text, f"write a loss that is a sum over tokens or rows; or {other}", "loss")


def _mixing(anatomy: Anatomy) -> Mapping[str, list[str]]:
    """The visits that need all tokens at once, by why: what layers of one kind do is said once."""
    found: dict[str, list[str]] = {}
    for passing in anatomy.tokens.visits if anatomy.tokens is not None else ():
        if passing.mixes:
            found.setdefault(NUMBERED.sub("*", passing.mixes), []).append(passing.visit)
    return found


def _placed(space: Space, visit: str) -> Iterator[tuple[float, Attend | Convolve]]:
    """The calls of attention and the convolutions of a visit in order, and where they stand among its calls of layers.

    Attention stands before the rows layer that ends it, a convolution behind the last layer that was called before.
    """
    tokens = (space.whole or space).anatomy.tokens
    mine = [attend for attend in tokens.attends if attend.visit == visit] if tokens is not None else []
    others = [each for each in tokens.convolves if each.visit == visit and each.reach] if tokens is not None else []
    calls = [(at, call.name) for at, call in enumerate(space.anatomy.calls) if call.visit == visit] if others else []
    last = calls[0][0] - 0.5 if calls else 0.0
    for number in range(len(mine) + 1):
        for each in (each for each in others if each.attended == number):
            last = max([last, *(at + 0.5 for at, name in calls if name in each.called)])
            yield last, each
        if number < len(mine):
            ends = [at for at, _ in _sides(space, visit, "rows", mine[number])]
            last = ends[number] - 0.5 if number < len(ends) else last
            yield last, mine[number]


def _sides(space: Space, visit: str, role: str, attend: Attend) -> Iterator[tuple[int, Side]]:
    """Of each layer of `role` in `visit` whose heads are those of `attend`, and are divided: its number, and how they are."""
    held = {layer: home for home in space.homes for layer in home.weight.layers if _heads(home.weight, attend)}
    for at, call in enumerate(space.anatomy.calls):
        if call.visit == visit and call.role == role and call.name in held:
            for side in space.sides(held[call.name], dict(space.coordinate)):
                if _of_heads(call, held[call.name].weight, side.cut.dim):
                    yield at, side


def _heads(weight: Weight, attend: Attend) -> bool:
    return any(cut.most == attend.heads and attend.groups % cut.units == 0 for cut in weight.cuts)


def _of_heads(call: Call, weight: Weight, dim: int) -> bool:
    cut = weight.side("out" if call.role == "columns" else "in")
    return cut is not None and cut.dim == dim
