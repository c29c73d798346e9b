"""Imports a torchtitan job config in TOML (its JobConfig of 2024 and 2025).

Options that were renamed in that time are known by both names. torchtitan's defaults are written where they
differ from those here: bfloat16, a linear decay after 200 warm-up steps, selective activation checkpointing.
"""

from typing import Any

from meshwright.commands.import_config.option_rules import (
    FLOAT8,
    HOST_STEPS,
    LOGGING,
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
    decay_all_parameters,
    offloaded_kinds,
    write_autocast,
    write_half_precision,
    write_layout,
)

SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zb_v",
    "dualpipev": "dualpipev",
}
P, T, C, A = "parallelism.", "training.", "checkpoint.", "activation_checkpoint."
EXPERTS = "experts have an axis of their own", "set mesh.ep to it, and divide mesh.dp_shard by it"
OTHER_FORMAT = "torch DCP checkpoints are not read", "convert to safetensors, and set model.weights"
MODEL_TEXT = "torchtitan's models are its own", "name a transformers model: --model SOURCE"
DATA_TEXT = "torchtitan's datasets are its own code", "name the data: --data SOURCE, with data.format"

RULES: dict[str, Rule] = {
    f"{T}local_batch_size": mapped("micro_batch"),
    f"{T}batch_size": mapped("micro_batch"),
    f"{T}global_batch_size": mapped("train.batch"),
    f"{T}seq_len": mapped("data.sequence"),
    f"{T}max_norm": mapped("train.clip"),
    f"{T}steps": mapped("train.steps"),
    f"{T}seed": mapped("train.seed"),
    "debug.seed": mapped("train.seed"),
    f"{T}dtype": mapped("precision.parameters"),
    f"{T}mixed_precision_param": mapped("precision.parameters", "precision.compute"),
    f"{T}mixed_precision_reduce": mapped("precision.reduce"),
    "optimizer.name": mapped("optimizer.name"),
    "optimizer.lr": mapped("optimizer.lr"),
    "optimizer.beta1": mapped("optimizer.betas"),
    "optimizer.beta2": mapped("optimizer.betas"),
    "optimizer.eps": mapped("optimizer.eps"),
    "optimizer.weight_decay": mapped("optimizer.weight_decay", reason="norms and biases decay too, as there"),
    "lr_scheduler.warmup_steps": mapped("lr_schedule.warmup"),
    f"{T}warmup_steps": mapped("lr_schedule.warmup"),
    "lr_scheduler.decay_ratio": mapped("lr_schedule.decay"),
    "lr_scheduler.decay_type": mapped("lr_schedule.name"),
    "lr_scheduler.lr_min": mapped("lr_schedule.floor"),
    "lr_scheduler.min_lr_factor": mapped("lr_schedule.floor"),
    "lr_scheduler.total_steps": mapped("lr_schedule.decay"),
    f"{P}data_parallel_replicate_degree": mapped("mesh.dp_replicate"),
    f"{P}data_parallel_shard_degree": mapped("mesh.dp_shard"),
    f"{P}fsdp_reshard_after_forward": mapped("zero.gather"),
    f"{P}tensor_parallel_degree": mapped("mesh.tp"),
    f"{P}enable_sequence_parallel": mapped("sequence_parallel"),
    f"{P}disable_loss_parallel": mapped("vocab_parallel"),
    f"{P}pipeline_parallel_degree": mapped("mesh.pp"),
    f"{P}pipeline_parallel_schedule": mapped("pipeline.schedule"),
    f"{P}pipeline_parallel_microbatch_size": mapped("micro_batch"),
    f"{P}context_parallel_degree": mapped("mesh.cp"),
    f"{P}context_parallel_load_balancer": mapped("ring.load_balance"),
    f"{A}mode": mapped("activation_checkpointing"),
    f"{A}selective_ac_option": mapped("activation_checkpointing.blocks", "activation_checkpointing.save"),
    f"{C}interval": mapped("run.save_every"),
    f"{C}keep_latest_k": mapped("run.keep"),
    "job.dump_folder": mapped("run.folder"),
    "metrics.enable_tensorboard": mapped("run.trackers"),
    "metrics.enable_wandb": mapped("run.trackers"),
    "comm.init_timeout_seconds": mapped("run.limits.init_s", "run.limits.first_step_s"),
    "comm.train_timeout_seconds": mapped("run.limits.step_s"),
    "validation.freq": mapped("evaluate.every"),
    "model.tokenizer_path": mapped("data.tokenizer"),
    "model.hf_assets_path": mapped("data.tokenizer"),
    **dropped(
        LOGGING,
        *(
            "job.description",
            "job.print_args",
            "job.print_config",
            "job.config_file",
            "job.custom_config_module",
        ),
        *(
            "job.use_for_integration_test",
            "job.save_config_file",
            "metrics.log_freq",
            "metrics.save_tb_folder",
        ),
        *("metrics.disable_color_printing", "metrics.save_for_all_ranks", "profiling.enable_profiling"),
        *("profiling.save_traces_folder", "profiling.profile_freq", "profiling.enable_memory_snapshot"),
        *("profiling.save_memory_snapshot_folder", "profiling.profiler_active", "profiling.profiler_warmup"),
        *("model.print_after_conversion", "comm.trace_buf_size", "comm.save_traces_folder", "comm.mode"),
        *(
            "memory_estimation.enabled",
            "memory_estimation.disable_fake_mode",
            "experimental.custom_args_module",
        ),
    ),
    **dropped(
        "torch.compile is not used: speed alone", "training.compile", "compile.enable", "compile.components"
    ),
    **refused(
        "names of torchtitan's own modules",
        "set pipeline.split_points to blocks of your model (`meshwright inspect`)",
        f"{P}pipeline_parallel_split_points",
    ),
    **dropped("torch.compile is not used: speed alone", "compile.backend", f"{P}enable_compiled_autograd"),
    **dropped("a setting of the Python process; results are the same", f"{T}gc_freq", f"{T}gc_debug"),
    f"{T}deterministic": mapped("run.deterministic"),
    "debug.deterministic": mapped("run.deterministic"),
    **dropped("an operation without such a kernel raises an error", "debug.deterministic_warn_only"),
    **dropped("the optimizer's kernel: speed alone", "optimizer.implementation"),
    **dropped("nearest: num_overlap_chunks of tensor_parallel", f"{P}enable_async_tensor_parallel"),
    **dropped("the ring sends keys and values to the neighbour", f"{P}context_parallel_rotate_method"),
    **dropped("it follows from micro_batch", f"{P}num_pp_microbatches"),
    **dropped("checkpoints are always on", f"{C}enable_checkpoint", f"{C}enable"),
    **dropped("in run.folder", f"{C}folder"),
    **dropped(
        "a checkpoint always holds everything", f"{C}last_save_model_only", f"{C}create_seed_checkpoint"
    ),
    **dropped("`meshwright export` does it", f"{C}export_dtype", f"{C}last_save_in_hf"),
    **dropped("saving waits for the file", f"{C}async_mode"),
    **dropped("`meshwright train --from-step N` does it", f"{C}load_step"),
    **dropped("the first checkpoint is that of run.save_every", f"{C}enable_first_step_checkpoint"),
    **dropped("set evaluate.source or evaluate.hold_out", "validation.enabled", "validation.enable"),
    **dropped("as in training", "validation.local_batch_size", "validation.seq_len"),
    **dropped("evaluate.samples limits it", "validation.steps"),
    **refused("the evaluation data are torchtitan's own", "set evaluate.source", "validation.dataset"),
    **refused("the evaluation data are torchtitan's own", "set evaluate.source", "validation.dataset_path"),
    **refused(*OTHER_FORMAT, f"{C}initial_load_path", f"{C}initial_load_in_hf", f"{C}exclude_from_loading"),
    **dropped("only with initial_load_path", f"{C}initial_load_model_only"),
    f"{T}enable_cpu_offload": mapped(*OFFLOAD_KEYS, reason=HOST_STEPS),
    **refused("steps stand outside of backward", "leave it out", "optimizer.early_step_in_backward"),
    **refused(*FLOAT8, "model.converters"),
    **dropped(
        "only with model.converters",
        *(
            f"float8.{name}"
            for name in ("enable_fsdp_float8_all_gather", "recipe_name", "filter_fqns", "emulate")
        ),
        *("float8.precompute_float8_dynamic_scale_for_fsdp", "float8.force_recompute_fp8_weight_in_bwd"),
        *(
            "float8.moe_fqns_prototype",
            "mx.recipe_name",
            "mx.filter_fqns",
            "mx.mxfp8_dim1_cast_kernel_choice",
        ),
        *("quantize", "float8", "mx"),
    ),
    **refused(*EXPERTS, f"{P}expert_parallel_degree", harmless=(1,)),
    **refused(
        "matrices of experts are not sharded",
        "leave it out",
        f"{P}expert_tensor_parallel_degree",
        harmless=(1,),
    ),
    **refused(
        "stages have equal cost, whatever the number of their layers",
        "leave it out, or set split_points of pipeline",
        f"{P}pipeline_parallel_layers_per_stage",
        f"{P}module_fqns_per_model_part",
        f"{P}pipeline_parallel_first_stage_less_layers",
        f"{P}pipeline_parallel_last_stage_less_layers",
    ),
    **refused(
        "its CSV has another format",
        "see docs/techniques/pipeline/schedules/custom.md",
        f"{P}pipeline_parallel_schedule_csv",
    ),
    **refused(
        "all matrix products of a block are kept, or none",
        "leave it out",
        f"{A}per_op_sac_force_recompute_mm_shapes_by_fqns",
    ),
    **dropped("the second forward draws the same numbers", f"{A}preserve_rng_state", f"{A}determinism_check"),
    **dropped(
        "a block that runs again leaves out its last product, if no backward reads it, in any case",
        f"{A}early_stop",
    ),
    **dropped("other operations in the rerun are an error", f"{A}debug"),
    **refused(
        "a share of the activations is not known before a trial",
        "add memory_budget, with its budget_mb in MiB",
        f"{A}memory_budget",
    ),
    **refused("replicas do not come and go", "leave it out", "fault_tolerance.enable"),
    **dropped(
        "only with fault_tolerance.enable",
        *(f"fault_tolerance.{name}" for name in ("process_group", "process_group_timeout_ms", "replica_id")),
        *(
            f"fault_tolerance.{name}"
            for name in ("group_size", "min_replica_size", "sync_steps", "should_quantize")
        ),
        *("fault_tolerance.fragment_sync_delay", "fault_tolerance.fragment_update_alpha"),
    ),
    **refused(
        "sites that train apart are not imported",
        "set mesh.outer to their number, and add the strategy local_sgd or diloco with sync_every",
        "fault_tolerance.semi_sync_method",
    ),
    **refused(
        "other code is not read", "write a factory: --model file.py:factory", "experimental.custom_import"
    ),
    **refused(*MODEL_TEXT, "model.name", "model.flavor"),
    **refused(*DATA_TEXT, f"{T}dataset", f"{T}dataset_path"),
}


