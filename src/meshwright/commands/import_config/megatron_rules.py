"""Rules of the Megatron-LM arguments that become no key: dropped with a reason, or refused with a repair."""

from meshwright.commands.import_config.option_rules import (
    ACTIVATION_OFFLOAD,
    LOGGING,
    Rule,
    dropped,
    refused,
)

KERNELS = "a kernel or a fusion: the same results but for rounding"
OVERLAP = "how communication overlaps; here it always does, and results are the same"
LAUNCHER = "a setting of the launcher: torchrun and `meshwright launch` start the ranks"
CHECKPOINT = "the format of Megatron's checkpoints; those here reshard between any two plans"
EXPERTS = "mixture-of-experts models are built by transformers"
DATA = (
    "Megatron's .bin and .idx files are not read",
    "name the text: --data SOURCE (data.tokenizer tokenizes it)",
)
OTHER_JOBS = "only language models are imported", "name a transformers model and its data"
LOAD = (
    "Megatron's checkpoints are not read",
    "convert to safetensors with Megatron's tools, and set model.weights",
)
FLOAT8 = (
    "float8 products are the strategy fp8, whose options are not imported, and float4 ones are not there",
    '--bf16, and write [[strategies]] name = "fp8"',
)
LOW_PRECISION = (
    "master weights and optimizer states are float32",
    'leave it out, or optimizer.name = "adamw_8bit"',
)

