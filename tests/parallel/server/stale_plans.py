"""Plans of asynchronous servers, runs with other timings, and their definition, played by one device."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

import torch
from torch import nn

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.rank_state import Metrics
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.server.arrival_record import ArrivalRecord, read_record, record_path
from meshwright.plan.plan import Plan
from meshwright.testing.ranks import run_on_threads
from tests.parallel.server.server_plans import samples_of
from tests.tiny_model import Tiny, analyzed_model, executor_of, tiny_job

Tensors = dict[str, torch.Tensor]


def stale_plan(
    workers: int = 3,
    servers: int = 1,
    micro_batch: int = 0,
    analyzed: AnalyzedModel | None = None,
    job: Mapping[str, object] | None = None,
    **options: object,
) -> Plan:
    """The plan of so many workers and servers, over 12 samples."""
    mesh, strategy = mw.Mesh(outer=workers + servers), mw.StaleServer(servers=servers, **options)
    return mw.make_plan(analyzed or analyzed_model(), tiny_job(**(job or {})), mesh, (strategy,), micro_batch)


def delays(seed: int, longest_s: float = 0.004) -> Callable[[int, int], float]:
    """Seconds that a rank sleeps before a step: another order of arrival for every seed."""
    return lambda rank, step: Random(f"{seed} {rank} {step}").random() * longest_s


def trained(
    plan: Plan,
    steps: int = 4,
    delay_s: Callable[[int, int], float] = lambda rank, step: 0.0,
    analyzed: AnalyzedModel | None = None,
) -> tuple[Tensors, list[list[Metrics]]]:
    """The parameters of all servers after so many steps, and the metrics of each rank."""

    def body(world: World) -> tuple[Tensors, list[Metrics]]:
        executor, metrics = executor_of(analyzed or analyzed_model(), plan, world), list[Metrics]()
        for step in range(steps):
            time.sleep(delay_s(world.rank, step))
            metrics.append(executor.step(samples_of(plan, world.rank, step) or None))
        found = {name: each.clone() for name, each in executor.gather_parameters().items()}
        executor.close()
        return found, metrics

    results = run_on_threads(body, plan.mesh)
    servers = plan.sharding.server_indices
    return {name: each for rank in servers for name, each in results[rank][0].items()}, [
        metrics for _, metrics in results
    ]


def records_of(plan: Plan, folder: Path) -> list[ArrivalRecord]:
    """The records that the servers of `plan` have written into `folder`."""
    return [read_record(record_path(str(folder), rank)) for rank in plan.sharding.server_indices]


def play_definition(
    plan: Plan,
    records: Sequence[ArrivalRecord],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    divides_lr: bool = False,
    **options: float | bool,
) -> Tensors:
    """The parameters after the recorded updates: each server has a list of versions of its parameters; the
    gradient of a worker is that of an ordinary backward at the versions that the records name.
    """
    model, owners = (
        Tiny(**options).double(),
        {e.param.name: e.owner_index for e in plan.sharding.param_shardings},
    )
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in initial_values(**options).items():
            named[name].copy_(value)
    trained = {name: each for name, each in named.items() if each.requires_grad}
    mine = {rank: [n for n in trained if owners[n] == rank] for rank in plan.sharding.server_indices}
    masters = {n: nn.Parameter(trained[n].detach().clone()) for n in trained}
    optimizers = {rank: make_optimizer([masters[n] for n in names]) for rank, names in mine.items()}
    versions = {rank: [{n: masters[n].detach().clone() for n in mine[rank]}] for rank in mine}
    made_with = {
        (rank, update.worker, update.step): update.version
        for rank, record in zip(mine, records, strict=True)
        for update in record.updates
    }
    left = {rank: list(record.updates) for rank, record in zip(mine, records, strict=True)}
    gradients = dict[tuple[int, int], Tensors]()
    while any(left.values()):
        rank = next(
            rank
            for rank, updates in left.items()
            if updates
            and all(made_with[j, updates[0].worker, updates[0].step] < len(versions[j]) for j in mine)
        )
        update = left[rank].pop(0)
        key = update.worker, update.step
        if key not in gradients:
            for j in mine:
                for name, value in versions[j][made_with[j, *key]].items():
                    trained[name].data.copy_(value)
            gradients[key] = worker_gradient(plan, model, trained, *key)
        for name in mine[rank]:
            masters[name].grad = gradients[key][name].clone()
        staleness, group = len(versions[rank]) - 1 - update.version, optimizers[rank].param_groups[0]
        rate = group["lr"]
        group["lr"] = rate / max(1, staleness) if divides_lr else rate
        optimizers[rank].step()
        group["lr"] = rate
        versions[rank].append({n: masters[n].detach().clone() for n in mine[rank]})
    return {name: each.detach() for name, each in masters.items()}


def worker_gradient(
    plan: Plan, model: nn.Module, named: Mapping[str, nn.Parameter], worker: int, step: int
) -> Tensors:
    """The clipped gradient of the mean loss over the tokens of one worker."""
    batch, params = samples_of(plan, worker, step), list(named.values())
    logits = model(batch["input_ids"]).flatten(0, 1)
    labels = batch["labels"].flatten()
    total = nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    loss = total / max(1, int((labels != -100).sum()))
    for parameter in params:
        parameter.grad = None
    loss.backward()
    if limit := plan.job.train.clip:
        nn.utils.clip_grad_norm_(params, limit)
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named.items()}


def initial_values(**options: float | bool) -> Tensors:
    """The values with which every plan of the tiny model begins."""
    plan = mw.make_plan(analyzed_model(**options), tiny_job(), mw.Mesh(), ())

    def body(world: World) -> Tensors:
        executor = executor_of(analyzed_model(**options), plan, world)
        found = {name: each.clone() for name, each in executor.gather_parameters().items()}
        executor.close()
        return found

    return run_on_threads(body, plan.mesh)[0]
