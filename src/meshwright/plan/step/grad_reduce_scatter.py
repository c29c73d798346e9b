"""Adds the reduce-scatter of gradients into shards to an action list, for parameters that are updated
S(flat).


    once per step        B1 PACK(1) ............ B1' ... REDUCE(1)    kept in one buffer of the group from the
                                                                      first backward; later ones add in place
    every microbatch    B1 PACK(1, 0) REDUCE(1, 0) .. B1' PACK(1, 1) REDUCE(1, 1) .. ACCUMULATE(1, 1)

    PACK         copies gradients to their offsets in one contiguous buffer, and frees them
    REDUCE       reduce-scatter over the ranks, or a reduce to the rank that owns the group; then, along
                 `replicate_axis`, an all-reduce of the shards
    ACCUMULATE   adds a shard to the sum of earlier microbatches, or casts it to the dtype of gradients
                 (where gradients rest on the host: copies the shard out of the buffer, and does it there)
    LOCAL_NORM   reads the sums: it waits for all of them

Two buffers serve all groups in turn: one is packed while the other is sent. A buffer is packed again after
its reduction has ended.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.plan.hardware.streams import COPY
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.param_sharding import ParamGroup
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.grad_dependencies import completing_backwards, contributing_calls
from meshwright.plan.step.memory.memory_names import grad_name, sum_name
from meshwright.plan.step.program import Action, Allocation, Transfer, index_of_last, with_waits
from meshwright.plan.step.single_device_program import WEIGHT_GRAD_KINDS

NUM_BUFFERS = 2


def ordered_reduce(transfer: Transfer, root: int, member_indices: tuple[int, ...] = ()) -> Transfer:
    """Returns the reduce to the rank at index `root` of what `transfer` reduces: all ranks, or those at
    `member_indices`, send theirs, and it adds them in their order, so that no bit depends on which rank it
    is.
    """
    gather = replace(transfer, collective="gather", root=root, member_indices=member_indices)
    return replace(gather, collective="reduce", carried_by=(gather,))


@dataclass
class _Buffer:
    """One of the alternating buffers, the action that uses it last, and an ACCUMULATE that is not yet
    issued.
    """

    allocation: Allocation
    last_use: Action | None = None
    pending_accumulate: Action | None = None
    staging: str = ""  # the host memory that it was last copied into, to be added from there


class GradReduceScatter:
    """Reductions into the shards of flat parameters, and of shards over `replicate_axis`; for every
    microbatch, or once per step.
    """

    def __init__(
        self,
        view: RankView,
        job: Job,
        replicate_axis: str,
        *,
        every_microbatch: bool,
    ) -> None:
        self.replicate_axis, self.every_microbatch = replicate_axis, every_microbatch
        self.flat_param_specs = view.flat_param_specs
        self._shard_numels = {name: view.shard_numel(spec) for name, spec in self.flat_param_specs.items()}
        self.param_groups = [group for group in view.param_groups if group.name in self.flat_param_specs]
        self._full_grads = {grad_name(group) for group in self.param_groups}
        self.block_calls = view.model_spec.block_calls
        self._groups_of = {
            block_call: [
                member
                for member in self.param_groups
                if block_call in contributing_calls(member, self.block_calls)
            ]
            for block_call in self.block_calls
        }
        precision = job.precision.effective
        self.param_dtype = precision.parameters
        self.grad_dtype = precision.gradients
        self.reduce_dtype = precision.reduce
        self.to_host = view.plan.tiers.gradients == "host"
        self._staging_names: tuple[str, ...] = ()

    def add_to(self, actions: list[Action]) -> list[Action]:
        """Returns `actions` with the gradients of every group reduced before LOCAL_NORM."""
        edited = list(self._reduce_once(actions) if self._in_place else self._reduce_every_time(actions))
        edited = self._reduce_over_replicas(edited) if self.replicate_axis else edited
        awaited = {
            action.tensors: action.name for action in edited if action.kind in ("REDUCE", "ACCUMULATE")
        }.values()
        frees = () if self._in_place else (*self._buffer_names(edited), *self._staging_names)
        norm_index = index_of_last(edited, "LOCAL_NORM") or 0
        edited[norm_index] = replace(with_waits(edited[norm_index], awaited), frees=frees)
        return [self._free_sums(action) for action in edited]

    @property
    def _in_place(self) -> bool:
        if self.to_host:
            return False
        return not self.every_microbatch and self.reduce_dtype == self.grad_dtype == self.param_dtype

    def _reduce(self, param_group: ParamGroup, microbatch: int | None, waits: Sequence[str]) -> Action:
        spec, nbytes = self.flat_param_specs[param_group.name], self._nbytes(param_group)
        members = spec.member_indices
        transfer = Transfer(
            "reduce_scatter", spec.axes, nbytes, dtype=self.reduce_dtype, member_indices=members
        )
        if spec.owner_index is not None:
            transfer = ordered_reduce(transfer, spec.owner_index, members)
        return Action(
            "REDUCE", param_group.name, microbatch, "comm", tuple(waits), param_group.names, transfer
        )

    def _reduce_over_replicas(self, actions: list[Action]) -> list[Action]:
        # A replica reduction is issued after two more groups have been packed: the shard is complete by then,
        # or its buffer would not be free.
        replicated = {
            group.names
            for group in self.param_groups
            if self.replicate_axis not in group.param_shardings[0].sliced_dims
        }
        sums = (action for action in actions if action.kind in ("REDUCE", "ACCUMULATE"))
        last = {action.tensors: action for action in sums if action.tensors in replicated}
        due: list[tuple[Action, int]] = []
        edited: list[Action] = []
        for action in actions:
            for shard_ready, num_packed in due if action.kind in ("PACK", "LOCAL_NORM") else ():
                if action.kind == "LOCAL_NORM" or num_packed == NUM_BUFFERS:
                    edited += self._replica_reduction(shard_ready)
            if action.kind == "PACK":
                due = [
                    (shard_ready, num_packed + 1)
                    for shard_ready, num_packed in due
                    if num_packed < NUM_BUFFERS
                ]
            edited.append(action)
            if last.get(action.tensors) == action:
                due.append((action, 0))
        return edited

    def _replica_reduction(self, shard_ready: Action) -> list[Action]:
        nbytes = self._shard_numels[shard_ready.subject] * FLOAT_NBYTES[self.grad_dtype]
        transfer = Transfer("all_reduce", (self.replicate_axis,), nbytes, dtype=self.grad_dtype)
        name = f"{shard_ready.subject}, replicas"
        wait = Action("WAIT", name, waits=(shard_ready.name,), tensors=shard_ready.tensors)
        return [wait, Action("REDUCE", name, None, "comm", (wait.name,), shard_ready.tensors, transfer)]

    def _reduce_once(self, actions: list[Action]) -> Iterator[Action]:
        actions_after: dict[int, list[Action]] = {}
        for group in self.param_groups:
            backwards = completing_backwards(actions, group, self.block_calls)
            first, last = backwards[0], backwards[-1]
            allocation = Allocation(sum_name(group), self._nbytes(group))
            waits = (actions[first].name,)
            pack = Action(
                "PACK",
                group.name,
                waits=waits,
                tensors=group.names,
                allocations=(allocation,),
                frees=(grad_name(group),),
            )
            actions_after.setdefault(first, []).append(pack)
            actions_after.setdefault(last, []).append(
                self._reduce(group, None, (*dict.fromkeys((pack.name, actions[last].name)),))
            )
        for i, action in enumerate(actions):
            yield action
            yield from actions_after.get(i, ())

    def _reduce_every_time(self, actions: list[Action]) -> Iterator[Action]:
        largest = max((self._nbytes(group) for group in self.param_groups), default=0)
        buffers = [_Buffer(Allocation(f"gradient buffer {number}", largest)) for number in range(NUM_BUFFERS)]
        num_packed, due = 0, self._groups_completed_at(actions)
        allocation, summed = set[str](), dict[str, str]()
        for i, action in enumerate(actions):
            if action.kind == "LOCAL_NORM":
                for number in range(num_packed, num_packed + NUM_BUFFERS):  # oldest first
                    yield from self._pop_accumulate(buffers[number % NUM_BUFFERS])
            yield self._with_gradients(action, allocation)
            for group in due.get(i, ()):
                buffer = buffers[num_packed % NUM_BUFFERS]
                num_packed += 1
                yield from self._pop_accumulate(buffer)
                yield from self._pack_and_reduce(group, action, buffer, summed)
                allocation.discard(group.name)

    def _groups_completed_at(self, actions: Sequence[Action]) -> dict[int, list[ParamGroup]]:
        found: dict[int, list[ParamGroup]] = {}
        for group in self.param_groups:
            backwards = completing_backwards(actions, group, self.block_calls)
            for at in backwards if self.every_microbatch else backwards[-1:]:
                found.setdefault(at, []).append(group)
        return found

    def _pack_and_reduce(
        self, param_group: ParamGroup, backward: Action, buffer: _Buffer, summed: dict[str, str]
    ) -> Iterator[Action]:
        """PACK and REDUCE after `backward`; an ACCUMULATE that follows is stored in `buffer`.

        `summed` maps groups to the last action that changed their sums.
        """
        microbatch = backward.microbatch if self.every_microbatch else None
        before = () if buffer.last_use is None else (buffer.last_use.name,)
        frees = (grad_name(param_group), *((buffer.allocation.name,) if buffer.last_use else ()))
        waits = (backward.name, *before)
        pack = Action(
            "PACK",
            param_group.name,
            microbatch,
            waits=waits,
            tensors=param_group.names,
            allocations=(buffer.allocation,),
            frees=frees,
        )
        reduce = self._reduce(param_group, microbatch, (pack.name,))
        first, casts = param_group.name not in summed, self.reduce_dtype != self.grad_dtype
        shard = Allocation(
            sum_name(param_group),
            self._shard_numels[param_group.name] * FLOAT_NBYTES[self.grad_dtype],
            tier="host" if self.to_host else "device",
        )
        accumulate = None
        if self.to_host:
            waits = (reduce.name, *(() if first else (summed[param_group.name],)))
            accumulate = self._accumulate_on_host(
                param_group, microbatch, waits, shard if first else None, buffer
            )
        elif casts or not first:
            waits = (reduce.name, *(() if first else (summed[param_group.name],)))
            accumulate = Action(
                "ACCUMULATE",
                param_group.name,
                microbatch,
                waits=waits,
                tensors=param_group.names,
                allocations=(shard,) if first else (),
            )
        reduce = replace(reduce, allocations=(shard,) if first and not casts and not self.to_host else ())
        buffer.last_use, buffer.pending_accumulate = accumulate or reduce, accumulate
        summed[param_group.name] = buffer.last_use.name
        yield pack
        yield reduce

    def _accumulate_on_host(
        self,
        param_group: ParamGroup,
        microbatch: int | None,
        waits: tuple[str, ...],
        shard: Allocation | None,
        buffer: _Buffer,
    ) -> Action:
        """Returns the copy of a reduced shard to the host, into `shard`; what is not the sum itself is copied
        into a staging buffer there, and added.
        """
        width = FLOAT_NBYTES[self.reduce_dtype]
        allocations, frees = (), ()
        if shard is None or self.reduce_dtype != self.grad_dtype:
            name = f"staging of {buffer.allocation.name}"
            largest = max(self._shard_numels.values()) * width
            allocations, frees = (
                (Allocation(name, largest, tier="host"),),
                (buffer.staging,) * bool(buffer.staging),
            )
            buffer.staging = name
            self._staging_names = tuple(dict.fromkeys((*self._staging_names, name)))
        nbytes = self._shard_numels[param_group.name] * width
        return Action(
            "ACCUMULATE",
            param_group.name,
            microbatch,
            "copy_out",
            waits,
            param_group.names,
            Transfer(COPY, (), nbytes, dtype=self.reduce_dtype),
            allocations=(*allocations, *(() if shard is None else (shard,))),
            frees=frees,
        )

    @staticmethod
    def _pop_accumulate(buffer: _Buffer) -> Iterator[Action]:
        if buffer.pending_accumulate is not None:
            yield buffer.pending_accumulate
            buffer.pending_accumulate = None

    def _with_gradients(self, action: Action, allocation: set[str]) -> Action:
        if action.kind not in WEIGHT_GRAD_KINDS or not self.every_microbatch:
            return action
        new_groups = [group for group in self._groups_of[action.subject] if group.name not in allocation]
        allocation |= {group.name for group in new_groups}
        kept = tuple(each for each in action.allocations if each.name not in self._full_grads)
        return replace(
            action,
            allocations=(
                *kept,
                *(
                    Allocation(grad_name(group), group.numel * FLOAT_NBYTES[self.param_dtype])
                    for group in new_groups
                ),
            ),
        )

    def _free_sums(self, action: Action) -> Action:
        if action.kind != "STEP":
            return action
        frees = tuple(name for name in action.frees if name not in self._full_grads)
        return replace(action, frees=(*frees, *map(sum_name, self.param_groups)))

    def _buffer_names(self, actions: Sequence[Action]) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(
                allocated.name
                for action in actions
                if action.kind == "PACK"
                for allocated in action.allocations
            )
        )

    def _nbytes(self, param_group: ParamGroup) -> int:
        return self.flat_param_specs[param_group.name].numel * FLOAT_NBYTES[self.reduce_dtype]