def translate(config: Translation, devices: int) -> None:
    """Fills `config` from a torchtitan job; `devices` is the number of ranks, 0 if unknown."""
    layout = _layout(config, devices)
    _write_training(config, layout, devices)
    _write_optimizer(config)
    _write_schedule(config)
    _write_precision(config, layout)
    write_layout(config, layout, _checkpointing(config))
    _write_run(config)
    for option, key in (("model.name", "model.source"), (f"{T}dataset", "data.source")):
        table = key.partition(".")[0]
        if "source" in config.document.get(table, {}):
            config.drop(option, f"replaced by --{table}")
            config.drop("model.flavor" if table == "model" else f"{T}dataset_path", f"replaced by --{table}")
        else:
            config.missing.append(key)


def _layout(config: Translation, devices: int) -> ParallelLayout:
    pp, tp = config.get(f"{P}pipeline_parallel_degree", 1), config.get(f"{P}tensor_parallel_degree", 1)
    cp, replicate = (
        config.get(f"{P}context_parallel_degree", 1),
        config.get(f"{P}data_parallel_replicate_degree", 1),
    )
    shard = config.get(f"{P}data_parallel_shard_degree", -1)
    if not config.is_given(f"{P}data_parallel_shard_degree"):
        config.record_default(f"{P}data_parallel_shard_degree", -1, "mesh.dp_shard")
    if shard == -1 and devices:
        shard = devices // (pp * tp * cp * replicate)
    reshard = str(config.get(f"{P}fsdp_reshard_after_forward", "default"))
    if reshard == "default":
        reshard = "never" if pp > 1 else "always"
    named = str(config.get(f"{P}pipeline_parallel_schedule", "1F1B"))
    schedule = SCHEDULES.get(named.lower())
    if pp > 1 and schedule is None:
        text = f"the schedule {named} is not there; written is 1f1b"
        config.refuse(
            f"{P}pipeline_parallel_schedule", text, f"set pipeline.schedule: {', '.join(SCHEDULES.values())}"
        )
    balancer = config.get(f"{P}context_parallel_load_balancer", "headtail")
    zero_stage = 0 if shard == 1 and cp == 1 else 3
    offloaded: tuple[str, ...] = ()
    if zero_stage and config.get(f"{T}enable_cpu_offload", False):  # FSDP2's CPUOffloadPolicy
        offloaded = offloaded_kinds(zero_stage, replicated=replicate != 1, weights=True)
    else:
        is_on = config.get(f"{T}enable_cpu_offload", False)
        config.drop(f"{T}enable_cpu_offload", "only with FSDP, as there" if is_on else OFF_TEXT)
    return ParallelLayout(
        pp=pp,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=cp,
        tp=tp,
        zero_stage=zero_stage,
        gather="microbatch" if reshard == "never" else "use",
        sequence_parallel=bool(config.get(f"{P}enable_sequence_parallel", True)),
        vocab_parallel=not config.get(f"{P}disable_loss_parallel", False),
        schedule=schedule or "1f1b",
        virtual_stages=2,
        offloaded=offloaded,
        context_strategy={
            "name": "ring",
            "load_balance": "zigzag" if balancer in ("headtail", "zigzag") else "contiguous",
        },
    )


