"""Races that are planted in the engine, to show that the checker sees them.

Each changes the code that a rank runs, while it is active: a wait that is dropped, a buffer that is used for
two things, memory that is freed too early. The same plan without the change has no race.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.data_parallel.small_llamas import TOKENS, analyzed_model
from benchmarks.races.fake_streams import DEVICE
from benchmarks.races.rank_in_streams import Play, RankInStreams, train_steps
from meshwright.api import make_plan
from meshwright.comm.backends.async_work import StreamWork
from meshwright.comm.backends.fake import CompletedWork
from meshwright.comm.collectives import redistribute
from meshwright.comm.collectives.group import Work
from meshwright.engine.forward_backward.block_redistributions import BlockCollectives
from meshwright.engine.forward_backward.stage_send_recv import StageIO
from meshwright.engine.optim.optimizer_step import OptimizerUpdate
from meshwright.engine.params.flat_param_store import FlatParamStore
from meshwright.engine.runtime.async_copies import DeviceCopies
from meshwright.engine.runtime.rank_state import Operand, RankState
from meshwright.engine.step import executor
from meshwright.engine.step.action_handlers import ActionHandlers
from meshwright.engine.step.executor import StepExecutor
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import DATA_AXES, BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

Plant = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class SmallPlan:
    """A plan for a Llama of three layers."""

    mesh: Mesh
    strategies: tuple[Strategy, ...]
    num_microbatches: int = 1
    micro_batch: int = 1

    def plan(self) -> Plan:
        """Returns the plan."""
        batch = self.num_microbatches * self.micro_batch * self.mesh.group_size(DATA_AXES)
        train = TrainConfig(batch=batch, clip=0.5)
        data, optimizer = DataConfig("example", sequence=TOKENS), OptimizerConfig("adamw", lr=0.1)
        job = Job(ModelConfig("llama"), data, train, optimizer)
        return make_plan(analyzed_model("tiny"), job, self.mesh, self.strategies, self.micro_batch)


@dataclass(frozen=True)
class PlantedRace:
    """A race: the plan in which `plant` makes it, and words that the report of one of its races has."""

    name: str
    small_plan: SmallPlan
    plant: Plant
    words: tuple[str, ...]
    play: Play = train_steps
    rank: int = 0


DDP_PLAN = SmallPlan(Mesh(dp_replicate=3), (BatchSplit(), DDP(bucket_mb=0.1)))
RING_SUM_PLAN = SmallPlan(Mesh(dp_replicate=3), (BatchSplit(), NaiveDDP(algorithm="ring")))
ZERO_PLAN = SmallPlan(Mesh(dp_shard=3), (BatchSplit("dp_shard"), ZeRO()), num_microbatches=2)
ZERO_2_PLAN = SmallPlan(Mesh(dp_shard=3), (BatchSplit("dp_shard"), ZeRO(stage=2)), num_microbatches=2)
RING_PLAN = SmallPlan(Mesh(cp=3), (RingAttention(), DDP(axis="cp")))
PIPELINE_PLAN = SmallPlan(Mesh(pp=3), (Pipeline(),), num_microbatches=4)
TENSOR_PLAN = SmallPlan(Mesh(tp=2), (TensorParallel(),))
OVERLAP_PLAN = SmallPlan(Mesh(tp=2), (TensorParallel(num_overlap_chunks=2),), micro_batch=2)
ALONE_PLAN = SmallPlan(Mesh(), ())


def drop_waits(waiting: str, awaited: str) -> Plant:
    """Lets actions of the kind `waiting` no longer wait for those of the kind `awaited`."""

    @contextmanager
    def plant() -> Iterator[None]:
        resolve = StepExecutor._resolve

        def without(actions: Any, handlers: Any) -> Any:
            return [
                (
                    action,
                    handler,
                    tuple(n for n in waits if action.kind != waiting or not n.startswith(f"{awaited}(")),
                )
                for action, handler, waits in resolve(actions, handlers)
            ]

        with patch.object(StepExecutor, "_resolve", staticmethod(without)):
            yield

    return plant


def read_loss_early() -> AbstractContextManager[object]:
    """Lets the metrics read the loss without the wait at the end of the step."""
    wait = executor.wait_for_works

    def without(names: Any, works: Any, profiler: Any) -> None:
        wait([name for name in names if not name.startswith("LOSS_SUM")], works, profiler)

    return patch.object(executor, "wait_for_works", without)


def swap_buckets() -> AbstractContextManager[object]:
    """Lets each reduction send the next bucket."""
    operand = RankState.operand

    def swapped(state: RankState, action: Any) -> Operand:
        names = list(state.buckets)
        if action.subject not in names or action.kind != "REDUCE":
            return operand(state, action)
        return Operand.in_place(state.buckets[names[names.index(action.subject) - 1]].buffer)

    return patch.object(RankState, "operand", swapped)


def share_one_buffer() -> AbstractContextManager[object]:
    """Gives all parameter groups one buffer, where two take turns."""
    buffer = FlatParamStore.buffer

    def shared(store: FlatParamStore, name: str, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return buffer(store, "shared", 2**20, dtype)[: nbytes // dtype.itemsize]

    return patch.object(FlatParamStore, "buffer", shared)


def step_during_gather() -> AbstractContextManager[object]:
    """Lets the optimizer step shards whose all-gather for the next step is under way."""
    step = OptimizerUpdate.step

    def gathers(update: OptimizerUpdate, names: Any = None) -> None:
        flat_params = list(update._store.by_param_group.values())
        works = [each.group.all_gather(each.full_tensor, each.shard) for each in flat_params]
        step(update, names)
        for work in works:
            work.wait()

    return patch.object(OptimizerUpdate, "step", gathers)


def step_on_another_stream() -> AbstractContextManager[object]:
    """Runs the optimizer on a stream that does not wait for the gradients."""
    step = OptimizerUpdate.step

    def elsewhere(update: OptimizerUpdate, names: Any = None) -> None:
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            step(update, names)

    return patch.object(OptimizerUpdate, "step", elsewhere)


def drop_shift_waits() -> AbstractContextManager[object]:
    """Lets ring attention use what it receives before it has arrived."""
    shift = BlockCollectives.shift

    def without_wait(collectives: BlockCollectives, *args: Any, **kwargs: Any) -> Work:
        shift(collectives, *args, **kwargs)
        return CompletedWork()

    return patch.object(BlockCollectives, "shift", without_wait)


def receive_into_what_is_read() -> AbstractContextManager[object]:
    """Lets ring attention receive into the keys that it computes with."""
    shift = BlockCollectives.shift

    def swapped(
        collectives: BlockCollectives, output: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Work:
        return shift(collectives, tensor, output, *args, **kwargs)

    return patch.object(BlockCollectives, "shift", swapped)


def reuse_sent_value() -> AbstractContextManager[object]:
    """Clears what a stage sends before it has been sent."""
    send = StageIO._send

    def clears(io: StageIO, action: Any, transfer: Any, tensor: torch.Tensor, *more: Any) -> None:
        send(io, action, transfer, tensor, *more)
        tensor.detach().zero_()

    return patch.object(StageIO, "_send", clears)


def receive_into_one_buffer() -> AbstractContextManager[object]:
    """Gives all microbatches one buffer to receive into."""
    empty, made = StageIO._empty, dict[str, torch.Tensor]()

    def shared(io: StageIO, stage_value: Any, microbatch: int) -> torch.Tensor:
        return made.setdefault(stage_value.name, empty(io, stage_value, microbatch)).detach()

    return patch.object(StageIO, "_empty", shared)


def drop_redistribution_waits() -> AbstractContextManager[object]:
    """Lets a layer use the sum over its ranks before it has arrived."""

    def without_wait(work: Work, overlap_fn: Callable[[], None] | None) -> None:
        if overlap_fn is not None:
            overlap_fn()

    return patch.object(redistribute, "wait_overlapped", without_wait)


def overlap_on_another_stream() -> AbstractContextManager[object]:
    """Runs what overlaps with a collective on a stream that nobody waits for."""
    wait = redistribute.wait_overlapped

    def elsewhere(work: Work, overlap_fn: Callable[[], None] | None) -> None:
        if overlap_fn is None:
            wait(work, None)
            return
        stream = torch.cuda.Stream(DEVICE)
        stream.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(stream):
            overlap_fn()
        wait(work, None)

    return patch.object(redistribute, "wait_overlapped", elsewhere)


def copy_batch_without_wait() -> AbstractContextManager[object]:
    """Lets no stream wait for the copy of the batch to the device."""
    copy = DeviceCopies.to_device

    def without_wait(copies: DeviceCopies, tensors: Any) -> Any:
        compute = torch.Stream(DEVICE)  # waits in place of the current stream
        with patch.object(torch.accelerator, "current_stream", lambda device=None: compute):
            return copy(copies, tensors)

    return patch.object(DeviceCopies, "to_device", without_wait)


def copy_into_a_freed_batch() -> AbstractContextManager[object]:
    """Frees a batch while the step still uses it, for the allocator does not know that it does."""
    step = ActionHandlers.step

    def prefetches(handlers: ActionHandlers, action: Any) -> None:
        handlers._state.step.free()
        handlers._state.copies.to_device([torch.zeros(8, dtype=torch.int64)])  # of the next batch
        step(handlers, action)

    stack = ExitStack()
    stack.enter_context(patch.object(ActionHandlers, "step", prefetches))
    stack.enter_context(drop_record_stream())
    return stack


def wait_on_the_wrong_stream() -> AbstractContextManager[object]:
    """Lets another stream than the current one wait for an all-reduce by a named algorithm."""

    def wait(work: StreamWork) -> None:
        torch.cuda.Stream(DEVICE).wait_event(work._event)

    return patch.object(StreamWork, "wait", wait)


def drop_record_stream() -> AbstractContextManager[object]:
    """Lets the allocator forget which other streams use a tensor."""
    return patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None)


def fail_once(running: RankInStreams) -> None:
    """Trains a step that fails before its gradients are clipped, and one more."""
    executor = running.executor
    entries = executor._entries
    executor._entries = [
        (action, _fail, ()) if action.kind == "CLIP" else (action, handler, waits)
        for action, handler, waits in entries
    ]
    with suppress(InterruptedError):
        running.step()
    executor._entries = entries
    running.step()


def _fail(action: object) -> None:
    raise InterruptedError


def save_on_a_stream(running: RankInStreams) -> None:
    """Copies the state to the host on a stream of its own between two steps."""
    running.step()
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        for value in running.executor.state_dict().values():
            tensor = value if isinstance(value, torch.Tensor) else value.values
            tensor.detach().to("cpu", non_blocking=True)
    wait_for_copies(stream)
    running.step()


def wait_for_copies(stream: torch.cuda.Stream) -> None:
    """Makes the current stream wait for the copies."""
    torch.cuda.current_stream(DEVICE).wait_stream(stream)


def drop_wait_for_copies() -> AbstractContextManager[object]:
    """Lets the next step begin while the state is copied."""
    return patch.object(sys.modules[__name__], "wait_for_copies", lambda stream: None)


PLANTED = (
    PlantedRace(
        "ddp: clipping reads buckets before their sums have arrived",
        DDP_PLAN,
        drop_waits("CLIP", "REDUCE"),
        ("all_reduce in REDUCE", "in CLIP()"),
    ),
    PlantedRace("ddp: two buckets are swapped", DDP_PLAN, swap_buckets, ("all_reduce in REDUCE", "in PACK")),
    PlantedRace(
        "ddp: the loss is read before its sum has arrived", DDP_PLAN, read_loss_early, ("in LOSS_SUM",)
    ),
    PlantedRace(
        "optimizer: a step on a stream that does not wait for gradients",
        DDP_PLAN,
        step_on_another_stream,
        ("in STEP()",),
    ),
    PlantedRace(
        "ring all-reduce: the wrong stream waits",
        RING_SUM_PLAN,
        wait_on_the_wrong_stream,
        ("in REDUCE", "in CLIP()"),
    ),
    PlantedRace(
        "ring all-reduce: a failed step frees what is under way, without record_stream",
        RING_SUM_PLAN,
        drop_record_stream,
        ("in REDUCE", "freed"),
        play=fail_once,
    ),
    PlantedRace(
        "zero: a block runs before its parameters are gathered",
        ZERO_PLAN,
        drop_waits("F", "UNSHARD"),
        ("all_gather in UNSHARD", "in F("),
    ),
    PlantedRace(
        "zero: an all-gather ahead fills the buffer in use",
        ZERO_PLAN,
        share_one_buffer,
        ("all_gather in UNSHARD", "in F("),
    ),
    PlantedRace(
        "zero 2: gradients are packed into a buffer that is still sent",
        ZERO_2_PLAN,
        drop_waits("PACK", "REDUCE"),
        ("reduce_scatter in REDUCE", "in PACK"),
    ),
    PlantedRace(
        "zero: shards are stepped while an all-gather reads them",
        ZERO_PLAN,
        step_during_gather,
        ("read on stream", "all_gather in STEP()", "adam"),
    ),
    PlantedRace(
        "ring attention: keys are used before they have arrived",
        RING_PLAN,
        drop_shift_waits,
        ("all_to_all in F(", "write on stream"),
    ),
    PlantedRace(
        "ring attention: keys arrive where others are read",
        RING_PLAN,
        receive_into_what_is_read,
        ("all_to_all in F(", "read on stream 0"),
    ),
    PlantedRace(
        "pipeline: a stage runs before its input has arrived",
        PIPELINE_PLAN,
        drop_waits("F", "RECV"),
        ("recv in RECV", "in F("),
        rank=1,
    ),
    PlantedRace(
        "pipeline: a value is cleared while it is sent",
        PIPELINE_PLAN,
        reuse_sent_value,
        ("send in SEND", "zero_ in SEND"),
    ),
    PlantedRace(
        "pipeline: all microbatches are received into one buffer",
        PIPELINE_PLAN,
        receive_into_one_buffer,
        ("recv in RECV", "in F("),
        rank=1,
    ),
    PlantedRace(
        "tensor parallelism: a sum is used before it has arrived",
        TENSOR_PLAN,
        drop_redistribution_waits,
        ("all_reduce in F(",),
    ),
    PlantedRace(
        "tensor parallelism: what overlaps runs on a stream that nobody waits for",
        OVERLAP_PLAN,
        overlap_on_another_stream,
        ("comm_overlap.py",),
    ),
    PlantedRace(
        "data: the batch is copied on a stream that nobody waits for",
        ALONE_PLAN,
        copy_batch_without_wait,
        ("to the device", "in F("),
    ),
    PlantedRace(
        "data: the next batch is copied into the memory of the last one, without record_stream",
        ALONE_PLAN,
        copy_into_a_freed_batch,
        ("freed", "embedding_dense_backward"),
    ),
    PlantedRace(
        "checkpoint: the next step changes parameters while they are copied to the host",
        ZERO_PLAN,
        drop_wait_for_copies,
        ("to the host", "in STEP()"),
        play=save_on_a_stream,
    ),
)
