"""PipeDream: asynchronous 1F1B; every microbatch is an update, and stages use different weight versions.

Why it works: the bubble comes from the wait, at the end of a step, for all gradients. Here no stage waits: a
stage updates its weights right after each backward, and the next forward uses the newest ones. If an update
falls between the forward and the backward of a microbatch, the two would use different weights; so a stage
keeps (stashes) those of every forward until its backward. The result is a gradient at weights that are
slightly old on the first stages: descent with a bounded delay.

    F3/1 is the forward of microbatch 3 with weights after one update; the backward uses the same
    rank 0   F0/0  F1/0  F2/0  ....  ....  B0/0  F3/1  B1/0  F4/2  B2/0  F5/3  B3/1
    rank 1   ....  F0/0  F1/0  ....  B0/0  F2/1  B1/0  F3/2  B2/1  F4/3  B3/2  F5/4
    rank 2   ....  ....  F0/0  B0/0  F1/1  B1/1  F2/2  B2/2  F3/3  B3/3  F4/4  B4/4

    microbatch k, stage s of p:  w(s, k + 1) = w(s, k) - rate * gradient s at versions v(0, k) .. v(p - 1, k)
    v(s, k) = max(0, k - (p - 1 - s)): once the pipeline is full, p - 1 - s updates old

A STEP stands behind each backward, of that microbatch alone and over its own token count. STASH (keep the
weights, because a backward will need them) stands before a STEP if forwards are in flight; LOAD_STASHED (put
the kept weights into the model) and LOAD_LATEST (put the newest ones back) surround a backward whose forward
used older ones:

    rank 0   F0 F1 F2  B0  STASH STEP  F3  LOAD_STASHED B1 LOAD_LATEST  STASH STEP  F4 ... STEP  LOSS_SUM

A step of the run is `train.batch` samples, as everywhere; after it weights can be saved, evaluated and
resumed under another plan. So at its end the pipeline drains, and the first microbatches of the next step
use weights that are new on all ranks. With n microbatches a rank makes n updates per step: momentum,
optimizer states and weight decay advance n times, and so does Adam's counter; the learning rate follows the
schedule per step. An update without valid tokens is left out.

Cost: no bubble but that of filling and draining, (p - 1) / (n + p - 1) of a step of n microbatches: small
if n is much larger than p. Stage s keeps p - s versions of its weights, and all but the last copy them once
per update; and the activations of as many microbatches, so memory is even if weights need more memory than
activations.
Limits: the numbers are not those of one device, nor of a plain step: the delay needs a smaller rate or a
warm-up. `verify` compares with a replay of these versions in one process. Refused, because they need all
stages at once: clipping by the global norm, the loss guard, a loss scale for float16, tied weights across
stages. Shards are refused too; replicas of the stages with other data are not, and their gradients are
summed for each update. The reported norm is the root of the mean square of those of the updates. One stage
per rank. Vertical sync, with one version for a microbatch on all ranks, is not implemented: it would keep p
versions everywhere.
Paper: Narayanan et al. 2019, "PipeDream", SOSP (section 3.3); Harlap et al. 2018, "PipeDream: Fast and
Efficient Pipeline Parallel DNN Training", arXiv 1806.03377.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.pipeline.schedules import one_f_one_b
from meshwright.parallel.pipeline.schedules.schedule import Schedule
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import one_of
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Allocation, Program, with_waits
from meshwright.plan.step.single_device_program import StageCalls, stepped_microbatches
from meshwright.plan.step.weight_stashing import forward_versions
from meshwright.plan.strategy_interface import Strategy, StrategyPhase


@dataclass(frozen=True)
class PipeDream(Strategy):
    """Puts stages that begin at `split_points` on the ranks along `axis`; every microbatch is an update
    of its own.
    """

    name: ClassVar[str] = "pipedream"
    phase: ClassVar[StrategyPhase] = "schedule"
    exact: ClassVar[bool] = False
    axis: str = field(default="pp", metadata=one_of("pp"))
    split_points: tuple[str, ...] = ()

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from (self._renamed(diagnostic) for diagnostic in self._pipeline.check(job, sharding))
        each = "every microbatch is an update of its own, and no rank has all gradients of one at a time"
        for call, key, what, fix in (
            (job.train.clip > 0, "train.clip", f"train.clip = {job.train.clip}", "set train.clip = 0"),
            (
                job.guard.action != "off",
                "guard.action",
                "the loss guard needs whole steps",
                'set guard.action = "off"',
            ),
            (
                job.train.noise_scale,
                "train.noise_scale",
                "the noise scale needs whole gradients",
                "set train.noise_scale = false",
            ),
            (
                job.precision.scales_loss,
                "precision.compute",
                "the loss is scaled for float16",
                'use compute = "bfloat16"',
            ),
            (
                sharding.model_spec.needs_global_batch,
                "loss",
                "the loss is computed on the whole batch at once",
                "use one that is a sum over samples",
            ),
            (
                sharding.model_spec.num_batch_sums > 0,
                "loss",
                "the auxiliary loss reads sums over the global batch",
                "leave it out (model.overrides.output_router_logits = false)",
            ),
        ):
            if call:
                yield Diagnostic(f"{what}: {each}", f'{fix}, or use the strategy "pipeline"', key)

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location = f"strategies.{self.name}"
        tied = [
            param_sharding.param.name
            for param_sharding in sharding.param_shardings
            if len(sharding.pp_ranks_using(param_sharding.param)) > 1 and param_sharding.param.trainable
        ]
        if tied:
            text = (
                f"{len(tied)} parameters ({tied[0]}...) are used by stages on several ranks, "
                f"whose copies would diverge"
            )
            fix = (
                "untie them, choose split_points that leave all their users in one stage, or "
                'use the strategy "pipeline"'
            )
            yield Diagnostic(text, fix, f"{location}.split_points")
        else:
            yield from (self._renamed(diagnostic) for diagnostic in self._pipeline.check_combined(sharding))
        shards = sorted(
            {axis for param_sharding in sharding.param_shardings for axis in param_sharding.flat_shard_axes}
        )
        if shards or sharding.primary_rank_axes:
            what = (
                f"cut into shards along {' and '.join(shards)}"
                if shards
                else f"stepped by one rank along {sharding.primary_rank_axes[0]}"
            )
            text = f"weights are {what}, which is not supported with an update per microbatch"
            yield Diagnostic(text, 'add the strategy "ddp", or use "pipeline" in its place', location)

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        return self._pipeline.place(sharding)

    def order_stage_calls(self, stage_calls: Sequence[StageCalls], view: RankView) -> Sequence[StageCalls]:
        found: list[StageCalls] = []
        for stage_call in self._pipeline.order_stage_calls(stage_calls, view):
            found += (
                [stage_call] if stage_call.kind == "F" else [stage_call, stage_call._replace(kind="STEP")]
            )
        return found

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        held = sum(
            weight.numel * weight.itemsize(job.precision.parameters) for weight in view.model_spec.trainable
        )
        has_replicas = view.plan.num_data > 1
        crossed = self._pipeline.rewrite(program, view, job)
        crossed = (
            crossed.edit(lambda actions: [_count_per_microbatch(action, actions) for action in actions])
            if has_replicas
            else crossed
        )
        return crossed.edit(lambda actions: _insert_stashing(actions, held))

    def build_schedule(self, sharding: ShardingPlan, num_microbatches: int) -> Schedule:
        """Returns the schedule of all pipeline ranks for `num_microbatches` microbatches."""
        return self._pipeline.build_schedule(sharding, num_microbatches)

    def exact_counterpart(self) -> Pipeline:
        return self._pipeline

    @property
    def _pipeline(self) -> Pipeline:
        return Pipeline(axis=self.axis, schedule="1f1b", split_points=self.split_points)

    def _renamed(self, diagnostic: Diagnostic) -> Diagnostic:
        return replace(
            diagnostic, location=diagnostic.location.replace("strategies.pipeline", f"strategies.{self.name}")
        )


class WeightVersion(NamedTuple):
    """The numbers of updates of the weights of `virtual_stage` that a microbatch uses, in forward and in
    backward.
    """

    virtual_stage: int
    microbatch: int
    forward: int
    backward: int


def pipedream_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the schedule of one step: 1F1B, after which the pipeline drains."""
    return one_f_one_b.one_f_one_b_schedule(num_ranks, num_microbatches)


