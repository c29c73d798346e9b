"""What a rank holds of the model's state, to the byte, read from a plan: from its layouts, its job, and what its actions hold.

    parameters   what is kept of the weights between their uses: whole, or a shard; padding included
    gradients    where the sums of a step lie until STEP
    master       the copy that the optimizer steps where weights have a narrower dtype
    moments      what the optimizer keeps, counters included
    buffers      memory of fixed size that the rest passes through: whole weights for their uses, messages, casts

    rank 0 of 4, stored in shards   [ w/4 ][ g/4 ][ m/4 ][ v/4 ]  + [ block ][ block ] + [ block ][ block ]
                                    what grows with the model        buffers: as large as the largest blocks

Activations, and the gradients of one block between its backward and the PACK behind it, come and go within a step;
`passing_bytes` says how much of that there is at most.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from meshwright.core.anatomy import NBYTES, Weight
from meshwright.core.job import Job
from meshwright.core.plan import Plan
from meshwright.core.rules import moment_nbytes, stepping_of
from meshwright.core.steps import USES

COUNTER = 4  # bytes of a count of steps, where it is a tensor


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one rank holds, by category (see the module)."""

    parameters: int
    gradients: int
    master: int
    moments: int
    buffers: int

    @property
    def states(self) -> int:
        """All but the buffers: what grows with the model."""
        return self.parameters + self.gradients + self.master + self.moments

    @property
    def total(self) -> int:
        """Everything."""
        return self.states + self.buffers

    def as_dict(self) -> dict[str, int]:
        """The bytes by category."""
        return asdict(self)


@dataclass(frozen=True)
class _Kept:
    """Of one bundle: bytes kept of the weights, elements kept as master, and what is stepped: weight, elements."""

    parameters: int
    master: int
    stepped: tuple[tuple[Weight, int], ...]


def state_bytes(plan: Plan, rank: int) -> StateBytes:
    """The bytes that `rank` of `plan` holds once it has taken a step.

    Of an optimizer that the caller makes nothing is known: moments are those of the rules that the job names.
    """
    precision = plan.job.precision.resolved
    width = NBYTES[precision.master]
    kept = list(_kept(plan, rank))
    gradients, buffers = _held(plan)
    cast = max((sum(numel for _, numel in each.stepped) for each in kept), default=0)  # a bundle's gradients, as they are stepped
    return StateBytes(
        parameters=sum(each.parameters for each in kept),
        gradients=gradients,
        master=sum(each.master for each in kept) * width if precision.master != precision.parameters else 0,
        moments=sum(moment_bytes(plan.job, *pair) for each in kept for pair in each.stepped),
        buffers=buffers + (cast * width if precision.gradients != precision.master else 0),
    )


def passing_bytes(plan: Plan) -> int:
    """The most that comes and goes in a step at any time, beside `state_bytes`: what blocks take, as far as it is known."""
    most = 0
    for _, actions in plan.program.roles:
        freed = {name for action in actions if action.kind == "STEP" for name in action.frees}
        now: dict[str, int] = {}
        for action in actions:
            if action.kind in USES:
                now |= {hold.name: hold.nbytes for hold in action.takes if hold.name not in freed}
            most = max(most, sum(now.values()))
            for name in action.frees:
                now.pop(name, None)
    return most


def moment_bytes(job: Job, weight: Weight, numel: int) -> int:
    """What the optimizer keeps for `numel` elements of `weight`, all of it or a piece; a rule says its bytes in core/rules.py."""
    stepping = stepping_of(job.optimizer, weight)
    shape = weight.shape if numel == weight.numel else (numel,)
    counter = COUNTER if stepping.rule == "adamw" else 0
    return moment_nbytes(stepping.rule, shape, NBYTES[job.precision.resolved.moments], stepping.momentum) + counter


def _kept(plan: Plan, rank: int) -> Iterator[_Kept]:
    """What `rank` keeps of each bundle."""
    space, parameters = plan.at(rank).space, plan.job.precision.parameters
    arenas = space.arenas()
    for bundle in space.all_bundles():
        arena, width = arenas.get(bundle.name), bundle.weights[0].width(parameters)
        steps = bundle.trainable and plan.leads(rank)
        if arena is None:
            mine = [(weight, weight.numel) for weight in bundle.weights]
            numel = sum(local for _, local in mine)
            yield _Kept(numel * width, numel if steps else 0, tuple(mine) if steps else ())
        else:
            weights = {weight.name: weight for weight in bundle.weights}
            pieces = arena.pieces(plan.mesh.peers(rank, arena.axes).index(rank)) if steps else ()
            numel = arena.shard if bundle.homes[0].in_shards else arena.numel
            stepped = tuple((weights[piece.name], piece.numel) for piece in pieces)
            yield _Kept(numel * width, arena.shard if steps else 0, stepped)


def _held(plan: Plan) -> tuple[int, int]:
    """The bytes of what actions take: what STEP frees are gradients, the rest is buffers.

    What blocks take, activations and gradients that nobody keeps, comes and goes and is neither.
    """
    gradients = buffers = 0
    for _, actions in plan.program.roles:
        freed = {name for action in actions if action.kind == "STEP" for name in action.frees}
        kept = {hold.name: hold.nbytes for action in actions for hold in action.takes if hold.name in freed}
        others = {hold.name: hold.nbytes for action in actions if action.kind not in USES for hold in action.takes}
        gradients = max(gradients, sum(kept.values()))
        buffers = max(buffers, sum(nbytes for name, nbytes in others.items() if name not in freed))
    return gradients, buffers
