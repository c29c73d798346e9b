"""Imports an Accelerate YAML config (accelerate 1.15): DDP, FSDP, DeepSpeed, and ParallelismConfig.

A DeepSpeed JSON that the file names is read with it. The training script, which the file does not contain,
holds the model, the data, the batch and the optimizer: they are listed as missing.
"""

from dataclasses import replace

from meshwright.commands.import_config.deepspeed_offload import PARAM_PATH, offloaded_of
from meshwright.commands.import_config.option_rules import (
    DISK_KEYS,
    FLOAT8,
    HOST_STEPS,
    OFF_TEXT,
    OFFLOAD_KEYS,
    Rule,
    Translation,
    dropped,
    mapped,
    refused,
)
from meshwright.commands.import_config.parallel_layout import (
    ParallelLayout,
    offloaded_kinds,
    write_autocast,
    write_half_precision,
    write_layout,
)

LAUNCH = "a setting of the launcher: `meshwright train`, torchrun or `meshwright launch` start the ranks"
FSDP, DS, PC = "fsdp_config.", "deepspeed_config.", "parallelism_config.parallelism_config_"
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # FSDP1, from 1
KEEP_GATHERED = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
MEGATRON_FIX = "import the Megatron-LM arguments of the job, or set mesh.tp, mesh.pp and the strategies"

FLOAT8_VALUE = "fp8"  # of mixed_precision

RULES: dict[str, Rule] = {
    "mixed_precision": mapped("precision.parameters", "precision.compute"),
    "fp16": mapped("precision.compute"),
    "num_processes": mapped("mesh"),
    "distributed_type": mapped("strategies"),
    f"{FSDP}fsdp_sharding_strategy": mapped("zero.stage", "zero.gather"),
    f"{FSDP}fsdp_reshard_after_forward": mapped("zero.stage", "zero.gather"),
    f"{FSDP}fsdp_activation_checkpointing": mapped("activation_checkpointing"),
    f"{FSDP}fsdp_activation_checkpointing_offload": mapped("activation_offload"),
    f"{DS}zero_stage": mapped("zero.stage"),
    f"{DS}gradient_accumulation_steps": mapped(reason="follows from train.batch and micro_batch"),
    f"{DS}gradient_clipping": mapped("train.clip"),
    f"{DS}deepspeed_config_file": mapped(reason="read with this file"),
    f"{PC}dp_replicate_size": mapped("mesh.dp_replicate"),
    f"{PC}dp_shard_size": mapped("mesh.dp_shard"),
    f"{PC}tp_size": mapped("mesh.tp"),
    f"{PC}cp_size": mapped("mesh.cp", "ring"),
    f"{PC}sp_size": mapped("mesh.cp", "ulysses"),
    f"{PC}sp_seq_length": mapped("data.sequence"),
    **dropped(
        LAUNCH,
        *("compute_environment", "machine_rank", "num_machines", "gpu_ids", "main_process_ip", "debug"),
        *(
            "main_process_port",
            "rdzv_backend",
            "same_network",
            "main_training_function",
            "enable_cpu_affinity",
        ),
        *(
            "mpirun_config",
            "command_file",
            "commands",
            "tpu_vm",
            "tpu_env",
            "tpu_name",
            "tpu_zone",
            "use_cpu",
        ),
        *("tpu_use_cluster", "tpu_use_sudo", "ipex_config", "enable_numa_affinity", "max_restarts"),
        *(f"{DS}deepspeed_multinode_launcher", f"{DS}deepspeed_hostfile", f"{DS}deepspeed_exclusion_filter"),
        *(f"{DS}deepspeed_inclusion_filter", "num_cpu_threads_per_process", "quiet"),
    ),
    **dropped(
        "weights are gathered one block ahead (zero.prefetch)",
        *(f"{FSDP}fsdp_backward_prefetch", f"{FSDP}fsdp_forward_prefetch"),
    ),
    **dropped("torch.compile is not used: speed alone", "dynamo_config", "dynamo_backend"),
    **dropped(
        "blocks are found by analysis",
        *(f"{FSDP}fsdp_auto_wrap_policy", f"{FSDP}fsdp_transformer_layer_cls_to_wrap"),
        *(f"{FSDP}fsdp_min_num_params", f"{DS}deepspeed_moe_layer_cls_names"),
    ),
    **dropped(
        "models are built without memory, and each rank makes the values it keeps",
        *(f"{FSDP}fsdp_cpu_ram_efficient_loading", f"{FSDP}fsdp_sync_module_states", f"{DS}zero3_init_flag"),
    ),
    **dropped("checkpoints are sharded, and reshard between any two plans", f"{FSDP}fsdp_state_dict_type"),
    **dropped("`meshwright export` writes whole weights", f"{DS}zero3_save_16bit_model"),
    **dropped("parameters keep their names", f"{FSDP}fsdp_use_orig_params"),
    **dropped("both versions mean the same here", f"{FSDP}fsdp_version"),
    f"{DS}offload_optimizer_nvme_path": mapped("disk_offload.folder"),
    **dropped(PARAM_PATH, f"{DS}offload_param_nvme_path"),
    **dropped(
        "keys and values travel round a ring", f"{PC}cp_comm_strategy", f"{PC}cp_backend", f"{PC}sp_backend"
    ),
    **dropped(
        "samples have data.sequence tokens", f"{PC}sp_seq_length_is_variable", f"{PC}sp_attn_implementation"
    ),
    **dict.fromkeys(
        (f"{FSDP}fsdp_offload_params", f"{DS}offload_optimizer_device", f"{DS}offload_param_device"),
        mapped(*OFFLOAD_KEYS, *DISK_KEYS, reason=HOST_STEPS),
    ),
    **refused("modules are not left out of sharding", "leave it out", f"{FSDP}fsdp_ignored_modules"),
    **refused(*FLOAT8, "fp8_config"),
    **refused("TPUs are not trained on", "train on GPUs or CPUs", "downcast_bf16"),
    **refused("Megatron-LM's options are read from its own arguments", MEGATRON_FIX, "megatron_lm_config"),
    **refused(
        "SageMaker starts other jobs than this",
        "use the config of the job inside",
        *("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name"),
        *("pytorch_version", "transformers_version", "py_version", "sagemaker_inputs_file"),
        *("sagemaker_metrics_file", "additional_args"),
    ),
}
DDP_TYPES = (
    "NO",
    "MULTI_GPU",
    "MULTI_CPU",
    "MULTI_NPU",
    "MULTI_XPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_HPU",
)


