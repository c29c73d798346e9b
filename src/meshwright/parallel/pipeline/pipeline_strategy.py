"""Pipeline parallelism: the layers of a model on several ranks; microbatches pass through them in turn.

Why it works: a layer needs of the layers before it only their outputs, and of those behind it only its
gradient. So runs of layers, *stages*, can live on ranks of their own, which hold no other weight, gradient
or optimizer state. While one microbatch is in the second stage, the next one is in the first: with many of
them all ranks are busy most of the time.

    rank 0   [ embed  layer 0  layer 1 ]  -- x -->  rank 1   [ layer 2  layer 3  head ]  --> loss
                                         <- dx --

    before   TOKEN_COUNT                    F F F F F F  LOSS  B B B B B B                              STEP
    rank 0   TOKEN_COUNT  F F F SEND  F F F SEND ....  RECV B B B  RECV B B B           LOSS_SUM  CLIP STEP
    rank 1   TOKEN_COUNT  RECV F F F LOSS B B B SEND  RECV F F F LOSS B B B SEND        LOSS_SUM  CLIP STEP

The schedule (one file each) orders the stages on a rank: a list of actions, in which each forward takes the
values that are alive at the boundary before its stage, and each backward the gradients of its outputs. A
value that several later stages use goes from each to the next one, so no rank sends it twice; its gradient
returns the same way, and is summed on it. Values that depend on no other stage (masks, positions) are
computed by each stage. Stages on the same rank pass values without sending.

    bytes = 2 sum over microbatches, boundaries and values of numel x itemsize     (and the gradient back)

In a split backward, I computes the gradients that other stages wait for, and W, any time later, those of
weights (model/blocks/split_backward.py). `schedule` is a name, "automatic" (a search, for uneven stages), or
a file (custom.py).

A weight that several stages use, such as a tied embedding, is on all of their ranks, and so is each weight
if a schedule has every stage on two: the sum of their gradients goes to each of them first (REDUCE_TIED,
plan/step/tied_params.py). It counts once in the norm and in a checkpoint. The sum comes after the last
backward and is exposed.

    bytes = 2 (k - 1)/k S        sent by each of k ranks that use S bytes of weights; of S in shards, a shard

If the ranks of a stage have slices of a value (tokens with sequence or context parallelism; the width with
2-D and 3-D tensor parallelism; heads), each sends its own to the rank at the same place of the next stage,
without a gather in between (plan/sharding/stage_value_shards.py). If they all have the full value, every rank
sends all of it over a link of its own; with `scatter` each sends one t-th, and the next stage gathers:

    bytes between stages, per rank    N full     N/t sliced     N/t with `scatter`, and (t-1)/t N received

That pays if links between stages are slower than those within: stages on other hosts. Ranks that own whole
matrices (Muon with slices) step those of their own stage (plan/step/matrix_owner_actions.py).

Evaluations go through the same stages, one microbatch directly after the other; so does `trainer.generate`,
which sends hidden states and tokens. Any other forward, also transformers' `generate` with its cache, is run
by all ranks in lockstep inside `trainer.full_params()`, each block where its weights are. The loss guard
replays a harmful step stage by stage. The noise scale is refused if several stages use a weight.

Cost: the bubble of the schedule; activations of the microbatches in flight. Stage boundaries balance the
operations best, unless `split_points` names the blocks with which stages begin.
Limits: as many stages as ranks times `virtual_stages`, and no more than blocks; no stage begins where glue
reads numbers (plan/model_spec/stage_transfers.py). A value whose sharding is unknown is refused by name,
with the split point; an output whose shape or dtype differs from the trial is not sent.
Paper: Huang et al. 2019, "GPipe", arXiv 1811.06965; Narayanan et al. 2019, "PipeDream" (SOSP), section 3.1
(balanced stages).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar, NamedTuple

from meshwright.parallel.pipeline.schedules.custom import file_digest, is_schedule_source
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES, ScheduleEntry, find_schedule
from meshwright.parallel.pipeline.schedules.schedule import Schedule, StageCosts, VirtualStage
from meshwright.parallel.pipeline.send_recv_insertion import SendRecvInsertion, TransferRoutes
from meshwright.plan.job.errors import Diagnostic, PlanError, suggest_name
from meshwright.plan.job.field_constraints import one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.stage_transfers import StageBoundaries, StageSpec
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.rank_work_share import weight_grad_flops
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.stage_value_shards import StageValueShards, stage_value_diagnostics
from meshwright.plan.step.program import Action, Program
from meshwright.plan.step.single_device_program import StageCalls, reduce_totals_along, step_total_nbytes
from meshwright.plan.strategy_interface import Strategy, StrategyPhase


def balance_stages(costs: Mapping[str, float], boundaries: Sequence[str], num_stages: int) -> tuple[str, ...]:
    """Returns the block calls, of `boundaries`, with which the second and later of `num_stages` stages begin.

    The most expensive stage is as cheap as possible; of equal splits the one with the earliest boundaries is
    taken:

        most(k, j) = min over i of max(most(k - 1, i), cost of the block calls from i to j)

    `costs` are in order of the forward; there are at least `num_stages - 1` boundaries.
    """
    block_calls = list(costs)
    before = [0.0, *accumulate(costs.values())]
    starts = [0, *(block_calls.index(block_call) for block_call in boundaries), len(block_calls)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (before[end], ()) for end in starts[1:]}
    for stages in range(2, num_stages + 1):
        ends = starts[stages:]
        best = {
            end: min(
                _with_last_stage(best, start, before[end] - before[start]) for start in best if start < end
            )
            for end in ends
        }
    return tuple(block_calls[at] for at in best[len(block_calls)][1])


def _with_last_stage(
    best: Mapping[int, tuple[float, tuple[int, ...]]], start: int, cost: float
) -> tuple[float, tuple[int, ...]]:
    most, cuts = best[start]
    return max(most, cost), (*cuts, start)


@dataclass(frozen=True)
class Pipeline(Strategy):
    """Puts runs of layers on the ranks along `axis`, `virtual_stages` on each, in the order of `schedule`.

    The later stages begin at the blocks `split_points`; without any, stages of equal cost are formed.
    With `scatter`, of a value that several ranks of a stage hold alike each sends a chunk, and the next stage
    gathers it.
    """

    name: ClassVar[str] = "pipeline"
    phase: ClassVar[StrategyPhase] = "schedule"
    axis: str = field(default="pp", metadata=one_of("pp"))
    schedule: str = "1f1b"
    virtual_stages: int = 0
    split_points: tuple[str, ...] = ()
    scatter: bool = False

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location = "strategies.pipeline"
        schedule = find_schedule(self.schedule)
        if schedule is None:
            yield Diagnostic(
                f"there is no schedule '{self.schedule}'",
                suggest_name(self.schedule, SCHEDULES),
                f"{location}.schedule",
            )
        if schedule is not None:
            yield from self._check_virtual_stages(sharding, schedule, location)
        if sharding.mesh.pp == 1:
            yield Diagnostic(
                "a pipeline of one rank", "set mesh.pp to 2 or more, or remove the strategy", "mesh.pp"
            )
        elif sharding.model_spec.stage_boundaries is None:
            yield Diagnostic(
                "the model spec has no stage boundaries",
                "analyze the model again: mw.analyze finds them",
                location,
            )
        else:
            yield from self._check_split(sharding, sharding.model_spec.stage_boundaries, location)

    def _check_virtual_stages(
        self, sharding: ShardingPlan, schedule: ScheduleEntry, location: str
    ) -> Iterator[Diagnostic]:
        if self.virtual_stages < 0 or (
            self.virtual_stages and schedule.num_virtual_stages not in (0, self.virtual_stages)
        ):
            several = (
                f"{schedule.num_virtual_stages} stages" if schedule.num_virtual_stages > 1 else "one stage"
            )
            text = f"virtual_stages = {self.virtual_stages}" + (
                f", and {self.schedule} has {several} per rank" if schedule.num_virtual_stages else ""
            )
            free = " or ".join(f'"{name}"' for name, each in SCHEDULES.items() if not each.num_virtual_stages)
            yield Diagnostic(
                text, f"leave virtual_stages out, or write schedule = {free}", f"{location}.virtual_stages"
            )
        yield from schedule.check(sharding.mesh.pp, 1)

    def _check_split(
        self, sharding: ShardingPlan, boundaries: StageBoundaries, location: str
    ) -> Iterator[Diagnostic]:
        num_virtual_stages, stages, known = (
            self._num_virtual_stages,
            self._num_stages(sharding),
            len(boundaries.open_boundaries()) + 1,
        )
        if (stages or sharding.mesh.pp) > known:
            num_ranks = f"{sharding.mesh.pp} ranks" + (
                f" of {num_virtual_stages} stages each" if num_virtual_stages > 1 else ""
            )
            text = (
                f"{num_ranks} for a model that can be cut into {known} stages "
                f"({len(boundaries.block_calls)} blocks)"
            )
            text += "".join(
                f"; none can begin with '{each.block_call}': {each.reason}"
                for each in boundaries.closed_boundaries[:1]
            )
            fix = self._fewer_stages_fix(sharding.mesh.pp, known)
            fix += "".join(f"; or {each.fix}" for each in boundaries.closed_boundaries[:1])
            yield Diagnostic(
                text,
                fix + (_declare_blocks_fix(sharding) if len(boundaries.block_calls) == 1 else ""),
                "mesh.pp",
            )
        if self.split_points and stages and len(self.split_points) != stages - 1:
            text = (
                f"{len(self.split_points)} split points make {len(self.split_points) + 1} "
                f"stages; needed are {stages}"
            )
            yield Diagnostic(
                text, f"name {stages - 1} block{'s' * (stages > 2)}, or none", f"{location}.split_points"
            )
        if self.split_points:
            yield from (
                replace(diagnostic, location=f"{location}.split_points")
                for diagnostic in boundaries.diagnostics(self.split_points)
            )

    def _fewer_stages_fix(self, ranks: int, known: int) -> str:
        num_virtual_stages, found = self._num_virtual_stages, find_schedule(self.schedule)
        fixes = (
            [f"set mesh.pp to {known // num_virtual_stages} at most"]
            if known >= 2 * num_virtual_stages
            else []
        )
        if num_virtual_stages > 1 and known >= ranks:
            free = found is not None and not found.num_virtual_stages and not found.source
            fixes.append(
                f"set virtual_stages to {known // ranks} at most"
                if free
                else 'take a schedule of one stage per rank, as "1f1b"'
            )
        return ", or ".join(fixes) or "set mesh.pp to 1, and remove the strategy"

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from self._check_boundary_values(sharding)

    def _check_boundary_values(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        values = [value for stage in self._find_stages(sharding) or () for value in stage.outputs]
        yield from stage_value_diagnostics(sharding, values)
        first_rank = RankView(sharding, sharding.mesh.coordinate(0))
        if self.scatter and not any(map(StageValueShards(first_rank, values).replicated_axes, values)):
            text = (
                "scatter = true, and no two ranks of a stage hold the same value: values are "
                "sharded already, or no weight is"
            )
            yield Diagnostic(text, "leave scatter out", "strategies.pipeline.scatter")

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        stages = self._find_stages(sharding)
        if stages is None:
            return sharding
        virtual_stages = sorted(self._placement(sharding), key=lambda virtual_stage: virtual_stage.stage)
        mine = [
            [virtual_stage.stage for virtual_stage in virtual_stages if virtual_stage.pp_rank == rank]
            for rank in range(sharding.mesh.pp)
        ]
        block_calls = (
            tuple(block_call for stage in owned for block_call in stages[stage].block_calls) for owned in mine
        )
        return sharding.with_pipeline(block_calls, tuple(stage.block_calls[0] for stage in stages[1:]))

    def order_stage_calls(self, stage_calls: Sequence[StageCalls], view: RankView) -> Sequence[StageCalls]:
        stages, mine = self._stages(view.plan), view.coordinate[self.axis]
        schedule = self.build_schedule(view.plan, len({stage_call.microbatch for stage_call in stage_calls}))
        actions = (
            (action, stages[schedule.virtual_stages[action.virtual_stage].stage])
            for action in schedule.actions[mine]
        )
        return [StageCalls(action.kind, stage.block_calls, action.microbatch) for action, stage in actions]

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        program = reduce_totals_along(program, self.axis, step_total_nbytes(view.plan))
        return program.edit(lambda actions: self._insert_send_recv(actions, view, job))

    def file_digests(self) -> tuple[tuple[str, str], ...]:
        return (("file", self._file_digest),) if self._file_digest else ()

    def build_schedule(self, sharding: ShardingPlan, num_microbatches: int) -> Schedule:
        """Returns the schedule of all pipeline ranks for `num_microbatches` microbatches."""
        call = self._request(sharding, num_microbatches)
        schedule, idle = _cached_schedule(call), _idle_stages(call)
        if schedule.virtual_stages != self._placement(sharding):
            text = (
                f"{self.schedule} puts stages on other ranks for {num_microbatches} "
                f"microbatches than for "
                f"{sharding.mesh.pp}"
            )
            raise PlanError(
                text,
                fix="have it put them on the same ones for any number",
                location="strategies.pipeline.schedule",
            )
        if idle:
            stage, rank = idle[0]
            text = (
                f"{self.schedule} has no microbatch for stage {stage} on rank {rank} of the pipeline, but "
                f"{num_microbatches} in all"
            )
            raise PlanError(text, fix="make more of them: a smaller micro_batch", location="micro_batch")
        return schedule

    def _request(self, sharding: ShardingPlan, num_microbatches: int) -> "_ScheduleRequest":
        model_spec, known = sharding.model_spec, self._stages(sharding)
        forward, weights = (
            _sum_per_stage(model_spec.block_calls, flops, known)
            for flops in (model_spec.flops, weight_grad_flops(model_spec))
        )
        return _ScheduleRequest(
            self.schedule,
            self._file_digest,
            sharding.mesh.pp,
            num_microbatches,
            self._num_virtual_stages,
            forward,
            weights,
            sharding.model_spec.num_batch_sums > 0,
        )

    @property
    def _file_digest(self) -> str:
        return file_digest(self.schedule) if is_schedule_source(self.schedule) else ""

    @property
    def _num_virtual_stages(self) -> int:
        found = find_schedule(self.schedule)
        if found is not None and found.num_virtual_stages:
            return found.num_virtual_stages  # another number is a fault, and is reported beside all others
        return max(self.virtual_stages, 0) or (1 if found is None else found.default_virtual_stages)

    def _placement(self, sharding: ShardingPlan) -> tuple[VirtualStage, ...]:
        return _cached_placement(self.schedule, self._file_digest, sharding.mesh.pp, self._num_virtual_stages)

    def _num_stages(self, sharding: ShardingPlan) -> int:
        return len({stage.stage for stage in self._placement(sharding)})

    def _insert_send_recv(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        call, stages = (
            self._request(view.plan, len({action.microbatch for action in actions if action.kind == "F"})),
            self._stages(view.plan),
        )
        return SendRecvInsertion(
            stages, _cached_routes(stages, call), view, job, self.axis, scatter=self.scatter
        ).insert(actions)

    def _find_stages(self, sharding: ShardingPlan) -> tuple[StageSpec, ...] | None:
        model_spec = sharding.model_spec
        boundaries, count = model_spec.stage_boundaries, self._num_stages(sharding)
        if boundaries is None or count < 2 or count > len(boundaries.open_boundaries()) + 1:
            return None
        if self.split_points and (
            len(self.split_points) != count - 1 or list(boundaries.diagnostics(self.split_points))
        ):
            return None
        if sharding.split_points:
            return _cached_stages(boundaries, sharding.split_points)
        return _cached_stages(
            boundaries,
            self.split_points
            or balance_stages(
                dict(zip(model_spec.block_calls, model_spec.flops, strict=True)),
                boundaries.open_boundaries(),
                count,
            ),
        )

    def _stages(self, sharding: ShardingPlan) -> tuple[StageSpec, ...]:
        stages = self._find_stages(sharding)
        if stages is None:
            raise ValueError("a plan was made although its pipeline has errors")
        return stages


def _sum_per_stage(
    block_calls: Sequence[str], each: Sequence[int], stages: Sequence[StageSpec]
) -> tuple[float, ...]:
    of = dict(zip(block_calls, each, strict=True))
    return tuple(float(sum(map(of.__getitem__, stage.block_calls))) for stage in stages)


class _ScheduleRequest(NamedTuple):
    schedule: str
    file: str
    num_ranks: int
    num_microbatches: int
    num_virtual_stages: int
    forward_flops: tuple[float, ...]
    weight_grad_flops: tuple[float, ...]
    forwards_first: bool


def _declare_blocks_fix(sharding: ShardingPlan) -> str:
    holders = list(dict.fromkeys(weight.name.rpartition(".")[0] for weight in sharding.model_spec.params))
    return f"; or declare blocks: Model(..., blocks={[name for name in holders if name][:4]})"


@lru_cache(maxsize=32)
def _cached_schedule(call: _ScheduleRequest) -> Schedule:
    found, forward = find_schedule(call.schedule), call.forward_flops
    if found is None:
        raise ValueError("a plan was made although its pipeline has errors")
    if any(forward):
        inputs = [2 * whole - half for whole, half in zip(forward, call.weight_grad_flops, strict=True)]
        costs = StageCosts(forward, inputs, call.weight_grad_flops)
    else:  # nobody has counted
        costs = StageCosts.uniform(len(forward))
    schedule = found.build(call.num_ranks, call.num_microbatches, call.num_virtual_stages, costs)
    if not call.forwards_first:
        return schedule
    # forwards wait for forwards alone, so their order among themselves stays one that ends
    lists = (tuple(sorted(each, key=lambda action: action.kind != "F")) for each in schedule.actions)
    return Schedule(schedule.virtual_stages, tuple(lists))


@lru_cache(maxsize=32)
def _idle_stages(call: _ScheduleRequest) -> tuple[VirtualStage, ...]:
    schedule = _cached_schedule(call)
    busy = {action.virtual_stage for actions in schedule.actions for action in actions}
    return tuple(stage for number, stage in enumerate(schedule.virtual_stages) if number not in busy)


@lru_cache(maxsize=8)
def _cached_routes(stages: tuple[StageSpec, ...], call: _ScheduleRequest) -> TransferRoutes:
    return TransferRoutes(stages, _cached_schedule(call))


@lru_cache(maxsize=8)
def _cached_stages(boundaries: StageBoundaries, cuts: tuple[str, ...]) -> tuple[StageSpec, ...]:
    return boundaries.stages(cuts)


@lru_cache(maxsize=32)
def _cached_placement(
    schedule: str, file: str, ranks: int, num_virtual_stages: int
) -> tuple[VirtualStage, ...]:
    found = find_schedule(schedule)
    return (
        ()
        if found is None or list(found.check(ranks, 1))
        else found.virtual_stages(ranks, num_virtual_stages)
    )
