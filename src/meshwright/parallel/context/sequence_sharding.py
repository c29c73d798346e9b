"""What techniques that deal the tokens of a sample to ranks say alike: where things live, the sums of a step, refusals, booking.

    batch       every rank along the axis reads the same rows, and runs the model on some of the tokens of each (core/tokens.py)
    weights     each rank's gradient is a summand: R along the axis, gradients P, as where ranks have other samples
    COUNT TALLY summed along the axis: a wish to stop is heard by all, and the loss is that of all tokens
    attention   moves something within the forwards and backwards of the visits that attend: Action.inner
    convolution likewise, at its borders (halo.py)

Among the moves of layers that are divided (tensor parallelism), attention stands before the rows layer that ends it; backwards
behind it. Its heads are then those of the rank.

What a program says of the tokens that glue brings together between blocks (model/together.py): within which actions they move.

    F(visit)     at its end, what the glue behind it needs: all_gather, or all_reduce where a sum will do
                 at its beginning what it needs itself, where a part of the model begins with it
    LOSS         what the loss needs; at its end the gradients of what the model gives out
    B(visit), I  at its end the gradients of what the visit took in first: reduce_scatter, all_reduce
                 at its beginning, where a part of the model ends with it, those of what later parts took in

Each rank gives as many tokens as the one that has most.
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from meshwright.model.tensor_parallel.layer_roles import NUMBERED
from meshwright.parallel.context.conv_halo import convolution_faults, met_beside
from meshwright.plan.job.errors import Fault
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.dim_split import Side
from meshwright.plan.model_spec.layer_calls import Call
from meshwright.plan.model_spec.model_spec import NBYTES, NBYTES_OWN, Anatomy, Weight
from meshwright.plan.model_spec.sequence_info import Attend, Convolve, Deal, Together
from meshwright.plan.model_spec.stage_boundaries import Part
from meshwright.plan.sharding.placement import S
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Program, Transfer, with_more
from meshwright.plan.step.single_device import BACKWARDS, FORWARDS, micro_rows, stream
from meshwright.plan.strategy import Phase, Strategy

LOSS = ""  # stands for it among visits
LATE = 1e9  # behind all that a visit itself moves


def glued(program: Program, space: Space, job: Job, axis: str) -> Program:
    """`program` with what glue brings together of the tokens that are dealt along `axis`."""
    tokens = (space.whole or space).anatomy.tokens
    if tokens is None or not tokens.met:
        return program

    def edited(actions: list[Action]) -> list[Action]:
        glue = _Glue.of(space, job, axis, micro_rows(actions, space, job))
        return [glue.within(action) for action in actions]

    return program.edit(edited)


@dataclass(frozen=True)
class _Glue:
    """By visit: the transfers before and behind its forward, their bytes, those of its backward, at its beginning and its end."""

    before: Mapping[str, Sequence[Transfer]]
    forth: Mapping[str, Sequence[Transfer]]
    more: Mapping[str, int]
    first: Mapping[str, Sequence[Transfer]]
    last: Mapping[str, Sequence[Transfer]]

    @classmethod
    def of(cls, space: Space, job: Job, axis: str, rows: int) -> "_Glue":
        """Those of the visits that the rank runs that sees `space`, on micro-batches of so many rows."""
        tokens = (space.whole or space).anatomy.tokens
        before, forth, first, last = (defaultdict[str, list[Transfer]](list) for _ in range(4))
        more = defaultdict[str, int](int)
        for each in tokens.met if tokens is not None else ():
            home = _home(each, space.parts)
            if not (home in space.anatomy.visits or (home == LOSS and space.takes_loss)):
                continue
            there, back, nbytes = _transfers(each, space, job, axis, rows)
            (before if home != each.visit else forth)[home].append(there)
            more[home] += nbytes
            for place, ends in dict.fromkeys(_places(each, home, space.parts)):
                (last if ends else first)[place].insert(0, back)  # what was made last flows first
        return cls(before, forth, more, first, last)

    def within(self, action: Action) -> Action:
        """`action` with what moves in it."""
        visit = LOSS if action.kind == "LOSS" else action.subject
        early, late = list[Transfer](), list[Transfer]()
        if action.kind in (*FORWARDS, "LOSS"):
            early += self.before.get(visit, ())
            late += self.forth.get(visit, ())
        if action.kind in (*BACKWARDS, "LOSS"):
            early += self.first.get(visit, ())
            late += self.last.get(visit, ())
        if not early and not late:
            return action
        inner = *_at(-LATE, early), *action.inner, *_at(LATE, late)
        held = stream(action.subject, action.micro or 0)
        more = self.more.get(visit, 0) if action.kind in FORWARDS else 0
        return replace(with_more(action, held, more), inner=inner)


def _at(time: float, moves: Iterable[Transfer]) -> Iterator[Transfer]:
    return (replace(move, at=time, between=True) for move in moves)


def _home(each: Together, parts: Sequence[Part]) -> str:
    """The visit in whose forward it moves: a part that begins with the one that is given it was handed each rank's own tokens."""
    begins = {part.visits[0] for part in parts}
    return each.into if each.into in begins else each.visit


def _places(each: Together, home: str, parts: Sequence[Part]) -> Iterator[tuple[str, bool]]:
    """Behind or before whose backwards a gradient goes back: the visit, and whether at its end.

    What another part took in first has its gradient when that has sent it.
    """
    mine = next((part for part in parts if home in part.visits), None)
    for visit in each.back:
        if mine is None or visit in mine.visits or (visit == LOSS and mine.last):
            yield visit, True
        else:
            yield mine.visits[-1], False


def _transfers(each: Together, space: Space, job: Job, axis: str, rows: int) -> tuple[Transfer, Transfer, int]:
    """The transfer of a forward, that of its gradient, and the bytes of what is there then, on so many rows."""
    numel, compute = each.numel * (rows if each.rows else 1), job.precision.compute
    mixed = compute != job.precision.parameters
    own = not each.dtype or (each.dtype in NBYTES and (mixed or compute == "float64"))
    dtype = compute if own else each.dtype
    if not each.tokens or space.deal is None:
        wide = "float64" if "float64" in ((each.dtype if not own or mixed else ""), compute) else "float32"
        move = Transfer("all_reduce", (axis,), numel * NBYTES[wide], dtype=wide)
        return move, move, numel * NBYTES[wide]
    share = numel // each.tokens * max(space.deal.counts(each.tokens)) * NBYTES_OWN[dtype]
    forth = Transfer("all_gather", (axis,), share, dtype=dtype)
    back = Transfer("reduce_scatter", (axis,), share * space.deal.ranks, dtype=dtype)
    return forth, back, numel * NBYTES_OWN[dtype]


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
