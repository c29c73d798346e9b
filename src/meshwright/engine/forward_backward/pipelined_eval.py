"""Forwards through pipeline stages outside of steps, one close behind the other.

The pipeline of an evaluation. With v stages on each rank, stage p of forward k runs at time v k + p; at equal
times stages run in order:

    one stage each    rank 0   0  1  2  3  4          two each, in a V    rank 0   0  .  1  0' 2  1' 3  2'
                      rank 1      0  1  2  3  4                           rank 1      0  0' 1  1' 2  2' 3  3'
                      rank 2         0  1  2  3  4

So all ranks are busy once the first forward has passed through, and no rank waits for anything with a later
time: no order of sends and receives can deadlock. A rank posts its receives one time step ahead, each
sender's in the order in which it sends, and goes on only when the sends that were due a round before have
completed. This bounds what is in flight.

The values are those of the recorded forward of an evaluation, which may differ from training: dropout is off.
The stages begin with the same blocks. Where a stage lies on two ranks, the one with fewer stages runs it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch

from meshwright.comm.collectives.group import Work
from meshwright.engine.runtime.comm_groups import p2p_group
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.loss.loss_definition import Batch
from meshwright.model.pipeline.forward_graph import ForwardGraph
from meshwright.model.pipeline.stage_forward import run_stage
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.model_spec.stage_transfers import StageSpec, StageTransfer, stage_transfers
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.stage_value_shards import StageValueShards

RECV_PREFETCH = 1  # time steps by which receives are posted ahead


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


def stage_ranks(sharding: ShardingPlan) -> tuple[int, ...]:
    """Returns for every stage the pp rank that runs it outside of steps."""
    ranks = list[int]()
    for stage in sharding.stages:
        candidates = [
            index
            for index, block_calls in enumerate(sharding.block_calls_by_pp_rank)
            if stage.block_calls[0] in block_calls
        ]
        ranks.append(min(candidates, key=lambda index: (ranks.count(index), index)))
    return tuple(ranks)


def rank_schedule(
    stages: Sequence[int], max_stages_per_rank: int, has_forward: Callable[[int], bool]
) -> Iterator[tuple[int, int]]:
    """Yields (stage, number of the forward) in the order of a rank with these `stages`.

    No rank has more than `max_stages_per_rank` stages. `has_forward(number)` tells whether there is a forward
    of that number.
    """
    for now in count() if stages else ():
        if now >= stages[-1] and not has_forward((now - stages[-1]) // max_stages_per_rank):
            return
        for stage in stages:
            number, rest = divmod(now - stage, max_stages_per_rank)
            if not rest and number >= 0 and has_forward(number):
                yield stage, number


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
        self._max_stages_per_rank = max(map(self._stage_ranks.count, self._stage_ranks))
        self._forwards: dict[int, _PipelinedForward] = {}
        self._num_begun, self._is_exhausted = 0, False
        self._sends: list[tuple[int, Work, torch.Tensor]] = []  # with the time at which each is due

    def outputs(self) -> Iterator[tuple[EvalMicrobatch, Any]]:
        """Yields each microbatch with the model's outputs, on the rank that runs the last stage.

        Nothing on others.
        """
        incoming = {
            peer: self._transfers_from(peer) for peer in range(self._group.size) if peer != self._group.index
        }
        pending: deque[tuple[int, int]] = deque()
        for stage, number in self._rank_schedule(self._group.index):
            self._post_recvs(stage, number, incoming)
            pending.append((stage, number))
            if len(pending) > RECV_PREFETCH:
                yield from self._run_stage(*pending.popleft())
        while pending:
            yield from self._run_stage(*pending.popleft())
        self._wait_for_sends(None)

    def _rank_schedule(self, rank: int) -> Iterator[tuple[int, int]]:
        return rank_schedule(
            [stage for stage, pp_rank in enumerate(self._stage_ranks) if pp_rank == rank],
            self._max_stages_per_rank,
            self._has_forward,
        )

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

    def _transfers_from(self, peer: int) -> Iterator[tuple[int, StageTransfer]]:
        """Yields the transfers from `peer` to this rank, in the order in which it sends them."""
        for stage, number in self._rank_schedule(peer):
            evaluation_forward = self._forwards.get(number)  # None: this rank is done with it
            for transfer in evaluation_forward.transfers if evaluation_forward is not None else ():
                if transfer.source == stage and self._stage_ranks[transfer.target] == self._group.index:
                    yield number, transfer

    def _post_recvs(
        self, stage: int, number: int, incoming: Mapping[int, Iterator[tuple[int, StageTransfer]]]
    ) -> None:
        """Posts the receives of a stage, and of all that its senders send before."""
        for transfer in self._recvs_of(stage, number):
            while transfer not in self._forwards[number].recvs:
                other_number, previous = next(incoming[self._stage_ranks[transfer.source]])
                self._receive(self._forwards[other_number], previous)

    def _recvs_of(self, stage: int, number: int) -> list[StageTransfer]:
        ranks = (transfer for transfer in self._forwards[number].transfers if transfer.target == stage)
        return [transfer for transfer in ranks if self._stage_ranks[transfer.source] != self._group.index]

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

    def _run_stage(self, stage: int, number: int) -> Iterator[tuple[EvalMicrobatch, Any]]:
        evaluation_forward, now = self._forwards[number], self._max_stages_per_rank * number + stage
        self._wait_for_sends(now - self._max_stages_per_rank)
        for transfer in self._recvs_of(stage, number):
            evaluation_forward.recvs[transfer].wait()
        local_stage, module = evaluation_forward.stages[stage], self._state.trained_module.module
        inputs = {value.name: evaluation_forward.values[value.name] for value in local_stage.inputs}
        device, options = (
            self._state.world.device,
            {
                "before_block": lambda block_call: None,
                "glue_shape": evaluation_forward.value_shapes.glue_shape,
            },
        )
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
        for transfer in evaluation_forward.transfers:
            target = self._stage_ranks[transfer.target]
            if transfer.source == stage and target != self._group.index:
                self._send(evaluation_forward, transfer, self._max_stages_per_rank * number + transfer.target)
        if all(pp_rank != self._group.index for pp_rank in self._stage_ranks[stage + 1 :]):
            del self._forwards[number]
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
