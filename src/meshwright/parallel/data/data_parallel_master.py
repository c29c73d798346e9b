"""Data parallelism with one master: one rank reads the data, computes the loss and steps; all run the model.

Why it is here: it is the first scheme that everybody builds, `torch.nn.DataParallel` works like this within
one process, and it shows what DDP avoids. A loss is a function of all outputs, so the master, which has them
all, computes it exactly as one device would. The gradient of the outputs is split into samples again, and the
backward, a sum over samples, continues where the samples are. The master is rank 0 of the axis, and one end
of every message:

    master   SCATTER(x) F F F GATHER(y)  LOSS  SCATTER(gradient(y)) B B B REDUCE(w)  CLIP STEP  BROADCAST(w)
    others   SCATTER(x) F F F GATHER(y)        SCATTER(gradient(y)) B B B REDUCE(w)             BROADCAST(w)

    SCATTER    sends each rank its samples of a tensor that the master holds
    GATHER     collects the samples of one output at the master
    REDUCE     sums a gradient at the master
    BROADCAST  sends a weight from the master to all ranks after STEP, so a step ends with equal weights

Labels stay at the master. TOKEN_COUNT and LOSS_SUM are those of `batch_split`.

    bytes through the master = S + (n-1) S + (n-1) (x + 2 y)       through a rank of `ddp` = 4 (n-1)/n S

These are sent and received bytes together: S bytes of weights go out (a backend forwards them along a tree
or ring) and come in from n-1 ranks; x are the bytes of a rank's inputs, y those of its outputs.

Cost: the bytes of the master grow with n; those of `ddp` stay below 4 S. The master holds the outputs of all
samples (n y) and all optimizer states; nothing overlaps, and n-1 ranks idle while it computes the loss and
steps.
Limits: one microbatch, no other axis. A loss that takes outputs which are not per sample is refused.
Paper: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server" (OSDI), of which this
is the case of one server that is a worker too; the documentation of torch.nn.DataParallel, which advises
against it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from meshwright.parallel.data.ddp import check_replicas
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, BatchTensor
from meshwright.plan.sharding.mesh import AXES, REPLICA_AXES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import I
from meshwright.plan.step.grad_dependencies import last_backward
from meshwright.plan.step.memory.memory_names import output_grad_name
from meshwright.plan.step.program import Action, Program, Transfer, index_of_last, with_waits
from meshwright.plan.step.single_device_program import FORWARD_KINDS, GRAD_NORM
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase


@dataclass(frozen=True)
class DataParallelMaster(Strategy):
    """Full replicas of the weights along `axis`; the rank at index 0 steps and broadcasts them."""

    name: ClassVar[str] = "data_parallel_master"
    phase: ClassVar[StrategyPhase] = "storage"
    axis: str = field(default="dp_replicate", metadata=one_of(*REPLICA_AXES))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location = f"strategies.{self.name}"
        yield from check_replicas(self.name, self.axis, "backend", sharding)
        others = [axis for axis in AXES if axis != self.axis and sharding.mesh.size(axis) > 1]
        if others:
            text = f"the ranks along {' and '.join(others)} would each have a master of their own"
            yield Diagnostic(text, f'set mesh.{others[0]} = 1, or use the strategy "ddp"', location)
        shared = [
            column for column in sharding.model_spec.outputs if column.used_by_loss and not column.per_sample
        ]
        if shared:
            one = shared[0]
            text = (
                f"the loss takes {one.name} of shape {list(one.shape)}, which is not per sample: it would be "
                f"that of the master"
            )
            yield Diagnostic(text, 'use the strategy "ddp"', location)
        for column in (
            *sharding.model_spec.inputs,
            *(column for column in sharding.model_spec.outputs if column.used_by_loss),
        ):
            yield from column.diagnostics(location)
        if job.precision.reduce != job.precision.parameters:
            text = (
                f"gradients are sent in {job.precision.parameters} here, and precision.reduce is "
                f"{job.precision.reduce}"
            )
            yield Diagnostic(text, 'use the strategy "ddp", or make the two dtypes equal', "precision.reduce")

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        with_primary = replace(sharding, primary_rank_axes=(*sharding.primary_rank_axes, self.axis))
        return with_primary.map_param_shardings(
            lambda param_sharding: replace(
                param_sharding, grad_layout=param_sharding.grad_layout.with_placement(self.axis, I)
            )
        )

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        num_samples = job.train.batch // view.plan.num_data
        return program.edit(lambda actions: self._insert_exchanges(actions, view, job, num_samples))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        return {"REDUCE": runtime.state.start_collective}

    def _insert_exchanges(
        self, actions: list[Action], view: RankView, job: Job, num_samples: int
    ) -> list[Action]:
        actions = [action for action in actions if action.kind != "GATHER"]  # to the master, not to all
        used = [column for column in view.model_spec.outputs if column.used_by_loss]
        first, at = (
            next(i for i, action in enumerate(actions) if action.kind in FORWARD_KINDS),
            index_of_last(actions, "LOSS") or 0,
        )
        forward, loss = actions[at - 1].name, actions[at]

        def batch_transfer(how: str, column: BatchTensor) -> Transfer:
            return Transfer(
                how, (self.axis,), num_samples * column.nbytes(job.precision.parameters), dtype="uint8"
            )  # as bytes

        scatters = [
            Action("SCATTER", c.name, waits=("TOKEN_COUNT()",), transfer=batch_transfer("scatter", c))
            for c in view.model_spec.inputs
        ]
        gathers = [
            Action("GATHER", c.name, stream="comm", waits=(forward,), transfer=batch_transfer("gather", c))
            for c in used
        ]
        grad_scatters = [
            Action(
                "SCATTER", output_grad_name(c.name), waits=(loss.name,), transfer=batch_transfer("scatter", c)
            )
            for c in used
            if c.dtype in FLOAT_NBYTES
        ]
        others = tuple(wait for wait in loss.waits if not wait.startswith("GATHER"))
        loss = with_waits(replace(loss, waits=others), [gather.name for gather in gathers])
        exchanged = [
            *actions[:first],
            *scatters,
            *actions[first:at],
            *gathers,
            loss,
            *grad_scatters,
            *actions[at + 1 :],
        ]
        return self._insert_weight_comm(exchanged, view, job)

    def _insert_weight_comm(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        clip, step = index_of_last(actions, "CLIP") or 0, index_of_last(actions, "STEP") or 0
        dtype, last = job.precision.parameters, (last_backward(actions).name,)
        norm = Transfer("broadcast", (self.axis,), 8, dtype="float64")
        reduces: list[Action] = []
        broadcasts = [Action("BROADCAST", GRAD_NORM, stream="comm", waits=("CLIP()",), transfer=norm)]
        for weight in view.model_spec.trainable:
            names = (weight.name,)
            sums = Transfer("reduce", (self.axis,), weight.numel * FLOAT_NBYTES[dtype], dtype=dtype)
            reduces.append(
                Action("REDUCE", weight.name, stream="comm", waits=last, tensors=names, transfer=sums)
            )
            out = replace(sums, collective="broadcast")
            broadcasts.append(
                Action(
                    "BROADCAST", weight.name, stream="comm", waits=("STEP()",), tensors=names, transfer=out
                )
            )
        waiting = with_waits(actions[clip], [reduce.name for reduce in reduces])
        return [
            *actions[:clip],
            *reduces,
            waiting,
            *actions[clip + 1 : step + 1],
            *broadcasts,
            *actions[step + 1 :],
        ]
