"""Offload of DeepSpeed's ZeRO, as its own JSON and Accelerate's YAML have it, to the CPU and to NVMe; and of
activations.

offload_optimizer cpu           offload: states, from stage 2 on gradients, stepped on the host
offload_param cpu as well       and weights
offload_optimizer nvme          disk_offload: folder = nvme_path; pipeline_read and pipeline_write each add
                                a buffer to the one that is stepped
offload_param nvme as well      and weights, in the same folder
offload_param without, or       refused: weights rest with the states that step them
on another tier
partition_activations           activation_checkpointing and partitioned_activations, with tensor parallelism
cpu_checkpointing               activation_checkpointing and activation_offload
"""

from typing import Any

from meshwright.commands.import_config.option_rules import OFF, OFF_TEXT, Translation
from meshwright.commands.import_config.parallel_layout import offloaded_kinds

ZERO = "zero_optimization."
ONLY_NVME = "only with offload to NVMe"
PARAM_PATH = "weights on NVMe rest in the folder of the optimizer states (offload_optimizer)"
CHECKPOINTING = "activation_checkpointing."
PIPELINED = ("pipeline", "pipeline_read", "pipeline_write")


def offloaded_of(
    config: Translation, stage: int, *, replicated: bool, prefix: str = ZERO
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Returns what rests in host memory, and the fields of disk_offload if optimizer states rest on NVMe.

    Refuses weights that rest elsewhere than the states that step them. `prefix` is that of the options:
    Accelerate has them flat, under names of its own.
    """
    separator = "." if prefix == ZERO else "_"
    optimizer, param = (f"{prefix}{table}{separator}" for table in ("offload_optimizer", "offload_param"))
    found = {
        table: _offload_device(config, f"{table}device", f"{prefix}{old}")
        for table, old in ((optimizer, "cpu_offload"), (param, "cpu_offload_param"))
    }
    for option, least in ((found[optimizer], 1), (found[param], 3)):
        if option and stage < least:
            config.drop(option, f"only with ZeRO stage {least} or more, as there")
    states = bool(found[optimizer]) and stage >= 1
    weights = bool(found[param]) and stage == 3
    on_disk = states and config.get(found[optimizer]) == "nvme"
    if weights and (not states or on_disk != (config.get(found[param]) == "nvme")):
        text = "weights rest where the optimizer states that step them rest"
        config.refuse(found[param], text, 'write "cpu" for both, or "nvme" for both, or leave it out')
        weights = False
    ratio = f"{prefix}offload_optimizer.ratio"
    if states and config.get(ratio, 1.0) != 1.0:
        config.refuse(ratio, config.rules[ratio].reason, config.rules[ratio].fix)
    if on_disk:
        what = {"what": ["optimizer_states", "weights"]} if weights else {}
        return (), _disk_fields(config, optimizer) | what
    for name in ("nvme_path", "buffer_count", *PIPELINED):
        config.drop(f"{optimizer}{name}", ONLY_NVME)
    return (offloaded_kinds(stage, replicated=replicated, weights=weights) if states else ()), {}


def _disk_fields(config: Translation, table: str) -> dict[str, Any]:
    """Returns the fields of disk_offload: the folder, and the buffers that are read, stepped and written."""
    folder = config.get(f"{table}nvme_path")
    if not folder:
        text = "states on NVMe have no folder"
        config.refuse(f"{table}nvme_path", text, "set disk_offload.folder to one that exists on each host")
    overlaps = [config.get(f"{table}{name}") for name in PIPELINED]
    both, read, written = (bool(each) for each in overlaps)
    is_given = any(each is not None for each in overlaps)
    buffers = {"num_buffers": 1 + (both or read) + (both or written)} if is_given else {}
    return {"folder": str(folder or "/nvme"), **buffers}


def activation_strategies(config: Translation, tp: int) -> tuple[str, ...]:
    """Returns the strategies of DeepSpeed's activation checkpointing: those that keep elsewhere what
    checkpointed blocks keep.
    """
    partition, copy = (f"{CHECKPOINTING}{name}" for name in ("partition_activations", "cpu_checkpointing"))
    partitions, copies = config.get(partition, False), config.get(copy, False)
    if partitions and tp == 1:
        config.drop(partition, "only with tensor parallelism: one rank has all of it")
    chosen = {"partitioned_activations": partitions and tp > 1, "activation_offload": copies}
    return tuple(name for name, is_chosen in chosen.items() if is_chosen)


def _offload_device(config: Translation, option: str, old: str) -> str:
    """Returns the option by which something rests on the host or on a disk; "" if none does."""
    if config.get(option, "none") not in OFF:
        return option
    config.drop(option, OFF_TEXT)
    if config.get(old, False):
        return old
    config.drop(old, OFF_TEXT)
    return ""
