"""Forwards through pipeline stages outside of steps, one close behind the other.

The pipeline of an evaluation: who runs, receives and sends when is in pipelined_eval_order.py.

The values are those of the recorded forward of an evaluation, which may differ from training: dropout is off.
The stages begin with the same blocks. Where a stage lies on two ranks, the one with fewer stages runs it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from meshwright.comm.collectives.group import Work
from meshwright.engine.forward_backward.pipelined_eval_order import EvalEvent, EvalOrder, stage_ranks
from meshwright.engine.runtime.comm_groups import p2p_group
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.loss.loss_definition import Batch
from meshwright.model.pipeline.forward_graph import ForwardGraph
from meshwright.model.pipeline.stage_forward import run_stage
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.model_spec.stage_transfers import StageSpec, StageTransfer, stage_transfers
from meshwright.plan.sharding.stage_value_shards import StageValueShards


@dataclass(frozen=True)
class EvalMicrobatch:
    """One microbatch of an evaluation; one without samples is a dummy and weighs nothing."""

    batch: Batch
    has_samples: bool


@dataclass
class _PipelinedForward:
    microbatch: EvalMicrobatch
    inputs: Mapping[str, torch.Tensor]
    forward_graph: ForwardGraph
    stages: tuple[StageSpec, ...]
    transfers: Sequence[StageTransfer]
    value_shapes: StageValueShards
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    recvs: dict[StageTransfer, Work] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return len(next(iter(self.inputs.values())))


class PipelinedEvaluation:
    """The forwards of one rank's stages on consecutive microbatches; values are sent for `action`."""

    def __init__(self, state: RankState, microbatches: Iterator[EvalMicrobatch], action: str) -> None:
        if state.trained_module.forward_graphs is None:
            raise RuntimeError("the plan has stages, and its model has no recorded forward")
        plan = state.plan
        self._view, self._sharding = plan.view, plan.sharding
        self._state, self._action = state, action
        self._forward_graphs, self._compute_dtype = (
            state.trained_module.forward_graphs,
            getattr(torch, plan.job.precision.compute),
        )
        self._microbatches = microbatches
        self._stage_ranks, self._group = stage_ranks(plan.sharding), state.world.group(("pp",))
        self._planned_values = tuple(value for stage in plan.sharding.stages for value in stage.outputs)
        self._order = EvalOrder(self._stage_ranks, self._has_forward, self._transfers_of)
        self._forwards: dict[int, _PipelinedForward] = {}
        self._num_begun, self._is_exhausted = 0, False
        self._sends: list[tuple[int, Work, torch.Tensor]] = []  # with the time at which each is due

    def outputs(self) -> Iterator[tuple[EvalMicrobatch, Any]]:
        """Yields each microbatch with the model's outputs, on the rank that runs the last stage.

        Nothing on others.
        """
        for event in self._order.events(self._group.index):
            evaluation_forward = self._forwards[event.number]
            if event.kind == "run":
                yield from self._run_stage(event)
            elif event.kind == "recv" and event.transfer is not None:
                self._receive(evaluation_forward, event.transfer)
            elif event.kind == "send" and event.transfer is not None:
                self._send(evaluation_forward, event.transfer, event.time)
            else:
                del self._forwards[event.number]
        self._wait_for_sends(None)

    def _transfers_of(self, number: int) -> Sequence[StageTransfer]:
        return self._forwards[number].transfers if number in self._forwards else ()

    def _has_forward(self, number: int) -> bool:
        """Begins the forward `number`; returns False where there are not so many."""
        while number >= self._num_begun and not self._is_exhausted:
            microbatch = next(self._microbatches, None)
            if microbatch is None:
                self._is_exhausted = True
            else:
                self._forwards[self._num_begun] = self._make_forward(microbatch)
                self._num_begun += 1
        return number < self._num_begun

    def _make_forward(self, microbatch: EvalMicrobatch) -> _PipelinedForward:
        inputs = self._state.loss.model_inputs(microbatch.batch)
        forward_graph = self._forward_graphs.get(
            inputs,
            self._compute_dtype,
            training=False,
            sequence_sharded=self._sharding.sequence_sharding is not None,
        )
        stages = forward_graph.boundaries.stages(self._sharding.split_points)
        local_calls = (self._sharding.block_calls_by_pp_rank[rank] for rank in self._stage_ranks)
        for stage, calls in zip(stages, local_calls, strict=True):
            missing = set(map(block_of, stage.block_calls)).difference(map(block_of, calls))
            if missing:
                text = (
                    f"in an evaluation the forward calls '{min(missing)}' in the stage that begins with "
                    f"'{stage.block_calls[0]}'"
                )
                fix = (
                    "call each block in the same place as in training, or choose split points so that both "
                    "places are in one stage"
                )
                raise PlanError(
                    f"{text}, and the rank of that stage does not hold its weights", fix=fix, location="model"
                )
        # slices are known for sequences of the plan's length
        value_shapes = StageValueShards(
            self._view, (*self._planned_values, *(value for stage in stages for value in stage.outputs))
        )
        return _PipelinedForward(
            microbatch,
            inputs,
            forward_graph,
            stages,
            list(stage_transfers(stages, self._stage_ranks)),
            value_shapes,
        )

    def _receive(self, evaluation_forward: _PipelinedForward, transfer: StageTransfer) -> None:
        tensor = torch.empty(
            self._shape(evaluation_forward, transfer),
            dtype=getattr(torch, transfer.value.dtype),
            device=self._state.world.device,
        )
        evaluation_forward.values[transfer.value.name] = tensor
        group, peer = p2p_group(
            self._state.world, ("pp",), self._stage_ranks[transfer.source], is_sender=False
        )
        evaluation_forward.recvs[transfer] = group.recv(
            tensor, source=peer, action=self._ledger_name(transfer)
        )

    def _run_stage(self, run: EvalEvent) -> Iterator[tuple[EvalMicrobatch, Any]]:
        evaluation_forward = self._forwards[run.number]
        self._wait_for_sends(run.time - self._order.max_stages_per_rank)
        for transfer in self._order.transfers_into(run.stage, run.number):
            evaluation_forward.recvs[transfer].wait()
        local_stage, module = evaluation_forward.stages[run.stage], self._state.trained_module.module
        inputs = {value.name: evaluation_forward.values[value.name] for value in local_stage.inputs}
        device, options = (
            self._state.world.device,
            {
                "before_block": lambda block_call: None,
                "glue_shape": evaluation_forward.value_shapes.glue_shape,
            },
        )
        self._state.evaluated_batch = evaluation_forward.microbatch.batch
        with self._state.sequence_runner.forward_context(evaluation_forward.microbatch.batch):
            call = partial(module, **evaluation_forward.inputs)
            stage_run = run_stage(
                call,
                self._state.driver,
                evaluation_forward.forward_graph,
                local_stage,
                evaluation_forward.num_samples,
                inputs,
                device,
                sharded_forward=self._state.sequence_runner.sharded_forward(),
                **options,
            )
        evaluation_forward.values |= stage_run.sent_values
        if local_stage.is_last:
            yield evaluation_forward.microbatch, stage_run.outputs

    def _send(self, evaluation_forward: _PipelinedForward, transfer: StageTransfer, due_time: int) -> None:
        tensor, shape = (
            evaluation_forward.values[transfer.value.name].contiguous(),
            self._shape(evaluation_forward, transfer),
        )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != shape or dtype != transfer.value.dtype:
            planned_shape = f"{transfer.value.dtype} {list(shape)}, and is {dtype} {list(tensor.shape)}"
            text = (
                f"in an evaluation the value '{transfer.value}' is sent between stages, which the trial "
                f"showed as {planned_shape}"
            )
            raise PlanError(
                text,
                fix="let the forward return the same shapes and dtypes as in the trial",
                location="model",
            )
        group, peer = p2p_group(
            self._state.world, ("pp",), self._stage_ranks[transfer.target], is_sender=True
        )
        work = group.send(tensor, target=peer, action=self._ledger_name(transfer))
        self._sends.append((due_time, work, tensor))

    def _wait_for_sends(self, now: int | None) -> None:
        overdue = [
            max_stages_per_rank
            for max_stages_per_rank in self._sends
            if now is None or max_stages_per_rank[0] < now
        ]
        for _, work, _ in overdue:
            work.wait()
        if overdue:
            self._sends = [
                max_stages_per_rank
                for max_stages_per_rank in self._sends
                if now is not None and max_stages_per_rank[0] >= now
            ]

    def _shape(self, evaluation_forward: _PipelinedForward, transfer: StageTransfer) -> tuple[int, ...]:
        return evaluation_forward.value_shapes.local_shape(transfer.value, evaluation_forward.num_samples)

    def _ledger_name(self, transfer: StageTransfer) -> str:
        return f"{self._action}({transfer.subject(backward=False)})"
