"""What a rank holds of the model's state, to the byte, read from a plan: from its layouts, its job, and what
its actions hold.

    parameters   what is kept of the weights between their uses: whole, or a shard; padding included
    gradients    where the sums of a step lie until STEP
    master       the copy that the optimizer steps where weights have a narrower dtype, or where a rank has
                 slices of them
    moments      what the optimizer keeps, counters included
    buffers      memory of fixed size that the rest passes through: whole weights for their uses, messages,
                 casts

    rank 0 of 4, stored in shards   [ w/4 ][ g/4 ][ m/4 ][ v/4 ]  + [ block ][ block ] + [ block ][ block ]
                                    what grows with the model        buffers: as large as the largest blocks

Activations, and the gradients of one block between its backward and the PACK behind it, come and go within a
step; `passing_bytes` says how much of that there is at most.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ParamSpec
from meshwright.plan.optimizer_spec import optimizer_state_nbytes, param_optimizer, update_scratch_nbytes
from meshwright.plan.plan import Plan
from meshwright.plan.step.action import Action
from meshwright.plan.step.matrix_owners import owned_params
from meshwright.plan.step.single_device import PARAM_USE_KINDS

TRANSIENT_KINDS = (
    *PARAM_USE_KINDS,
    "LOSS",
    "CONCAT",
    "CONCAT_GRAD",
)  # kinds that take what comes and goes: activations, gradients that nobody keeps
STEP_COUNTER_NBYTES = 4  # bytes of a count of steps, where it is a tensor


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one rank holds, by category (see the module)."""

    parameters: int
    gradients: int
    master: int
    optimizer_states: int
    buffers: int

    @property
    def model_states(self) -> int:
        """All but the buffers: what grows with the model."""
        return self.parameters + self.gradients + self.master + self.optimizer_states

    @property
    def total(self) -> int:
        """Everything."""
        return self.model_states + self.buffers

    def as_dict(self) -> dict[str, int]:
        """The bytes by category."""
        return asdict(self)


@dataclass(frozen=True)
class _GroupState:
    """Of one bundle: bytes kept of the weights, elements kept as master, and what is stepped: weight,
    elements.

    `owned` are the elements of whole weights that the rank steps and has slices of.
    """

    parameter_nbytes: int
    master_numel: int
    stepped_params: tuple[tuple[ParamSpec, int], ...]
    owned_numel: int = 0


def state_bytes(plan: Plan, rank: int) -> StateBytes:
    """The bytes that `rank` of `plan` holds once it has taken a step.

    Of an optimizer that the caller makes nothing is known: moments are those of the rules that the job names.
    """
    precision, plan = plan.job.precision.effective, plan.for_rank(rank)
    width = FLOAT_NBYTES[precision.master]
    kept = list(_group_states(plan, rank))
    gradients, buffers = _gradient_and_buffer_nbytes(plan)
    return StateBytes(
        parameters=sum(each.parameter_nbytes for each in kept),
        gradients=gradients,
        master=sum(
            each.owned_numel + (each.master_numel if precision.master != precision.parameters else 0)
            for each in kept
        )
        * width,
        optimizer_states=sum(moment_bytes(plan.job, *pair) for each in kept for pair in each.stepped_params),
        buffers=buffers + _cast_nbytes(plan.job, kept),
    )


def transient_nbytes(plan: Plan) -> int:
    """The most that comes and goes in a step at any time, beside `state_bytes`: what blocks take, as far as
    it is known.
    """
    most = 0
    for _, actions in plan.program.roles:
        freed = {name for action in actions if action.kind == "STEP" for name in action.frees}
        now: dict[str, int] = {}
        for action in actions:
            if _is_transient(action) and action.kind != "LOSS":
                now |= {hold.name: hold.nbytes for hold in action.allocations if hold.name not in freed}
            most = max(most, sum(now.values()))
            for name in action.frees:
                now.pop(name, None)
    return most


def peak_nbytes(plan: Plan, rank: int) -> int:
    """The most bytes that `rank` of `plan` holds at any moment of a step, as far as it is known.

    That is what it keeps between steps, buffers and shards of gradients included, and what comes and goes at
    the fullest: whole gradients, what blocks hand on and keep inside, what the loss takes for itself, and
    what rules of optimizers do, unless they are the caller's. Scratch memory of single operations, and that
    in which messages arrive, is not in it.
    """
    return sum(peak_nbytes_by_category(plan, rank).values())


def optimizer_work(plan: Plan, rank: int) -> tuple[int, int]:
    """The elements that `rank` of `plan` steps, and the bytes of what its optimizer remembers of them."""
    plan = replace(plan, sharding=plan.sharding.at_coordinate(plan.mesh.coordinate(rank)))
    pairs = [pair for each in _group_states(plan, rank) for pair in each.stepped_params]
    return sum(numel for _, numel in pairs), sum(moment_bytes(plan.job, *pair) for pair in pairs)


