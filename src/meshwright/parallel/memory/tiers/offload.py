"""Offload: optimizer states, gradients and weights rest in host memory; the device or the host steps them.

Why it works: the optimizer states are the largest part of what a rank holds (12 of 16 bytes per element in
mixed precision), and a step reads and writes each of them once, in a known order, at its end. So they can
rest in the larger memory of the host. Either the states of each parameter group pass through a few buffers on
the device while its neighbours are stepped, or the CPU steps them where they rest, and only gradients and
weights are copied. The arithmetic is that of the plan without offload: where the same kernels step, every bit
is equal.

    what                                    step_on     rests on the host
    ["optimizer_states"]                    "device"    optimizer states, masters
    ["optimizer_states"]                    "host"      the same (ZeRO-Offload)
    ["optimizer_states", "gradients"]       "host"      and the shards of summed gradients: zero
    [..., "gradients", "weights"]           "host"      and the shards of weights: zero, stage 3

    step_on = "device", prefetch = 1: groups 0, 1, 2, three buffers
    copy_in    FETCH_STATES(0)  FETCH_STATES(1)    FETCH_STATES(2)
    compute    LOCAL_NORM CLIP  STEP(0)            STEP(1)            STEP(2)
    copy_out                    OFFLOAD_STATES(0)  OFFLOAD_STATES(1)  OFFLOAD_STATES(2)

    step_on = "host"
    copy_out   OFFLOAD_GRAD(0)  OFFLOAD_GRAD(1)
    host                        CLIP  STEP(0)          STEP(1)
    copy_in                                            FETCH_PARAM(0)   FETCH_PARAM(1)

    step_on = "host", delay = 1: the host steps beside the next step of the device
    compute    step 1: F B            LOCAL_NORM CLIP   step 2: F B            ...
    copy       step 1:     FETCH_PARAM OFFLOAD_GRAD     step 2:     FETCH_PARAM OFFLOAD_GRAD
    host       STEP of step 0                           STEP of step 1

    FETCH_STATES     copies optimizer states and masters of a group into a buffer on the device
    OFFLOAD_STATES   copies them back after STEP, and frees the buffer
    OFFLOAD_GRAD     copies the summed gradients of a group to the host
    FETCH_PARAM      copies weights to the device: what the host has stepped, or a shard before its all-gather

    copies of a rank per step, N elements stepped, bf16 weights and gradients, fp32 masters and Adam states,
    m microbatches, u uses of a gathered group:
        device step  12 N in, 12 N out        host step  2 N out, 2 N in
        gradients    2 m N out                weights    2 u N in, in place of the 2 N of the host step
    device memory saved: 12 N, less prefetch + 2 buffers of the largest group for the device step; 2 N each
    for gradients and weights. Host memory: 12 N; for the host step also 2 N of gradients and 2 N of weights,
    and a buffer for the cast of one group

With `gradients`, a reduced shard is copied out of the reduction's buffer as soon as it is complete, beside
the rest of the backward, and ACCUMULATE adds microbatches on the host. `host_gb` bounds the host memory of
each rank: a plan that needs more is refused before anything starts.

With `delay = 1` the gradients of a step are computed at weights that lack the update of the step before:

    w(t+1) = w(t) - rate(t) u(g at w(t-1))

so the numbers are not those of one device; `verify` compares with a replay of these weights in one process. A
checkpoint holds the stepped weights, and those that the device computes with; a plan without delay that
loads it continues from the stepped ones. Evaluations use the weights of the device.

The first step of a run finds no optimizer states, so the device step copies the masters alone.
Cost: the device step takes as long as the copies, if they are slower than what they overlap with; the host
step takes what a CPU needs for Adam (torch's fused kernel), bound by its memory.
With a delay a step takes the longer of what the device and what the host needs, in place of their sum.
Limits: a delay is for optimizer states alone, without loss guard and without schedulers of the caller.
Refused are optimizers that read whole matrices (Muon, Adafactor), those that the caller makes,
updates within a step (PipeDream) and data_parallel_master; gradients with replicas (replicate_axis) or
parameters that several pipeline ranks use, because they are summed once more on the device.
Paper: Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840 (sections 4 and 5: the host step); Rajbhandari et al.
2021, "ZeRO-Infinity", arXiv 2104.07857 (section 5: streamed states). The delay is the "one-step delayed
parameter update" of the first (section 5.2).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

from meshwright.parallel.memory.tiers.offload_actions import (
    copy_of_group,
    host_buffer_nbytes,
    host_step,
    other_owner_diagnostics,
    refuse_above,
    refuse_updates_within,
    whole_matrix_diagnostics,
)
from meshwright.plan.hardware.memory_tiers import MemoryTier, SteppingTier
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import above, at_least, one_of
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.grad_dependencies import first_grad_reader
from meshwright.plan.step.memory.model_states import GroupStates, cast_nbytes, group_states
from meshwright.plan.step.program import Action, Allocation, Program, with_waits
from meshwright.plan.step.single_device_program import step_by_group
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

OffloadedKind = Literal["optimizer_states", "gradients", "weights"]
HOST_GB_FIX = "write the GB of host memory that each rank may use, or remove host_gb"


@dataclass(frozen=True)
class Offload(Strategy):
    """Keeps `what` in host memory; the device steps it group by group, or the host does.

    `step_on` says who steps: "device" or "host". The device fetches the states of `prefetch` groups ahead;
    the host may step beside the next step (`delay` = 1). Each rank may use `host_gb` GB (2^30 bytes) of host
    memory; None: no bound.
    """

    name: ClassVar[str] = "offload"
    phase: ClassVar[StrategyPhase] = "comm"
    what: tuple[OffloadedKind, ...] = field(
        default=("optimizer_states",), metadata=one_of(*get_args(OffloadedKind))
    )
    step_on: SteppingTier = "device"
    prefetch: int = field(default=1, metadata=at_least(0))
    delay: int = field(default=0, metadata=one_of(0, 1))
    host_gb: float | None = field(default=None, metadata=above(0, fix=HOST_GB_FIX))

    @property
    def exact(self) -> bool:  # type: ignore[override]  # it depends on a field
        """Whether gradients are those of the newest weights."""
        return not self.delay

    def exact_counterpart(self) -> "Offload":
        return replace(self, delay=0)

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        where = "strategies.offload"
        yield from self._check_delay(job)
        if "optimizer_states" not in self.what:
            text = f"what = {list(self.what)} leaves out optimizer_states, the largest part"
            yield Diagnostic(text, 'add "optimizer_states" to what', f"{where}.what")
        if len(self.what) > 1 and self.step_on == "device":
            text = f"the device steps, and {' and '.join(self.what[1:])} would be copied out and in again"
            yield Diagnostic(text, 'set step_on = "host", or what = ["optimizer_states"]', where)
        if self.step_on == "host" and self.prefetch != 1:
            text = "prefetch is for states that the device steps, and the host steps them"
            yield Diagnostic(text, 'remove prefetch, or set step_on = "device"', where)
        yield from whole_matrix_diagnostics(sharding, self.name)

    def _check_delay(self, job: Job) -> Iterator[Diagnostic]:
        where = "strategies.offload.delay"
        if not self.delay:
            return
        if self.step_on == "device":
            text = "the device steps, so nothing runs beside its next step"
            yield Diagnostic(text, 'set step_on = "host", or remove delay', where)
        if len(self.what) > 1:
            text = f"{' and '.join(self.what[1:])} on the host would be overwritten while the host steps"
            yield Diagnostic(text, 'set what = ["optimizer_states"], or remove delay', where)
        if job.guard.action != "off":
            text = "the loss guard looks for the cause of a harmful step at its weights, and with a delay "
            text += "the device has newer ones by then"
            yield Diagnostic(text, 'set guard.action = "off", or remove delay', where)

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        where = "strategies.offload.what"
        trained = [each for each in sharding.param_shardings if each.param.trainable]
        in_shards = [each for each in trained if each.flat_shard_axes]
        summed_twice = [
            axis
            for each in in_shards
            for axis, collective in each.grad_reductions().items()
            if collective == "all_reduce" and sharding.mesh.size(axis) > 1
        ]
        if "gradients" in self.what and not in_shards:
            text = "gradients leave the device when they are reduced into shards, and no strategy does that"
            yield Diagnostic(text, "use zero with stage = 2 or 3, or remove gradients from what", where)
        elif "gradients" in self.what and summed_twice:
            text = "gradients leave the device when they are reduced, and some are summed again afterwards "
            text += f"along {summed_twice[0]} (replicas, or parameters that several pipeline ranks use)"
            yield Diagnostic(text, "remove gradients from what", where)
        if "weights" in self.what and not any(each.is_stored_sharded for each in trained):
            text = "weights are gathered from shards on the host, and no strategy stores shards"
            yield Diagnostic(text, "use zero with stage = 3, or remove weights from what", where)
        yield from other_owner_diagnostics(sharding, self.name, self._tier_of("optimizer_states"))

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        states, gradients, weights = (self._tier_of(each) for each in get_args(OffloadedKind))
        tiers = replace(
            sharding.tiers,
            optimizer_states=states,
            gradients=gradients,
            weights=weights,
            step=self.step_on,
            delay=self.delay,
        )
        return replace(sharding, tiers=tiers)

    def _tier_of(self, kind: OffloadedKind) -> MemoryTier:
        return "host" if kind in self.what else "device"

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        states = {each.name: each for each in group_states(job, view)}
        insert = _stream_states if self.step_on == "device" else _step_on_host
        edited = program.edit(lambda actions: insert(self, actions, view, states))
        self._check_host_memory(edited, states, job)
        return edited

    def _check_host_memory(self, program: Program, states: Mapping[str, GroupStates], job: Job) -> None:
        """Raises PlanError if the rank needs more host memory than it may use."""
        needed = sum(
            each.master_nbytes
            + each.state_nbytes
            + each.rounded_nbytes
            + (each.weight_nbytes if each.weight_tier == "host" else 0)
            for each in states.values()
        )
        needed += host_buffer_nbytes(program)
        needed += cast_nbytes(job, states.values()) if self.step_on == "host" else 0
        refuse_above(needed, self.host_gb, "host_gb", "host memory", self.name)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        offloaded = runtime.state.offloaded
        adds = {"ACCUMULATE": offloaded.accumulate} if "gradients" in self.what else {}
        return offloaded.handlers | adds


def _stream_states(
    strategy: Offload, actions: list[Action], view: RankView, states: Mapping[str, GroupStates]
) -> list[Action]:
    """Returns `actions` with the states of each group on the device during its STEP alone."""
    refuse_updates_within(actions, strategy.name)
    actions = step_by_group(actions, view)
    nbytes = {name: each.master_nbytes + each.state_nbytes for name, each in states.items()}
    steps = [action for action in actions if action.kind == "STEP" and nbytes[action.subject]]
    num_buffers = min(strategy.prefetch + 2, len(steps))
    largest = max((nbytes[step.subject] for step in steps), default=0)
    fetches, offloads = list[Action](), list[Action]()
    for number, step in enumerate(steps):
        buffer = Allocation(f"state buffer {number % num_buffers}", largest)
        waits = [offloads[number - num_buffers].name] if number >= num_buffers else []
        fetches.append(
            copy_of_group("FETCH_STATES", step, nbytes[step.subject], waits, allocations=(buffer,))
        )
        offloads.append(
            copy_of_group("OFFLOAD_STATES", step, nbytes[step.subject], (step.name,), frees=(buffer.name,))
        )
    numbers, found = {step.name: number for number, step in enumerate(steps)}, list[Action]()
    first = first_grad_reader(actions)
    for at, action in enumerate(actions):
        if at == first:
            found += fetches[: strategy.prefetch]
        number = numbers.get(action.name)
        if number is None:
            found.append(action)
            continue
        found += fetches[number + strategy.prefetch : number + strategy.prefetch + 1]
        found += [with_waits(action, (fetches[number].name,)), offloads[number]]
    return found


def _step_on_host(
    strategy: Offload, actions: list[Action], view: RankView, states: Mapping[str, GroupStates]
) -> list[Action]:
    """Returns `actions` with gradients copied to the host before they are read, and weights back after."""
    refuse_updates_within(actions, strategy.name)
    actions, first = step_by_group(actions, view), first_grad_reader(actions)
    waits, grads, found = actions[first].waits, dict[str, Action](), list[Action]()
    left = (
        set(view.flat_param_specs) if "gradients" in strategy.what else set[str]()
    )  # when they were reduced
    for step in (action for action in actions if action.kind == "STEP" and action.subject not in left):
        nbytes = states[step.subject].grad_nbytes
        host = Allocation(f"host gradient({step.subject})", nbytes, tier="host")
        grads[step.subject] = copy_of_group("OFFLOAD_GRAD", step, nbytes, waits, allocations=(host,))
    names = [grad.name for grad in grads.values()]
    steps = [action for action in actions if action.kind == "STEP"]
    for at, action in enumerate(actions):
        if at == first:
            found += _fetch_previous(steps, states) if strategy.delay else []
            found += [_after_previous(grad) for grad in grads.values()] if strategy.delay else grads.values()
        if action.kind == "CLIP":
            found.append(with_waits(action, names))
        elif action.kind == "STEP":
            group = states[action.subject]
            copied = grads[action.subject].allocations if action.subject in grads else ()
            found.append(host_step(action, group, (each.name for each in copied)))
            if group.update_nbytes and not strategy.delay:
                found.append(copy_of_group("FETCH_PARAM", action, group.update_nbytes, (action.name,)))
        else:
            found.append(action)
    return found


def _fetch_previous(steps: Iterable[Action], states: Mapping[str, GroupStates]) -> list[Action]:
    """Returns the copies of the weights that the host has stepped beside this step, behind their last use."""
    stepped = ((step, states[step.subject].update_nbytes) for step in steps)
    return [
        _after_previous(copy_of_group("FETCH_PARAM", step, nbytes, ())) for step, nbytes in stepped if nbytes
    ]


def _after_previous(action: Action) -> Action:
    """Returns `action`, waiting for the STEP of its group that the step before has started."""
    return replace(action, previous_waits=(Action("STEP", action.subject).name,))
