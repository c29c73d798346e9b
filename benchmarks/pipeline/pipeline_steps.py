"""Steps of a Llama cut into parts on several ranks: by hand, by torch.distributed.pipelining, and ours; and
what each holds.

    rank 0   [ embed  layers 0-3 ]  --- x --->  rank 1   [ layers 4-7  norm  head ]
                                   <--- dx ---

*by hand* is the plain per-stage loop: a module of the stage's own layers, isend and irecv, `backward` from
what came, in the order of the schedule; nothing else. torch's schedules run the same module. All sides train
the same parameters on the same samples, with the optimizer of `llama_steps`, clip to norm 1 over all ranks, and
tell the mean loss on every rank.
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
from meshwright.engine.optim.optimizers import make_param_groups
from meshwright.engine.runtime.step_profiler import ProfilerSpan, StepProfiler
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.pipeline.schedules.schedule import Schedule, StageCosts
from meshwright.plan.job.data_source import DataConfig, ModelConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.training.engine import Trainer

Step = Callable[[], object]
THEIRS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
CHUNKS = {"interleaved": 2}


class Stage(nn.Module):
    """A run of the blocks of a Llama, whose hidden states go in and come out; ids go into the first, logits
    out of the last.
    """

    def __init__(self, model: Any, first: int, end: int, *, begins: bool, ends: bool) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens if begins else None
        self.layers = nn.ModuleDict({str(number): model.model.layers[number] for number in range(first, end)})
        self.rotary = model.model.rotary_emb
        self.norm, self.head = (model.model.norm, model.lm_head) if ends else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states (rows, sequence, width), or logits."""
        if self.embed is not None:
            x = self.embed(x)
        tables = self.rotary(x, torch.arange(x.shape[1]).unsqueeze(0))
        for layer in self.layers.values():
            x = layer(x, attention_mask=None, position_embeddings=tables)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters; their ends are the names that they have in the model."""
        return self.named_parameters()


def stages(workload: str, rank: int, size: int, chunks: int) -> list[Stage]:
    """The stages of one rank: as many layers in each of all, as nearly as may be, where our own cuts lie."""
    spec, count = WORKLOADS[workload], size * chunks
    model, starts = spec.model(), [spec.layers * part // count for part in range(count)] + [spec.layers]
    spans = list(pairwise(starts))
    mine = range(rank, count, size)
    return [Stage(model, *spans[part], begins=part == 0, ends=part == count - 1) for part in mine]


def cuts(workload: str, size: int, chunks: int) -> tuple[str, ...]:
    """The blocks with which those stages begin, but for the first."""
    spec, count = WORKLOADS[workload], size * chunks
    return tuple(f"model.layers.{spec.layers * part // count}" for part in range(1, count))


class Update:
    """What stands round a schedule: the optimizer, the clip by the norm of all ranks, and the loss that all
    are told.
    """

    def __init__(self, mine: Sequence[Stage]) -> None:
        named = {
            f"{number}.{name}": each for number, stage in enumerate(mine) for name, each in stage.named()
        }
        groups = make_param_groups(OPTIMIZER, named)
        self._parameters = list(named.values())
        self._optimizer = torch.optim.AdamW(
            groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True
        )

    def begin(self) -> None:
        """Gradients are gone."""
        self._optimizer.zero_grad(set_to_none=True)

    def end(self, losses: Sequence[torch.Tensor], micros: int) -> float:
        """Clip, step, and the mean loss; `losses` of the microbatches, on the last rank."""
        norms = torch._foreach_norm([each.grad for each in self._parameters if each.grad is not None])
        told = torch.stack([torch.stack(norms).square().sum(), sum(losses, start=torch.zeros(()))]).detach()
        dist.all_reduce(told)
        factor = (1.0 / (told[0].sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([each.grad for each in self._parameters if each.grad is not None], factor)
        self._optimizer.step()
        return told[1].item() / micros


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens of a microbatch."""
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), labels.reshape(-1))


def theirs(rank: int, size: int, workload: str, store: str, schedule: str, micros: int) -> Step:
    """The step of torch.distributed.pipelining."""
    join(rank, size, store)
    torch.set_num_threads(1)
    chunks, batches = CHUNKS.get(schedule, 1), Batches(WORKLOADS[workload])
    mine = stages(workload, rank, size, chunks)
    made: Any = [
        PipelineStage(stage, rank + size * number, size * chunks, torch.device("cpu"))
        for number, stage in enumerate(mine)
    ]
    play: Any = THEIRS[schedule](made if chunks > 1 else made[0], micros, loss_of)
    update = Update(mine)

    def step() -> float:
        batch, losses = batches.next(), list[torch.Tensor]()
        update.begin()
        given = (batch["input_ids"],) if rank == 0 else ()
        target = {"target": batch["labels"], "losses": losses} if rank == size - 1 else {}
        play.step(*given, **target, return_outputs=False)
        return update.end(losses, micros)

    return step


