"""Imports the arguments of a Megatron-LM job (those of 2025), from a shell script or a list.

Megatron's defaults are written where they differ from those here: a linear decay to `--min-lr`, betas of 0.9
and 0.999, weight decay of 0.01, a seed of 1234. The architecture becomes a transformers config
(`megatron_model`), unless --model names one.
"""

from typing import Any

from meshwright.commands.import_config.megatron_model import ARCHITECTURE
from meshwright.commands.import_config.megatron_rules import OTHER_RULES
from meshwright.commands.import_config.option_rules import OFFLOAD_KEYS, Rule, Translation, mapped
from meshwright.commands.import_config.parallel_layout import (
    ParallelLayout,
    write_half_precision,
    write_layout,
)

STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
SCHEDULE_NAMES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}

RULES: dict[str, Rule] = {
    "tensor-model-parallel-size": mapped("mesh.tp"),
    "pipeline-model-parallel-size": mapped("mesh.pp"),
    "context-parallel-size": mapped("mesh.cp"),
    "sequence-parallel": mapped("sequence_parallel"),
    "num-layers-per-virtual-pipeline-stage": mapped("pipeline.virtual_stages"),
    "num-virtual-stages-per-pipeline-rank": mapped("pipeline.virtual_stages"),
    "use-distributed-optimizer": mapped("zero.stage"),
    "data-parallel-sharding-strategy": mapped("zero.stage"),
    "use-megatron-fsdp": mapped("zero.stage"),
    "use-torch-fsdp2": mapped("zero.stage"),
    "torch-fsdp2-no-reshard-after-forward": mapped("zero.gather"),
    "num-distributed-optimizer-instances": mapped("mesh.dp_replicate", "zero.replicate_axis"),
    "cp-comm-type": mapped("ring", "ulysses", "hybrid_context_parallel"),
    "hierarchical-context-parallel-sizes": mapped("hybrid_context_parallel.ulysses_degree"),
    "nproc_per_node": mapped("mesh", reason="the number of ranks"),
    "nnodes": mapped("mesh", reason="the number of ranks"),
    "micro-batch-size": mapped("micro_batch"),
    "global-batch-size": mapped("train.batch"),
    "train-iters": mapped("train.steps"),
    "train-samples": mapped("train.steps"),
    "seq-length": mapped("data.sequence"),
    "seed": mapped("train.seed"),
    "clip-grad": mapped("train.clip"),
    "optimizer": mapped("optimizer.name"),
    "lr": mapped("optimizer.lr"),
    "weight-decay": mapped("optimizer.weight_decay"),
    "adam-beta1": mapped("optimizer.betas"),
    "adam-beta2": mapped("optimizer.betas"),
    "adam-eps": mapped("optimizer.eps"),
    "sgd-momentum": mapped("optimizer.momentum"),
    "muon-momentum": mapped("optimizer.momentum"),
    "lr-decay-style": mapped("lr_schedule.name"),
    "min-lr": mapped("lr_schedule.floor", reason="a fraction of lr"),
    "lr-decay-iters": mapped("train.steps", reason="schedules end with training"),
    "lr-decay-samples": mapped("train.steps", reason="schedules end with training"),
    "lr-warmup-iters": mapped("lr_schedule.warmup"),
    "lr-warmup-samples": mapped("lr_schedule.warmup"),
    "lr-warmup-fraction": mapped("lr_schedule.warmup"),
    "lr-wsd-decay-iters": mapped("lr_schedule.decay"),
    "lr-wsd-decay-samples": mapped("lr_schedule.decay"),
    "lr-wsd-decay-style": mapped("lr_schedule.name"),
    "bf16": mapped("precision.parameters", "precision.compute", "precision.master"),
    "fp16": mapped("precision.parameters", "precision.compute", "precision.master"),
    "initial-loss-scale": mapped("precision.loss_scale"),
    "loss-scale-window": mapped("precision.loss_scale_window"),
    "accumulate-allreduce-grads-in-fp32": mapped("precision.reduce", "precision.gradients"),
    "grad-reduce-in-bf16": mapped("precision.reduce"),
    "recompute-granularity": mapped("activation_checkpointing"),
    "recompute-activations": mapped("activation_checkpointing"),
    "recompute-method": mapped("activation_checkpointing"),
    "recompute-num-layers": mapped("activation_checkpointing"),
    "checkpoint-activations": mapped("activation_checkpointing"),
    "save": mapped("run.folder"),
    "save-interval": mapped("run.save_every"),
    "eval-interval": mapped("evaluate.every"),
    "tokenizer-model": mapped("data.tokenizer"),
    "tensorboard-dir": mapped("run.trackers"),
    "wandb-project": mapped("run.trackers", "run.tracker_project"),
    "optimizer-cpu-offload": mapped(*OFFLOAD_KEYS, reason="the host steps with PyTorch's fused AdamW"),
    "offload-optimizer-states": mapped(*OFFLOAD_KEYS, reason="the device steps, group by group"),
    "num-workers": mapped("run.workers"),
    "deterministic-mode": mapped("run.deterministic"),
    **ARCHITECTURE,
    **OTHER_RULES,
}


