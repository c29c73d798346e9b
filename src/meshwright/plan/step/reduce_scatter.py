"""The gradients of each bundle summed into shards: what is added to the list behind backwards where weights are stepped S(flat).

    once per step        B1 PACK(1) ............ B1' ... REDUCE(1)            kept in one buffer of the bundle from the first
                                                                              backward on; later ones add in place
    every micro-batch    B1 PACK(1, 0) REDUCE(1, 0) .. B1' PACK(1, 1) REDUCE(1, 1) .. ACCUMULATE(1, 1)

    PACK      gradients into a contiguous buffer, at the places of the arena; where they lay is free again
    REDUCE    their sum over the ranks, of which each gets its shard (reduce_scatter), over `across` then the sum of shards
    ACCUMULATE       a shard to what the micro-batches before have left, or from the dtype of the wire to that of the gradients
    LOCAL_NORM    looks at the sums: it waits for all of them (core/steps.py)

Two buffers serve all bundles in turn: one is packed while the other travels. What was in it has left before it is packed again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.param_sharding import ParamGroup
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.action import Action, Allocation, Transfer, index_of_last, with_waits
from meshwright.plan.step.single_device import (
    SCRATCH,
    WEIGHT_GRAD_KINDS,
    completing_backwards,
    contributing_calls,
    grad_name,
)

NUM_BUFFERS = 2


@dataclass
class _Buffer:
    """One of the buffers that bundles take in turn, and the reduction that it is busy with."""

    allocation: Allocation
    last_use: Action | None = None
    pending_accumulate: Action | None = None


class GradReduceScatter:
    """Sums over `axes` into shards, and of shards over `across`; `every` micro-batch, or once per step."""

    def __init__(
        self,
        sharding: ShardingPlan,
        job: Job,
        axes: tuple[str, ...],
        replicate_axis: str,
        *,
        every_microbatch: bool,
    ) -> None:
        self.axes, self.replicate_axis, self.every_microbatch = axes, replicate_axis, every_microbatch
        self.param_groups, self.flat_param_specs, self.block_calls = (
            sharding.param_groups(),
            sharding.flat_param_specs(),
            sharding.model_spec.block_calls,
        )
        self._using = {
            visit: [each for each in self.param_groups if visit in contributing_calls(each, self.block_calls)]
            for visit in self.block_calls
        }
        precision = job.precision.effective
        self.param_dtype, self.grad_dtype, self.reduce_dtype = (
            precision.parameters,
            precision.gradients,
            precision.reduce,
        )

    def add_to(self, actions: list[Action]) -> list[Action]:
        """`actions` with the gradients of every bundle summed before LOCAL_NORM."""
        done = list(self._once(actions) if self._in_place else self._in_turn(actions))
        done = self._summed_across(done) if self.replicate_axis else done
        awaited = {
            action.tensors: action.name for action in done if action.kind in ("REDUCE", "ACCUMULATE")
        }.values()
        frees = () if self._in_place else self._buffer_names(done)
        square = index_of_last(done, "LOCAL_NORM") or 0
        done[square] = replace(with_waits(done[square], awaited), frees=frees)
        return [self._stepped(action) for action in done]

    @property
    def _in_place(self) -> bool:
        """Whether gradients stay in the buffer that is sent: once per step, in the dtype in which backward makes them."""
        return not self.every_microbatch and self.reduce_dtype == self.grad_dtype == self.param_dtype

    def _reduce(self, param_group: ParamGroup, microbatch: int | None, waits: Sequence[str]) -> Action:
        transfer = Transfer("reduce_scatter", self.axes, self._nbytes(param_group), dtype=self.reduce_dtype)
        return Action(
            "REDUCE", param_group.name, microbatch, "comm", tuple(waits), param_group.names, transfer
        )

    def _summed_across(self, actions: list[Action]) -> list[Action]:
        """`actions` with the sum of each bundle's shard over the replicas, once it is complete.

        It is waited for where two more bundles have been packed: it has arrived by then, or their buffer would not be free.
        """
        last = {action.tensors: action for action in actions if action.kind in ("REDUCE", "ACCUMULATE")}
        due: list[tuple[Action, int]] = []
        edited: list[Action] = []
        for action in actions:
            for complete, packed in due if action.kind in ("PACK", "LOCAL_NORM") else ():
                if action.kind == "LOCAL_NORM" or packed == NUM_BUFFERS:
                    edited += self._across(complete)
            if action.kind == "PACK":
                due = [(complete, packed + 1) for complete, packed in due if packed < NUM_BUFFERS]
            edited.append(action)
            if last.get(action.tensors) == action:
                due.append((action, 0))
        return edited

    def _across(self, complete: Action) -> list[Action]:
        """The sum over the replicas of the shard that `complete`, a REDUCE or an ACCUMULATE of a bundle, leaves."""
        nbytes = self.flat_param_specs[complete.subject].shard_numel * FLOAT_NBYTES[self.grad_dtype]
        transfer, name = (
            Transfer("all_reduce", (self.replicate_axis,), nbytes, dtype=self.grad_dtype),
            f"{complete.subject}, replicas",
        )
        ready = Action("WAIT", name, waits=(complete.name,), tensors=complete.tensors)
        return [ready, Action("REDUCE", name, None, "comm", (ready.name,), complete.tensors, transfer)]

    def _once(self, actions: list[Action]) -> Iterator[Action]:
        """Each bundle packed behind its first backward and reduced behind its last."""
        behind: dict[int, list[Action]] = {}
        for bundle in self.param_groups:
            places = completing_backwards(actions, bundle, self.block_calls)
            first, last = places[0], places[-1]
            held = Allocation(self._sum(bundle), self._nbytes(bundle))
            waits = (actions[first].name,)
            pack = Action(
                "PACK",
                bundle.name,
                waits=waits,
                tensors=bundle.names,
                allocations=(held,),
                frees=(grad_name(bundle),),
            )
            behind.setdefault(first, []).append(pack)
            behind.setdefault(last, []).append(
                self._reduce(bundle, None, (*dict.fromkeys((pack.name, actions[last].name)),))
            )
        for i, action in enumerate(actions):
            yield action
            yield from behind.get(i, ())

    def _in_turn(self, actions: list[Action]) -> Iterator[Action]:
        """Each bundle packed and reduced behind each backward that completes it; those before the last only if `every`."""
        largest = max(self._nbytes(bundle) for bundle in self.param_groups)
        turn = [_Buffer(Allocation(f"gradient buffer {number}", largest)) for number in range(NUM_BUFFERS)]
        packed, due = 0, self._due(actions)
        held, summed = set[str](), dict[str, str]()
        for i, action in enumerate(actions):
            if action.kind == "LOCAL_NORM":
                for number in range(
                    packed, packed + NUM_BUFFERS
                ):  # the one that was packed first comes first
                    yield from self._added(turn[number % NUM_BUFFERS])
            yield self._holding(action, held)
            for bundle in due.get(i, ()):
                buffer = turn[packed % NUM_BUFFERS]
                packed += 1
                yield from self._added(buffer)
                yield from self._packed(bundle, action, buffer, summed)
                held.discard(bundle.name)

    def _due(self, actions: Sequence[Action]) -> dict[int, list[ParamGroup]]:
        """By the place of a backward, the bundles that are packed behind it."""
        found: dict[int, list[ParamGroup]] = {}
        for bundle in self.param_groups:
            places = completing_backwards(actions, bundle, self.block_calls)
            for at in places if self.every_microbatch else places[-1:]:
                found.setdefault(at, []).append(bundle)
        return found

    def _packed(
        self, param_group: ParamGroup, backward: Action, buffer: _Buffer, summed: dict[str, str]
    ) -> Iterator[Action]:
        """PACK and REDUCE behind `backward`; the ACCUMULATE that may be due is noted in `buffer`.

        `summed` are the actions after which shards hold the sums so far.
        """
        micro = backward.microbatch if self.every_microbatch else None
        before = () if buffer.last_use is None else (buffer.last_use.name,)
        frees = (grad_name(param_group), *((buffer.allocation.name,) if buffer.last_use else ()))
        waits = (backward.name, *before)
        pack = Action(
            "PACK",
            param_group.name,
            micro,
            waits=waits,
            tensors=param_group.names,
            allocations=(buffer.allocation,),
            frees=frees,
        )
        reduce = self._reduce(param_group, micro, (pack.name,))
        first, casts = param_group.name not in summed, self.reduce_dtype != self.grad_dtype
        shard = Allocation(
            self._sum(param_group),
            self.flat_param_specs[param_group.name].shard_numel * FLOAT_NBYTES[self.grad_dtype],
        )
        adds = None
        if casts or not first:
            waits = (reduce.name, *(() if first else (summed[param_group.name],)))
            adds = Action(
                "ACCUMULATE",
                param_group.name,
                micro,
                waits=waits,
                tensors=param_group.names,
                allocations=(shard,) if first else (),
            )
        reduce = replace(reduce, allocations=(shard,) if first and not casts else ())
        buffer.last_use, buffer.pending_accumulate = adds or reduce, adds
        summed[param_group.name] = buffer.last_use.name
        yield pack
        yield reduce

    @staticmethod
    def _added(buffer: _Buffer) -> Iterator[Action]:
        if buffer.pending_accumulate is not None:
            yield buffer.pending_accumulate
            buffer.pending_accumulate = None

    def _holding(self, action: Action, held: set[str]) -> Action:
        """A backward with the whole gradients that it makes, until they are packed; `held` are those that are there."""
        if action.kind not in WEIGHT_GRAD_KINDS or not self.every_microbatch:
            return action
        made = [bundle for bundle in self._using[action.subject] if bundle.name not in held]
        held |= {bundle.name for bundle in made}
        own = tuple(hold for hold in action.allocations if hold.name == SCRATCH)
        return replace(
            action,
            allocations=(
                *own,
                *(
                    Allocation(grad_name(bundle), bundle.numel * FLOAT_NBYTES[self.param_dtype])
                    for bundle in made
                ),
            ),
        )

    def _stepped(self, action: Action) -> Action:
        """STEP, which frees what is kept of the sums."""
        if action.kind != "STEP":
            return action
        whole = {grad_name(bundle) for bundle in self.param_groups}
        frees = tuple(name for name in action.frees if name not in whole)
        return replace(action, frees=(*frees, *map(self._sum, self.param_groups)))

    def _buffer_names(self, actions: Sequence[Action]) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(
                hold.name for action in actions if action.kind == "PACK" for hold in action.allocations
            )
        )

    def _nbytes(self, param_group: ParamGroup) -> int:
        return self.flat_param_specs[param_group.name].numel * FLOAT_NBYTES[self.reduce_dtype]

    @staticmethod
    def _sum(param_group: ParamGroup) -> str:
        return f"summed gradient({param_group.name})"