def by_hand(rank: int, size: int, workload: str, store: str, schedule: str, micros: int) -> Step:
    """The step of a plain loop over the slots of the schedule."""
    join(rank, size, store)
    torch.set_num_threads(1)
    chunks, batches = CHUNKS.get(schedule, 1), Batches(WORKLOADS[workload])
    mine = stages(workload, rank, size, chunks)
    order = SCHEDULES[schedule].build(size, micros, chunks, StageCosts.uniform(size * chunks))
    update, spec = Update(mine), WORKLOADS[workload]
    shape = (spec.batch // micros, spec.sequence, spec.hidden)

    def step() -> float:
        batch = batches.next()
        update.begin()
        losses = _looped(
            rank, order, mine, batch["input_ids"].chunk(micros), batch["labels"].chunk(micros), shape
        )
        return update.end(losses, micros)

    return step


def _looped(
    rank: int,
    order: Schedule,
    mine: Sequence[Stage],
    ids: Sequence[torch.Tensor],
    labels: Sequence[torch.Tensor],
    shape: tuple[int, ...],
) -> list[torch.Tensor]:
    """Play this rank's slots; the losses of the microbatches, where this rank takes them."""
    size, last, micros = order.num_ranks, order.num_stages - 1, len(ids)
    under_way: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    sent, losses = [], []
    for kind, part, micro in order.actions[rank]:
        if kind == "F":
            x = ids[micro] if part == 0 else torch.empty(shape)
            if part:
                dist.recv(x, (part - 1) % size, tag=2 * part)
                x.requires_grad_()
            y = mine[part // size](x)
            if part == last:
                y = loss_of(y, labels[micro]) / micros
                losses.append(y.detach() * micros)
            else:
                sent.append(dist.isend(y.detach(), (part + 1) % size, tag=2 * part + 2))
            under_way[part, micro] = x, y
        else:
            x, y = under_way.pop((part, micro))
            if part == last:
                y.backward()
            else:
                gradient = torch.empty(shape)
                dist.recv(gradient, (part + 1) % size, tag=2 * part + 3)
                y.backward(gradient)
            if part and x.grad is not None:
                sent.append(dist.isend(x.grad, (part - 1) % size, tag=2 * part + 1))
    for each in sent:
        each.wait()
    return losses


def ours(rank: int, size: int, workload: str, store: str, schedule: str, micros: int) -> Step:
    """The step of the engine on the same model, cut at the same places where its parts are as many."""
    engine, batches = _engine(rank, size, workload, store, schedule, micros)

    def step() -> float:
        return engine.step(engine.local_batch(batches.next())).loss

    return step


def timed(rank: int, size: int, workload: str, store: str, schedule: str, micros: int) -> Step:
    """Our step, whose note are seconds: the means of F and B of each part by number, and the rest that stands
    round them.
    """
    engine, batches = _engine(rank, size, workload, store, schedule, micros)
    player, anatomy = engine.executor, engine.plan.model_spec
    if anatomy.stage_boundaries is None:
        raise ValueError("nothing is known of the borders between blocks: read the model with them")
    part_of = {
        visit: n
        for n, part in enumerate(anatomy.stage_boundaries.stages(engine.plan.sharding.split_points))
        for visit in part.block_calls
    }

    def step() -> dict[str, object]:
        watch = StepProfiler(torch.device("cpu"))
        player.step(engine.local_batch(batches.next()), profiler=watch)
        return _sorted_out(watch.spans(), part_of)

    return step


def pinged(rank: int, size: int, workload: str, store: str, micros: int) -> Step:
    """The seconds that hidden states of a microbatch take from one rank to the next: half of a way there and
    back.
    """
    join(rank, size, store)
    torch.set_num_threads(1)
    spec, group = (
        WORKLOADS[workload],
        TorchWorld(Mesh(pp=size), rank, "cpu", shared_memory=False).group(("pp",)),
    )
    tensor, peer = torch.zeros(spec.batch // micros, spec.sequence, spec.hidden), 1 - rank

    def step() -> float:
        begin = time.perf_counter()
        for sends in (rank == 0, rank == 1):
            (group.send(tensor, target=peer) if sends else group.recv(tensor, source=peer)).wait()
        return (time.perf_counter() - begin) / 2

    return step


def _engine(
    rank: int, size: int, workload: str, store: str, schedule: str, micros: int
) -> tuple[Trainer, Batches]:
    join(rank, size, store)
    torch.set_num_threads(1)
    spec, mesh = WORKLOADS[workload], Mesh(pp=size)
    chunks = CHUNKS.get(schedule, SCHEDULES[schedule].num_virtual_stages)
    reading = analyze(
        spec.model, Batches(spec).next()
    )  # an `nn.Module` that is handed over stays in memory beside its parts
    data = DataConfig("stdlib", sequence=spec.sequence)
    job = Job(ModelConfig("llama"), data, TrainConfig(batch=spec.batch), OPTIMIZER)
    pipeline = Pipeline(
        schedule=schedule, virtual_stages=CHUNKS.get(schedule, 0), split_points=cuts(workload, size, chunks)
    )
    plan = make_plan(reading, job, mesh, (pipeline,), spec.batch // micros)
    return parallelize(reading, plan, world=TorchWorld(mesh, rank, "cpu", shared_memory=False)), Batches(spec)


def _sorted_out(spans: Sequence[ProfilerSpan], part_of: Mapping[str, int]) -> dict[str, Any]:
    """Means of F and B by part, and the sum of all that is neither, nor waiting."""
    took: dict[str, dict[int, dict[int | None, float]]] = {"F": defaultdict(dict), "B": defaultdict(dict)}
    last, rest = max(part_of.values()), 0.0
    for span in spans:
        seconds, action = span.end - span.begin, span.action
        if span.stream != "compute" or span.kind in ("wait", "F") or (action is None and span.kind != "glue"):
            continue
        if span.kind == "glue":  # the model's forward, or the script of it
            inside = next(
                each.action for each in spans if each.kind == "F" and each.begin >= span.begin and each.action
            )
            took["F"][part_of[inside.subject]][inside.microbatch] = seconds
        elif action is not None and span.kind in ("B", "LOSS"):
            back = took["B"][part_of.get(action.subject, last)]
            back[action.microbatch] = back.get(action.microbatch, 0.0) + seconds
        else:
            rest += seconds
    found: dict[str, Any] = {
        kind: {part: fmean(each.values()) for part, each in parts.items()} for kind, parts in took.items()
    }
    return found | {"rest": rest}
