"""Imports a DeepSpeed JSON config (https://www.deepspeed.ai/docs/config-json, DeepSpeed 0.19).

What DeepSpeed does without being told is written too: no clipping, Adam with betas of 0.9 and 0.999, weight
decay of norms and biases.
"""

from typing import Any

from meshwright.commands.import_config.deepspeed_offload import (
    CHECKPOINTING,
    ONLY_NVME,
    PARAM_PATH,
    PIPELINED,
    ZERO,
    activation_strategies,
    offloaded_of,
)
from meshwright.commands.import_config.deepspeed_zero_plus_plus import (
    ZERO_PLUS_PLUS_RULES,
    gradient_ranks_per_host,
    partition_size,
    quantizes_weights,
)
from meshwright.commands.import_config.option_rules import (
    DISK_KEYS,
    HOST_STEPS,
    LOGGING,
    OFFLOAD_KEYS,
    Rule,
    Translation,
    dropped,
    mapped,
    refused,
)
from meshwright.commands.import_config.parallel_layout import (
    ParallelLayout,
    decay_all_parameters,
    write_autocast,
    write_half_precision,
    write_layout,
)

EVERY_BLOCK = "of every block; DeepSpeed checkpoints where the model's code calls deepspeed.checkpointing"
BUFFERS = "a buffer of DeepSpeed's implementation; results are the same"
CHECKPOINT_FORMAT = "the format of DeepSpeed's checkpoints; those here reshard between any two plans"
DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
}
DTYPES |= {"float16": "float16", "torch.bfloat16": "bfloat16", "torch.float16": "float16"}
ADAMS = ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam")
OPTIMIZERS = {**dict.fromkeys(ADAMS, "adamw"), "sgd": "sgd", "lion": "lion", "muon": "muon"}
OFFLOADS = tuple(
    f"{ZERO}{option}"
    for option in ("offload_optimizer.device", "offload_param.device", "cpu_offload", "cpu_offload_param")
)

