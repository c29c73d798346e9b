"""What the visits of a forward hold in memory, weighed on a trial: bytes in the dtypes of a job, by the number of rows.

    F(v)     what it hands on, what it keeps inside                               until its B
    LOSS     the gradient of what came to it; on top, for itself                  logits in wider floats, their loss, its gradient
    B(v)     the gradients of its weights; on top, for itself                     gradients of what lies within

What comes on top is the most that is there at any moment, which may be the first of a backward, with all of the inside still
there, or a late one, with the gradients of weights. Scratch memory within one operation is not seen.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import NBYTES, Anatomy
from meshwright.plan.model_spec.op_costs import Line, Load
from meshwright.plan.sharding.rank_share import Share, head_in_pieces, own_share, shares
from meshwright.plan.sharding.sharding_plan import Space


@dataclass(frozen=True)
class Taken:
    """Bytes of one visit on one rank: handed on, kept inside, and on top in its backward, weights' gradients apart or not.

    `attending` is on top while attention's own backward runs, may be below 0, and is None where that is not known.
    """

    stream: int
    inside: int
    backward: int = 0
    learning: int = 0
    attending: int | None = None

    def scratch(self, added: int, new: int) -> int:
        """What a backward has for itself beside `new` bytes of gradients, if the largest that it adds to others has `added`."""
        return max(added, max(self.backward, self.learning if new else 0) - new)


def taken(space: Space, job: Job, rows: int) -> dict[str, Taken]:
    """What each visit takes on the rank that sees `space`, in micro-batches of so many rows."""
    anatomy, width, loads = space.anatomy, NBYTES[job.precision.compute], loads_of(space.anatomy)
    insides = anatomy.inside_numel or (0,) * len(anatomy.visits)
    known = dict(zip(anatomy.visits, zip(insides, anatomy.stream_numel, strict=True), strict=True))
    weights = _own_weights(space) if loads else {}
    found = {}
    for visit, share in shares(space).items():
        found[visit] = Taken(share.hands_on * rows * width, share.inside * rows * width)
        if visit in loads:
            own = own_share(space, visit), weights.get(visit, Fraction(1))
            found[visit] = _weighed(loads[visit], share, known[visit], *own, rows)
            found[visit] = replace(found[visit], inside=max(0, found[visit].inside - _masks(space, visit, rows) * width))
    if anatomy.weighed is not None and found:
        first = next(iter(found))  # from its forward to its backward all the others run
        found[first] = replace(found[first], stream=found[first].stream + anatomy.weighed.glue.at(rows))
    return found


def of_loss(space: Space, job: Job, kept: int, rows: int) -> int:
    """The bytes that LOSS has for itself; where that was not weighed, those of so many elements that are `kept`."""
    anatomy = space.anatomy
    if anatomy.weighed is None or space.logits.axes("S"):
        return kept * max(NBYTES[job.precision.compute], NBYTES["float32"])  # in that at least
    return round(anatomy.weighed.loss.at(rows) * own_share(space, anatomy.visits[-1]))


def _masks(space: Space, visit: str, rows: int) -> int:
    """The elements of masks that a kernel makes of bools and keeps, on one device: where tokens are dealt nobody does."""
    tokens = (space.whole or space).anatomy.tokens
    if space.deal is None or tokens is None:
        return 0
    found = 0
    for attend in tokens.attends:
        if attend.visit == visit and attend.mask is not None and not attend.mask.adds:
            each = attend.keys * (attend.queries if attend.mask.by_query else 1)
            found += each * (rows if attend.mask.by_row else 1) * (attend.heads if attend.mask.by_head else 1)
    return round(found * own_share(space, visit))


def _own_weights(space: Space) -> dict[str, Fraction]:
    """The share that the rank has of the elements of the weights that visits use, by visit; what LOSS multiplies with is its."""
    mine, all_of_them = Counter[str](), Counter[str]()
    head = head_in_pieces(space)
    for home, logical in zip(space.homes, space.logical, strict=True):
        for visit in home.weight.visits:
            later = head is not None and visit == head.visit and head.name in home.weight.layers
            mine[visit] += 0 if later else home.weight.numel
            all_of_them[visit] += logical.weight.numel
    return {visit: Fraction(mine[visit], numel) for visit, numel in all_of_them.items() if numel}


def loads_of(anatomy: Anatomy) -> Mapping[str, Load]:
    """What was weighed, by visit."""
    return {} if anatomy.weighed is None else {load.visit: load for load in anatomy.weighed.visits}


def _weighed(load: Load, share: Share, whole: tuple[int, int], own: Fraction, weights: Fraction, rows: int) -> Taken:
    """What falls to a rank of the bytes of a visit: as much as of its elements, and of those of its `weights`."""
    inside = Fraction(share.inside, whole[0]) if whole[0] else own
    stream = Fraction(share.hands_on, whole[1]) if whole[1] else own

    def part(line: Line, of: Fraction) -> int:
        return line.part(rows, of, weights)

    late = None if load.attending is None else load.attending.signed(rows, inside, weights)
    on_top = part(load.backward, inside), part(load.learning, inside), late
    return Taken(part(load.stream, stream), part(load.inside, inside), *on_top)
