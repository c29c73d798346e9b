"""Mixed plans of models of some 10 M parameters, as one rank runs them: twelve for `planner_here`, and those
with offload for `planner_offload`, with codes for `planner_compression`.

Four unmodified families of transformers, without dropout; float32, AdamW; 2 and 4 ranks, one thread each,
over the shared memory of ranks of one host. A rank's note is the peak of live bytes of one step, of all
tensors that torch's operations made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.harness.peak_bytes import PeakLive
from benchmarks.models.llama_steps import OPTIMIZER, join
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.world import TorchWorld
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.compression.activation_compression import ActivationCompression
from meshwright.parallel.compression.codecs.int4 import Int4Compression
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.compression.codecs.powersgd import PowerSGDCompression
from meshwright.parallel.compression.codecs.sign import SignCompression
from meshwright.parallel.compression.codecs.topk import TopKCompression
from meshwright.parallel.compression.quantized_weights import QuantizedWeights
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

VOCAB_SIZE, TOKENS, NUM_SAMPLES = 4096, 256, 8
WARMUP_STEPS = 3  # steps before the timed ones; bytes are counted in the last of them


@dataclass(frozen=True)
class Case:
    """A plan: a family of models, the mesh, the strategies, and the samples of a microbatch (0: one
    microbatch).
    """

    family: str
    mesh: Mesh
    strategies: tuple[Strategy, ...]
    micro_batch: int = 0


SPLIT, DDP_REPLICAS = BatchSplit("dp_shard"), (BatchSplit(), DDP())
CASES: Mapping[str, Case] = {
    "llama, ddp on 2": Case("llama", Mesh(dp_replicate=2), DDP_REPLICAS),
    "bert, ZeRO 1 on 2": Case("bert", Mesh(dp_shard=2), (SPLIT, ZeRO(stage=1))),
    "gpt2, ZeRO 2 on 2, 2 microbatches": Case("gpt2", Mesh(dp_shard=2), (SPLIT, ZeRO(stage=2)), 2),
    "llama, ZeRO 3 on 4": Case("llama", Mesh(dp_shard=4), (SPLIT, ZeRO(stage=3))),
    "gpt2, tensor_parallel on 2": Case("gpt2", Mesh(tp=2), (TensorParallel(), VocabParallel())),
    "llama, tensor_parallel on 2, ddp on 2": Case(
        "llama", Mesh(dp_replicate=2, tp=2), (TensorParallel(), VocabParallel(), *DDP_REPLICAS)
    ),
    "llama, 1F1B on 2": Case("llama", Mesh(pp=2), (Pipeline(schedule="1f1b"),), 2),
    "gpt2, GPipe on 4": Case("gpt2", Mesh(pp=4), (Pipeline(schedule="gpipe"),), 2),
    "llama, ZB-H1 on 2": Case("llama", Mesh(pp=2), (Pipeline(schedule="zb_h1"),), 2),
    "llama, ring of 2": Case("llama", Mesh(cp=2), (RingAttention(), DDP(axis="cp"))),
    "gpt2, Ulysses on 2": Case("gpt2", Mesh(cp=2), (Ulysses(), DDP(axis="cp"))),
    "t5, ddp on 2, activation_checkpointing": Case(
        "t5", Mesh(dp_replicate=2), (*DDP_REPLICAS, ActivationCheckpointing())
    ),
}

DISK_FOLDER = "/var/tmp"  # on a disk, not in memory
EVERYTHING = ("optimizer_states", "gradients", "weights")
OFFLOADED_CASES: Mapping[str, Case] = {
    "llama, ddp on 2, states stepped on the device": Case(
        "llama", Mesh(dp_replicate=2), (*DDP_REPLICAS, Offload())
    ),
    "gpt2, ZeRO 2 on 2, states stepped on the host": Case(
        "gpt2", Mesh(dp_shard=2), (SPLIT, ZeRO(stage=2), Offload(step_on="host"))
    ),
    "llama, ZeRO 3 on 2, everything on the host": Case(
        "llama", Mesh(dp_shard=2), (SPLIT, ZeRO(stage=3), Offload(EVERYTHING, "host"))
    ),
    "llama, ZeRO 2 on 2, states on disk": Case(
        "llama", Mesh(dp_shard=2), (SPLIT, ZeRO(stage=2), DiskOffload(DISK_FOLDER))
    ),
    "llama, ZeRO 3 on 2, states and weights on disk": Case(
        "llama",
        Mesh(dp_shard=2),
        (SPLIT, ZeRO(stage=3), DiskOffload(DISK_FOLDER, what=("optimizer_states", "weights"))),
    ),
    "gpt2, ddp on 2, activations on the host": Case(
        "gpt2", Mesh(dp_replicate=2), (*DDP_REPLICAS, ActivationOffload())
    ),
}
COMPRESSED_CASES: Mapping[str, Case] = {
    "llama, ddp on 2, int8": Case("llama", Mesh(dp_replicate=2), (*DDP_REPLICAS, Int8Compression())),
    "gpt2, ddp on 2, PowerSGD": Case(
        "gpt2", Mesh(dp_replicate=2), (*DDP_REPLICAS, PowerSGDCompression(rank=4))
    ),
    "bert, ddp on 2, the largest 1 %": Case(
        "bert", Mesh(dp_replicate=2), (*DDP_REPLICAS, TopKCompression(density=0.01))
    ),
    "llama, ZeRO 2 on 2, signs": Case(
        "llama", Mesh(dp_shard=2), (SPLIT, ZeRO(stage=2), SignCompression()), 4
    ),
    "llama, ZeRO 3 on 2, int4, quantized weights": Case(
        "llama", Mesh(dp_shard=2), (SPLIT, ZeRO(stage=3), QuantizedWeights(), Int4Compression())
    ),
    "gpt2, 1F1B on 2, int8 activations": Case(
        "gpt2", Mesh(pp=2), (Pipeline(schedule="1f1b"), ActivationCompression(codec="int8")), 2
    ),
}
ALL_CASES = {**CASES, **OFFLOADED_CASES, **COMPRESSED_CASES}

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6}
T5: Mapping[str, Any] = {
    **{
        "vocab_size": VOCAB_SIZE,
        "d_model": 384,
        "d_ff": 1536,
        "d_kv": 64,
        "num_layers": 3,
        "num_heads": 6,
        "dropout_rate": 0.0,
    },
    **{"decoder_start_token_id": 0, "use_cache": False},
}


def config_of(family: str) -> tuple[Any, Any]:
    """Returns the class and the config of a family's model."""
    match family:
        case "llama":
            config = transformers.LlamaConfig(
                **SIZES, intermediate_size=1024, max_position_embeddings=TOKENS, use_cache=False
            )
            return transformers.LlamaForCausalLM, config
        case "gpt2":
            fields = {
                "vocab_size": VOCAB_SIZE,
                "n_embd": 384,
                "n_layer": 6,
                "n_head": 6,
                "n_positions": TOKENS,
                "use_cache": False,
            }
            return transformers.GPT2LMHeadModel, transformers.GPT2Config(**fields, **GPT2_NO_DROPOUT, **ENDS)
        case "bert":
            config = transformers.BertConfig(
                **SIZES, **NO_DROPOUT, intermediate_size=1536, max_position_embeddings=TOKENS
            )
            return transformers.BertForMaskedLM, config
        case _:
            config = transformers.T5Config(**T5)
            return transformers.T5ForConditionalGeneration, config


