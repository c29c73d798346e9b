"""meshwright: plan, verify and train any PyTorch model with any combination of parallelism techniques.

    import meshwright as mw

    job = mw.Job(train=mw.TrainConfig(steps=1000, batch=16))
    analyzed = mw.analyze(model, example_batch)
    strategies = [mw.BatchSplit(axis="dp_shard"), mw.ZeRO(), mw.TensorParallel()]
    plan = mw.make_plan(analyzed, job, mw.Mesh(dp_shard=4, tp=2), strategies)
    mw.verify(analyzed, plan, [batch], loss=loss).raise_if_failed()
    trainer = mw.parallelize(analyzed, plan, optimizer=torch.optim.AdamW, loss=loss)
    metrics = trainer.step(trainer.local_batch(batch))

A name is imported on first use, so `import meshwright` is fast and does not import torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "meshwright.api": ("analyze", "make_plan", "parallelize", "trace", "verify"),
    "meshwright.commands.python_train_loop": ("train",),
    "meshwright.engine.forward_backward.evaluation": ("Evaluation",),
    "meshwright.engine.generation.answer_logprobs": ("AnswerLogprobs",),
    "meshwright.engine.generation.sampling_params": ("GeneratedAnswer", "SamplingParams"),
    "meshwright.model.loss.loss_definition": ("AuxiliaryLoss", "Loss"),
    "meshwright.model.loss.token_cross_entropy": ("token_cross_entropy",),
    "meshwright.engine.runtime.rank_state": ("Metrics",),
    "meshwright.model.analysis.analyze": ("AnalyzedModel",),
    "meshwright.model.loading.loader": ("Model",),
    "meshwright.oom_advice": ("OutOfMemory",),
    "meshwright.parallel.compression.activation_compression": ("ActivationCompression",),
    "meshwright.parallel.compression.codecs.cast": ("CastCompression",),
    "meshwright.parallel.compression.codecs.int4": ("Int4Compression",),
    "meshwright.parallel.compression.codecs.int8": ("Int8Compression",),
    "meshwright.parallel.compression.codecs.powersgd": ("PowerSGDCompression",),
    "meshwright.parallel.compression.quantized_weights": ("QuantizedWeights",),
    "meshwright.parallel.compression.codecs.sign": ("SignCompression",),
    "meshwright.parallel.compression.codecs.topk": ("TopKCompression",),
    "meshwright.parallel.compression.codecs.two_level_sums": ("QgZCompression",),
    "meshwright.parallel.context.hybrid": ("HybridContextParallel",),
    "meshwright.parallel.context.ring": ("RingAttention",),
    "meshwright.parallel.context.ulysses": ("Ulysses",),
    "meshwright.parallel.data.batch_split": ("BatchSplit",),
    "meshwright.parallel.data.data_parallel_master": ("DataParallelMaster",),
    "meshwright.parallel.data.ddp": ("DDP",),
    "meshwright.parallel.data.ddp_naive": ("NaiveDDP",),
    "meshwright.parallel.data.hierarchical_partition": ("HierarchicalPartition",),
    "meshwright.parallel.data.sync_batch_norm": ("SyncBatchNorm",),
    "meshwright.parallel.embedding.embedding_host": ("EmbeddingHost",),
    "meshwright.parallel.expert.expert_parallel": ("ExpertParallel",),
    "meshwright.parallel.expert.expert_tensor_parallel": ("ExpertTensorParallel",),
    "meshwright.parallel.expert.loss_free_balancing": ("LossFreeBalancing",),
    "meshwright.parallel.data.zero": ("ZeRO",),
    "meshwright.parallel.memory.activation_checkpointing": ("ActivationCheckpointing",),
    "meshwright.parallel.memory.tiers.activation_offload": ("ActivationOffload",),
    "meshwright.parallel.memory.chunked_loss": ("ChunkedLoss",),
    "meshwright.parallel.memory.tiers.disk_offload": ("DiskOffload",),
    "meshwright.parallel.memory.tiers.offload": ("Offload",),
    "meshwright.parallel.memory.compiled_blocks": ("CompiledBlocks",),
    "meshwright.parallel.memory.gist": ("Gist",),
    "meshwright.parallel.memory.partitioned_activations": ("PartitionedActivations",),
    "meshwright.parallel.memory.memory_budget": ("MemoryBudget",),
    "meshwright.parallel.memory.tiled_mlp": ("TiledMLP",),
    "meshwright.parallel.observer.observer": ("Observer",),
    "meshwright.parallel.outer.diloco": ("DiLoCo",),
    "meshwright.parallel.outer.local_sgd": ("LocalSGD",),
    "meshwright.parallel.outer.streaming_diloco": ("StreamingDiLoCo",),
    "meshwright.parallel.precision.fp8": ("Float8Products",),
    "meshwright.parallel.server.parameter_server": ("ParameterServer",),
    "meshwright.parallel.server.stale_server": ("StaleServer",),
    "meshwright.parallel.pipeline.pipedream": ("PipeDream",),
    "meshwright.parallel.pipeline.pipeline_strategy": ("Pipeline",),
    "meshwright.parallel.tensor.cube_3d": ("TensorParallel3D",),
    "meshwright.parallel.tensor.megatron_1d": ("TensorParallel",),
    "meshwright.parallel.tensor.optimus_2d": ("TensorParallel2D",),
    "meshwright.parallel.tensor.sequence_parallel": ("SequenceParallel",),
    "meshwright.parallel.tensor.tesseract_25d": ("TensorParallel25D",),
    "meshwright.parallel.tensor.vocab_parallel": ("VocabParallel",),
    "meshwright.plan.job.data_config": ("DataConfig", "MixturePart"),
    "meshwright.plan.job.errors": ("Diagnostic", "PlanError"),
    "meshwright.plan.job.job": (
        *("EvalConfig", "Job", "LossGuard", "OptimizerConfig", "ParamGroupConfig", "LRScheduleConfig"),
        "TrainConfig",
    ),
    "meshwright.plan.job.model_config": ("ModelConfig",),
    "meshwright.plan.job.precision": ("PrecisionConfig",),
    "meshwright.plan.job.checkpoint_logging_config": ("RunConfig",),
    "meshwright.plan.plan": ("Plan",),
    "meshwright.plan.sharding.mesh": ("Mesh",),
    "meshwright.plan.strategy_interface": ("Strategy",),
    "meshwright.run.export.weight_source": ("WeightSource",),
    "meshwright.run.telemetry.callbacks": ("Callback",),
    "meshwright.run.training.trainer": ("Trainer",),
    "meshwright.verifier.verdict_and_cause": ("Verdict",),
}
_PACKAGES = ("nn",)  # with public names of their own
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted([*_MODULE_OF, *_PACKAGES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"meshwright.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'; it has {', '.join(__all__)}")
    return vars(import_module(_MODULE_OF[name]))[name]


def __dir__() -> list[str]:
    return list(__all__)