def _write_training(config: Translation, layout: ParallelLayout, devices: int) -> None:
    local = config.get(f"{T}local_batch_size", config.get(f"{T}batch_size", 8))
    micro = config.get(f"{P}pipeline_parallel_microbatch_size", 1) if layout.pp > 1 else local
    config.set("micro_batch", micro)
    batch, known = config.get(f"{T}global_batch_size", -1), layout.dp_shard != -1
    num_data = layout.dp_replicate * layout.dp_shard if known else layout.dp_replicate
    if batch == -1:
        config.set("train.batch", local * num_data)
        if not known:
            text = f"the global batch is {local * num_data} x the size of dp_shard, which is not known"
            config.refuse(f"{T}global_batch_size", text, "give --devices N, or set train.batch")
    else:
        config.set("train.batch", batch)
    config.map(f"{T}seq_len", "data.sequence", 2048)
    config.map(f"{T}max_norm", "train.clip")
    config.map(f"{T}steps", "train.steps", 10_000)
    config.map(f"{T}seed", "train.seed")
    config.map("debug.seed", "train.seed")


def _write_optimizer(config: Translation) -> None:
    name = str(config.get("optimizer.name", "AdamW"))
    config.set("optimizer.name", "adamw")
    if name.lower() == "adam" and config.get("optimizer.weight_decay", 0.1):
        config.refuse(
            "optimizer.name", "Adam decays through the gradient, and adamw apart from it", "accept AdamW"
        )
    elif name.lower() not in ("adamw", "adam"):
        config.refuse(
            "optimizer.name", f"the optimizer {name} is not there; written is adamw", "set optimizer.name"
        )
    config.map("optimizer.lr", "optimizer.lr", 8e-4)
    config.set("optimizer.betas", [config.get("optimizer.beta1", 0.9), config.get("optimizer.beta2", 0.95)])
    config.map("optimizer.eps", "optimizer.eps")
    config.map("optimizer.weight_decay", "optimizer.weight_decay", 0.1)
    decay_all_parameters(config)


