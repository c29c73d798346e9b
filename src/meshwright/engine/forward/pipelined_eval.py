"""Forwards through the parts of a model outside of steps, one close behind the other: how an evaluation goes through a pipeline.

With v parts on each rank, the turn of part p of forward k is at v k + p; what has the same turn goes in the order of the parts:

    one part each    rank 0   0  1  2  3  4            two each, in a V    rank 0   0  .  1  0' 2  1' 3  2'
                     rank 1      0  1  2  3  4                             rank 1      0  0' 1  1' 2  2' 3  3'
                     rank 2         0  1  2  3  4

So all ranks are busy once the first forward has come through, and nobody ever waits for what has a later turn: no order of
sends and receives can lock. A rank posts its receives one turn ahead, each sender's in the order in which that sends; and it goes
on only when what it has sent was taken that was due a round before. What is under way is as little as that.

The values are those of the course of an evaluation, which may differ from those of training: dropout is off. The parts begin with
the same blocks. Where a part lies on two ranks, the one that has fewer of them runs it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch

from meshwright.comm.collectives.group import Work
from meshwright.engine.forward.sequence_sharding import FullSequenceRunner
from meshwright.engine.runtime.comm_groups import p2p_group
from meshwright.engine.runtime.loss import Batch
from meshwright.engine.runtime.state import RankState
from meshwright.model.blocks.driver import ForwardDriver
from meshwright.model.pipeline.forward_graph import ForwardGraph
from meshwright.model.pipeline.stage_forward import run_stage
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.model_spec.stage_boundaries import StageSpec, StageTransfer, stage_transfers
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.stage_values import StageValueShards

RECV_PREFETCH = 1  # turns for which receives are posted before they come


@dataclass(frozen=True)
class EvalMicrobatch:
    """One micro-batch that is evaluated; one that is not `real` stands in and weighs nothing."""

    batch: Batch
    has_samples: bool


@dataclass
class _PipelinedForward:
    """One that is under way: what goes in, its parts and the hops between them, values as they came, and what is to come."""

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
        """How many it has."""
        return len(next(iter(self.inputs.values())))


def stage_ranks(space: ShardingPlan) -> tuple[int, ...]:
    """For every part of the model the index along pp of the rank that runs it outside of steps."""
    found = list[int]()
    for part in space.stages:
        able = [
            index for index, stage in enumerate(space.block_calls_by_pp_rank) if part.block_calls[0] in stage
        ]
        found.append(min(able, key=lambda index: (found.count(index), index)))
    return tuple(found)


def rank_schedule(
    stages: Sequence[int], max_stages_per_rank: int, has_forward: Callable[[int], bool]
) -> Iterator[tuple[int, int]]:
    """The turns of a rank with these `parts`, where no rank has more than `each`: the part, and the number of the forward.

    `begins(number)` tells whether there is one of that number.
    """
    for time in count() if stages else ():
        if time >= stages[-1] and not has_forward((time - stages[-1]) // max_stages_per_rank):
            return
        for part in stages:
            number, rest = divmod(time - part, max_stages_per_rank)
            if not rest and number >= 0 and has_forward(number):
                yield part, number


class PipelinedEvaluation:
    """The forwards of one rank's parts on one micro-batch after the other, and the values between them; sent for `action`."""

    def __init__(
        self,
        plan: Plan,
        state: RankState,
        driver: ForwardDriver,
        sequence_runner: FullSequenceRunner,
        microbatches: Iterator[EvalMicrobatch],
        action: str,
    ) -> None:
        if state.trained_module.forward_graphs is None:
            raise RuntimeError("a plan has stages, and nothing is known of the courses of its model")
        self._space, self._state, self._drive, self._action = plan.sharding, state, driver, action
        self._courses, self._compute = (
            state.trained_module.forward_graphs,
            getattr(torch, plan.job.precision.compute),
        )
        self._micros, self._dealing = microbatches, sequence_runner
        self._ranks, self._group = stage_ranks(plan.sharding), state.world.group(("pp",))
        self._planned = tuple(value for part in plan.sharding.stages for value in part.outputs)
        self._round = max(map(self._ranks.count, self._ranks))
        self._forwards: dict[int, _PipelinedForward] = {}
        self._begun, self._over = 0, False
        self._sending: list[tuple[int, Work, torch.Tensor]] = []  # with the turn at which it is due

    def outputs(self) -> Iterator[tuple[EvalMicrobatch, Any]]:
        """Each micro-batch with the model's outputs, on the rank that runs the last part; on others nothing comes."""
        arriving = {
            peer: self._sent_by(peer) for peer in range(self._group.size) if peer != self._group.index
        }
        ahead: deque[tuple[int, int]] = deque()
        for part, number in self._turns(self._group.index):
            self._expect(part, number, arriving)
            ahead.append((part, number))
            if len(ahead) > RECV_PREFETCH:
                yield from self._run(*ahead.popleft())
        while ahead:
            yield from self._run(*ahead.popleft())
        self._settle(None)

    def _turns(self, rank: int) -> Iterator[tuple[int, int]]:
        return rank_schedule(
            [part for part, owner in enumerate(self._ranks) if owner == rank], self._round, self._begin
        )

    def _begin(self, number: int) -> bool:
        """Have the forward `number` begun; False where there are not so many."""
        while number >= self._begun and not self._over:
            micro = next(self._micros, None)
            if micro is None:
                self._over = True
            else:
                self._forwards[self._begun] = self._forward(micro)
                self._begun += 1
        return number < self._begun

    def _forward(self, micro: EvalMicrobatch) -> _PipelinedForward:
        inputs = self._state.loss.model_inputs(micro.batch)
        course = self._courses.get(
            inputs, self._compute, training=False, sequence_sharded=self._space.sequence_sharding is not None
        )
        parts = course.boundaries.stages(self._space.split_points)
        for part, stage in zip(
            parts, (self._space.block_calls_by_pp_rank[rank] for rank in self._ranks), strict=True
        ):
            missing = {block_of(visit) for visit in part.block_calls}.difference(map(block_of, stage))
            if missing:
                text = f"in an evaluation the forward calls '{min(missing)}' in the part that begins with '{part.block_calls[0]}'"
                fix = "call each block in the same place as in training, or choose cuts so that both places are in one part"
                raise PlanError(
                    f"{text}, and the rank of that has not its weights", fix=fix, location="model"
                )
        # which of them go in slices is known of rows of the plan's length
        crossed = StageValueShards(
            self._space, (*self._planned, *(value for part in parts for value in part.outputs))
        )
        return _PipelinedForward(
            micro, inputs, course, parts, list(stage_transfers(parts, self._ranks)), crossed
        )

    def _sent_by(self, peer: int) -> Iterator[tuple[int, StageTransfer]]:
        """What `peer` sends to this rank, in its order."""
        for part, number in self._turns(peer):
            forward = self._forwards.get(number)  # where this rank is done with it, nothing comes any more
            for hop in forward.transfers if forward is not None else ():
                if hop.source == part and self._ranks[hop.target] == self._group.index:
                    yield number, hop

    def _expect(
        self, part: int, number: int, arriving: Mapping[int, Iterator[tuple[int, StageTransfer]]]
    ) -> None:
        """Post the receives of what a part takes, and of all that its senders send before."""
        for hop in self._into(part, number):
            while hop not in self._forwards[number].recvs:
                other, earlier = next(arriving[self._ranks[hop.source]])
                self._receive(self._forwards[other], earlier)

    def _into(self, part: int, number: int) -> list[StageTransfer]:
        """What is sent to `part`, which lies here, by other ranks."""
        found = (hop for hop in self._forwards[number].transfers if hop.target == part)
        return [hop for hop in found if self._ranks[hop.source] != self._group.index]

    def _receive(self, forward: _PipelinedForward, hop: StageTransfer) -> None:
        tensor = torch.empty(
            self._shape(forward, hop), dtype=getattr(torch, hop.value.dtype), device=self._state.world.device
        )
        forward.values[hop.value.name] = tensor
        group, peer = p2p_group(self._state.world, ("pp",), self._ranks[hop.source], is_sender=False)
        forward.recvs[hop] = group.recv(tensor, source=peer, action=self._named(hop))

    def _run(self, part: int, number: int) -> Iterator[tuple[EvalMicrobatch, Any]]:
        """Run a part when what it takes has come, and send what others take."""
        forward, now = self._forwards[number], self._round * number + part
        self._settle(now - self._round)
        for hop in self._into(part, number):
            forward.recvs[hop].wait()
        mine, module = forward.stages[part], self._state.trained_module.module
        given = {value.name: forward.values[value.name] for value in mine.inputs}
        device, how = (
            self._state.world.device,
            {"before_block": lambda visit: None, "glue_shape": forward.value_shapes.glue_shape},
        )
        with self._dealing.forward_context(forward.microbatch.batch):
            call = partial(module, **forward.inputs)
            ran = run_stage(
                call,
                self._drive,
                forward.forward_graph,
                mine,
                forward.num_samples,
                given,
                device,
                sharded_forward=self._dealing.sharded_forward(),
                **how,
            )
        forward.values |= ran.sent_values
        for hop in forward.transfers:
            target = self._ranks[hop.target]
            if hop.source == part and target != self._group.index:
                self._send(forward, hop, self._round * number + hop.target)
        if all(owner != self._group.index for owner in self._ranks[part + 1 :]):
            del self._forwards[number]
        if mine.is_last:
            yield forward.microbatch, ran.outputs

    def _send(self, forward: _PipelinedForward, hop: StageTransfer, due: int) -> None:
        tensor, shape = forward.values[hop.value.name].contiguous(), self._shape(forward, hop)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != shape or dtype != hop.value.dtype:
            said = f"{hop.value.dtype} {list(shape)}, and is {dtype} {list(tensor.shape)}"
            text = f"in an evaluation the value '{hop.value}' crosses between parts, which the trial run showed as {said}"
            raise PlanError(
                text,
                fix="let the forward give out the same shapes and dtypes as in the trial run",
                location="model",
            )
        group, peer = p2p_group(self._state.world, ("pp",), self._ranks[hop.target], is_sender=True)
        work = group.send(tensor, target=peer, action=self._named(hop))
        self._sending.append((due, work, tensor))

    def _settle(self, time: int | None) -> None:
        """Return when what was due before `time` has been taken; None: when all has."""
        late = [each for each in self._sending if time is None or each[0] < time]
        for _, work, _ in late:
            work.wait()
        if late:
            self._sending = [each for each in self._sending if time is not None and each[0] >= time]

    def _shape(self, forward: _PipelinedForward, hop: StageTransfer) -> tuple[int, ...]:
        return forward.value_shapes.local_shape(hop.value, forward.num_samples)

    def _named(self, hop: StageTransfer) -> str:
        return f"{self._action}({hop.subject(backward=False)})"
