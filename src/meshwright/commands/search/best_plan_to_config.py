"""The best plan of a search as a config: mesh, strategies and precision for `plan`, `verify` and `train`.

The cost model and the config agree: parameters and gradients in 16 bits, float32 masters and optimizer
states; gathered inputs of tensor-parallel matrices not saved; every layer recomputed but the last block.
`unwritten_notes` says what a config cannot.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from meshwright.plan.job.job import Job
from meshwright.planner.analytic.parallel_config import OffloadMode, ParallelConfig
from meshwright.planner.search.search import Candidate

MAX_WARMUP_STEPS = 2000
STATES, GRADIENTS = "optimizer_states", "gradients"
OFFLOAD_FIELDS: dict[OffloadMode, dict[str, Any]] = {
    "device_step": {"what": [STATES], "step_on": "device"},
    "host_step": {"what": [STATES], "step_on": "host"},
    "gradients": {"what": [STATES, GRADIENTS], "step_on": "host"},
    "everything": {"what": [STATES, GRADIENTS, "weights"], "step_on": "host"},
}
# nobody but the user knows his disks; a run without this folder is refused before its first step
ASSUMED_DISK_FOLDER = "/nvme/scratch"


def config_tables(
    model: str, batch: int, sequence: int, steps: int, best: Candidate, layers: Sequence[str]
) -> dict[str, Any]:
    """Returns the tables of a config for `steps` steps.

    `layers` names the model's blocks, for unequal stages. The data have no source yet.
    """
    dtype, job = best.config.dtype, Job()
    roles = {"parameters": dtype, "compute": dtype, "reduce": dtype, "master": "float32", "gradients": dtype}
    train = {"steps": steps, "batch": batch, "clip": job.train.clip, "seed": job.train.seed}
    optimizer = {
        "name": job.optimizer.name,
        "lr": job.optimizer.lr,
        "weight_decay": job.optimizer.weight_decay,
    }
    return {
        "micro_batch": int(best.config.micro_batch),
        "model": {"source": model},
        "data": {"source": job.data.source, "sequence": sequence},
        "train": train,
        "optimizer": optimizer,
        "lr_schedule": {"name": "cosine", "warmup": min(MAX_WARMUP_STEPS, steps // 10), "floor": 0.1},
        "precision": roles,
        "mesh": mesh_sizes(best.config),
        "strategies": strategy_tables(best, layers),
    }


def mesh_sizes(config: ParallelConfig) -> dict[str, int]:
    """Returns the axes of the mesh of `config` that have several ranks."""
    return dict(_mesh(config))


def strategy_tables(best: Candidate, layers: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns the strategies of `best`, as tables of a config."""
    return list(_strategies(best, layers))


def unwritten_notes(best: Candidate, layers: Sequence[str]) -> Iterator[str]:
    """Yields what the config of `best` does not express."""
    if best.config.tp_across_hosts:
        yield (
            "A mesh puts the ranks of tp next to each other; here data-parallel ranks share a "
            "host: start the ranks in that order."
        )
    if best.config.offload == "disk":
        yield f"disk_offload has the folder {ASSUMED_DISK_FOLDER}: name one on a fast disk of each host."
    if best.config.is_lossy:
        yield (
            "Lossy: gradients are summed as codes, and what they lose arrives in later steps. "
            "`meshwright verify CONFIG --curve` compares how it learns with the exact plan."
        )
    if best.layer_assignment:
        kinds = list(dict.fromkeys(kind for kind, _ in best.layer_assignment))
        yield f"Ranks use devices in their order: start them on the {', then on the '.join(kinds)}."
        if not layers:
            counts = ", ".join(str(count) for _, count in best.layer_assignment)
            yield f"The split points of the layers ({counts}) are not written: their names are not known."


def _mesh(config: ParallelConfig) -> Iterator[tuple[str, int]]:
    outer, inner = _data_parallel_sizes(config)
    sizes = (
        ("pp", config.pp),
        ("dp_replicate", outer),
        ("dp_shard", inner),
        ("ep", config.ep_dp),
        ("cp", config.cp),
        ("tp", config.tp),
    )
    for axis, size in sizes:
        if size > 1:
            yield axis, size


def _data_parallel_sizes(config: ParallelConfig) -> tuple[int, int]:
    if not config.zero_stage:
        return config.dp, 1
    group = config.zero_group_size or config.dp
    return config.dp // group, group // config.ep_dp


def _strategies(best: Candidate, layers: Sequence[str]) -> Iterator[dict[str, Any]]:
    config = best.config
    if config.pp > 1:
        yield {"name": "pipeline", "schedule": best.schedule, **_split_fields(best, layers)}
    if config.tp > 1:
        yield {"name": "tensor_parallel"}
        yield from [{"name": "sequence_parallel", "regather": True}] if config.sequence_parallel else []
        yield {"name": "vocab_parallel"}
    if config.cp > 1:
        yield _attention(config)
    if config.recompute != "none":
        yield {"name": "activation_checkpointing"}
    if config.expert_tp > 1:
        yield {"name": "expert_tensor_parallel"}
    over = expert_axes(config)
    if over:
        yield {"name": "expert_parallel", **({} if over == ["ep"] else {"over": over})}
    yield from [{"name": "batch_split", "axis": "ep"}] if config.ep_dp > 1 else []
    outer, inner = _data_parallel_sizes(config)
    yield from [{"name": "batch_split", "axis": "dp_replicate"}] if outer > 1 else []
    is_sharded = inner > 1 or config.ep_dp > 1 or (config.zero_stage and config.data_parallel_size == 1)
    yield from [{"name": "batch_split", "axis": "dp_shard"}] if is_sharded else []
    if config.data_parallel_size > 1 or config.zero_stage:
        yield _storage_strategy(config, outer, inner)
    if config.activation_offload:
        yield {"name": "activation_offload"}
    if config.offload == "disk":
        yield {"name": "disk_offload", "folder": ASSUMED_DISK_FOLDER}
    elif config.offload != "none":
        yield {"name": "offload", **OFFLOAD_FIELDS[config.offload]}
    if config.compress:
        yield {"name": "compress", "mode": config.compress}


def expert_axes(config: ParallelConfig) -> list[str]:
    """Returns the axes over which experts are distributed."""
    ranks = {"ep": config.ep_dp, "cp": config.ep_dispatch // config.ep_dp, "tp": config.ep_tp}
    return [axis for axis, size in ranks.items() if size > 1]


def _split_fields(best: Candidate, layers: Sequence[str]) -> dict[str, Any]:
    if best.layer_assignment and layers:
        begins = list(accumulate(count for _, count in best.layer_assignment))[:-1]
        return {"split_points": [layers[begin] for begin in begins]}
    return {"virtual_stages": best.config.virtual_stages} if best.schedule == "interleaved" else {}


def _attention(config: ParallelConfig) -> dict[str, Any]:
    if config.ulysses_degree == 1:
        return {"name": "ring"}
    return (
        {"name": "ulysses"}
        if config.ulysses_degree == config.cp
        else {"name": "hybrid_context_parallel", "ulysses_degree": config.ulysses_degree}
    )


def _storage_strategy(config: ParallelConfig, outer: int, inner: int) -> dict[str, Any]:
    if not config.zero_stage:
        return {"name": "ddp", "axis": "dp_replicate" if outer > 1 else "cp"}
    replicate_axis = {"replicate_axis": "dp_replicate"} if outer > 1 else {}
    return {
        "name": "zero",
        "axis": "cp" if config.cp > 1 and inner * config.ep_dp == 1 else "dp_shard",
        "stage": config.zero_stage,
        **replicate_axis,
    }