RULES: dict[str, Rule] = {
    "train_batch_size": mapped("train.batch"),
    "train_micro_batch_size_per_gpu": mapped("micro_batch"),
    "gradient_accumulation_steps": mapped(reason="follows from train.batch and micro_batch"),
    "gradient_clipping": mapped("train.clip"),
    "seed": mapped("train.seed"),
    "optimizer.type": mapped("optimizer.name"),
    "optimizer.params.lr": mapped("optimizer.lr"),
    "optimizer.params.betas": mapped("optimizer.betas"),
    "optimizer.params.eps": mapped("optimizer.eps"),
    "optimizer.params.weight_decay": mapped("optimizer.weight_decay"),
    "optimizer.params.momentum": mapped("optimizer.momentum"),
    "scheduler.type": mapped("lr_schedule.name"),
    "scheduler.params.warmup_max_lr": mapped("optimizer.lr"),
    "scheduler.params.warmup_num_steps": mapped("lr_schedule.warmup"),
    "scheduler.params.warmup_type": mapped(reason="the warm-up is linear"),
    "scheduler.params.total_num_steps": mapped("train.steps"),
    "scheduler.params.cos_min_ratio": mapped("lr_schedule.floor"),
    "bf16.enabled": mapped("precision.parameters", "precision.compute", "precision.master"),
    "fp16.enabled": mapped("precision.parameters", "precision.compute", "precision.master"),
    "fp16.initial_scale_power": mapped("precision.loss_scale"),
    "fp16.loss_scale_window": mapped("precision.loss_scale_window"),
    "communication_data_type": mapped("precision.reduce"),
    "data_types.grad_accum_dtype": mapped("precision.gradients"),
    "torch_autocast.enabled": mapped("precision.compute"),
    "torch_autocast.dtype": mapped("precision.compute"),
    f"{ZERO}stage": mapped("mesh.dp_shard", "mesh.dp_replicate", "zero.stage"),
    f"{ZERO}mics_shard_size": mapped("mesh.dp_shard", "zero.replicate_axis"),
    **ZERO_PLUS_PLUS_RULES,
    "tensor_parallel.autotp_size": mapped("mesh.tp"),
    "sequence_parallel_size": mapped("mesh.cp", "ulysses"),
    "tensorboard.enabled": mapped("run.trackers"),
    "wandb.enabled": mapped("run.trackers"),
    "wandb.project": mapped("run.tracker_project"),
    **dropped(
        "weights are gathered block by block, one ahead of use; nearest: keep_mb and prefetch of zero",
        *(f"{ZERO}stage3_{name}" for name in ("max_live_parameters", "max_reuse_distance")),
        *(f"{ZERO}stage3_{name}" for name in ("param_persistence_threshold", "model_persistence_threshold")),
    ),
    **dropped(
        "weights are gathered one block ahead: zero.prefetch counts blocks, not elements",
        f"{ZERO}stage3_prefetch_bucket_size",
    ),
    **refused("the stages of a pipeline are those of the script", "set mesh.pp", "pipeline.stages"),
    **dropped("communication always overlaps with computation", f"{ZERO}overlap_comm"),
    **dropped("ZeRO sends each block when its backward ends", f"{ZERO}reduce_bucket_size"),
    **dropped(
        BUFFERS,
        *(f"{ZERO}{name}" for name in ("allgather_bucket_size", "allgather_partitions", "reduce_scatter")),
        *(f"{ZERO}{name}" for name in ("contiguous_gradients", "sub_group_size", "round_robin_gradients")),
        *(f"{ZERO}{name}" for name in ("use_multi_rank_bucket_allreduce", "memory_efficient_linear")),
        *(f"{ZERO}{name}" for name in ("override_module_apply", "legacy_stage1", "leaf_module")),
        *(f"{ZERO}stage3_{name}" for name in ("module_granularity_threshold", "allgather_sequential")),
        *(
            f"{ZERO}stage3_{name}"
            for name in ("use_all_reduce_for_fetch_params", "partition_stream_chunk_size")
        ),
        f"{ZERO}mics_hierarchical_params_gather",
        *("disable_allgather", "graph_harvesting", "use_node_local_storage", "compile"),
        *("bf16.immediate_grad_update", "optimizer.params.fused", "optimizer.params.torch_adam"),
        *(
            "fp16.auto_cast",
            "fp16.fused_mode",
            "optimizer.legacy_fusion",
            "seq_parallel_comm_data_type",
            "seq_parallel_communication_data_type",
        ),
        *(
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
            "pipeline.activation_checkpoint_interval",
        ),
    ),
    **dropped(
        CHECKPOINT_FORMAT,
        *("checkpoint", "nebula", "datastates_ckpt", f"{ZERO}load_from_fp32_weights"),
        *(f"{ZERO}elastic_checkpoint", f"{ZERO}pipeline_loading_checkpoint", "load_universal_checkpoint"),
    ),
    **dropped(
        "`meshwright export` writes whole weights",
        f"{ZERO}stage3_gather_16bit_weights_on_model_save",
        f"{ZERO}stage3_gather_fp16_weights_on_model_save",
        f"{ZERO}gather_16bit_weights_on_model_save",
    ),
    **dropped(
        LOGGING,
        *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler"),
        *("comms_logger", "monitor_config", "csv_monitor", "comet", "tensorboard.output_path"),
        *("tensorboard.job_name", "wandb.group", "wandb.team", f"{ZERO}log_trace_cache_warnings"),
        *(f"{ZERO}enable_sanity_checks", "autotuning", "eigenvalue", "timers"),
    ),
    **dropped("gradients are plain sums, never divided", "prescale_gradients", "gradient_predivide_factor"),
    **dropped("an unused parameter has a gradient of zero", f"{ZERO}ignore_unused_parameters"),
    **dropped("the vocabulary is that of the model", "vocabulary_size"),
    **dropped("batches are global, and an incomplete last one is not trained", "dataloader_drop_last"),
    **dropped("the scale is halved by each overflow, and is at least 1", "fp16.hysteresis"),
    **dropped("the scale is at least 1", "fp16.min_loss_scale"),
    **dropped("an overflow is never ignored", "fp16.consecutive_hysteresis", "bf16.check_grad_overflow"),
    **dropped("it belongs to NVMe offload", "aio", f"{ZERO}save_muon_momentum_buffer_in_memory"),
    **dropped(
        "modules that stay in float32 are chosen by torch's autocast",
        "torch_autocast.lower_precision_safe_modules",
    ),
    **dict.fromkeys(OFFLOADS, mapped(*OFFLOAD_KEYS, *DISK_KEYS, reason=HOST_STEPS)),
    f"{ZERO}offload_optimizer.nvme_path": mapped("disk_offload.folder"),
    **dict.fromkeys(
        (f"{ZERO}offload_optimizer.{name}" for name in PIPELINED),
        mapped("disk_offload.num_buffers", reason="one buffer is stepped, others are read and written"),
    ),
    **dropped(
        "host memory is pinned on accelerators",
        *(f"{ZERO}{table}.pin_memory" for table in ("offload_optimizer", "offload_param")),
        f"{ZERO}cpu_offload_use_pin_memory",
    ),
    **dropped(
        "a buffer of DeepSpeed holds one state of a parameter; here it holds a parameter group",
        f"{ZERO}offload_optimizer.buffer_count",
    ),
    **dropped(PARAM_PATH, f"{ZERO}offload_param.nvme_path"),
    **dropped(
        BUFFERS, *(f"{ZERO}offload_param.{name}" for name in ("buffer_count", "buffer_size", "max_in_cpu"))
    ),
    **dropped(
        ONLY_NVME,
        f"{ZERO}offload_optimizer.fast_init",
    ),
    **dropped(
        "how the host steps; here it runs PyTorch's fused AdamW, and results are the same",
        *(f"{ZERO}offload_optimizer.{name}" for name in ("super_offload", "cpuadam_cores_perc")),
        f"{ZERO}offload_optimizer.convert_grad_on_cpu",
    ),
    **refused(
        "optimizer states rest on the host all together or not at all",
        "leave it out: all of them rest there",
        f"{ZERO}offload_optimizer.ratio",
        harmless=(1.0,),
    ),
    **refused(
        "every gradient is stepped in its own step", "leave it out: offload is exact", f"{ZERO}zenflow"
    ),
    **refused("the loss scale is always dynamic", "leave it out", "fp16.loss_scale"),
    **refused("masters are float32", "leave it out", "fp16.fp16_master_weights_and_grads"),
    **refused(
        "masters are float32",
        'for bfloat16 states too: precision.master = "" and optimizer.name = "adamw_bf16"',
        *("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
    ),
    **refused("apex amp is not there", 'precision.compute = "bfloat16" is autocast', "amp"),
    **refused("Adam has no such variant here", "train without it", "optimizer.params.amsgrad"),
    **refused("Adam corrects its bias", "leave it out", "optimizer.params.bias_correction", harmless=(True,)),
    **refused(
        "weight decay is decoupled (AdamW)",
        "set optimizer.weight_decay = 0, or accept AdamW",
        "optimizer.params.adam_w_mode",
        harmless=(True,),
    ),
    **refused("momentum is not Nesterov's", "leave it out", "optimizer.params.nesterov"),
    **refused("clipping is that of train.clip", "set train.clip", "optimizer.params.max_grad_norm"),
    **refused("the warm-up begins near 0", "leave it out", "scheduler.params.warmup_min_lr"),
    **refused("the warm-up begins near 0", "leave it out", "scheduler.params.warmup_min_ratio"),
    **refused("sparse gradients are not there", "embeddings get dense gradients", "sparse_gradients"),
    **refused("sparse attention is not there", "use a model whose attention is sparse", "sparse_attention"),
    **refused("layers are not dropped", "leave it out", "progressive_layer_drop"),
    **refused("the sequence length is fixed", "set data.sequence", "curriculum_learning", "data_efficiency"),
    **refused(
        "experts have an axis of their own",
        "leave it out, and set mesh.ep",
        "use_data_before_expert_parallelism",
        "moe",
    ),
    **refused("the batch is fixed", "set train.batch", "elasticity"),
    **refused(
        "models are not pruned, distilled or quantised (`compress` is for the sums of gradients)",
        "leave it out",
        "compression_training",
        "quantize_training",
        "weight_quantization",
    ),
    **refused("RLHF's hybrid engine is not there", "train and generate apart", "hybrid_engine"),
    f"{CHECKPOINTING}partition_activations": mapped(
        "activation_checkpointing", "partitioned_activations", reason=EVERY_BLOCK
    ),
    f"{CHECKPOINTING}cpu_checkpointing": mapped(
        "activation_checkpointing", "activation_offload", reason=EVERY_BLOCK
    ),
    **dropped(
        "only where the model's code calls deepspeed.checkpointing",
        *(f"activation_checkpointing.{name}" for name in ("contiguous_memory_optimization", "profile")),
        *(f"activation_checkpointing.{name}" for name in ("number_checkpoints",)),
        "activation_checkpointing.synchronize_checkpoint_boundary",
    ),
    **refused("only AutoTP's size is read", "set mesh.tp", "tensor_parallel.tp_grain_size", harmless=(1,)),
    **dropped(
        "layers are found by analysis", "tensor_parallel.preset_model", "tensor_parallel.tensor_parallel"
    ),
}
RULES = dict(sorted(RULES.items()))


def translate(config: Translation, devices: int) -> None:
    """Fills `config` from the options of a DeepSpeed JSON; `devices` is the number of ranks, 0 if unknown."""
    write_batch(config, devices)
    config.map("gradient_clipping", "train.clip", 0.0)
    config.map("seed", "train.seed")
    _write_optimizer(config)
    _write_schedule(config)
    _write_precision(config)
    layout = layout_of(config, devices)
    elsewhere = activation_strategies(config, layout.tp)
    write_layout(config, layout, {} if elsewhere else None)
    for name in elsewhere:
        config.add_strategy(name)
    trackers = [name for name in ("tensorboard", "wandb") if config.get(f"{name}.enabled", False)]
    if trackers:
        config.set("run.trackers", trackers)
    config.map("wandb.project", "run.tracker_project")
    config.missing += ["model.source", "data.source", "data.sequence"]
    if "steps" not in config.document.get("train", {}):
        config.missing.append("train.steps")


def write_batch(config: Translation, devices: int) -> None:
    """Writes the global batch and the microbatch, of which DeepSpeed needs two of three."""
    micro = config.map("train_micro_batch_size_per_gpu", "micro_batch") or 0
    steps = config.get("gradient_accumulation_steps", 1)
    model_ranks = config.get("tensor_parallel.autotp_size", 1) * config.get("sequence_parallel_size", 1)
    num_data = max(1, devices // model_ranks)
    batch = config.map("train_batch_size", "train.batch")
    if batch is None and micro:
        config.set("train.batch", micro * steps * num_data)
        if not devices:
            text = (
                f"the global batch is {micro} x {steps} x the data-parallel ranks, whose number is not known"
            )
            config.refuse("train_batch_size", text, "give --devices N, or set train.batch")
    elif batch is None:
        config.missing.append("train.batch")
    elif not micro and config.is_given("gradient_accumulation_steps") and devices:
        config.set("micro_batch", batch // (steps * num_data))


def layout_of(config: Translation, devices: int) -> ParallelLayout:
    """Returns the parallelism: ZeRO, MiCS, AutoTP and Ulysses."""
    stage = config.get(f"{ZERO}stage", 0)
    tp, cp = config.get("tensor_parallel.autotp_size", 1) or 1, config.get("sequence_parallel_size", 1)
    data = devices // (tp * cp) if devices else -1
    mics, num_ranks = config.get(f"{ZERO}mics_shard_size", -1), data * cp if devices else 0
    offloaded, on_disk = offloaded_of(config, stage, replicated=bool(stage and mics > 0))
    sizes: dict[str, Any] = {"dp_replicate": data} if stage == 0 else {"dp_shard": data}
    if stage and mics > 0:
        sizes = {"dp_shard": mics, "dp_replicate": data // mics if devices else -1}
    return ParallelLayout(
        tp=tp,
        cp=cp,
        zero_stage=stage,
        offloaded=offloaded,
        on_disk=on_disk,
        partition_size=partition_size(config, stage, num_ranks, (*offloaded, *on_disk.get("what", ()))),
        quantized_weights=quantizes_weights(config, stage, num_ranks),
        gradient_ranks_per_host=gradient_ranks_per_host(config, stage, num_ranks, mics),
        context_strategy={"name": "ulysses"},
        vocab_parallel=False,
        **sizes,
    )


def _write_optimizer(config: Translation) -> None:
    kind = config.get("optimizer.type")
    if kind is None:
        config.missing.append("optimizer")
        return
    name = OPTIMIZERS.get(str(kind).lower())
    if name is None:
        known = "adamw, sgd, lion, adafactor or muon"
        config.refuse("optimizer.type", f"the optimizer {kind} is not there", f"set optimizer.name: {known}")
        return
    config.set("optimizer.name", name)
    config.map("optimizer.params.lr", "optimizer.lr", {"adamw": 1e-3, "lion": 1e-4}.get(name))
    if name in ("adamw", "lion"):
        betas = config.map(
            "optimizer.params.betas", "optimizer.betas", [0.9, 0.999 if name == "adamw" else 0.99]
        )
        config.set("optimizer.betas", list(betas))
    if name == "adamw":
        config.map("optimizer.params.eps", "optimizer.eps")
    if name in ("sgd", "muon"):
        config.map("optimizer.params.momentum", "optimizer.momentum", 0.95 if name == "muon" else None)
    config.map("optimizer.params.weight_decay", "optimizer.weight_decay", 0.0)
    if config.is_given("optimizer.params.weight_decay"):
        decay_all_parameters(config)


def _write_schedule(config: Translation) -> None:
    kind = config.get("scheduler.type")
    names = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind is None:
        return
    if kind not in names:
        text = f"the scheduler {kind} is not there"
        config.refuse(
            "scheduler.type", text, "set lr_schedule.name: constant, linear, cosine, wsd, polynomial"
        )
        return
    config.set("lr_schedule.name", names[kind])
    config.map("scheduler.params.warmup_num_steps", "lr_schedule.warmup", 1000)
    config.map("scheduler.params.warmup_max_lr", "optimizer.lr")
    config.map("scheduler.params.total_num_steps", "train.steps")
    if kind == "WarmupCosineLR":
        config.map("scheduler.params.cos_min_ratio", "lr_schedule.floor", 1e-4)
    if config.get("scheduler.params.warmup_type", "log") == "log":
        text = "the warm-up is logarithmic (DeepSpeed's default), and linear here"
        config.refuse("scheduler.params.warmup_type", text, "accept it, or lengthen lr_schedule.warmup")


def _write_precision(config: Translation) -> None:
    stage = config.get(f"{ZERO}stage", 0)
    sent = DTYPES.get(str(config.get("communication_data_type")))
    sums = DTYPES.get(str(config.get("data_types.grad_accum_dtype")), "")
    if config.get("bf16.enabled", False):
        # without ZeRO, DeepSpeed sums in float32; with it, in the dtype of the parameters
        write_half_precision(config, "bfloat16", reduce=sent or "bfloat16", gradients=sums if stage else "")
        if not stage and sums != "bfloat16":
            text = "gradients of parameters that are not sharded are summed in bfloat16, not in float32"
            config.refuse("data_types.grad_accum_dtype", text, "use ZeRO stage 1, or accept it")
    elif config.get("fp16.enabled", False):
        write_half_precision(config, "float16", reduce=sent or "float16", gradients=sums if stage else "")
        config.set("precision.loss_scale", 2.0 ** config.get("fp16.initial_scale_power", 16))
        config.map("fp16.loss_scale_window", "precision.loss_scale_window", 1000)
    elif config.get("torch_autocast.enabled", False):
        write_autocast(config, DTYPES.get(str(config.get("torch_autocast.dtype")), "bfloat16"))
    elif sent:
        config.set("precision.reduce", sent)


def alias_options(values: dict[str, Any]) -> dict[str, Any]:
    """Returns `values` with the present names of keys that have older ones."""
    renamed = dict(values)
    if "bfloat16" in renamed:
        renamed["bf16"] = renamed.pop("bfloat16")
    if isinstance(renamed.get("zero_optimization"), bool):
        renamed["zero_optimization"] = {"stage": int(renamed["zero_optimization"])}
    zero = renamed.get("zero_optimization")
    if isinstance(zero, dict):  # an empty table, or none, is one without a device
        empty = [name for name in ("offload_optimizer", "offload_param") if name in zero and not zero[name]]
        renamed["zero_optimization"] = {**zero, **{name: {"device": "none"} for name in empty}}
    return renamed