ALIASES = {"nproc-per-node": "nproc_per_node", "persistent-save-interval": "save-interval"}


def translate(config: Translation, devices: int) -> None:
    """Fills `config` from Megatron-LM arguments; `devices` is the number of ranks, 0: as torchrun's arguments
    say.
    """
    _refuse_variables(config)
    if not devices and config.is_given("nproc_per_node"):
        devices = config.get("nproc_per_node") * config.get("nnodes", 1)
    layout = _layout(config, devices)
    batch = _write_training(config, layout)
    _write_optimizer(config)
    _write_schedule(config, batch)
    _write_precision(config, layout)
    write_layout(config, layout, _checkpointing(config))
    if config.get("offload-optimizer-states", False) and not layout.offloaded:
        config.add_strategy("offload", what=["optimizer_states"], step_on="device")
    _write_run(config)
    if "source" in config.document.get("data", {}):
        for option in ("data-path", "train-data-path", "data-args-path", "split", "mock-data"):
            config.drop(option, "replaced by --data")
    else:
        config.missing.append("data.source")


def typed_options(values: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments with numbers as numbers, and of two names of an option the first."""
    found = {name: _number(value) if isinstance(value, str) else value for name, value in values.items()}
    return {ALIASES.get(name, name): value for name, value in found.items()}


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text.replace("_", ""))
        except ValueError:
            continue
    return {"true": True, "True": True, "false": False, "False": False}.get(text, text)


def _refuse_variables(config: Translation) -> None:
    """Takes out options that become a key and whose value the script computes, and refuses them by name."""
    computed = [
        option
        for option, value in config.options.items()
        if "$" in str(value) and option in config.rules and config.rules[option].verdict == "mapped"
    ]
    for option in computed:
        keys, reason = config.rules[option].keys, "the script computes the value when it runs"
        if all(key.startswith("run.") for key in keys):
            config.drop(option, f"{reason}; set {' and '.join(keys)}")
        else:
            config.refuse(option, reason, f"set {' and '.join(keys)}")
    config.options = {option: value for option, value in config.options.items() if option not in computed}


def _layout(config: Translation, devices: int) -> ParallelLayout:
    tp, pp = config.get("tensor-model-parallel-size", 1), config.get("pipeline-model-parallel-size", 1)
    cp = config.get("context-parallel-size", 1)
    data = devices // (tp * pp * cp) if devices else -1
    stage = 1 if config.get("use-distributed-optimizer", False) else 0
    if config.get("use-megatron-fsdp", False):
        stage = STAGES.get(str(config.get("data-parallel-sharding-strategy", "no_shard")), 0)
    if config.get("use-torch-fsdp2", False):
        stage = 3
    copies = config.get("num-distributed-optimizer-instances", 1)
    sizes: dict[str, Any] = {"dp_shard": data} if stage else {"dp_replicate": data}
    if stage and copies > 1:
        sizes = {"dp_replicate": copies, "dp_shard": data // copies if devices else -1}
    return ParallelLayout(
        pp=pp,
        cp=cp,
        tp=tp,
        zero_stage=stage,
        gather="microbatch" if config.get("torch-fsdp2-no-reshard-after-forward", False) else "use",
        offloaded=_offloaded(config),
        sequence_parallel=bool(config.get("sequence-parallel", False)),
        context_strategy=_context_strategy(config),
        **_virtual_stages(config, pp),
        **sizes,
    )


def _offloaded(config: Translation) -> tuple[str, ...]:
    """What rests in host memory and is stepped there: of Megatron, optimizer states alone."""
    fraction = config.get("optimizer-offload-fraction", 1.0)
    if not config.get("optimizer-cpu-offload", False):
        for option in ("optimizer-cpu-offload", "optimizer-offload-fraction"):
            config.drop(option, "only with --optimizer-cpu-offload")
        return ()
    if fraction == 0:
        config.drop("optimizer-cpu-offload", "--optimizer-offload-fraction 0 leaves nothing to it")
        return ()
    return ("optimizer_states",)


def _context_strategy(config: Translation) -> dict[str, Any]:
    """The table of the strategy along cp."""
    given = config.get("cp-comm-type", "p2p")
    kinds = set(given) if isinstance(given, list) else {given}
    if len(kinds) > 1:
        text = "all layers have one kind of context parallelism; written is ring"
        config.refuse("cp-comm-type", text, "choose one")
        return {"name": "ring"}
    levels = config.get("hierarchical-context-parallel-sizes", [2])
    degree = int(levels[0]) if isinstance(levels, list) else levels
    hybrid = {"name": "hybrid_context_parallel", "ulysses_degree": degree}
    return {"a2a": {"name": "ulysses"}, "a2a+p2p": hybrid}.get(kinds.pop(), {"name": "ring"})


def _virtual_stages(config: Translation, pp: int) -> dict[str, Any]:
    per_rank, layers = config.get("num-virtual-stages-per-pipeline-rank"), config.get("num-layers")
    per_stage = config.get("num-layers-per-virtual-pipeline-stage")
    if per_rank is None and per_stage is not None:
        if layers is None:
            config.refuse(
                "num-layers-per-virtual-pipeline-stage",
                "needed is --num-layers",
                "set pipeline.virtual_stages",
            )
            return {}
        per_rank = layers // pp // per_stage
    return {"schedule": "interleaved", "virtual_stages": per_rank} if per_rank and per_rank > 1 else {}


def _write_training(config: Translation, layout: ParallelLayout) -> int:
    micro, batch = config.map("micro-batch-size", "micro_batch"), config.get("global-batch-size")
    known = -1 not in (layout.dp_replicate, layout.dp_shard)
    if batch is None:
        batch = (micro or 1) * (layout.dp_replicate * layout.dp_shard if known else 1)
        if not known:
            text = f"the global batch is {micro or 1} x the data-parallel ranks, whose number is not known"
            config.refuse("global-batch-size", text, "give --devices N, or set train.batch")
        else:
            config.record_default("global-batch-size", batch, "train.batch")
    config.set("train.batch", batch)
    if config.is_given("train-samples"):
        config.set("train.steps", max(1, config.get("train-samples") // batch))
    elif not config.map("train-iters", "train.steps"):
        config.missing.append("train.steps")
    config.map("seq-length", "data.sequence")
    config.map("seed", "train.seed", 1234)
    config.map("clip-grad", "train.clip")
    return batch


def _write_optimizer(config: Translation) -> None:
    kind = config.get("optimizer", "adam")
    name = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}.get(kind)
    if name is None:
        config.refuse(
            "optimizer", f"the optimizer {kind} is not there; written is adamw", "set optimizer.name"
        )
    config.set("optimizer.name", name or "adamw")
    if not config.map("lr", "optimizer.lr"):
        config.missing.append("optimizer.lr")
    config.map("weight-decay", "optimizer.weight_decay", 0.01)
    if name in ("sgd", "muon"):
        config.map(f"{name}-momentum", "optimizer.momentum", 0.9)
    if name != "sgd":
        betas = [config.get("adam-beta1", 0.9), config.get("adam-beta2", 0.999)]
        config.set("optimizer.betas", betas)
        if not config.is_given("adam-beta2"):
            config.record_default("adam-beta2", 0.999, "optimizer.betas")
        config.map("adam-eps", "optimizer.eps")


def _write_schedule(config: Translation, batch: int) -> None:
    steps, lr = config.document["train"].get("steps", 1000), config.get("lr")
    style = config.get("lr-decay-style", "linear")
    config.set("lr_schedule.name", SCHEDULE_NAMES.get(style, "constant"))
    if not config.is_given("lr-decay-style"):
        config.record_default("lr-decay-style", style, "lr_schedule.name")
    decay = config.get("lr-decay-iters", config.get("lr-decay-samples", steps * batch) // batch)
    if decay != steps and style in ("linear", "cosine"):
        option = "lr-decay-iters" if config.is_given("lr-decay-iters") else "lr-decay-samples"
        text = f"the {style} decay ends after {decay} steps, and here with training, after {steps}"
        config.refuse(option, text, 'make the two equal, or use lr_schedule.name = "wsd"')
    warmup = config.get("lr-warmup-iters", config.get("lr-warmup-samples", 0) // batch)
    if config.is_given("lr-warmup-fraction"):
        warmup = round(config.get("lr-warmup-fraction") * decay)
    config.set("lr_schedule.warmup", min(warmup, steps))
    if config.get("min-lr", 0) and lr:
        config.set("lr_schedule.floor", config.get("min-lr") / lr)
    if style == "inverse-square-root" and warmup:
        config.set("lr_schedule.timescale", warmup)
    if style == "WSD":
        last = config.get("lr-wsd-decay-iters", config.get("lr-wsd-decay-samples", 0) // batch)
        config.set("lr_schedule.decay", min(last, steps - min(warmup, steps)))
        shape = config.get("lr-wsd-decay-style", "exponential")
        if shape != "linear":
            text = f"the decay of wsd is linear, and Megatron's is {shape}"
            config.refuse("lr-wsd-decay-style", text, "write --lr-wsd-decay-style linear, or accept it")


def _write_precision(config: Translation, layout: ParallelLayout) -> None:
    sums = "float32" if layout.zero_stage else ""
    if config.get("bf16", False):
        narrow = config.get("grad-reduce-in-bf16", False)
        write_half_precision(
            config, "bfloat16", reduce="bfloat16" if narrow else "float32", gradients="" if narrow else sums
        )
    elif config.get("fp16", False):
        wide = config.get("accumulate-allreduce-grads-in-fp32", False)
        write_half_precision(
            config, "float16", reduce="float32" if wide else "float16", gradients=sums if wide else ""
        )
        config.map("initial-loss-scale", "precision.loss_scale", 2.0**32)
        config.set("precision.loss_scale", float(config.document["precision"]["loss_scale"]))
        config.map("loss-scale-window", "precision.loss_scale_window", 1000)
    else:
        return
    if not sums and not config.get("grad-reduce-in-bf16", False) and layout.dp_replicate != 1:
        config.refuse(
            "accumulate-allreduce-grads-in-fp32",
            "gradients of parameters that are not sharded are summed in 16 bits",
            "add --use-distributed-optimizer (zero, stage 1), or accept it",
        )


def _checkpointing(config: Translation) -> dict[str, Any] | None:
    granularity = config.get("recompute-granularity")
    if config.get("recompute-activations", False):
        granularity = "selective"
    if granularity == "selective":
        modules = config.get("recompute-modules", "core_attn")
        if modules in ("core_attn", ["core_attn"]):
            for option in ("recompute-granularity", "recompute-activations", "recompute-modules"):
                config.drop(option, "fused attention keeps no scores, so there is nothing of it to recompute")
        else:
            config.refuse(
                "recompute-modules",
                "modules inside a block are not recomputed alone",
                'add activation_checkpointing with save = ["matmul", "attention"], which recomputes all '
                "else, or memory_budget, or declare the parts as blocks",
            )
        return None
    if granularity != "full" and not config.get("checkpoint-activations", False):
        return None
    layers = config.get("recompute-num-layers", 1)
    if config.get("recompute-method", "uniform") == "block" or layers != 1:
        text = "written is that every block is recomputed by itself"
        config.refuse(
            "recompute-num-layers", text, "accept it, set its `blocks`, or take memory_budget in its place"
        )
    return {}


def _write_run(config: Translation) -> None:
    config.map("save", "run.folder")
    config.map("save-interval", "run.save_every")
    config.map("eval-interval", "evaluate.every")
    config.map("num-workers", "run.workers")
    config.map("deterministic-mode", "run.deterministic")
    if config.get("tokenizer-type") == "HuggingFaceTokenizer":
        config.map("tokenizer-model", "data.tokenizer")
    elif config.is_given("tokenizer-model"):
        text = f"only tokenizers of Hugging Face are read, and this is a {config.get('tokenizer-type')}"
        config.refuse("tokenizer-model", text, "set data.tokenizer to its folder, or its name on the hub")
    trackers = [
        name
        for name, option in (("tensorboard", "tensorboard-dir"), ("wandb", "wandb-project"))
        if config.is_given(option)
    ]
    if trackers:
        config.set("run.trackers", trackers)
    config.map("wandb-project", "run.tracker_project")
