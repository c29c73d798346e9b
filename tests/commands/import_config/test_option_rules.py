"""Rules of options: each option that the sources of the tools have is mapped, dropped or refused.

The names below are those of the sources of 2025: constants and ZeRO config of DeepSpeed, arguments of
Megatron-LM, JobConfig of torchtitan. Accelerate's are read from the installed package.
"""

import dataclasses

import pytest
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig

from meshwright.commands.import_config.import_config import FORMATS
from meshwright.commands.import_config.option_rules import Translation, dropped, flatten, mapped, refused

DEEPSPEED = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler
communication_data_type prescale_gradients gradient_predivide_factor sparse_gradients fp16 bf16
torch_autocast amp gradient_clipping zero_optimization zero_allow_untested_optimizer
zero_force_ds_cpu_optimizer steps_per_print wall_clock_breakdown dump_state memory_breakdown
flops_profiler autotuning activation_checkpointing sparse_attention data_efficiency curriculum_learning
tensorboard wandb comet csv_monitor elasticity comms_logger compression_training checkpoint data_types
dataloader_drop_last eigenvalue progressive_layer_drop hybrid_engine pipeline aio nebula
graph_harvesting tensor_parallel sequence_parallel_size
"""
ZERO = """
stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint
zenflow sub_group_size cpu_offload_param cpu_offload
stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
ignore_unused_parameters round_robin_gradients zero_hpz_partition_size zero_quantized_weights
zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size
mics_hierarchical_params_gather memory_efficient_linear override_module_apply leaf_module
offload_optimizer.device offload_optimizer.nvme_path offload_optimizer.buffer_count
offload_optimizer.pin_memory offload_optimizer.pipeline_read offload_optimizer.pipeline_write
offload_optimizer.fast_init offload_optimizer.ratio offload_optimizer.super_offload
offload_optimizer.convert_grad_on_cpu offload_optimizer.cpuadam_cores_perc offload_param.device
offload_param.nvme_path offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu
offload_param.pin_memory
"""
MEGATRON = """
attention-backend kv-channels group-query-attention num-query-groups window-size max-position-embeddings
position-embedding-type use-rotary-position-embeddings rotary-base rotary-percent rotary-interleaved
use-rope-scaling make-vocab-size-divisible-by normalization norm-epsilon apply-layernorm-1p squared-relu
swiglu untie-embeddings-and-output-weights multi-latent-attention mtp-num-layers log-params-norm
log-throughput timing-log-level wandb-project wandb-exp-name attention-dropout hidden-dropout
weight-decay start-weight-decay weight-decay-incr-style clip-grad adam-beta1 adam-beta2 adam-eps
sgd-momentum muon-momentum muon-scale-mode micro-batch-size batch-size global-batch-size
rampup-batch-size recompute-activations recompute-granularity no-check-for-nan-in-loss-and-grad
distribute-saved-activations recompute-method recompute-num-layers recompute-modules
cpu-offloading-num-layers fine-grained-activation-offloading offload-modules
min-offloaded-tensor-size profile tp-comm-overlap use-cpu-initialization empty-unused-memory-level
deterministic-mode calculate-per-token-loss train-iters train-samples log-interval exit-interval
exit-duration-in-mins tensorboard-dir no-masked-softmax-fusion no-bias-gelu-fusion no-rope-fusion
cross-entropy-loss-fusion use-flash-attn disable-bias-linear add-qkv-bias optimizer
optimizer-cpu-offload optimizer-offload-fraction use-torch-optimizer-for-cpu-offload
overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params offload-optimizer-states
dataloader-type sequence-parallel no-gradient-accumulation-fusion use-mcore-models
manual-gc seed data-parallel-random-init init-method-std embedding-init-method-std lr lr-decay-style
lr-wsd-decay-style lr-decay-iters lr-decay-samples lr-wsd-decay-iters lr-warmup-fraction lr-warmup-iters
lr-warmup-samples lr-warmup-init min-lr decoupled-lr save save-interval load no-load-optim no-load-rng
finetune ckpt-format async-save fp16 bf16 grad-reduce-in-bf16 loss-scale initial-loss-scale
loss-scale-window fp32-residual-connection attention-softmax-in-fp32 accumulate-allreduce-grads-in-fp32
tensor-model-parallel-size pipeline-model-parallel-size decoder-first-pipeline-num-layers
pipeline-model-parallel-layout num-layers-per-virtual-pipeline-stage
num-virtual-stages-per-pipeline-rank overlap-grad-reduce overlap-param-gather use-distributed-optimizer
use-megatron-fsdp data-parallel-sharding-strategy num-distributed-optimizer-instances use-torch-fsdp2
context-parallel-size cp-comm-type eval-iters eval-interval vocab-size vocab-file merge-file
tokenizer-type tokenizer-model data-path split train-data-path mock-data seq-length num-workers
reset-position-ids reset-attention-mask eod-mask-loss qk-layernorm expert-model-parallel-size
num-experts moe-router-topk moe-aux-loss-coeff moe-grouped-gemm q-lora-rank kv-lora-rank spec
use-precision-aware-optimizer main-grads-dtype exp-avg-dtype fp8-format num-layers hidden-size
ffn-hidden-size num-attention-heads transformer-impl
"""
TORCHTITAN = """
training.local_batch_size training.global_batch_size training.seq_len training.max_norm training.steps
training.enable_cpu_offload training.mixed_precision_param training.mixed_precision_reduce
training.compile training.gc_freq training.seed training.deterministic training.dataset
training.dataset_path optimizer.name optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.eps
optimizer.weight_decay optimizer.implementation optimizer.early_step_in_backward
lr_scheduler.warmup_steps lr_scheduler.decay_ratio lr_scheduler.decay_type lr_scheduler.lr_min
lr_scheduler.min_lr_factor parallelism.data_parallel_replicate_degree
parallelism.enable_compiled_autograd parallelism.data_parallel_shard_degree
parallelism.fsdp_reshard_after_forward parallelism.tensor_parallel_degree
parallelism.disable_loss_parallel parallelism.enable_async_tensor_parallel
parallelism.pipeline_parallel_degree parallelism.pipeline_parallel_split_points
parallelism.pipeline_parallel_layers_per_stage parallelism.pipeline_parallel_schedule
parallelism.pipeline_parallel_schedule_csv parallelism.pipeline_parallel_microbatch_size
parallelism.context_parallel_degree parallelism.context_parallel_rotate_method
parallelism.expert_parallel_degree checkpoint.enable_checkpoint checkpoint.folder
checkpoint.initial_load_path checkpoint.initial_load_model_only checkpoint.interval
checkpoint.last_save_model_only checkpoint.export_dtype checkpoint.create_seed_checkpoint
checkpoint.async_mode checkpoint.keep_latest_k checkpoint.load_step checkpoint.exclude_from_loading
checkpoint.enable_first_step_checkpoint checkpoint.last_save_in_hf activation_checkpoint.mode
activation_checkpoint.selective_ac_option
activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns comm.init_timeout_seconds
comm.train_timeout_seconds comm.trace_buf_size fault_tolerance.enable fault_tolerance.replica_id
fault_tolerance.group_size fault_tolerance.semi_sync_method validation.enabled validation.dataset
validation.freq validation.steps metrics.log_freq metrics.enable_tensorboard metrics.enable_wandb
model.name model.flavor model.tokenizer_path model.converters job.dump_folder job.description
"""
RULES = {
    "size": mapped("train.batch"),
    "count": mapped("train.steps", reason="in steps"),
    **dropped("not needed", "color"),
    **refused("not there", "do without", "magic", harmless=(1,)),
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("deepspeed", DEEPSPEED.split()),
        ("deepspeed", [f"zero_optimization.{option}" for option in ZERO.split()]),
        ("megatron", MEGATRON.split()),
        ("torchtitan", TORCHTITAN.split()),
        (
            "accelerate",
            [field.name for each in (ClusterConfig, SageMakerConfig) for field in dataclasses.fields(each)],
        ),
    ],
)
def test_every_option_of_the_source_has_a_rule(kind: str, options: list[str]):
    rules = FORMATS[kind]
    tables = {name.partition(".")[0] for name in rules if "." in name}
    assert [option for option in options if option not in rules and option not in tables] == []


def test_an_option_is_mapped_with_its_value_dropped_refused_or_unknown():
    config = Translation(RULES, {"size": 4, "count": 3, "color": "red", "magic": 2, "sizes": 1})
    config.map("size", "train.batch")
    config.map("count", "train.steps")
    assert [(each.option, each.verdict, each.text) for each in config.outcome()] == [
        ("magic", "refused", "not there"),
        ("sizes", "unknown", "this importer does not know it; did you mean 'size'?"),
        ("color", "dropped", "not needed"),
        ("size", "mapped", "train.batch = 4"),
        ("count", "mapped", "train.steps = 3; in steps"),
    ]


@pytest.mark.parametrize("value", [None, False, 0, 1, "none", {"enabled": False}, {"device": "none"}, []])
def test_a_refused_option_that_turns_nothing_on_is_dropped(value: object):
    (found,) = Translation(RULES, {"magic": value}).outcome()
    assert (found.verdict, found.text) == ("dropped", "this value turns nothing on")


@pytest.mark.parametrize("value", [2, True, "cpu", {"enabled": True}, {"device": "cpu"}, [3]])
def test_a_refused_option_that_is_on_is_refused(value: object):
    (found,) = Translation(RULES, {"magic": value}).outcome()
    assert (found.verdict, found.fix) == ("refused", "do without")


def test_auto_is_refused_where_a_key_would_follow_from_it():
    config = Translation(RULES, {"size": "auto", "color": "auto"})
    assert config.map("size", "train.batch", 7) == 7
    assert {each.option: each.verdict for each in config.outcome()} == {"size": "refused", "color": "dropped"}


def test_a_default_of_the_tool_is_recorded_under_its_option():
    config = Translation(RULES, {})
    config.map("size", "train.batch", 8)
    (found,) = config.outcome()
    assert (found.option, found.verdict, found.text) == ("size (default)", "mapped", "train.batch = 8")


def test_nested_tables_are_flattened_but_for_those_with_a_rule_of_their_own():
    values = {"a": {"b": 1, "c": {}}, "color": {"d": 2}}
    assert dict(flatten(values, RULES)) == {"a.b": 1, "a.c": {}, "color": {"d": 2}}