def _write_schedule(config: Translation) -> None:
    steps = config.document["train"]["steps"]
    old = config.get(f"{T}warmup_steps", 200)
    warmup = min(config.get("lr_scheduler.warmup_steps", old), steps)
    ratio, kind = config.get("lr_scheduler.decay_ratio"), config.get("lr_scheduler.decay_type", "linear")
    floor = config.get("lr_scheduler.min_lr_factor", config.get("lr_scheduler.lr_min", 0.0))
    if not config.is_given("lr_scheduler.warmup_steps") and not config.is_given(f"{T}warmup_steps"):
        config.set("lr_schedule.warmup", warmup)
        config.record_default("lr_scheduler.warmup_steps", warmup, "lr_schedule.warmup")
    decay = steps - warmup if ratio is None else min(steps - warmup, round(steps * ratio))
    config.set("lr_schedule", {"name": "wsd", "warmup": warmup, "decay": decay, "floor": floor})
    if not config.is_given("lr_scheduler.decay_type"):
        config.record_default("lr_scheduler.decay_type", kind, "lr_schedule.name", "lr_schedule.decay")
    if kind == "cosine" and decay == steps - warmup:
        config.set("lr_schedule", {"name": "cosine", "warmup": warmup, "floor": floor})
    elif kind != "linear":
        text = f"a {kind} decay of {decay} steps is not there; written is a linear one"
        config.refuse("lr_scheduler.decay_type", text, "accept it, or set lr_schedule.name")
    if config.get("lr_scheduler.total_steps", steps) != steps:
        text = f"the decay ends with training, after {steps} steps"
        config.refuse("lr_scheduler.total_steps", text, "set lr_schedule.decay")