def weight_versions(schedule: Schedule, *, stashing: bool = True) -> list[WeightVersion]:
    """Returns the weight versions that each stage uses for each microbatch with an update after each
    backward, in that order.

    With `stashing`, a backward uses the weights of its forward; otherwise the newest ones.
    """
    found: list[WeightVersion] = []
    for actions in schedule.actions:
        seen = [0] * len(schedule.virtual_stages)
        used: dict[tuple[int, int], int] = {}
        newest: dict[tuple[int, int], int] = {}
        for kind, stage, microbatch in actions:
            if kind == "F":
                used[stage, microbatch] = seen[stage]
            if kind in ("B", "I"):
                newest[stage, microbatch] = seen[stage]
            if kind in ("B", "W"):
                forward = used[stage, microbatch]
                found.append(
                    WeightVersion(
                        stage, microbatch, forward, forward if stashing else newest[stage, microbatch]
                    )
                )
                seen[stage] += 1
    return found


def max_versions_kept(schedule: Schedule) -> list[int]:
    """Returns the largest number of weight versions that each stage holds at once, the newest one
    included.
    """
    most = [1] * len(schedule.virtual_stages)
    for actions in schedule.actions:
        seen = [0] * len(schedule.virtual_stages)
        used: dict[tuple[int, int], int] = {}
        for kind, stage, microbatch in actions:
            if kind == "F":
                used[stage, microbatch] = seen[stage]
            needed = {version for (at, _), version in used.items() if at == stage}
            most[stage] = max(most[stage], len(needed | {seen[stage]}))
            if kind in ("B", "W"):
                del used[stage, microbatch]
                seen[stage] += 1
    return most


