"""Bytes of a checkpoint that each rank reads when it resumes, against what it keeps: equal to the byte.

    weights    elements of each parameter that the rank stores: its shard, its slice, or all (DDP, ZeRO 1, 2)
    states     elements of each parameter that the rank steps, once for each of the optimizer's states
    others     numbers such as step counts, and buffers

Each in the dtype of the checkpoint. A checkpoint is saved under each plan, and loaded under each. Before it
is loaded, all ranks together verify checksums, each of a share of the files: the bytes of the checkpoint
divided by the ranks. Headers of files, and what is around the elements in a page of the file, are not
counted.

Ranks are threads, with Adam's two states; the model is a small Llama.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.data_parallel.small_llamas import TOKENS, analyzed_model, random_samples
from benchmarks.harness.result import Result
from meshwright.api import Trainer, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.tensors.lazy_mapping import LazyTensors, Region, read_region, tensor_shape
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.checkpoint.distributed_checkpoint import open_tensors
from meshwright.run.checkpoint.manifest import read_manifest
from meshwright.testing.ranks import run_on_threads

NAME = "restore_bytes"
CLAIM = "each rank reads of a checkpoint exactly the elements that it keeps, under any plan, saved under any"
SHARD = BatchSplit("dp_shard")
LAYOUTS: Mapping[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "one device": (Mesh(), ()),
    "DDP on 2": (Mesh(dp_replicate=2), (BatchSplit(), DDP())),
    **{f"ZeRO {stage} on 3": (Mesh(dp_shard=3), (SHARD, ZeRO(stage=stage))) for stage in (1, 2, 3)},
    "ZeRO 3 on 4": (Mesh(dp_shard=4), (SHARD, ZeRO())),
    "HSDP on 2 x 2": (
        Mesh(dp_replicate=2, dp_shard=2),
        (BatchSplit(), SHARD, ZeRO(replicate_axis="dp_replicate")),
    ),
    "TP on 2": (Mesh(tp=2), (TensorParallel(),)),
    "TP x ZeRO 3 on 2 x 2": (Mesh(dp_shard=2, tp=2), (SHARD, TensorParallel(), ZeRO())),
}
PRECISIONS = {"float32": PrecisionConfig(), "bfloat16": PrecisionConfig("bfloat16", "bfloat16", "bfloat16")}


def make_layout_plan(layout: str, analyzed: AnalyzedModel, precision: str) -> Plan:
    """Returns the plan of `layout`."""
    mesh, strategies = LAYOUTS[layout]
    data, train = DataConfig("example", sequence=TOKENS), TrainConfig(batch=12)
    roles, optimizer = PRECISIONS[precision], OptimizerConfig("adamw", lr=0.01)
    job = Job(ModelConfig("llama"), data, train, precision=roles, optimizer=optimizer)
    return make_plan(analyzed, job, mesh, strategies, 1)


def save_under(plan: Plan, analyzed: AnalyzedModel, folder: Path) -> Path:
    """Returns the checkpoint that the ranks of `plan` save after a step."""

    def save(world: World) -> Path:
        with parallelize(analyzed, plan, world=world) as trainer:
            trainer.step(trainer.local_batch(random_samples(12)))
            return trainer.save(folder)

    return run_on_threads(save, plan.mesh)[0]


def read_nbytes(plan: Plan, analyzed: AnalyzedModel, checkpoint: Path) -> list[tuple[int, int]]:
    """Returns the bytes that each rank reads of `checkpoint`, and those that it keeps."""

    def load(world: World) -> tuple[int, int]:
        entries = read_manifest(checkpoint).entries
        stored, read = open_tensors(checkpoint, entries), 0

        def region(name: str, region: Region = ()) -> torch.Tensor:
            nonlocal read
            part = read_region(stored, name, region)
            read += part.nbytes
            return part

        counted = LazyTensors(stored, region, region, lambda name: tensor_shape(stored, name))
        with parallelize(analyzed, plan, world=world) as trainer:
            trainer.executor.load_state_dict(counted, 1)
            return read, kept_nbytes(trainer, stored)

    return run_on_threads(load, plan.mesh)


def kept_nbytes(trainer: Trainer, checkpoint: Mapping[str, torch.Tensor]) -> int:
    """Returns the bytes of `checkpoint` that this rank keeps, by the sizes of what it has."""
    state = trainer.executor.state
    stepped, nbytes = state.flat_params.optimizer_params(), 0
    is_sharded = {each.param.name: each.is_stored_sharded for each in state.plan.view.param_shardings}
    for entry, tensor in checkpoint.items():
        kind, _, name = entry.replace("optimizer/", "optimizer.").partition("/")
        if kind == "model":
            shard = state.flat_params.param_shard(name)
            numel = state.trained_module.parameters[name].numel()
            if is_sharded[name]:
                numel = 0 if shard is None else shard.numel
        elif kind.startswith("optimizer."):
            numel = (stepped[name].numel() if tensor.ndim else 1) if name in stepped else 0
        else:
            numel = tensor.numel()
        nbytes += numel * tensor.element_size()
    return nbytes


def compare(names: Sequence[str] = tuple(LAYOUTS)) -> Iterator[dict[str, object]]:
    """Yields the bytes read by each rank, for each pair of the layouts `names` and each precision."""
    analyzed = analyzed_model("tiny")
    for precision in PRECISIONS:
        plans = {name: make_layout_plan(name, analyzed, precision) for name in names}
        with TemporaryDirectory() as folder:
            for saved, plan in plans.items():
                checkpoint = save_under(plan, analyzed, Path(folder) / saved)
                size = sum(file.nbytes for file in read_manifest(checkpoint).files.values())
                for loaded in names:
                    ranks = read_nbytes(plans[loaded], analyzed, checkpoint)
                    off = max(abs(read - kept) / kept for read, kept in ranks)
                    case = f"{precision}, saved by {saved}, loaded by {loaded}"
                    print(f"{case}: off {off:g}", file=sys.stderr)
                    yield {"case": case, "off": off, "read": [r for r, _ in ranks], "checkpoint": size}


def result(rows: Sequence[Mapping[str, object]]) -> Result:
    """Returns the result of all cases: in how many every rank reads exactly what it keeps."""
    values = [float(str(row["off"])) for row in rows]
    return Result.of_count(NAME, CLAIM, values, limit=0.0, bar=len(values), detail={"cases": list(rows)})


def main() -> None:
    """Save and load under all plans, and write the result."""
    torch.set_num_threads(1)
    found = result(list(compare()))
    print(f"{found.median:g} of {found.bar:g} cases read what they keep", file=sys.stderr)
    print(found.write(NAME))


if __name__ == "__main__":
    main()
