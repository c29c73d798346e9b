"""Computes the bytes of the model states of a parameter group on one rank, and the tier that each rests in.

weights             all of them, or a shard with its padding
master              if the optimizer steps another dtype than that of the weights, if a rank steps what it
                    has slices of, or if the host steps weights that rest on the device or on disk
rounded             the stepped weights in the dtype of the weights, where the host rounds them
optimizer states    step counters included

On disk a group is one record of whole blocks of the file: masters, states, and the rest of the last block.
Its shard of the weights is another one, which each use reads.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.plan.hardware.memory_tiers import FILE_BLOCK_NBYTES, MemoryTier
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ParamSpec
from meshwright.plan.optimizer_per_param import optimizer_state_nbytes, param_optimizer, update_scratch_nbytes
from meshwright.plan.sharding.flat_param import round_up
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.matrix_owner_actions import owned_params

STEP_COUNTER_NBYTES = 4  # bytes of a step counter that is a tensor
WIDEST_ITEM_NBYTES = 8  # bytes of an element of the widest dtype


@dataclass(frozen=True)
class GroupStates:
    """The model states of the parameter group `name` on a rank.

    `stepped_params` are the parameters whose optimizer states it has, with the elements of each; `numel`
    elements are stored of the group, padding included. `grad_nbytes` are those of the summed gradients that
    the optimizer reads, `update_nbytes` those of the weights in another tier that the host updates.
    """

    name: str
    numel: int
    weight_nbytes: int
    weight_tier: MemoryTier
    master_nbytes: int
    rounded_nbytes: int
    grad_nbytes: int
    update_nbytes: int
    state_nbytes: int
    stepped_params: tuple[tuple[ParamSpec, int], ...]

    @property
    def stepped_numel(self) -> int:
        """The elements that the rank steps."""
        return sum(numel for _, numel in self.stepped_params)

    @property
    def record_states_begin(self) -> int:
        """Where optimizer states begin in the record of the group on disk, behind the masters."""
        return round_up(self.master_nbytes, WIDEST_ITEM_NBYTES)

    @property
    def record_nbytes(self) -> int:
        """The bytes of that record, which a step reads and writes."""
        return round_up(self.record_states_begin + self.state_nbytes, FILE_BLOCK_NBYTES)

    @property
    def weight_record_nbytes(self) -> int:
        """The bytes of the record of weights on disk, which each use reads; 0 if they rest elsewhere."""
        return round_up(self.weight_nbytes, FILE_BLOCK_NBYTES) if self.weight_tier == "disk" else 0


def group_states(job: Job, view: RankView) -> Iterator[GroupStates]:
    """Yields the model states of every parameter group of the rank of `view`, frozen ones included."""
    precision, mesh, tiers = job.precision.effective, view.plan.mesh, view.plan.tiers
    owned, is_primary = (
        list(owned_params(view)),
        not any(view.coordinate[axis] for axis in view.plan.primary_rank_axes),
    )
    owned_names = {each.param.name for each in view.param_shardings if each.owner_axes}
    width = FLOAT_NBYTES[precision.master]
    for group in view.all_param_groups:
        spec, itemsize = (
            view.flat_param_specs.get(group.name),
            group.params[0].itemsize(job.precision.parameters),
        )
        is_stepped, is_stored_sharded = (
            group.trainable and is_primary,
            group.param_shardings[0].is_stored_sharded,
        )
        copies, rounds = (
            tiers.host_steps_copy(is_stored_sharded=is_stored_sharded),
            precision.master != precision.parameters,
        )
        owned_here = [(param, param.numel) for name, param in owned if name == group.name]
        if spec is None:
            stepped = [
                (each, each.numel) for each in group.params if is_stepped and each.name not in owned_names
            ]
            kept_numel, master_numel = sum(each.numel for each in group.params), sum(n for _, n in stepped)
        else:
            params = {param.name: param for param in group.params}
            shards = spec.param_shards(mesh.index(view.coordinate, spec.axes)) if is_stepped else ()
            stepped = [(params[each.name], each.numel) for each in shards if each.name not in owned_names]
            shard_numel = view.shard_numel(spec)
            kept_numel = shard_numel if is_stored_sharded else spec.numel
            master_numel = shard_numel if is_stepped and not owned_names & set(params) else 0
        pairs = (*stepped, *owned_here)
        yield GroupStates(
            group.name,
            kept_numel,
            kept_numel * itemsize,
            tiers.weights if is_stored_sharded else "device",
            width * (sum(n for _, n in owned_here) + (master_numel if copies or rounds else 0)),
            itemsize * master_numel if copies and rounds else 0,
            FLOAT_NBYTES[precision.gradients] * master_numel,
            itemsize * master_numel if copies else 0,
            sum(param_state_nbytes(job, *pair) for pair in pairs),
            pairs,
        )


def cast_nbytes(job: Job, states: Iterable[GroupStates]) -> int:
    """Returns the bytes of the gradients of one parameter group in the dtype in which they are stepped, if
    that differs.
    """
    precision = job.precision.effective
    if precision.gradients == precision.master:
        return 0
    return max((each.stepped_numel for each in states), default=0) * FLOAT_NBYTES[precision.master]


def param_state_nbytes(job: Job, param: ParamSpec, numel: int) -> int:
    """Returns the bytes of the optimizer states for `numel` elements of `param`, all of it or a part."""
    stepping = param_optimizer(job.optimizer, param)
    shape = param.shape if numel == param.numel else (numel,)
    counter = STEP_COUNTER_NBYTES if stepping.optimizer == "adamw" else 0
    itemsize = FLOAT_NBYTES[job.precision.effective.optimizer_states]
    return optimizer_state_nbytes(stepping.optimizer, shape, itemsize, stepping.momentum) + counter


def param_update_nbytes(job: Job, param: ParamSpec, numel: int) -> int:
    """Returns the temporary bytes of stepping `numel` elements of `param`, all of it or a part."""
    shape = param.shape if numel == param.numel else (numel,)
    return update_scratch_nbytes(
        param_optimizer(job.optimizer, param).optimizer, shape, FLOAT_NBYTES[job.precision.effective.master]
    )
