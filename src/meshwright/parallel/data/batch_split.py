"""Splits the global batch: each rank computes on its own share of the samples.

Why it works: the loss of a step is a sum over tokens divided by one number, the count of valid tokens in the
*global* batch. A sum can be taken in parts. Each rank divides its own sum by the global count, never by its
own, so the gradients of all ranks add up; nothing is divided by a number of ranks. The mean of per-rank means
is wrong as soon as ranks hold different numbers of valid tokens.

    global batch  [ s0 s1 s2 s3 s4 s5 ]        rank 0: s0 s1    rank 1: s2 s3    rank 2: s4 s5
    before   TOKEN_COUNT                                       F F F  LOSS  B B B  LOSS_SUM              STEP
    after    TOKEN_COUNT(all-reduce, during the first F)       F F F  LOSS  B B B  LOSS_SUM(all-reduce)  STEP

    loss = sum_ranks sum_tokens l / sum_ranks count        weights I -> R, so their gradients are P

A contrastive loss compares samples with each other, so it is no such sum. Then one GATHER per input tensor of
the loss collects the samples of all ranks on every rank, and every rank computes the same loss on all of
them. In a pipeline, those are the ranks of the last stage.

    after    TOKEN_COUNT  F F F  GATHER(facts) GATHER(output0) GATHER(output1)  LOSS  B B B  LOSS_SUM  STEP

An auxiliary loss that balances experts reads sums over the global batch (tokens per expert). All forwards
run first, and BATCH_SUM sums them over the ranks; then every rank adds its part to its losses.

    after    TOKEN_COUNT  F F F  F F F  BATCH_SUM(all-reduce)  LOSS  B B B  LOSS  B B B  LOSS_SUM  STEP

Cost: two messages, of 32 and 8 bytes, per rank and step; per GATHER n-1 times the bytes of a rank's samples;
per BATCH_SUM 8 bytes for each sum, and the activations of all microbatches; memory of activations / n. A rank
without samples takes part with zero weight: its labels are ignored, its gradients are zero, no rank waits.
Limits: the ranks divide the global batch. The gradients stay pending sums: a storage strategy must reduce
them.
Paper: Dean et al. 2012, "Large Scale Distributed Deep Networks" (NeurIPS); Goyal et al. 2017, arXiv
1706.02677, section 3 (losses normalized by the total, not by the per-worker minibatch).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.mesh import GRAD_SUM_AXES, REPLICA_AXES, axes_with
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import S
from meshwright.plan.step.program import Action, Program, Transfer, index_of_last, with_waits
from meshwright.plan.step.single_device_program import (
    BATCH_INFO,
    BATCH_SUM,
    FORWARD_KINDS,
    reduce_totals_along,
    step_total_nbytes,
)
from meshwright.plan.strategy_interface import Strategy, StrategyPhase

DATA_AXES = axes_with("samples")
SAMPLE_AXIS = one_of(
    *DATA_AXES,
    fix=f"choose one of: {', '.join(REPLICA_AXES)}; or ep, for the strategy expert_parallel; "
    "local_sgd and diloco split outer by themselves",
)
GRAD_SUM_AXIS = one_of(*GRAD_SUM_AXES, fix=f"choose one of: {', '.join(REPLICA_AXES)}")


@dataclass(frozen=True)
class BatchSplit(Strategy):
    """Splits the samples of the global batch along `axis`."""

    name: ClassVar[str] = "batch_split"
    phase: ClassVar[StrategyPhase] = "shard"
    axis: str = field(default="dp_replicate", metadata=SAMPLE_AXIS)

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if sharding.model_spec.needs_global_batch:
            for column in (
                *sharding.model_spec.targets,
                *(column for column in sharding.model_spec.outputs if column.used_by_loss),
            ):
                yield from column.diagnostics("loss")

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        split = sharding.with_batch_placement(self.axis, S(0))
        return split.map_param_shardings(lambda param_sharding: param_sharding.with_partial_grad(self.axis))

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        met = program.edit(
            lambda actions: [
                self._gather_along_axis(action) for action in self._insert_gathers(actions, view, job)
            ]
        )
        batch_sum = {BATCH_SUM: FLOAT_NBYTES["float64"] * view.model_spec.num_batch_sums}
        return reduce_totals_along(met, self.axis, step_total_nbytes(view.plan) | batch_sum)

    def _insert_gathers(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        model_spec, at = view.model_spec, index_of_last(actions, "LOSS")
        has_gathers = any(action.kind == "GATHER" for action in actions)
        if not model_spec.needs_global_batch or has_gathers or at is None:  # another stage computes the loss
            return actions
        num_samples = job.train.batch // view.plan.num_data
        used = [column for column in model_spec.outputs if column.used_by_loss]
        sizes = {BATCH_INFO: 8 * (1 + sum(not column.per_sample for column in used))}
        for column in (*model_spec.targets, *used):
            if column.per_sample:
                sizes[column.name] = num_samples * column.nbytes(job.precision.parameters)
        forward = next(action.name for action in reversed(actions) if action.kind in FORWARD_KINDS)
        gathers = [
            Action(
                "GATHER",
                name,
                stream="comm",
                waits=(forward,),
                transfer=Transfer("all_gather", (), nbytes, dtype="uint8"),
            )
            for name, nbytes in sizes.items()
        ]
        loss = with_waits(actions[at], [gather.name for gather in gathers])
        return [*actions[:at], *gathers, loss, *actions[at + 1 :]]

    def _gather_along_axis(self, action: Action) -> Action:
        if action.kind == "GATHER" and action.transfer is not None:
            return replace(action, transfer=replace(action.transfer, axes=(*action.transfer.axes, self.axis)))
        return action


def same_data_diagnostic(what: str, axis: str, where: str) -> Diagnostic:
    """Returns the diagnostic of summing gradients along `axis` although nothing splits samples or tokens
    there; `what` is replicated.
    """
    if axis in DATA_AXES:
        text = f"the {what} along {axis} would all see the same samples: no strategy splits the batch there"
        return Diagnostic(text, f'add [[strategies]] name = "batch_split", axis = "{axis}"', where)
    text = (
        f"the {what} along {axis} would all see the same tokens: no strategy shards those of a sample there"
    )
    return Diagnostic(text, f'add [[strategies]] name = "ring", axis = "{axis}"', where)