def batch_of(family: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns the batch of a step."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB_SIZE, (NUM_SAMPLES, TOKENS + 1), generator=generator)
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    return {**batch, "decoder_input_ids": tokens[:, :-1].clone()} if family == "t5" else batch


def analyze_and_plan(case: Case) -> tuple[AnalyzedModel, Plan]:
    """Returns the analyzed model and the plan."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model, config = config_of(case.family)
        return model(config)

    analyzed = analyze(make, batch_of(case.family), loss=token_cross_entropy())
    job = Job(
        ModelConfig(case.family),
        DataConfig("example", sequence=TOKENS),
        TrainConfig(batch=NUM_SAMPLES),
        OPTIMIZER,
    )
    return analyzed, make_plan(analyzed, job, case.mesh, case.strategies, case.micro_batch)


def plan_step(rank: int, size: int, plan: str, store: str) -> Callable[[], object]:
    """Returns the step of one rank, whose note is the peak of live bytes of the last warm-up step."""
    torch.set_num_threads(1)
    case = ALL_CASES[plan]
    join(rank, size, store)
    world = TorchWorld(case.mesh, rank, "cpu")
    engine = parallelize(*analyze_and_plan(case), world=world)
    batch = engine.local_batch(batch_of(case.family))
    module = engine.executor.state.trained_module.module
    files = [file.tensor for file in engine.executor._files]
    with PeakLive([*module.parameters(), *module.buffers()], on_disk=files) as live:
        for _ in range(WARMUP_STEPS):
            live.reset_peak()
            engine.step(batch)

    def step() -> int:
        engine.step(batch)
        return live.peak

    return step
