"""Rounds: sites train apart on their own samples, and meet every H steps to average parameters.

Why it works: a link between data centres carries a message now and then, not one per step. Parameters that
started equal and took H steps on samples of the same kind have not gone far apart, so their mean is a good
common start. A *site* is all ranks at one index along `outer` (and `site`); inside it any plan runs as it
would alone.

    batch        axis `outer` splits the samples of the global batch: each site has batch / k of them
    gradients    summed inside a site only; the loss of a site is divided by what counts in its own samples
    parameters   V along `outer`: each site has its own, until a round ends. V is left by a mean alone
    optimizer    each site steps its own states, which stay its own (V) beyond the round, unless local SGD
                 averages them with the parameters: the message of a group is then parameters, states

    site 0   F B STEP TOTALS   F B STEP TOTALS   F B STEP TOTALS  AVERAGE(1) AVERAGE(2) END_ROUND(1) ...
    site 1   F B STEP TOTALS   F B STEP TOTALS   F B STEP TOTALS  AVERAGE(1) AVERAGE(2) END_ROUND(1) ...
             <----------------- a round of H = 3 steps ----------------------------------------------->

    ROUND_TOTALS   adds loss, loss weight, samples and tokens of the step to those of the round; each step
    ROUND_SUM      sums them over the sites, with the wishes to stop                        end of a round
    PACK_ROUND     makes one message of what STEP has stepped: masters, shards or parameters, float32 at
                   least; or of what the technique sends in their place
    AVERAGE        all-reduces the messages of all sites, which are parameters
    OUTER_REDUCE   all-reduces them where they are outer gradients (DiLoCo), which codes may carry
    END_ROUND      divides by k, and makes the mean (local SGD), or what follows from it (DiLoCo), the
                   parameters; the averages of two parameter groups are under way at once

Two levels are two axes, with one strategy each: local SGD with axis = "site" averages the sites of a data
centre every H1 steps, and local SGD or DiLoCo with axis = "outer" every H2, a multiple of H1. Where both end,
the sites of a centre meet first, and then each with those at its index in the other centres. Whatever is said
of rounds below is said of the longer ones.

    step          1  2  3  4  5  6  7  8        site = 2 in each of outer = 2; H1 = 2, H2 = 4
    over site        x     x     x     x        AVERAGE_SITE: 2 (s-1)/s N bytes, s sites of a centre
    over outer             x           x        AVERAGE:      2 (c-1)/c N bytes, c centres

    PACK_ROUND_SITE   makes one message of what STEP has stepped, for the sites of a data centre
    AVERAGE_SITE      all-reduces the messages of the sites of a data centre
    END_ROUND_SITE    makes their mean the parameters of these sites

Between two rounds nothing crosses `outer`: metrics are those of a site, and a wish to stop waits. The step
that ends a round returns the loss of the round over all sites too (`Metrics.round`), and whether any rank
wished to stop: a run stops within one round. The last step of the run ends a round, however short. A mean of
sites is not a mean of tokens: with other counts at each site, H = 1 is not data parallelism.

Defined per site: the gradient norm and `train.clip`, the learning-rate schedule (all count the same steps),
sums over a batch (auxiliary losses), tied parameters, a step in which nothing counts (that site stands
still). Refused by name: the loss guard, the noise scale and the loss scale of float16, whose decisions must
be those of all ranks; running statistics and biases that a forward or a step changes outside of the
optimizer; one rank that steps for others; an optimizer of whole matrices over shards; weight versions; model
states off the device; an evaluation in the middle of a round.

A checkpoint may be saved after any step: in the middle of a round it has the parameters of each site, and
resumes with the same bits. Another number of sites needs the end of a round; then site i of m takes the
optimizer states of site i mod k.

Cost, per rank and round: 2 (k-1)/k N bytes over `outer`, N the bytes of what the rank steps (a shard under
ZeRO, all under DDP, where each replica sends its own), and 40 bytes; between rounds 0. Memory: two buffers
of one parameter group each on each level, none where shards of float32 are averaged in place.
Limits: lossy. How far H may go is for the held-out loss to say.
Paper: McMahan et al. 2017, "Communication-Efficient Learning", arXiv 1602.05629 (FedAvg); Stich 2019, "Local
SGD Converges Fast and Communicates Little", arXiv 1805.09767.
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from meshwright.parallel.outer.round_averages import TOTALS, RoundAverages, RoundRule
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.field_constraints import at_least, one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ModelSpec, ParamSpec
from meshwright.plan.sharding.mesh import ROUND_AXES
from meshwright.plan.sharding.param_sharding import ParamGroup
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import AVERAGES, Layout, P, S
from meshwright.plan.step.program import Action, Allocation, Period, Program, Transfer
from meshwright.plan.step.single_device_program import stepped_microbatches
from meshwright.plan.strategy_compatibility import joint_decision_diagnostics
from meshwright.plan.strategy_interface import EndStep, Handler, Runtime, SiteLoop, Strategy, StrategyPhase
from meshwright.plan.strategy_state import StateSpec

if TYPE_CHECKING:
    import torch

EndRound = Callable[[Mapping[str, "torch.Tensor"]], None]  # told what codes lost
OUTER_REDUCE = "OUTER_REDUCE"
KINDS = {  # of the actions that pack, sum and end a round, by axis
    "outer": ("PACK_ROUND", "AVERAGE", "END_ROUND"),
    "site": ("PACK_ROUND_SITE", "AVERAGE_SITE", "END_ROUND_SITE"),
}
EVERY_FIX = "write the steps of a round, at least 1: 1 averages after every step"


@dataclass(frozen=True)
class RoundStrategy(Strategy):
    """Lets the sites along `axis` train apart for `sync_every` steps."""

    phase: ClassVar[StrategyPhase] = "comm"  # behind what stores parameters: that is averaged
    exact: ClassVar[bool] = False
    sum_kind: ClassVar[str] = ""  # of the actions that sum over the sites; "": averages
    axis: str = field(default="outer", metadata=one_of(*ROUND_AXES))
    sync_every: int = field(default=16, metadata=at_least(1, EVERY_FIX))

    @property
    def is_outermost(self) -> bool:
        """Whether all sites agree when a round of these ends."""
        return self.axis == ROUND_AXES[0]

    @abstractmethod
    def end_rounds_of(self, sites: "Sequence[SiteLoop]") -> "EndRound":
        """Returns what ends a round of the loops of `sites` that lie along `axis`, with which plans are
        compared: it is told what codes lost of the outer gradients of them all, by name.
        """

    @abstractmethod
    def period(self, job: Job) -> Period:
        """Returns the rounds of a run of `job`."""

    def agreement(self, job: Job) -> Period:
        """Returns the rounds behind which all sites have the same parameters; by default all."""
        return self.period(job)

    def periods_of(self, group: ParamGroup, model_spec: ModelSpec, job: Job) -> tuple[Period, Period]:
        """Returns in which steps the average of `group` begins, and in which the sites go on with it; by
        default when rounds end.
        """
        return self.period(job), self.period(job)

    def begin_average(self, name: str, stepped: "torch.Tensor", kept: "Mapping[str, torch.Tensor]") -> None:
        """Makes of the flat `stepped` values, in place, what is averaged; by default themselves.

        `name` and `kept` as for `end_round`.
        """

    @abstractmethod
    def end_round(self, name: str, mean: "torch.Tensor", kept: "Mapping[str, torch.Tensor]") -> None:
        """Makes of the flat `mean` over the sites, in place, what all sites go on with.

        `name` is the parameter, or this rank's part of it; `kept` are the tensors of `states`, by key.
        """

    def averaged_states(self, job: Job, param: ParamSpec) -> tuple[str, ...]:
        """Returns the names of the optimizer states of `param` that become their mean with it; none."""
        return ()

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        where, num_sites = f"strategies.{self.name}", sharding.mesh.size(self.axis)
        outside = ROUND_AXES[: ROUND_AXES.index(self.axis)]
        apart = [axis for axis in ROUND_AXES[len(outside) + 1 :] if sharding.mesh.size(axis) > 1]
        if self.axis in sharding.varying_axes:
            text = f"two strategies let the sites along {self.axis} train apart"
            yield Diagnostic(text, "keep one of them", where)
        elif set(outside).intersection(sharding.varying_axes):
            text = f"rounds over {self.axis} are within those over {outside[0]}, and listed behind them"
            yield Diagnostic(text, f"list {self.name} over {self.axis} first", where)
        elif not set(apart) <= set(sharding.varying_axes):
            text = f"mesh.{apart[0]} is {sharding.mesh.size(apart[0])}, and nothing averages these sites"
            fix = f'list local_sgd with axis = "{apart[0]}" before {self.name}, or set mesh.{apart[0]} = 1'
            yield Diagnostic(text, fix, where)
        if not self.is_outermost and sharding.mesh.size(ROUND_AXES[0]) == 1:
            text = f"mesh.{ROUND_AXES[0]} is 1: {self.axis} is for sites of one data centre among several"
            fix = f'set mesh.{ROUND_AXES[0]} = {num_sites}, mesh.{self.axis} = 1 and axis = "{ROUND_AXES[0]}"'
            yield Diagnostic(text, fix, f"{where}.axis")
        if num_sites == 1:
            text = f"mesh.{self.axis} is 1: there are no sites that could train apart"
            yield Diagnostic(
                text, f"set mesh.{self.axis} to the number of sites, or remove {self.name}", where
            )
        if self.sync_every > job.train.steps > 0:
            text = f"rounds of {self.sync_every} steps in a run of {job.train.steps}"
            fix = f"write at most {job.train.steps}, or raise train.steps"
            yield Diagnostic(text, fix, f"{where}.sync_every")
        yield from self._check_job(job)

    def _check_job(self, job: Job) -> Iterator[Diagnostic]:
        apart = f"and the sites along {self.axis} know nothing of one another between rounds"
        yield from joint_decision_diagnostics(job, apart)
        if job.evaluate.is_enabled or job.evaluate.tasks:
            yield from self.check_evaluations(job)

    def check_evaluations(self, job: Job) -> Iterator[Diagnostic]:
        """Yields a problem if an evaluation would come in the middle of a round."""
        every, period = job.evaluate.every, self.agreement(job)
        steps = range(every - 1, job.train.steps, every) if every else ()
        if any(not period.ends_with(step) for step in steps):
            text = f"an evaluation every {every} steps, some of them in the middle of a round"
            fix = f"set evaluate.every to a multiple of {period.num_steps}"
            if period.warmup_steps % self.sync_every:
                fix += ", and warmup_steps too"
            fix += "; or evaluate.every = 0: at the end alone"
            yield Diagnostic(text, fix, "evaluate.every")

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        where, model_spec = f"strategies.{self.name}", sharding.model_spec
        if sharding.primary_rank_axes:
            text = "one rank steps for all others (data_parallel_master), and each averages what it steps"
            yield Diagnostic(text, 'use the strategy "ddp" or "zero" in its place', where)
        if not sharding.tiers.keeps_states_on_device:
            text = "model states rest off the device, and what is averaged there is not yet supported"
            yield Diagnostic(text, f"remove offload and disk_offload, or {self.name}", where)
        owned = [each.param.name for each in sharding.param_shardings if each.owner_axes]
        if owned:
            text = f"one rank steps the whole matrix {owned[0]}, of which the others hold parts"
            fix = 'use "ddp" inside a site, or an optimizer that steps elements ("adamw")'
            yield Diagnostic(text, fix, where)
        norms = [call.name for call in model_spec.batch_norm_calls if call.has_running_stats]
        if norms:
            text = f"the running statistics of {len(norms)} batch norms ({norms[0]}...) differ between sites"
            fix = "use norms without them (LayerNorm, GroupNorm), or one site"
            yield Diagnostic(text, fix, where)
        if model_spec.choice_biases:
            text = f"{model_spec.choice_biases[0].buffer} follows the load of experts of all ranks"
            yield Diagnostic(text, "use the auxiliary loss to balance experts, or one site", where)

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        apart = sharding.with_batch_placement(self.axis, S(0))
        return apart.map_param_shardings(lambda each: each.varying(self.axis))

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        if view.plan.mesh.size(self.axis) == 1:
            return program
        if any(stepped_microbatches(role.actions) for role in program.roles):
            text = "each microbatch is a step of its own, at weights that are several updates old"
            fix = "use another schedule of the pipeline, or one site"
            raise PlanError(text, fix=fix, location=f"strategies.{self.name}")
        period, inner = self.period(job), program.period
        step = None if inner is None else period.first_end_outside(inner)
        if inner is not None and step is not None:
            text = f"step {step + 1} ends a round of {period.num_steps} steps over {self.axis}, and none of "
            text += f"{inner.num_steps} within a data centre"
            fix = f"set sync_every to a multiple of {inner.num_steps}, and warmup_steps likewise"
            raise PlanError(text, fix=fix, location=f"strategies.{self.name}.sync_every")
        return program.edit(lambda actions: [*actions, *self._round_actions(actions, view, job)])

    def states(self, view: RankView, job: Job) -> Iterator[StateSpec]:
        """Returns the totals of the round; a summand of each site."""
        if self.is_outermost:
            layout = Layout().with_placement(view.plan.varying_axes, P)
            yield StateSpec(TOTALS, (4,), dtype="float64", layout=layout)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        plan = runtime.state.plan
        averaged = {param.name: self.averaged_states(plan.job, param) for param in plan.model_spec.trainable}
        rule = RoundRule(self.axis, self._kinds, self.begin_average, self.end_round, averaged)
        return RoundAverages(runtime, rule).handlers

    def on_sites(self, job: Job, sites: "Sequence[SiteLoop]") -> EndStep | None:
        period, groups = self.period(job), dict[tuple[int, ...], list[SiteLoop]]()
        for site in sites:
            others = tuple(index for axis, index in site.index.items() if axis != self.axis)
            groups.setdefault(others, []).append(site)
        ends = [self.end_rounds_of(group) for group in groups.values()]

        def end_step(step: int, lost: "Mapping[str, torch.Tensor]") -> None:
            for end_round in ends if period.ends_with(step) else ():
                end_round(lost)

        return end_step

    def _round_actions(self, actions: Sequence[Action], view: RankView, job: Job) -> Iterator[Action]:
        period = self.period(job)
        if self.is_outermost:
            sums = (action.name for action in actions if action.kind == "LOSS_SUM")
            totals = Action("ROUND_TOTALS", waits=("TOKEN_COUNT()", *sums))
            yield totals
            axes, nbytes = view.plan.varying_axes, 5 * FLOAT_NBYTES["float64"]
            message = Transfer("all_reduce", axes, nbytes, dtype="float64")
            yield Action("ROUND_SUM", stream="comm", waits=(totals.name,), transfer=message, period=period)
        changing = ("STEP", *(end for _, _, end in KINDS.values()))
        steps = tuple(action.name for action in actions if action.kind in changing)
        at_once = defaultdict[tuple[Period, Period], list[ParamGroup]](list)
        for group in view.param_groups:
            at_once[self.periods_of(group, view.plan.model_spec, job)].append(group)
        sums = [
            [
                # what ends in a later step is a state
                (
                    self._average(group, view, job, begins, steps),
                    0
                    if begins != ends or self._is_in_place(group, view, job)
                    else self._message_nbytes(group, view, job),
                )
                for group in groups
            ]
            for (begins, ends), groups in at_once.items()
        ]
        for (_, ends), averages in zip(at_once, self._with_packs(sums), strict=True):
            for number, (pack, average) in enumerate(averages):
                yield from (pack, average)  # while it travels, the one before is written back
                if number:
                    yield self._end_of(*averages[number - 1], ends)
            yield self._end_of(*averages[-1], ends)

    def _average(
        self, group: ParamGroup, view: RankView, job: Job, period: Period, steps: tuple[str, ...]
    ) -> Action:
        nbytes, dtype = self._message_nbytes(group, view, job), averaged_dtype(job)
        transfer = Transfer(AVERAGES["V", "I"], (self.axis,), nbytes, dtype=dtype)
        pack, total, _ = self._kinds
        waits = (*steps, f"{pack}({group.name})")
        return Action(total, group.name, None, "comm", waits, group.names, transfer, period=period)

    def _message_nbytes(self, group: ParamGroup, view: RankView, job: Job) -> int:
        flat = view.flat_param_specs.get(group.name)
        numel = group.numel if flat is None else view.shard_numel(flat)
        return (1 + self._num_states(group, job)) * numel * FLOAT_NBYTES[averaged_dtype(job)]

    @property
    def _kinds(self) -> tuple[str, str, str]:
        pack, average, end = KINDS[self.axis]
        return pack, self.sum_kind or average, end

    def _num_states(self, group: ParamGroup, job: Job) -> int:
        """Returns the most states of a parameter of `group` that become their mean."""
        return max(len(self.averaged_states(job, param)) for param in group.params)

    def _is_in_place(self, group: ParamGroup, view: RankView, job: Job) -> bool:
        """Returns whether what is averaged of `group` is one flat tensor of the dtype of its average."""
        is_flat = group.name in view.flat_param_specs and not self._num_states(group, job)
        return is_flat and job.precision.roles["master"] == averaged_dtype(job)

    def _with_packs(
        self, rounds: Sequence[Sequence[tuple[Action, int]]]
    ) -> Iterator[list[tuple[Action, Action]]]:
        """Yields for each of `rounds` its averages, with what makes their messages of so many bytes, or in
        place (0): in two buffers in turn, which all rounds share, each as large as the largest message in it.
        """
        sizes = [max((size for each in rounds for _, size in each[turn::2]), default=0) for turn in (0, 1)]
        for averages in rounds:
            found = list[tuple[Action, Action]]()
            for number, (average, nbytes) in enumerate(averages):
                buffer = Allocation(f"mean({self.axis}, {number % 2})", sizes[number % 2])
                pack = Action(
                    self._kinds[0],
                    average.subject,
                    waits=average.waits[:-1],
                    tensors=average.tensors,
                    allocations=(buffer,) if nbytes else (),
                    period=average.period,
                )
                found.append((pack, average))
            yield found

    def _end_of(self, pack: Action, average: Action, period: Period) -> Action:
        is_late = period != average.period
        return Action(
            self._kinds[2],
            average.subject,
            waits=pack.waits if is_late else (average.name,),
            tensors=average.tensors,
            frees=tuple(each.name for each in pack.allocations),
            previous_waits=(average.name,) if is_late else (),
            period=period,
        )


def averaged_dtype(job: Job) -> str:
    """Returns the dtype in which parameters are averaged: that in which they are stepped, at least
    float32.
    """
    master = job.precision.roles["master"]
    return master if FLOAT_NBYTES[master] >= FLOAT_NBYTES["float32"] else "float32"