OTHER_RULES: dict[str, Rule] = {
    **dropped(
        LOGGING,
        *("log-interval", "log-params-norm", "log-num-zeros-in-grad", "log-throughput", "log-progress"),
        *("timing-log-level", "timing-log-option", "log-energy", "no-barrier-with-level-1-timing"),
        *("tensorboard-log-interval", "tensorboard-queue-size", "log-timers-to-tensorboard"),
        *(
            "no-log-loss-scale-to-tensorboard",
            "log-validation-ppl-to-tensorboard",
            "log-memory-to-tensorboard",
        ),
        *("log-world-size-to-tensorboard", "log-loss-scale-to-tensorboard", "wandb-entity", "wandb-exp-name"),
        *(
            "wandb-save-dir",
            "logging-level",
            "log-learning-rate-to-tensorboard",
            "log-batch-size-to-tensorboard",
        ),
        *("log-straggler", "disable-straggler-on-startup", "straggler-ctrlr-port", "straggler-minmax-count"),
        *(
            "no-one-logger",
            "one-logger-project",
            "one-logger-run-name",
            "one-logger-async",
            "app-tag-run-name",
        ),
        *("app-tag-run-version", "config-logger-dir", "run-workload-inspector-server", "profile"),
        *("profile-step-start", "profile-step-end", "profile-ranks", "use-pytorch-profiler"),
        *("record-memory-history", "memory-snapshot-path", "moe-per-layer-logging"),
        *("result-rejected-tracker-filename", "log-device-memory-used"),
    ),
    **dropped(
        KERNELS,
        *("use-flash-attn", "attention-backend", "no-masked-softmax-fusion", "no-bias-gelu-fusion"),
        *("no-bias-swiglu-fusion", "no-bias-dropout-fusion", "no-rope-fusion", "cross-entropy-loss-fusion"),
        *("cross-entropy-fusion-impl", "no-persist-layer-norm", "no-gradient-accumulation-fusion"),
        *("use-te-activation-func", "use-fused-weighted-squared-relu", "attention-softmax-in-fp32"),
        *("disable-bf16-reduced-precision-matmul", "enable-cuda-graph", "external-cuda-graph"),
        *("cuda-graph-scope", "cuda-graph-warmup-steps", "te-rng-tracker", "use-ring-exchange-p2p"),
        *("no-clone-scatter-output-in-embedding", "onnx-safe", "use-sharp"),
        *("disable-mamba-mem-eff-path", "use-transformer-engine-op-fuser", "no-gradient-reduce-div-fusion"),
        *("cuda-graph-impl", "cuda-graph-num-microbatches", "cuda-graph-retain-backward-graph"),
    ),
    **dropped(
        OVERLAP,
        *("overlap-grad-reduce", "overlap-param-gather", "overlap-param-gather-with-optimizer-step"),
        *("no-overlap-p2p-communication", "overlap-p2p-communication-warmup-flush", "no-align-grad-reduce"),
        *("no-align-param-gather", "defer-embedding-wgrad-compute", "wgrad-deferral-limit"),
        *("ddp-num-buckets", "ddp-bucket-size", "ddp-pad-buckets-for-high-nccl-busbw"),
        *(
            "ddp-average-in-collective",
            "tp-comm-overlap",
            "tp-comm-overlap-cfg",
            "disable-tp-comm-overlap-ag",
        ),
        *("disable-tp-comm-overlap-rs", "tp-comm-overlap-rs-dgrad", "disable-tp-comm-bulk-dgrad"),
        *("disable-tp-comm-bulk-wgrad", "tp-comm-bootstrap-backend", "disable-tp-comm-split-ag"),
        *("disable-tp-comm-split-rs", "no-async-tensor-model-parallel-allreduce", "delay-wgrad-compute"),
        *("no-scatter-gather-tensors-in-pipeline", "high-priority-stream-groups", "use-nccl-ub"),
        *("disable-symmetric-registration", "sharp-enabled-group", "fsdp-double-buffer"),
        *("suggested-communication-unit-size", "microbatch-group-size-per-virtual-pipeline-stage"),
        *("pipeline-model-parallel-comm-backend", "nccl-communicator-config-path", "delay-grad-reduce"),
        *("ddp-reduce-scatter-with-fp32-accumulation", "reuse-grad-buf-for-mxfp8-param-ag"),
        *("distribute-saved-activations", "overlap-moe-expert-parallel-comm", "keep-fp8-transpose-cache"),
        *("symmetric-ar-type", "batch-p2p-communication", "no-batch-p2p-communication"),
    ),
    **dropped(
        LAUNCHER,
        *("node_rank", "master_addr", "master_port", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "rdzv-id"),
        *("rdzv-backend", "rdzv-endpoint", "node-rank", "master-addr", "master-port", "max_restarts", "tee"),
        *("max-restarts", "log_dir", "log-dir", "redirects", "standalone", "local-rank", "local_rank"),
        *("distributed-backend", "lazy-mpu-init", "use-cpu-initialization", "disable-gloo-process-groups"),
        *("use-tp-pp-dp-mapping", "init-model-with-meta-device", "adlr-autoresume", "local-ranks-filter"),
        *("adlr-autoresume-interval", "inprocess-restart", "enable-ft-package", "calc-ft-timeouts"),
        *("inprocess-max-iterations", "inprocess-granularity", "inprocess-active-world-size", "disable-msc"),
        *(
            "inprocess-monitor-thread-interval",
            "inprocess-monitor-process-interval",
            "inprocess-barrier-timeout",
        ),
        *("inprocess-progress-watchdog-interval", "inprocess-heartbeat-interval", "inprocess-soft-timeout"),
        *("inprocess-hard-timeout", "inprocess-heartbeat-timeout", "inprocess-completion-timeout"),
        *("inprocess-last-call-wait", "inprocess-termination-grace-time", "inprocess-empty-cuda-cache"),
        *("manual-gc", "manual-gc-interval", "no-manual-gc-eval", "empty-unused-memory-level"),
        *("train-sync-interval", "enable-experimental", "rank", "world-size", "env", "ntasks", "nodes"),
    ),
    **dropped("set run.limits", "distributed-timeout-minutes", "distributed-timeout-seconds-after-init"),
    **dropped(
        "SIGTERM saves a checkpoint and stops", "exit-signal-handler", "exit-signal-handler-dataloader"
    ),
    **dropped("training ends with train.steps", "exit-interval", "exit-duration-in-mins"),
    **dropped("set guard.action", "no-check-for-nan-in-loss-and-grad", "check-for-spiky-loss"),
    **dropped("set guard.action", "check-for-large-grads", "rerun-mode"),
    **dropped(
        "`meshwright verify` compares with one device", "check-weight-hash-across-dp-replicas-interval"
    ),
    **dropped("the loss is a sum over tokens by their global count", "calculate-per-token-loss"),
    **dropped(
        CHECKPOINT,
        *("ckpt-format", "use-dist-ckpt", "dist-ckpt-format", "auto-detect-ckpt-format", "async-save"),
        *("ckpt-fully-parallel-save", "no-ckpt-fully-parallel-save", "ckpt-fully-parallel-load"),
        *("ckpt-assume-constant-structure", "dist-ckpt-strictness", "use-persistent-ckpt-worker"),
        *("ckpt-convert-format", "ckpt-convert-save", "ckpt-convert-update-legacy-dist-opt-format"),
        *("no-strict-fsdp-dtensor-load", "dist-ckpt-save-pre-mcore-014", "dist-ckpt-optim-fully-reshardable"),
        *("distrib-optim-fully-reshardable-mem-efficient", "non-persistent-save-interval", "replication"),
        *("non-persistent-ckpt-type", "non-persistent-global-ckpt-dir", "non-persistent-local-ckpt-dir"),
        *("non-persistent-local-ckpt-algo", "replication-jump", "replication-factor", "save-retain-interval"),
        *("override-opt_param-scheduler", "override-opt-param-scheduler", "use-checkpoint-args"),
        *("use-checkpoint-opt_param-scheduler", "use-checkpoint-opt-param-scheduler", "no-initialization"),
        *("use-mp-args-from-checkpoint-args", "no-use-tokenizer-model-from-checkpoint-args"),
        *("exit-on-missing-checkpoint", "dump-param-to-param-group-map"),
    ),
    **dropped("a checkpoint always holds everything", "no-save-optim", "no-save-rng", "no-load-optim"),
    **dropped("a checkpoint always holds everything", "no-load-rng", "load-main-params-from-ckpt"),
    **dropped("set evaluate.samples", "eval-iters", "full-validation", "multiple-validation-sets"),
    **dropped("set evaluate.source or evaluate.hold_out", "split", "valid-data-path", "test-data-path"),
    **dropped("evaluation is that of [evaluate]", "test-mode"),
    **dropped(
        "tokens are cached in run.cache", "data-cache-path", "no-mmap-bin-files", "mid-level-dataset-surplus"
    ),
    **dropped("tokens are cached in run.cache", "num-dataset-builder-threads", "object-storage-cache-path"),
    **dropped("masks follow from the model", "no-create-attention-mask-in-dataloader"),
    **dropped("data are read in a seeded order, again and again", "dataloader-type"),
    **dropped("data.tokenizer decides", "tokenizer-type", "legacy-tokenizer", "tokenizer-metadata"),
    **dropped("the scale is halved by each overflow, and is at least 1", "hysteresis", "min-loss-scale"),
    **dropped("the warm-up begins near 0", "lr-warmup-init"),
    **dropped("of generation", "inference-dynamic-batching", "cache-mla-latents"),
    **dropped("only with --use-precision-aware-optimizer", "main-grads-dtype", "main-params-dtype"),
    **dropped("only with --use-precision-aware-optimizer", "exp-avg-dtype", "exp-avg-sq-dtype"),
    **dropped("only with selective recomputation", "recompute-modules"),
    **refused(
        "optimizer states rest on the host all together or not at all",
        "leave it out: all of them rest there",
        "optimizer-offload-fraction",
        harmless=(1.0,),
    ),
    **dropped(
        "a setting of --optimizer-cpu-offload: host memory is pinned on accelerators, copies overlap with "
        "the steps of other groups, and PyTorch's fused AdamW steps",
        *("no-pin-cpu-grads", "no-pin-cpu-params", "use-torch-optimizer-for-cpu-offload"),
        "overlap-cpu-optimizer-d2h-h2d",
    ),
    **dropped(
        "only with offload of activations",
        *("offload-modules", "min-offloaded-tensor-size", "activation-offload-fraction"),
        *("delta-offload-bytes-across-pp-ranks", "cpu-offloading-double-buffering"),
        *("no-cpu-offloading-double-buffering", "cpu-offloading-retain-pinned-cpu-buffers"),
    ),
    **dropped(
        "of generation",
        "inference-max-requests",
        "inference-max-seq-length",
        "inference-batch-times-seqlen-threshold",
    ),
    **dropped(
        "of generation",
        "inference-max-batch-size",
        "max-tokens-to-oom",
        "output-bert-embeddings",
        "flash-decode",
    ),
    **dropped(
        "of testing Megatron",
        "error-injection-rate",
        "error-injection-type",
        "moe-router-force-load-balancing",
    ),
    **refused(
        *DATA, "data-path", "train-data-path", "data-args-path", "per-split-data-args-path", "mock-data"
    ),
    **refused(
        "tokenizers are those of Hugging Face",
        "set data.tokenizer to a folder, or a name on the hub",
        *(
            "vocab-file",
            "merge-file",
            "tiktoken-pattern",
            "tiktoken-num-special-tokens",
            "tiktoken-special-tokens",
        ),
    ),
    **refused(
        "code of a hub runs only of a commit",
        "set model.revision and model.trust_remote_code",
        "trust-remote-code",
    ),
    **refused(
        "documents of a sample are not told apart",
        "train on samples that are one document each",
        *("reset-position-ids", "reset-attention-mask", "eod-mask-loss", "allow-ambiguous-pad-tokens"),
    ),
    **refused("every sample is read", "leave it out", "sample-rate", "iterations-to-skip", harmless=(1.0,)),
    **refused("only language models are imported", "leave it out", "mask-prob", "short-seq-prob", "sft"),
    **refused(*LOAD, "load", "finetune", "pretrained-checkpoint", "ckpt-step"),
    **refused("the batch is fixed", "set train.batch", "rampup-batch-size", "decrease-batch-size-if-needed"),
    **refused(
        "weight decay is constant", "set optimizer.weight_decay", "start-weight-decay", "end-weight-decay"
    ),
    **refused("weight decay is constant", "leave it out", "weight-decay-incr-style", harmless=("constant",)),
    **refused(
        "a rate of its own for embedding and head",
        "set optimizer.groups, with pattern and lr_factor",
        *("decoupled-lr", "decoupled-min-lr", "head-lr-mult"),
    ),
    **refused(
        "older names are not read", "use the present name", "batch-size", "model-parallel-size", "warmup"
    ),
    **refused("the loss scale is always dynamic", "leave it out", "loss-scale"),
    **refused("the loss is computed in float32", "leave it out", "fp16-lm-cross-entropy"),
    **refused(*LOW_PRECISION, "use-precision-aware-optimizer"),
    **refused(
        "muon has one way to split, scale and iterate",
        "leave it out",
        "muon-no-split-qkv",
    ),
    **refused(
        "muon has one way to split, scale and iterate",
        "accept it",
        *("muon-use-nesterov", "muon-scale-mode", "muon-fp32-matmul-prec", "muon-num-ns-steps"),
        *("muon-tp-mode", "muon-extra-scale-factor"),
    ),
    **refused(
        *ACTIVATION_OFFLOAD,
        *("cpu-offloading", "cpu-offloading-num-layers", "cpu-offloading-activations"),
        *("cpu-offloading-weights", "fine-grained-activation-offloading"),
    ),
    **refused(
        *FLOAT8, "fp8-format", "fp8-hybrid", "fp8-e4m3", "fp8-recipe", "fp8-param-gather", "fp4-format"
    ),
    **refused(*FLOAT8, "fp8-margin", "fp8-interval", "fp8-amax-history-len", "fp8-amax-compute-algo"),
    **refused(*FLOAT8, "no-fp8-wgrad", "first-last-layers-bf16", "num-layers-at-start-in-bf16"),
    **refused(*FLOAT8, "num-layers-at-end-in-bf16", "kitchen-config-file", "kitchen-recipe-number"),
    **refused(
        "stages have equal cost, whatever the number of their layers",
        "leave it out, or set split_points of pipeline",
        *("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
        *("pipeline-model-parallel-layout", "pipeline-model-parallel-split-rank"),
    ),
    **dropped("stages have equal cost", "account-for-embedding-in-pipeline-split"),
    **dropped("stages have equal cost", "account-for-loss-in-pipeline-split"),
    **refused("replicas begin with the same values", "leave it out", "data-parallel-random-init"),
    **refused(
        "shards of replicas are not sharded again", "use one level of zero", "enable-full-sharding-in-hsdp"
    ),
    **refused("arguments in another file are not followed", "import that file, or copy them", "yaml-cfg"),
    **refused("nothing is evaluated without training", "`meshwright verify` or a script", "skip-train"),
    **refused(
        "experts have an axis of their own",
        "set mesh.ep to it, and divide mesh.dp_shard or mesh.dp_replicate by it",
        "expert-model-parallel-size",
        harmless=(1,),
    ),
    **refused(
        "matrices of experts are not sharded", "leave it out", "expert-tensor-parallel-size", harmless=(1,)
    ),
    **refused(
        EXPERTS,
        "name a transformers model with experts: --model SOURCE",
        *("moe-router-topk", "num-experts"),
        *("moe-ffn-hidden-size", "moe-layer-freq", "moe-shared-expert-intermediate-size"),
        *("moe-router-load-balancing-type", "moe-aux-loss-coeff", "moe-z-loss-coeff", "moe-input-jitter-eps"),
        *(
            "moe-router-score-function",
            "moe-router-pre-softmax",
            "moe-router-num-groups",
            "moe-router-group-topk",
        ),
        *("moe-router-topk-scaling-factor", "moe-router-enable-expert-bias", "moe-router-bias-update-rate"),
        *("moe-router-dtype", "moe-expert-capacity-factor", "moe-token-drop-policy", "moe-use-upcycling"),
        *("moe-upcycling-granularity", "moe-apply-probs-on-input", "moe-layer-recompute", "moe-extended-tp"),
        *("moe-pad-expert-input-to-capacity", "moe-router-padding-for-fp8"),
        harmless=(1,),
    ),
    **dropped(
        "how experts compute and send; results are the same",
        *(
            "moe-grouped-gemm",
            "moe-use-legacy-grouped-gemm",
            "moe-token-dispatcher-type",
            "moe-enable-deepep",
        ),
        *("moe-deepep-num-sms", "moe-permute-fusion", "moe-router-fusion", "moe-shared-expert-overlap"),
        *("moe-pad-experts-for-cuda-graph-inference",),
    ),
    **refused(
        *OTHER_JOBS,
        *(
            *("grpo-group-size", "langrl-env-config", "rl-partial-rollouts", "sft-tokenizer-prompt-format"),
            "vision-pretraining",
            "vision-backbone-type",
            "retro-add-retriever",
            "retro-project-dir",
            "ict-load",
        ),
        *("ict-head-size", "bert-load", "biencoder-projection-dim", "titles-data-path", "perform-rl-step"),
        *("retriever-seq-length", "num-classes", "img-h", "img-w", "num-channels", "patch-dim"),
    ),
}