def translate(config: Translation, devices: int) -> None:
    """Fills `config` from an Accelerate YAML; `devices` overrides its number of processes, 0: as it says."""
    ranks = devices or max(0, config.get("num_processes", 0))
    layout = _layout(config, ranks)
    _write_precision(config, layout)
    checkpointing = {} if config.get(f"{FSDP}fsdp_activation_checkpointing", False) else None
    config.set("train.clip", config.get(f"{DS}gradient_clipping", 0.0))
    if not config.is_given(f"{DS}gradient_clipping"):
        config.record_default("clip_grad_norm_ in the script", "none", "train.clip")
    config.map(f"{PC}sp_seq_length", "data.sequence")
    write_layout(config, layout, checkpointing)
    offloads = f"{FSDP}fsdp_activation_checkpointing_offload"
    if config.get(offloads, False) and checkpointing is not None:
        config.add_strategy("activation_offload")
    else:
        config.drop(offloads, "only with fsdp_activation_checkpointing")
    config.missing += [
        "model.source",
        "data.source",
        "train.steps",
        "train.batch",
        "micro_batch",
        "optimizer",
        "lr_schedule",
    ]


def _layout(config: Translation, ranks: int) -> ParallelLayout:
    kind = str(config.get("distributed_type", "NO"))
    size = {
        name: max(1, config.get(f"{PC}{name}_size", 1))
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    model_ranks = size["tp"] * size["cp"] * size["sp"]
    data = max(1, ranks // model_ranks) if ranks else -1
    by_cp = {"name": "ulysses" if size["sp"] > 1 else "ring"}
    cp = size["cp"] * size["sp"]
    common = ParallelLayout(cp=cp, tp=size["tp"], vocab_parallel=False, context_strategy=by_cp)
    if kind == "FSDP" or config.is_given(f"{PC}dp_shard_size"):
        return _fsdp_layout(config, size, data, common)
    if kind == "DEEPSPEED":
        stage = int(config.get(f"{DS}zero_stage", 2))
        offloaded, on_disk = offloaded_of(config, stage, replicated=False, prefix=DS)
        if stage:
            sharded = replace(common, dp_shard=data, zero_stage=stage)
            return replace(sharded, offloaded=offloaded, on_disk=on_disk)
        return replace(common, dp_replicate=data)
    if kind not in DDP_TYPES:
        config.refuse(
            "distributed_type", f"{kind} is not there; written is DDP", "set the mesh and strategies"
        )
    return replace(common, dp_replicate=1 if kind == "NO" else data)


def _fsdp_layout(
    config: Translation, size: dict[str, int], data: int, common: ParallelLayout
) -> ParallelLayout:
    """FSDP1 has a sharding strategy; FSDP2 says whether weights are freed after forward."""
    strategy = str(config.get(f"{FSDP}fsdp_sharding_strategy", "FULL_SHARD")).upper()
    reshard = str(config.get(f"{FSDP}fsdp_reshard_after_forward", True)).upper()
    if reshard in SHARDING:  # FSDP1 configs have the strategy under this name
        strategy = reshard
    if strategy.isdecimal() and 1 <= int(strategy) <= len(SHARDING):
        strategy = SHARDING[int(strategy) - 1]
    replicate = size["dp_replicate"]
    if strategy.startswith("HYBRID") and replicate == 1:
        config.refuse(
            f"{FSDP}fsdp_sharding_strategy",
            "hybrid sharding replicates across hosts, whose size is not in this file",
            "set mesh.dp_shard to the ranks of a host, mesh.dp_replicate to the hosts, and replicate_axis",
        )
    shard = size["dp_shard"] if size["dp_shard"] > 1 else data // replicate if data > 0 else -1
    if strategy == "NO_SHARD":
        return replace(common, dp_replicate=data)
    gather = "microbatch" if reshard == "FALSE" or strategy in KEEP_GATHERED else "use"
    layout = replace(common, dp_replicate=replicate, dp_shard=shard, zero_stage=3, gather=gather)
    if not config.get(f"{FSDP}fsdp_offload_params", False):
        config.drop(f"{FSDP}fsdp_offload_params", OFF_TEXT)
        return layout
    return replace(layout, offloaded=offloaded_kinds(3, replicated=replicate != 1, weights=True))


def _write_precision(config: Translation, layout: ParallelLayout) -> None:
    name = str(config.get("mixed_precision", "fp16" if config.get("fp16", False) else "no")).lower()
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(name)
    if name == FLOAT8_VALUE:
        config.refuse("mixed_precision", *FLOAT8)
    if dtype is None:
        return
    if layout.zero_stage:
        write_half_precision(config, dtype, reduce=dtype)
    else:
        write_autocast(config, dtype)