def peak_nbytes_by_category(plan: Plan, rank: int) -> dict[str, int]:
    """The same as `peak_bytes`, by what it is; only what is there.

    That is parameters, master, moments, buffers, gradients, activations, and what the optimizer has while it
    steps.
    """
    plan = plan.for_rank(rank)
    kept, said, most = list(_group_states(plan, rank)), state_bytes(plan, rank), Counter[str]()
    update = max((update_bytes(plan.job, *pair) for each in kept for pair in each.stepped_params), default=0)
    passing = {hold.name for action in plan.actions if _is_transient(action) for hold in action.allocations}
    others = {
        hold.name: hold.nbytes
        for action in plan.actions
        for hold in action.allocations
        if hold.name not in passing
    }
    now: dict[str, int] = {}
    for action in plan.actions:
        now |= {hold.name: hold.nbytes for hold in action.allocations if hold.name in passing}
        beside = update if action.kind == "STEP" else 0
        if sum(now.values()) + beside > most.total():
            most = Counter(optimizer=beside)
            for name, nbytes in now.items():
                most["gradients" if name.startswith("gradient(") else "activations"] += nbytes
        for name in action.frees:
            now.pop(name, None)
    for name, nbytes in others.items():
        most["gradients" if name.startswith(("gradient(", "summed gradient")) else "buffers"] += nbytes
    most["buffers"] += _cast_nbytes(plan.job, kept)
    states = {"parameters": said.parameters, "master": said.master, "optimizer_states": said.optimizer_states}
    found = {**states, **{name: most[name] for name in ("gradients", "buffers", "activations", "optimizer")}}
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def moment_bytes(job: Job, param: ParamSpec, numel: int) -> int:
    """What the optimizer keeps for `numel` elements of `weight`, all of it or a piece; a rule says its bytes
    in core/rules.py.
    """
    stepping = param_optimizer(job.optimizer, param)
    shape = param.shape if numel == param.numel else (numel,)
    counter = STEP_COUNTER_NBYTES if stepping.optimizer == "adamw" else 0
    return (
        optimizer_state_nbytes(
            stepping.optimizer,
            shape,
            FLOAT_NBYTES[job.precision.effective.optimizer_states],
            stepping.momentum,
        )
        + counter
    )


def update_bytes(job: Job, param: ParamSpec, numel: int) -> int:
    """What a step of `numel` elements of `weight`, all of it or a piece, has for itself; a rule says it in
    core/rules.py.
    """
    shape = param.shape if numel == param.numel else (numel,)
    return update_scratch_nbytes(
        param_optimizer(job.optimizer, param).optimizer, shape, FLOAT_NBYTES[job.precision.effective.master]
    )


def _cast_nbytes(job: Job, kept: Iterable[_GroupState]) -> int:
    """The bytes of the gradients of one bundle as they are stepped, where that is another dtype."""
    precision = job.precision.effective
    if precision.gradients == precision.master:
        return 0
    return (
        max((sum(numel for _, numel in each.stepped_params) for each in kept), default=0)
        * FLOAT_NBYTES[precision.master]
    )


def _group_states(plan: Plan, rank: int) -> Iterator[_GroupState]:
    """What `rank` keeps of each bundle."""
    space, parameters = plan.sharding, plan.job.precision.parameters
    arenas, owned = space.flat_param_specs(), list(owned_params(space, rank))
    apart = {home.param.name for home in space.param_shardings if home.owner_axes}
    for bundle in space.all_param_groups():
        arena, width = arenas.get(bundle.name), bundle.params[0].itemsize(parameters)
        steps = bundle.trainable and plan.is_primary_rank(rank)
        whole = [(weight, weight.numel) for name, weight in owned if name == bundle.name]
        if arena is None:
            mine = [(weight, weight.numel) for weight in bundle.params]
            stepped = [(weight, numel) for weight, numel in mine if weight.name not in apart] if steps else []
            kept, master = sum(numel for _, numel in mine), sum(numel for _, numel in stepped)
        else:
            weights = {weight.name: weight for weight in bundle.params}
            pieces = arena.param_shards(plan.mesh.peers(rank, arena.axes).index(rank)) if steps else ()
            stepped = [(weights[piece.name], piece.numel) for piece in pieces if piece.name not in apart]
            kept = arena.shard_numel if bundle.param_shardings[0].is_stored_sharded else arena.numel
            master = arena.shard_numel if steps and not apart & set(weights) else 0
        yield _GroupState(kept * width, master, (*stepped, *whole), sum(numel for _, numel in whole))


def _is_transient(action: Action) -> bool:
    """Whether what `action` takes comes and goes within a step, as what another rank has sent does."""
    return action.kind in TRANSIENT_KINDS or action.stream == "recv"


def _gradient_and_buffer_nbytes(plan: Plan) -> tuple[int, int]:
    """The bytes of what actions take: what STEP frees are gradients, the rest is buffers.

    What blocks take, activations and gradients that nobody keeps, comes and goes and is neither.
    """
    actions = plan.actions
    freed = {name for action in actions if action.kind == "STEP" for name in action.frees}
    kept = {hold.name: hold.nbytes for action in actions for hold in action.allocations if hold.name in freed}
    others = {
        hold.name: hold.nbytes
        for action in actions
        if not _is_transient(action)
        for hold in action.allocations
    }
    return sum(kept.values()), sum(nbytes for name, nbytes in others.items() if name not in freed)
