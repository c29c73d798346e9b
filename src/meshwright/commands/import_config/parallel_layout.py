"""Writes the mesh, the strategies and the precision of an imported config, which all formats share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.commands.import_config.option_rules import Translation


@dataclass(frozen=True)
class ParallelLayout:
    """The parallelism that another tool's options ask for.

    Sizes are numbers of ranks; of the two data-parallel ones one may be -1: what is left. `zero_stage` 0 is
    DDP. `context_strategy` is the table of the strategy along cp. `offloaded`: what rests in host memory and
    is stepped there; `on_disk`: the fields of disk_offload, if optimizer states rest on disk.
    `partition_size`: the ranks among which backward gathers weights; 1: all that share them.
    `quantized_weights`: they are gathered as codes. `gradient_ranks_per_host`: the ranks of a host that sum
    gradients as codes before hosts do; 0: sums are exact.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    zero_stage: int = 0
    gather: Literal["use", "microbatch"] = "use"
    sequence_parallel: bool = False
    vocab_parallel: bool = True
    schedule: str = "1f1b"
    virtual_stages: int = 0
    offloaded: tuple[str, ...] = ()
    partition_size: int = 1
    quantized_weights: bool = False
    gradient_ranks_per_host: int = 0
    on_disk: Mapping[str, Any] = field(default_factory=dict)
    context_strategy: Mapping[str, Any] = field(default_factory=lambda: {"name": "ring"})


def write_layout(config: Translation, layout: ParallelLayout, checkpointing: dict[str, Any] | None) -> None:
    """Writes [mesh] and [[strategies]]; `checkpointing`: fields of activation_checkpointing, or None."""
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        if vars(layout)[axis] != 1:
            config.set(f"mesh.{axis}", vars(layout)[axis])
    config.document.setdefault("strategies", [])
    if layout.pp > 1:
        stages = {"virtual_stages": layout.virtual_stages} if layout.schedule == "interleaved" else {}
        config.add_strategy("pipeline", schedule=layout.schedule, **stages)
    if layout.tp > 1:
        config.add_strategy("tensor_parallel")
        if layout.sequence_parallel:
            config.add_strategy("sequence_parallel")
        if layout.vocab_parallel:
            config.add_strategy("vocab_parallel")
    if layout.cp > 1:
        config.add_strategy(**layout.context_strategy)
    if checkpointing is not None:
        config.add_strategy("activation_checkpointing", **checkpointing)
    # what rests on the host in shards is made by zero, also where one rank has all of them
    is_alone = layout.dp_replicate == layout.dp_shard == layout.cp == 1 and len(layout.offloaded) > 1
    for axis in ("dp_replicate", "dp_shard"):
        if vars(layout)[axis] != 1 or (is_alone and axis == "dp_shard"):
            config.add_strategy("batch_split", axis=axis)
    if is_alone:
        config.add_strategy("zero", stage=layout.zero_stage, axis="dp_shard")
    _add_storage_strategy(config, layout)
    if layout.partition_size > 1:
        config.add_strategy("hpz", partition_size=layout.partition_size)
    if layout.quantized_weights:
        config.add_strategy("quantized_weights")
    if layout.gradient_ranks_per_host:
        config.add_strategy("compress", mode="qgz", ranks_per_host=layout.gradient_ranks_per_host)
    if layout.offloaded:
        config.add_strategy("offload", what=list(layout.offloaded), step_on="host")
    if layout.on_disk:
        config.add_strategy("disk_offload", **layout.on_disk)


def _add_storage_strategy(config: Translation, layout: ParallelLayout) -> None:
    replicated, sharded = layout.dp_replicate != 1, layout.dp_shard != 1
    if not (replicated or sharded or layout.cp > 1):
        return
    if layout.zero_stage == 0:
        config.add_strategy("ddp", axis="dp_replicate" if replicated else "dp_shard" if sharded else "cp")
        return
    fields: dict[str, Any] = {"stage": layout.zero_stage}
    fields["axis"] = "dp_shard" if sharded else "cp" if layout.cp > 1 else "dp_replicate"
    if replicated and fields["axis"] != "dp_replicate":
        fields["replicate_axis"] = "dp_replicate"
    if layout.gather != "use":
        fields["gather"] = layout.gather
    config.add_strategy("zero", **fields)


def offloaded_kinds(stage: int, *, replicated: bool, weights: bool) -> tuple[str, ...]:
    """Returns what rests in host memory where another tool steps shards of ZeRO `stage` on the CPU, and with
    `weights` keeps their weights there too.

    The shards of gradients rest there from stage 2 on, but with replicas, which sum them on the device.
    """
    gradients = ("gradients",) if stage >= 2 and not replicated else ()
    return ("optimizer_states", *gradients, *(("weights",) if weights and stage == 3 else ()))


def write_half_precision(config: Translation, dtype: str, *, reduce: str, gradients: str = "") -> None:
    """Writes parameters and products in the 16-bit `dtype`, with float32 master weights; gradients are sent
    in `reduce`, and summed in `gradients` if given.
    """
    roles = {"parameters": dtype, "compute": dtype, "master": "float32", "reduce": reduce}
    if gradients and gradients != dtype:
        roles["gradients"] = gradients
    for role, value in roles.items():
        config.set(f"precision.{role}", value)


def write_autocast(config: Translation, dtype: str) -> None:
    """Writes float32 parameters whose products are computed in the 16-bit `dtype`."""
    config.set("precision.compute", dtype)


def decay_all_parameters(config: Translation) -> None:
    """Applies the weight decay to norms and biases too, as tools do that build one parameter group."""
    decay = config.document.get("optimizer", {}).get("weight_decay", 0)
    if decay:
        config.set("optimizer.groups", [{"pattern": "*", "weight_decay": decay}])
