"""Bytes that offload copies in a step, and the memory of both tiers, against the formulas of its page.

    models    Llama, GPT-2, T5, ViT and ResNet of transformers, unmodified
    plans     ddp and ZeRO 1 to 3 on 2 and 3 ranks, as threads, each with every mode that it allows
    copies    of the third step, counted where they are made, against
                  device step           12 N - 8 p + c in, 12 N - 8 p + c out
                  host step              2 N out, 2 N in
                  and gradients        2 m N out, 2 N in
                  and weights          2 m N out, 2 u N in
              N: the elements of the shards of a rank (ddp: of the model), p of them padding, for which
              Adam has no states;
              c: 4 bytes for each step counter of Adam; m: microbatches (ZeRO 1, which reduces once: 1);
              u: gatherings of each group
    memory    of each tier and category, against the plan

The weights and gradients are bfloat16, masters and states float32. Every figure is a number of bytes that is
off; all must be 0.

    python -m benchmarks.memory.offload_bytes      six minutes on two cores
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from benchmarks.harness.result import Result
from benchmarks.models.head_batches import TEXTS
from benchmarks.models.head_families import ALL_HEADS
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.sync_batch_norm import SyncBatchNorm
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.offload import Offload
from meshwright.plan.hardware.memory_tiers import MEMORY_TIERS
from meshwright.plan.job.job import Job, OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.plan.plan import Plan, RankPlan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.testing.ranks import run_on_threads

NAME, BAR = "offload_bytes", 0.0
CLAIM = (
    "offload copies the bytes of its formulas in every mode, and both memory tiers hold what the plan says, "
    "to the byte: unmodified Llama, GPT-2, T5, ViT and ResNet under ddp and ZeRO 1 to 3"
)
ARCHITECTURES = (
    *("LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"),
    *("ViTForImageClassification", "ResNetForImageClassification"),
)
MIXED = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")
# bytes of a weight or a gradient, of a master, of two states, of a step counter
HALF, MASTER, STATES, COUNTER = 2, 4, 8, 4
DEVICE, HOST, GRADIENTS, EVERYTHING = "device step", "host step", "and gradients", "and weights"
MODES: Mapping[str, Offload] = {
    DEVICE: Offload(),
    HOST: Offload(step_on="host"),
    GRADIENTS: Offload(("optimizer_states", "gradients"), "host"),
    EVERYTHING: Offload(("optimizer_states", "gradients", "weights"), "host"),
}
STORES: Mapping[str, tuple[Strategy, Sequence[str]]] = {
    "ddp": (DDP(), (DEVICE, HOST)),
    "zero 1": (ZeRO("dp_replicate", 1), (DEVICE, HOST, GRADIENTS)),
    "zero 2": (ZeRO("dp_replicate", 2), (DEVICE, HOST, GRADIENTS)),
    "zero 3": (ZeRO("dp_replicate", 3, keep_mb=0.0), (DEVICE, HOST, GRADIENTS, EVERYTHING)),
}
NUM_STEPS = 3


@cache
def analyzed_model(architecture: str) -> tuple[AnalyzedModel, dict[str, torch.Tensor]]:
    """Returns the analyzed model, and a batch."""
    head = next(each for each in ALL_HEADS if each.architecture == architecture and not each.note)
    batch = head.collate(head.build())
    return analyze(head.build, batch), batch


def plan_of(architecture: str, store: str, mode: str, num_ranks: int) -> Plan:
    """Returns the plan; batch norms take one microbatch."""
    analyzed, _ = analyzed_model(architecture)
    has_norms = "ResNet" in architecture
    norms = (SyncBatchNorm(),) if has_norms else ()
    strategies = (BatchSplit("dp_replicate"), *norms, STORES[store][0], MODES[mode])
    job = Job(
        train=TrainConfig(steps=NUM_STEPS, batch=len(TEXTS), clip=0.5),
        optimizer=OptimizerConfig("adamw", lr=0.01),
        precision=MIXED,
    )
    return make_plan(analyzed, job, Mesh(dp_replicate=num_ranks), strategies, 0 if has_norms else 1)


def expected_copies(plan: RankPlan, store: str, mode: str) -> dict[str, int]:
    """Returns the bytes that the formulas say, in and out."""
    sharded = store != "ddp"
    groups = [group for group in plan.view.all_param_groups if group.trainable]
    specs = plan.view.flat_param_specs
    if sharded:
        numel = {group.name: specs[group.name].shard_numel for group in groups}
        rank = plan.sharding.mesh.index(plan.view.coordinate, specs[groups[0].name].axes)
        shards = [shard for group in groups for shard in specs[group.name].param_shards(rank)]
        counters, num_stepped = len(shards), sum(shard.numel for shard in shards)
    else:
        numel = {group.name: sum(each.numel for each in group.params) for group in groups}
        counters, num_stepped = sum(len(group.params) for group in groups), sum(numel.values())
    total, microbatches = sum(numel.values()), 1 if store == "zero 1" else plan.num_microbatches
    if mode == DEVICE:
        nbytes = MASTER * total + STATES * num_stepped + COUNTER * counters
        return dict.fromkeys(("in", "out"), nbytes)
    if mode == HOST:
        return {"in": HALF * total, "out": HALF * total}
    fetched = HALF * total
    if mode == EVERYTHING:
        group_of = {param.name: group.name for group in groups for param in group.params}
        uses = [each.tensors[0] for each in plan.actions if each.kind == "UNSHARD"]
        fetched = HALF * sum(numel[group_of[name]] for name in uses)
    return {"in": fetched, "out": HALF * microbatches * total}


def measure_rank(world: World, architecture: str, plan: Plan, store: str, mode: str) -> dict[str, Any]:
    """Returns the bytes that are off in the third step of a rank, and what it has copied."""
    torch.set_num_threads(1)
    analyzed, batch = analyzed_model(architecture)
    batch = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}
    rank_plan = plan.for_rank(world.rank)
    with parallelize(analyzed, plan, world=world) as trainer:
        before: dict[str, int] = {}
        for _ in range(NUM_STEPS):
            before = dict(world.ledger.copied_nbytes)
            trainer.step(trainer.local_batch(batch))
        copied = {name: n - before.get(name, 0) for name, n in world.ledger.copied_nbytes.items()}
        streams = {each.name: each.stream for each in rank_plan.actions}
        measured = {
            way: sum(n for name, n in copied.items() if streams[name] == f"copy_{way}")
            for way in ("in", "out")
        }
        row: dict[str, Any] = {"copied": measured, "formula": expected_copies(rank_plan, store, mode)}
        row["off"] = sum(abs(measured[way] - row["formula"][way]) for way in measured)
        for tier in MEMORY_TIERS:
            said, held = (
                state_bytes(plan, world.rank, tier).as_dict(),
                trainer.executor.memory_by_category(tier),
            )
            said["buffers"] += said.pop("gradients")  # under ddp gradients lie in buckets
            held["buffers"] = held.pop("buckets", 0) + held.pop("gradients", 0)
            names = {*said, *held}
            row[f"{tier} off"] = sum(abs(said.get(name, 0) - held.get(name, 0)) for name in names)
        return row


def cases() -> Iterator[tuple[str, str, str, int]]:
    """Yields model, store, mode and number of ranks."""
    for architecture in ARCHITECTURES:
        for store, (_, modes) in STORES.items():
            for mode in modes:
                for num_ranks in (2, 3):
                    yield architecture, store, mode, num_ranks


def main() -> None:
    """Measures every case, and writes the result."""
    rows: list[dict[str, Any]] = []
    for architecture, store, mode, num_ranks in cases():
        plan = plan_of(architecture, store, mode, num_ranks)
        body = partial(measure_rank, architecture=architecture, plan=plan, store=store, mode=mode)
        for rank, row in enumerate(run_on_threads(body, plan.mesh)):
            case = {"model": architecture, "store": store, "mode": mode, "ranks": num_ranks}
            rows.append({**case, "rank": rank, **row})
        print(rows[-1], file=sys.stderr, flush=True)
    values = [float(row["off"] + sum(row[f"{tier} off"] for tier in MEMORY_TIERS)) for row in rows]
    detail = {"rows": rows}
    print(Result.of_count(NAME, CLAIM, values, limit=BAR, bar=len(rows), detail=detail).write(NAME))


if __name__ == "__main__":
    main()
