"""One training step of a Llama in pipeline stages: by a plain loop, by torch.distributed.pipelining, and by
our engine; with times and peak memory.

    rank 0   [ embed  layers 0-3 ]  --- x --->  rank 1   [ layers 4-7  norm  head ]
                                   <--- dx ---

The *plain loop* is a per-stage loop: a module of the stage's own layers, isend and irecv, and `backward` from
the received gradient, in the order of the schedule; nothing else. torch's schedules run the same module. All
sides train the same parameters on the same samples, with the optimizer of `llama_steps`, clip to norm 1 over
all ranks, and return the mean loss on every rank.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from benchmarks.models.llama_steps import OPTIMIZER, VOCABULARY, WORKLOADS, Batches, join
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.world import TorchWorld
from meshwright.engine.optim.make_optimizers import make_param_groups
from meshwright.engine.runtime.step_profiler import ProfilerSpan, StepProfiler
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.pipeline.schedules.schedule import Schedule, StageCosts
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.training.trainer import Trainer

Step = Callable[[], object]
TORCH_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
VIRTUAL_STAGES = {"interleaved": 2}


class Stage(nn.Module):
    """A run of consecutive layers of a Llama, from hidden states to hidden states.

    The first stage takes ids, the last one returns logits.
    """

    def __init__(self, model: Any, first: int, end: int, *, begins: bool, ends: bool) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens if begins else None
        self.layers = nn.ModuleDict({str(number): model.model.layers[number] for number in range(first, end)})
        self.rotary = model.model.rotary_emb
        self.norm, self.head = (model.model.norm, model.lm_head) if ends else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns hidden states (samples, sequence, width), or logits."""
        if self.embed is not None:
            x = self.embed(x)
        tables = self.rotary(x, torch.arange(x.shape[1]).unsqueeze(0))
        for layer in self.layers.values():
            x = layer(x, attention_mask=None, position_embeddings=tables)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters by name; a name ends with the name in the model."""
        return self.named_parameters()


def stages(workload: str, rank: int, size: int, virtual_stages: int) -> list[Stage]:
    """Returns the stages of one rank; layers are split as evenly as possible, at `split_points`."""
    spec, count = WORKLOADS[workload], size * virtual_stages
    model = spec.model()
    starts = [*(spec.layers * index // count for index in range(count)), spec.layers]
    spans = list(pairwise(starts))
    local_stages = range(rank, count, size)
    return [
        Stage(model, *spans[stage_index], begins=stage_index == 0, ends=stage_index == count - 1)
        for stage_index in local_stages
    ]


def split_points(workload: str, size: int, virtual_stages: int) -> tuple[str, ...]:
    """Returns the blocks with which the second and later stages begin."""
    spec, count = WORKLOADS[workload], size * virtual_stages
    return tuple(f"model.layers.{spec.layers * stage_index // count}" for stage_index in range(1, count))


class Update:
    """The part of a step around the schedule: optimizer, clipping by the norm over all ranks, all-reduced
    loss.
    """

    def __init__(self, local_stages: Sequence[Stage]) -> None:
        named = {
            f"{number}.{name}": each
            for number, stage in enumerate(local_stages)
            for name, each in stage.named()
        }
        groups = make_param_groups(OPTIMIZER, named)
        self._parameters = list(named.values())
        self._optimizer = torch.optim.AdamW(
            groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True
        )

    def begin(self) -> None:
        """Frees the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def end(self, losses: Sequence[torch.Tensor], num_microbatches: int) -> float:
        """Clips, steps and returns the mean loss; `losses`: those of the microbatches, on the last rank."""
        norms = torch._foreach_norm([each.grad for each in self._parameters if each.grad is not None])
        reduced = torch.stack(
            [torch.stack(norms).square().sum(), sum(losses, start=torch.zeros(()))]
        ).detach()
        dist.all_reduce(reduced)
        factor = (1.0 / (reduced[0].sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([each.grad for each in self._parameters if each.grad is not None], factor)
        self._optimizer.step()
        return reduced[1].item() / num_microbatches


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss over the tokens of a microbatch."""
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), labels.reshape(-1))


def torch_step(
    rank: int,
    size: int,
    workload: str,
    store: str,
    schedule: str,
    num_microbatches: int,
    *,
    compiled: bool = False,
) -> Step:
    """Returns the step of torch.distributed.pipelining; `compiled`: each stage by torch.compile."""
    join(rank, size, store)
    torch.set_num_threads(1)
    virtual_stages, batches = VIRTUAL_STAGES.get(schedule, 1), Batches(WORKLOADS[workload])
    local_stages = stages(workload, rank, size, virtual_stages)
    for stage in local_stages if compiled else ():
        stage.compile()
    made: Any = [
        PipelineStage(stage, rank + size * number, size * virtual_stages, torch.device("cpu"))
        for number, stage in enumerate(local_stages)
    ]
    schedule_runner: Any = TORCH_SCHEDULES[schedule](
        made if virtual_stages > 1 else made[0], num_microbatches, loss_of
    )
    update = Update(local_stages)

    def step() -> float:
        batch, losses = batches.next(), list[torch.Tensor]()
        update.begin()
        inputs = (batch["input_ids"],) if rank == 0 else ()
        target = {"target": batch["labels"], "losses": losses} if rank == size - 1 else {}
        schedule_runner.step(*inputs, **target, return_outputs=False)
        return update.end(losses, num_microbatches)

    return step


def plain_loop_step(
    rank: int, size: int, workload: str, store: str, schedule: str, num_microbatches: int
) -> Step:
    """Returns the step of a plain loop over the actions of the schedule."""
    join(rank, size, store)
    torch.set_num_threads(1)
    virtual_stages, batches = VIRTUAL_STAGES.get(schedule, 1), Batches(WORKLOADS[workload])
    local_stages = stages(workload, rank, size, virtual_stages)
    order = SCHEDULES[schedule].build(
        size, num_microbatches, virtual_stages, StageCosts.uniform(size * virtual_stages)
    )
    update, spec = Update(local_stages), WORKLOADS[workload]
    shape = (spec.batch // num_microbatches, spec.sequence, spec.hidden)

    def step() -> float:
        batch = batches.next()
        update.begin()
        losses = _run_actions(
            rank,
            order,
            local_stages,
            batch["input_ids"].chunk(num_microbatches),
            batch["labels"].chunk(num_microbatches),
            shape,
        )
        return update.end(losses, num_microbatches)

    return step


def _run_actions(
    rank: int,
    order: Schedule,
    local_stages: Sequence[Stage],
    ids: Sequence[torch.Tensor],
    labels: Sequence[torch.Tensor],
    shape: tuple[int, ...],
) -> list[torch.Tensor]:
    """Runs the actions of this rank; returns the losses of the microbatches, on the last rank."""
    size, last, num_microbatches = order.num_ranks, order.num_stages - 1, len(ids)
    in_flight: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    sent, losses = [], []
    for kind, stage_index, micro in order.actions[rank]:
        if kind == "F":
            x = ids[micro] if stage_index == 0 else torch.empty(shape)
            if stage_index:
                dist.recv(x, (stage_index - 1) % size, tag=2 * stage_index)
                x.requires_grad_()
            y = local_stages[stage_index // size](x)
            if stage_index == last:
                y = loss_of(y, labels[micro]) / num_microbatches
                losses.append(y.detach() * num_microbatches)
            else:
                sent.append(dist.isend(y.detach(), (stage_index + 1) % size, tag=2 * stage_index + 2))
            in_flight[stage_index, micro] = x, y
        else:
            x, y = in_flight.pop((stage_index, micro))
            if stage_index == last:
                y.backward()
            else:
                gradient = torch.empty(shape)
                dist.recv(gradient, (stage_index + 1) % size, tag=2 * stage_index + 3)
                y.backward(gradient)
            if stage_index and x.grad is not None:
                sent.append(dist.isend(x.grad, (stage_index - 1) % size, tag=2 * stage_index + 1))
    for each in sent:
        each.wait()
    return losses


def engine_step(
    rank: int,
    size: int,
    workload: str,
    store: str,
    schedule: str,
    num_microbatches: int,
    *,
    compiled: bool = False,
) -> Step:
    """Returns the step of our engine on the same model, with the same split points for as many stages."""
    inside = (CompiledBlocks(),) if compiled else ()
    engine, batches = _engine(rank, size, workload, store, schedule, num_microbatches, inside)

    def step() -> float:
        return engine.step(engine.local_batch(batches.next())).loss

    return step


def profiled_step(
    rank: int, size: int, workload: str, store: str, schedule: str, num_microbatches: int
) -> Step:
    """Returns our step, whose note has seconds: the mean of F and of B by stage index, and the rest of the
    step.
    """
    engine, batches = _engine(rank, size, workload, store, schedule, num_microbatches)
    executor, model_spec = engine.executor, engine.plan.model_spec
    if model_spec.stage_boundaries is None:
        raise ValueError("the analyzed model has no stage boundaries: analyze it with them")
    stage_of = {
        block_call: n
        for n, stage in enumerate(model_spec.stage_boundaries.stages(engine.plan.sharding.split_points))
        for block_call in stage.block_calls
    }

    def step() -> dict[str, object]:
        profiler = StepProfiler(torch.device("cpu"))
        executor.step(engine.local_batch(batches.next()), profiler=profiler)
        return _mean_times(profiler.spans(), stage_of)

    return step


def transfer_step(rank: int, size: int, workload: str, store: str, num_microbatches: int) -> Step:
    """Returns a step whose note has the seconds to send the hidden states of a microbatch to the next rank:
    half of a round trip.
    """
    join(rank, size, store)
    torch.set_num_threads(1)
    spec, group = (
        WORKLOADS[workload],
        TorchWorld(Mesh(pp=size), rank, "cpu", shared_memory=False).group(("pp",)),
    )
    tensor, peer = torch.zeros(spec.batch // num_microbatches, spec.sequence, spec.hidden), 1 - rank

    def step() -> float:
        begin = time.perf_counter()
        for sends in (rank == 0, rank == 1):
            (group.send(tensor, target=peer) if sends else group.recv(tensor, source=peer)).wait()
        return (time.perf_counter() - begin) / 2

    return step


def _engine(
    rank: int,
    size: int,
    workload: str,
    store: str,
    schedule: str,
    num_microbatches: int,
    inside: Sequence[Strategy] = (),
) -> tuple[Trainer, Batches]:
    join(rank, size, store)
    torch.set_num_threads(1)
    spec, mesh = WORKLOADS[workload], Mesh(pp=size)
    virtual_stages = VIRTUAL_STAGES.get(schedule, SCHEDULES[schedule].num_virtual_stages)
    # a function, because a ready `nn.Module` would stay in memory beside its stages
    analyzed = analyze(spec.model, Batches(spec).next(), loss=token_cross_entropy())
    data = DataConfig("stdlib", sequence=spec.sequence)
    job = Job(ModelConfig("llama"), data, TrainConfig(batch=spec.batch), OPTIMIZER)
    pipeline = Pipeline(
        schedule=schedule,
        virtual_stages=VIRTUAL_STAGES.get(schedule, 0),
        split_points=split_points(workload, size, virtual_stages),
    )
    plan = make_plan(analyzed, job, mesh, (pipeline, *inside), spec.batch // num_microbatches)
    return parallelize(analyzed, plan, world=TorchWorld(mesh, rank, "cpu", shared_memory=False)), Batches(
        spec
    )


def _mean_times(spans: Sequence[ProfilerSpan], stage_of: Mapping[str, int]) -> dict[str, Any]:
    """Returns the mean times of F and B by stage index, and the sum of all other times without waiting."""
    times: dict[str, dict[int, dict[int | None, float]]] = {"F": defaultdict(dict), "B": defaultdict(dict)}
    last, rest = max(stage_of.values()), 0.0
    for span in spans:
        seconds, action = span.end - span.begin, span.action
        if span.stream != "compute" or span.kind in ("wait", "F") or (action is None and span.kind != "glue"):
            continue
        if span.kind == "glue":  # the model's forward, or its recorded forward
            inside = next(
                each.action for each in spans if each.kind == "F" and each.begin >= span.begin and each.action
            )
            times["F"][stage_of[inside.subject]][inside.microbatch] = seconds
        elif action is not None and span.kind in ("B", "LOSS"):
            back = times["B"][stage_of.get(action.subject, last)]
            back[action.microbatch] = back.get(action.microbatch, 0.0) + seconds
        else:
            rest += seconds
    found: dict[str, Any] = {
        kind: {stage_index: fmean(each.values()) for stage_index, each in by_stage.items()}
        for kind, by_stage in times.items()
    }
    return found | {"rest": rest}
