"""Gradient compression: the sum of gradients along one axis travels as codes, and what they lose is owed.

Why it works: a step needs no exact gradient, but none may be lost for good. Each rank adds to its gradient
what its codes lost before (the residual, *error feedback*), so that everything arrives, some of it late:
the sum over all steps of what was applied, and of all residuals, is the sum of all gradients.

    gradient + residual -> codes -> ranks exchange them -> sum of codes = what is applied
                        \\-> gradient + residual - value of the codes = the new residual (placement P)

    REDUCE   means what it meant: all_reduce (ddp, replicas of zero) or reduce_scatter (zero) of gradients;
             `carried_by` says which messages carry it
    STEP     keeps the new residuals if the step counts; if it is left out, residuals stay to the bit

Which axis: by default the outermost of those along which gradients are summed, since its links are the
slowest. Behind an exact reduce-scatter within a host, over its other axes (`zero` with `replicate_axis`), a
residual has 4 bytes / n per parameter; where all ranks code whole gradients it has 4.

Between sites that meet in rounds (diloco), with axis = "outer", codes carry the outer gradients: once per
round, OUTER_REDUCE in place of REDUCE, and the residual waits for the next round. Gradients inside a site are
summed exactly.

Which parameters: those that match one of `params` and have at least `min_numel` elements. They get buckets
and flat parameters of their own; all others are summed as before. Gradients that are summed along other axes
too, one after the other (tied over pipeline stages, norms under sequence parallelism), stay exact. The first
`exact_steps` steps send exact sums.

Every rank decodes the same codes in the same order, so replicas stay equal to the last bit. The norm, the
clip and the loss guard see the sum of codes. Residuals belong to unscaled gradients, whatever the loss scale
of float16. Where each microbatch is reduced on its own (zero 2 and 3), each takes what the one before owes.

Cost: two passes over the gradients for coding; one residual per coded gradient, in float32, and another one
within a step that the loss guard or the loss scale may leave out.
Limits: lossy: `verify` compares a plan with what its codes say (docs/concepts/verification.md). Error
feedback has a proof for SGD, and none for Adam.
Paper: Seide et al. 2014, "1-bit stochastic gradient descent" (Interspeech; error feedback); Karimireddy et
al. 2019, "Error Feedback Fixes SignSGD", arXiv 1901.09847; Stich et al. 2018, arXiv 1809.07599.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import ClassVar

import torch

from meshwright.comm.collectives.group import Rounds
from meshwright.parallel.compression.coded_sum import CodedSum
from meshwright.parallel.compression.residuals import CodedOperand, CodedSums, split_state_key
from meshwright.plan.job.errors import Diagnostic, PlanError, suggest_name
from meshwright.plan.job.field_constraints import at_least, one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.mesh import GRAD_SUM_AXES, ROUND_AXES, in_mesh_order
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import FLAT, Layout, P, S
from meshwright.plan.step.memory.memory_names import coded_sum_name, new_states_name
from meshwright.plan.step.program import Action, Allocation, Program, Transfer
from meshwright.plan.step.single_device_program import stepped_microbatches
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase
from meshwright.plan.strategy_state import StateSpec, local_state_nbytes

CODED_KINDS = ("REDUCE", "OUTER_REDUCE")  # sums of gradients, and of outer gradients
SUMS = ("all_reduce", "reduce_scatter")  # of them; a reduce to one rank is none


@dataclass(frozen=True)
class GradientCompression(Strategy):
    """Sums gradients along `axis` ("": the outermost) as codes.

    `params` are patterns of logical names (fnmatch; none: all parameters); smaller parameters than
    `min_numel` elements, and the first `exact_steps` steps, are summed exactly. Without `error_feedback`
    what codes lose is lost.
    """

    name: ClassVar[str] = "compress"
    phase: ClassVar[StrategyPhase] = "comm"
    exact: ClassVar[bool] = False
    codes_in_residuals: ClassVar[bool] = False  # takes each parameter by itself: `CodedOperand.in_residuals`
    axis: str = field(default="", metadata=one_of("", *GRAD_SUM_AXES, *ROUND_AXES))
    params: tuple[str, ...] = ()
    min_numel: int = field(default=0, metadata=at_least(0))
    exact_steps: int = field(default=0, metadata=at_least(0))
    error_feedback: bool = True

    @property
    def least_ranks(self) -> int:
        """The fewest ranks between which a sum sends codes."""
        return 2

    @abstractmethod
    def messages(self, coded_sum: CodedSum) -> tuple[Transfer, ...]:
        """Returns the collectives that carry `coded_sum.transfer`, of one size for all its shards."""

    @abstractmethod
    def sum_rounds(self, operand: CodedOperand) -> Rounds:
        """Yields the messages of one sum, round by round, as `Group.exchange` takes them.

        `operand.values`, and its parts `operand.by_param`, hold this rank's gradient and what it owed; the
        codec leaves there what it owes now, calls `operand.keep_residual()`, and writes the sum into
        `operand.output`. Other states of the codec are in `operand.before`, and go into `operand.after`.
        """

    @abstractmethod
    def defined_sum(
        self,
        coded_sum: CodedSum,
        inputs: Sequence[torch.Tensor],
        keys: Sequence[int],
        states: MutableMapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Returns the sum of the flat `inputs` of all ranks as this technique defines it.

        In one process and without messages; `verify` compares every sum with it. `keys` are those of the
        ranks for random numbers. `states` has what the technique keeps beside residuals, by key; it replaces
        what the sum changes.
        """

    def prepare(self, operand: CodedOperand) -> None:
        """Changes the gradients in `operand.values` before what is owed is added to them; by default not."""

    @abstractmethod
    def scratch_nbytes(self, coded_sum: CodedSum) -> int:
        """Returns the bytes that a rank takes for the sum beside its operand, while it lasts."""

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location, names = f"strategies.{self.name}", [each.name for each in sharding.model_spec.params]
        if self.axis in ROUND_AXES and self.axis not in sharding.varying_axes:
            text = f"no sites meet along {self.axis}"
            fix = "list diloco before compress, and set the number of sites in the mesh"
            yield Diagnostic(text, fix, f"{location}.axis")
        elif self.axis and self.axis not in (*sharding.grad_sum_axes, *ROUND_AXES):
            text = f"no gradient is summed along {self.axis}"
            summed = [axis for axis in sharding.grad_sum_axes if sharding.mesh.size(axis) > 1]
            fix = f"choose one of: {', '.join(summed)}" if summed else "remove compress"
            yield Diagnostic(text, fix, f"{location}.axis")
        for pattern in self.params:
            if not any(fnmatchcase(name, pattern) for name in names):
                text = f"'{pattern}' matches no parameter of {sharding.model_spec.name}"
                yield Diagnostic(text, suggest_name(pattern, names), f"{location}.params")

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location, axis = f"strategies.{self.name}", self._axis(sharding)
        if sharding.varying_axes and axis not in sharding.varying_axes:
            text = "the sums of gradients inside sites that train apart, which verify cannot compare yet"
            fix = f'set axis = "{sharding.varying_axes[0]}": outer gradients (diloco), or remove compress'
            yield Diagnostic(text, fix, f"{location}.axis")
        elif sharding.primary_rank_axes:
            text = "data_parallel_master sums gradients on one rank, and codes are summed by all ranks"
            yield Diagnostic(text, 'use the strategy "ddp" in its place, or remove compress', location)
        elif sharding.mesh.size(axis) > 1 and not any(
            self._selects(each, sharding) for each in sharding.param_shardings
        ):
            text = f"no gradient that is summed along {axis} is chosen by params and min_numel"
            yield Diagnostic(text, "choose more parameters, a smaller min_numel or another axis", location)

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        return sharding.map_param_shardings(
            lambda each: replace(each, is_compressed=True) if self._selects(each, sharding) else each
        )

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        if any(stepped_microbatches(role.actions) for role in program.roles):
            text = "each microbatch is an update of its own, and verify cannot compare codes of such sums yet"
            fix = "use another schedule (1f1b), or remove compress"
            raise PlanError(text, fix=fix, location=f"strategies.{self.name}")
        sums = (each for role in program.roles for each in role.actions if each.kind in CODED_KINDS)
        if self.axis in ROUND_AXES and not any(
            self.axis in move.axes for each in sums for move in each.transfers
        ):
            text = f"nothing that is summed along {self.axis} is a gradient: local_sgd averages parameters"
            fix = "use diloco (outer_lr = 1 and outer_momentum = 0 is local SGD), or remove compress"
            raise PlanError(text, fix=fix, location=f"strategies.{self.name}.axis")
        return program.edit(lambda actions: self._compress(actions, view, job))

    def states(self, view: RankView, job: Job) -> Iterable[StateSpec]:
        dtype = residual_dtype(job)
        for each in view.param_shardings if self.error_feedback else ():
            if each.is_compressed:  # chosen by its whole size, whatever a rank has of it
                layout = self.owed_layout(each, view.plan)
                yield StateSpec("residual", param=each.param.name, dtype=dtype, layout=layout)

    def coding_passes(self, action: Action, view: RankView) -> Mapping[str, int]:
        transfer = action.transfer
        if transfer is None or not self.codes(action, view.plan):
            return {}
        return {self.mode: transfer.nbytes // FLOAT_NBYTES[transfer.dtype]}

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        plan = runtime.state.plan
        coded = [each for each in plan.actions if self.codes(each, plan.sharding)]
        sums = CodedSums(runtime, self, coded, may_skip=leaves_steps_out(plan.job))
        for kind in dict.fromkeys(each.kind for each in coded):
            runtime.wrap(kind, sums.wrap_reduce)
        runtime.wrap("STEP", sums.wrap_step)
        return {}

    def codes(self, action: Action, sharding: ShardingPlan) -> bool:
        """Returns whether this strategy carries the sum of `action`."""
        transfer, axis = action.transfer, self._axis(sharding)
        return (
            action.kind in CODED_KINDS
            and transfer is not None
            and transfer.collective in SUMS
            and (axis in transfer.axes or self.codes_replicas(action, sharding))
            and sharding.mesh.group_size(transfer.axes) > 1
            and action.tensors[0] in sharding.compressed_params
        )

    def codes_replicas(self, action: Action, sharding: ShardingPlan) -> bool:
        """Returns whether the sum of `action`, of shards over their replicas, is coded behind the sum along
        the axis, and what it loses is added to the residual of that; by default not.
        """
        return False

    def _axis(self, sharding: ShardingPlan) -> str:
        found = [each for each in in_mesh_order(sharding.grad_sum_axes) if sharding.mesh.size(each) > 1]
        return self.axis or (found or ["dp_replicate"])[0]

    def _selects(self, each: ParamSharding, sharding: ShardingPlan) -> bool:
        reductions, axis = each.grad_reductions(), self._axis(sharding)
        return (
            each.param.trainable
            and (axis in reductions or axis in sharding.varying_axes)
            and sharding.mesh.size(axis) > 1
            and set(reductions) <= set(sharding.grad_sum_axes)
            and each.param.numel >= self.min_numel
            and (not self.params or any(fnmatchcase(each.param.name, pattern) for pattern in self.params))
        )

    def owed_layout(self, each: ParamSharding, sharding: ShardingPlan) -> Layout:
        """Returns the layout of what is owed to a parameter.

        Each rank holds a summand along the axes over which its gradient is still partial, and a shard where
        it is summed as one. Of an outer gradient, each site holds a summand.
        """
        if self.axis in ROUND_AXES:
            layout = Layout().with_placement(self.axis, P)
            return layout.with_placement(each.flat_shard_axes, S(FLAT))
        summed, sliced = set(each.grad_reductions()), each.flat_shard_axes
        if self._axis(sharding) in sliced or not sliced:
            return Layout().with_placement(in_mesh_order(summed), P)
        layout = Layout().with_placement(in_mesh_order(summed - set(sliced)), P)
        return layout.with_placement(sliced, S(FLAT))

    def other_axes(self, each: ParamSharding, sharding: ShardingPlan) -> tuple[str, ...]:
        """Returns the axes along which ranks sum other codes of a parameter: other slices or shards of it, or
        the gradients of other samples.
        """
        sliced, reduced = set(each.flat_shard_axes), set(each.grad_reductions())
        if self.axis in ROUND_AXES:
            return in_mesh_order(sliced | each.sliced_dims.keys())
        summed = sliced if self._axis(sharding) in sliced else reduced - sliced
        return in_mesh_order((reduced | sliced | each.sliced_dims.keys()) - summed)

    def _compress(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        sizes = Counter[str]()  # of what the strategy keeps, by parameter
        for spec in self.states(view, job):
            sizes[split_state_key(spec.key)[1]] += local_state_nbytes(spec, view)
        edited = list[Action]()
        scratch = dict[str, str]()  # what is freed, by the sum that it is waited for
        pending = dict[str, str]()  # likewise, by a parameter whose step decides
        for action in actions:
            waits = (*action.waits, *action.previous_waits)
            done = [scratch.pop(wait) for wait in waits if wait in scratch]
            if self.codes(action, view.plan) and action.transfer is not None:
                action = self._coded(action, action.transfer, view, job)
                scratch[action.name] = action.allocations[-1].name
                nbytes = sum(sizes[name] for name in action.tensors)
                if leaves_steps_out(job) and nbytes and action.tensors[0] not in pending:
                    kept = Allocation(new_states_name(action.name), nbytes)
                    action = replace(action, allocations=(*action.allocations, kept))
                    pending[action.tensors[0]] = kept.name
            elif action.kind == "STEP":
                done += [pending.pop(name) for name in action.tensors if name in pending]
            edited.append(replace(action, frees=(*action.frees, *done)) if done else action)
        return edited

    def _coded(self, action: Action, transfer: Transfer, view: RankView, job: Job) -> Action:
        coded_sum = CodedSum.of(action, transfer, view)
        messages = self.messages(coded_sum)
        transfer = replace(transfer, carried_by=messages, carried_from=self.exact_steps)
        coded_sum = replace(coded_sum, transfer=transfer)
        nbytes, wide = self.scratch_nbytes(coded_sum), residual_dtype(job)
        if transfer.dtype != wide:  # then gradients and residuals are added in a copy
            nbytes += coded_sum.numel * FLOAT_NBYTES[wide]
        scratch = Allocation(coded_sum_name(action.name), nbytes)
        return replace(action, transfer=transfer, allocations=(*action.allocations, scratch))


def leaves_steps_out(job: Job) -> bool:
    """Returns whether the loss guard or the loss scale may leave a step out, for what its gradients are."""
    return job.guard.action != "off" or job.precision.effective.scales_loss


def residual_dtype(job: Job) -> str:
    """Returns the dtype of residuals: float32, or wider where gradients are."""
    return "float64" if job.precision.effective.reduce == "float64" else "float32"