def _write_precision(config: Translation, layout: ParallelLayout) -> None:
    if config.get(f"{T}dtype", "float32") == "bfloat16":
        config.set("precision", {"parameters": "bfloat16", "compute": "bfloat16", "reduce": "float32"})
    elif config.get(f"{T}mixed_precision_param", "bfloat16") == "bfloat16":
        reduce = config.get(f"{T}mixed_precision_reduce", "float32")
        if layout.zero_stage:
            write_half_precision(config, "bfloat16", reduce=reduce)
        else:
            write_autocast(config, "bfloat16")
        if not config.is_given(f"{T}mixed_precision_param"):
            config.record_default(
                f"{T}mixed_precision_param", "bfloat16", "precision.parameters", "precision.compute"
            )


def _checkpointing(config: Translation) -> dict[str, Any] | None:
    mode, option = config.get(f"{A}mode", "selective"), str(config.get(f"{A}selective_ac_option", "op"))
    if mode == "full" or (mode == "selective" and option == "1"):
        return {}
    if mode == "selective" and option == "2":
        return {"blocks": ["*[13579]"]}
    if mode == "selective" and option == "op":
        with_cp = config.get(f"{P}context_parallel_degree", 1) > 1  # attention returns a part for each rank
        save = ["matmul"] if with_cp else ["matmul", "attention"]
        text = f"written is save = {save}, which keeps what every matrix product returns: torchtitan keeps "
        text += "every second one, in fewer bytes, and the reduce-scatter's. The numbers are the same"
        config.refuse(_option(config), text, "accept it, or leave out `save`: then everything runs again")
        return {"save": save}
    if mode != "none":
        text = f"selective checkpointing by '{option}' is not there; written is none"
        config.refuse(_option(config), text, 'add [[strategies]] name = "memory_budget", with budget_mb')
    return None


def _option(config: Translation) -> str:
    return f"{A}selective_ac_option" if config.is_given(f"{A}selective_ac_option") else f"{A}mode"


def _write_run(config: Translation) -> None:
    config.map("job.dump_folder", "run.folder")
    if config.get(f"{C}enable_checkpoint", config.get(f"{C}enable", True)):
        config.map(f"{C}interval", "run.save_every")
    keep = config.get(f"{C}keep_latest_k")
    if keep:
        config.set("run.keep", keep)
    elif keep == 0:
        config.refuse(f"{C}keep_latest_k", "keeping all checkpoints is not there", "set run.keep")
    trackers = [name for name in ("tensorboard", "wandb") if config.get(f"metrics.enable_{name}", False)]
    if trackers:
        config.set("run.trackers", trackers)
    for option in (f"{T}deterministic", "debug.deterministic"):
        config.map(option, "run.deterministic")
    for key in ("init_s", "first_step_s"):
        config.map("comm.init_timeout_seconds", f"run.limits.{key}")
    config.map("comm.train_timeout_seconds", "run.limits.step_s")
    config.map("validation.freq", "evaluate.every")
    config.map("model.tokenizer_path", "data.tokenizer")
    config.map("model.hf_assets_path", "data.tokenizer")
