"""Computes the bytes that a rank holds, exactly, from the layouts and the program of a plan.

    parameters          what is kept of the weights between their uses: all, or a shard with its padding
    gradients           the gradients of a step, until STEP
    master              master weights, if parameters have a narrower dtype or a rank has slices of them
    optimizer_states    what the optimizer keeps, step counters included
    strategy_states     what techniques keep from step to step, such as residuals (plan/strategy_state.py)
    buffers             memory of fixed size, used again and again: unsharded weights, messages, casts

    rank 0 of 4, ZeRO 3     [ w/4 ][ g/4 ][ m/4 ][ v/4 ]  + [ block ][ block ] + [ block ][ block ]
                            grows with the model            buffers: as large as the largest blocks

Activations, and the gradients of one block between its backward and the PACK after it, are transient;
`transient_nbytes` is their peak. What the data decides (the rows that come to the experts of a rank) counts
with the bytes that are expected, and in a peak `at_most` with the most that it can be.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ParamSpec
from meshwright.plan.optimizer_per_param import optimizer_state_nbytes, param_optimizer, update_scratch_nbytes
from meshwright.plan.plan import Plan, RankPlan
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.matrix_owner_actions import owned_params
from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import PARAM_USE_KINDS
from meshwright.plan.strategy_state import local_state_nbytes

# actions that allocate activations, and gradients that are not kept
TRANSIENT_KINDS = (*PARAM_USE_KINDS, "LOSS", "CONCAT", "CONCAT_GRAD")
STEP_COUNTER_NBYTES = 4  # bytes of a step counter that is a tensor


@dataclass(frozen=True)
class StateBytes:
    """The bytes that one rank holds, by category (see the module)."""

    parameters: int
    gradients: int
    master: int
    optimizer_states: int
    buffers: int
    strategy_states: int = 0

    @property
    def model_states(self) -> int:
        """The bytes that grow with the model: all but the buffers."""
        kept = self.parameters + self.master + self.optimizer_states + self.strategy_states
        return kept + self.gradients

    @property
    def total(self) -> int:
        """All bytes."""
        return self.model_states + self.buffers

    def as_dict(self) -> dict[str, int]:
        """Returns the bytes by category."""
        return asdict(self)


@dataclass(frozen=True)
class _GroupState:
    """The buffers and states of one parameter group on a rank.

    `owned_numel`: elements of whole matrices that the rank steps although it stores slices of them.
    """

    parameter_nbytes: int
    master_numel: int
    stepped_params: tuple[tuple[ParamSpec, int], ...]
    owned_numel: int = 0


def state_bytes(plan: Plan, rank: int) -> StateBytes:
    """Returns the bytes that `rank` of `plan` holds after its first step.

    The optimizer states are those of the optimizers that the job names; nothing is known of an optimizer that
    the caller makes.
    """
    rank_plan = plan.for_rank(rank)
    return _state_bytes(rank_plan, list(_group_states(plan, rank_plan.view)))


def _state_bytes(plan: RankPlan, group_states: Sequence[_GroupState]) -> StateBytes:
    precision = plan.job.precision.effective
    width = FLOAT_NBYTES[precision.master]
    gradients, buffers = _gradient_and_buffer_nbytes(plan)
    return StateBytes(
        parameters=sum(each.parameter_nbytes for each in group_states),
        gradients=gradients,
        master=sum(
            each.owned_numel + (each.master_numel if precision.master != precision.parameters else 0)
            for each in group_states
        )
        * width,
        optimizer_states=sum(
            param_state_nbytes(plan.job, *pair) for each in group_states for pair in each.stepped_params
        ),
        buffers=buffers + _cast_nbytes(plan.job, group_states),
        strategy_states=sum(
            local_state_nbytes(spec, plan.view) for specs in plan.states.values() for spec in specs
        ),
    )


def transient_nbytes(plan: Plan) -> int:
    """Returns the peak of the bytes that are transient within a step, as far as blocks are known."""
    peak = 0
    for role in plan.program.roles:
        freed = {name for action in role.actions if action.kind == "STEP" for name in action.frees}
        live: dict[str, int] = {}
        for action in role.actions:
            if _is_transient(action) and action.kind != "LOSS":
                live |= {
                    allocation.name: allocation.nbytes
                    for allocation in action.allocations
                    if allocation.name not in freed
                }
            peak = max(peak, sum(live.values()))
            for name in action.frees:
                live.pop(name, None)
    return peak


def peak_nbytes(plan: Plan, rank: int, *, at_most: bool = False) -> int:
    """Returns the expected peak of the bytes that `rank` of `plan` holds during a step, as far as blocks are
    known, or with `at_most` the peak of any step.

    That is what it keeps between steps, with buffers and sharded gradients, and the largest sum of transient
    tensors: unsharded gradients, activations, temporaries of the loss and of the optimizers that the job
    names. Scratch memory of single operations and receive buffers are not included.
    """
    return sum(peak_nbytes_by_category(plan, rank, at_most=at_most).values())


def optimizer_work(plan: Plan, rank: int) -> tuple[int, int]:
    """Returns the elements that `rank` of `plan` steps, and the bytes of their optimizer states."""
    pairs = [pair for each in _group_states(plan, plan.rank_view(rank)) for pair in each.stepped_params]
    return sum(numel for _, numel in pairs), sum(param_state_nbytes(plan.job, *pair) for pair in pairs)


def peak_nbytes_by_category(plan: Plan, rank: int, *, at_most: bool = False) -> dict[str, int]:
    """Returns the bytes of `peak_nbytes` by category, without those that are zero.

    The categories are parameters, master, optimizer_states, strategy_states, gradients, buffers, activations,
    and optimizer: the temporaries of STEP.
    """
    rank_plan = plan.for_rank(rank)
    group_states, peak = list(_group_states(plan, rank_plan.view)), Counter[str]()
    states = _state_bytes(rank_plan, group_states)
    update = max(
        (param_update_nbytes(plan.job, *pair) for each in group_states for pair in each.stepped_params),
        default=0,
    )
    transient_names = {
        allocation.name
        for action in rank_plan.actions
        if _is_transient(action)
        for allocation in action.allocations
    }
    persistent = {
        allocation.name: allocation.max_nbytes if at_most else allocation.nbytes
        for action in rank_plan.actions
        for allocation in action.allocations
        if allocation.name not in transient_names
    }
    live: dict[str, int] = {}
    for action in rank_plan.actions:
        live |= {
            allocation.name: allocation.max_nbytes if at_most else allocation.nbytes
            for allocation in action.allocations
            if allocation.name in transient_names
        }
        scratch = update if action.kind == "STEP" else 0
        if sum(live.values()) + scratch > peak.total():
            peak = Counter(optimizer=scratch)
            for name, nbytes in live.items():
                peak["gradients" if name.startswith("gradient(") else "activations"] += nbytes
        for name in action.frees:
            live.pop(name, None)
    for name, nbytes in persistent.items():
        peak["gradients" if name.startswith(("gradient(", "summed gradient")) else "buffers"] += nbytes
    peak["buffers"] += _cast_nbytes(plan.job, group_states)
    by_category = {
        "parameters": states.parameters,
        "master": states.master,
        "optimizer_states": states.optimizer_states,
        "strategy_states": states.strategy_states,
    }
    found = {
        **by_category,
        **{name: peak[name] for name in ("gradients", "buffers", "activations", "optimizer")},
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def param_state_nbytes(job: Job, param: ParamSpec, numel: int) -> int:
    """Returns the bytes of the optimizer states for `numel` elements of `param`, all of it or a part."""
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


def param_update_nbytes(job: Job, param: ParamSpec, numel: int) -> int:
    """Returns the temporary bytes of stepping `numel` elements of `param`, all of it or a part."""
    shape = param.shape if numel == param.numel else (numel,)
    return update_scratch_nbytes(
        param_optimizer(job.optimizer, param).optimizer, shape, FLOAT_NBYTES[job.precision.effective.master]
    )


def _cast_nbytes(job: Job, group_states: Iterable[_GroupState]) -> int:
    """The gradients of one parameter group in the dtype in which they are stepped, if that differs."""
    precision = job.precision.effective
    if precision.gradients == precision.master:
        return 0
    return (
        max((sum(numel for _, numel in each.stepped_params) for each in group_states), default=0)
        * FLOAT_NBYTES[precision.master]
    )


def _group_states(plan: Plan, view: RankView) -> Iterator[_GroupState]:
    parameters, rank = plan.job.precision.parameters, plan.mesh.rank(view.coordinate)
    owned = list(owned_params(view))
    owned_names = {
        param_sharding.param.name for param_sharding in view.param_shardings if param_sharding.owner_axes
    }
    for param_group in view.all_param_groups:
        flat_spec, width = (
            view.flat_param_specs.get(param_group.name),
            param_group.params[0].itemsize(parameters),
        )
        is_stepped = param_group.trainable and plan.is_primary_rank(rank)
        owned_params_here = [(param, param.numel) for name, param in owned if name == param_group.name]
        if flat_spec is None:
            local_params = [(param, param.numel) for param in param_group.params]
            stepped = (
                [(param, numel) for param, numel in local_params if param.name not in owned_names]
                if is_stepped
                else []
            )
            kept_numel, master_numel = (
                sum(numel for _, numel in local_params),
                sum(numel for _, numel in stepped),
            )
        else:
            params = {param.name: param for param in param_group.params}
            shards = (
                flat_spec.param_shards(plan.mesh.peers(rank, flat_spec.axes).index(rank))
                if is_stepped
                else ()
            )
            stepped = [(params[shard.name], shard.numel) for shard in shards if shard.name not in owned_names]
            kept_numel = (
                flat_spec.shard_numel if param_group.param_shardings[0].is_stored_sharded else flat_spec.numel
            )
            master_numel = flat_spec.shard_numel if is_stepped and not owned_names & set(params) else 0
        yield _GroupState(
            kept_numel * width,
            master_numel,
            (*stepped, *owned_params_here),
            sum(numel for _, numel in owned_params_here),
        )


def _is_transient(action: Action) -> bool:
    return action.kind in TRANSIENT_KINDS or action.stream == "recv"


def _gradient_and_buffer_nbytes(plan: RankPlan) -> tuple[int, int]:
    """Returns the bytes of gradients, which STEP frees, and of buffers, the other allocations.

    Transient allocations are neither.
    """
    actions = plan.actions
    freed = {name for action in actions if action.kind == "STEP" for name in action.frees}
    gradients = {
        allocation.name: allocation.nbytes
        for action in actions
        for allocation in action.allocations
        if allocation.name in freed
    }
    allocated = {
        allocation.name: allocation.nbytes
        for action in actions
        if not _is_transient(action)
        for allocation in action.allocations
    }
    return sum(gradients.values()), sum(nbytes for name, nbytes in allocated.items() if name not in freed)