def _count_per_microbatch(action: Action, actions: Sequence[Action]) -> Action:
    if action.kind != "TOKEN_COUNT" or action.transfer is None:
        return action
    nbytes = action.transfer.nbytes + 8 * len(stepped_microbatches(actions))
    return replace(action, transfer=replace(action.transfer, nbytes=nbytes))


def _insert_stashing(actions: Sequence[Action], nbytes: int) -> list[Action]:
    met, schedule = forward_versions(actions), stepped_microbatches(actions)
    last = {met[microbatch]: microbatch for microbatch in schedule}  # the last backward that needs a version
    versions: dict[int, str] = {}
    free = [f"old weights({version})" for version in reversed(range(len(schedule)))]
    begun: set[int] = set()
    done, newest = list[Action](), 0
    for action in actions:
        microbatch = action.microbatch or 0
        stale = action.kind in ("B", "LOCAL_NORM") and met[microbatch] < newest
        if action.kind == "B" and microbatch not in begun:
            begun.add(microbatch)
            done += [Action("LOAD_STASHED", versions[met[microbatch]], microbatch)] if stale else []
        elif action.kind == "LOCAL_NORM" and stale:
            ends = last[met[microbatch]] == microbatch
            version = versions.pop(met[microbatch]) if ends else versions[met[microbatch]]
            done.append(
                Action(
                    "LOAD_LATEST", version, microbatch, waits=action.waits, frees=(version,) if ends else ()
                )
            )
            free += [version] if ends else []
        if action.kind == "STEP":
            if last.get(newest, microbatch) != microbatch:
                versions[newest] = free.pop()
                done.append(
                    Action(
                        "STASH",
                        versions[newest],
                        microbatch,
                        waits=action.waits,
                        allocations=(Allocation(versions[newest], nbytes),),
                    )
                )
                action = with_waits(action, (done[-1].name,))
            newest += 1
        done.append(action)
    return done
