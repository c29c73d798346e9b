"""Models under ring attention: the same results as one device, in float64, on 2, 3 and 4 ranks."""

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.static_checks import static_checks
from tests.parallel.tensor.odd_llama import analyzed_llama, batches

NUM_SAMPLES, TOKENS = 4, 9
JOB = Job(
    ModelConfig("llama"),
    DataConfig("random", sequence=TOKENS),
    TrainConfig(batch=NUM_SAMPLES, clip=0.5),
    OptimizerConfig("adamw", lr=0.1, weight_decay=0.1),
)
REPLICAS = DDP(axis="cp")


def planned(analyzed: AnalyzedModel, mesh: Mesh, *strategies: Strategy, micro_batch: int = 0) -> Plan:
    return make_plan(analyzed, JOB, mesh, strategies, micro_batch)


def equal(analyzed: AnalyzedModel, plan: Plan) -> None:
    assert not static_checks(plan)
    verdict = verify(analyzed, plan, batches(2, NUM_SAMPLES))
    assert verdict.passed, verdict


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_llama_on_a_ring(ranks: int):
    equal(
        analyzed_llama(), planned(analyzed_llama(), Mesh(cp=ranks), RingAttention(), REPLICAS, micro_batch=2)
    )


def test_a_ring_has_more_ranks_than_tokens():
    short = analyzed_llama(length=3)
    plan = planned(short, Mesh(cp=4), RingAttention(), REPLICAS)
    verdict = verify(short, plan, batches(2, NUM_SAMPLES, 3))
    assert verdict.passed, verdict


@pytest.mark.parametrize("length", [3, 5])
def test_vocab_parallel_works_where_ranks_have_one_token_or_none(length: int):
    short = analyzed_llama(length=length)
    plan = planned(short, Mesh(cp=4, tp=2), RingAttention(), TensorParallel(), VocabParallel(), REPLICAS)
    verdict = verify(short, plan, batches(2, NUM_SAMPLES, length))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(dp_replicate=2, cp=2), (BatchSplit(), RingAttention(), DDP())),
        (Mesh(dp_shard=2, cp=2), (BatchSplit(axis="dp_shard"), RingAttention(), ZeRO(stage=1))),
        (Mesh(dp_shard=2, cp=3), (BatchSplit(axis="dp_shard"), RingAttention(), ZeRO(stage=2))),
        (
            Mesh(dp_shard=2, cp=2),
            (BatchSplit(axis="dp_shard"), RingAttention(), ZeRO(stage=3), ActivationCheckpointing()),
        ),
        (Mesh(cp=3), (RingAttention(), ZeRO(axis="cp"))),
    ],
    ids=str,
)
def test_with_ddp_zero_and_activation_checkpointing(mesh: Mesh, strategies: tuple[Strategy, ...]):
    equal(analyzed_llama(), planned(analyzed_llama(), mesh, *strategies, micro_batch=1))


class Attention(nn.Module):
    """Heads of width 4 that attend to what came before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1)
        )
        made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(made.transpose(1, 2).flatten(2))


class Own(nn.Module):
    """A model of nobody's library: positions by length, two layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(67, 8), nn.Embedding(16, 8)
        self.layers, self.head = nn.ModuleList(Attention(8) for _ in range(2)), nn.Linear(8, 67)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def qwen() -> nn.Module:
    sizes = {
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 29,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    )


def gpt2(p: float = 0.0) -> nn.Module:
    drops = {"resid_pdrop": p, "embd_pdrop": p, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=67, n_embd=24, n_layer=2, n_head=3, n_positions=32, **drops)
    )


def sliding() -> nn.Module:
    sizes = {
        "vocab_size": 67,
        "hidden_size": 24,
        "intermediate_size": 29,
        "num_hidden_layers": 2,
        "sliding_window": 4,
    }
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**sizes, num_attention_heads=3, num_key_value_heads=1)
    )


@pytest.mark.parametrize("make", [Own, qwen, gpt2, sliding], ids=lambda make: make.__name__)
def test_other_models_on_a_ring_of_three(make):
    analyzed = analyze(make(), batches(1, NUM_SAMPLES)[0])
    equal(analyzed, planned(analyzed, Mesh(cp=3), RingAttention(), REPLICAS))


def test_dropout_draws_what_one_device_draws():
    analyzed = analyze(gpt2(0.2), batches(1, NUM_SAMPLES)[0])
    equal(analyzed, planned(analyzed, Mesh(cp=2), RingAttention(), REPLICAS))


def padded(model: nn.Module, steps: int) -> tuple[AnalyzedModel, list[dict[str, torch.Tensor]]]:
    """The analyzed model of `model` on samples that end in padding, and such global batches, of which one
    needs no mask.
    """
    found = batches(steps, NUM_SAMPLES)
    for step, batch in enumerate(found):
        mask = torch.ones_like(batch["input_ids"])
        for row in range(NUM_SAMPLES):
            mask[row, TOKENS - (row + step) % 4 if step else TOKENS :] = 0
        batch["attention_mask"] = mask
        batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return analyze(model, found[-1]), found


def bert() -> nn.Module:
    sizes = {
        "vocab_size": 67,
        "hidden_size": 24,
        "intermediate_size": 29,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    }
    drops = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **drops, max_position_embeddings=16))


@pytest.mark.parametrize("make", [qwen, gpt2, sliding, bert], ids=lambda make: make.__name__)
def test_padding_is_attended_to_by_nobody(make):
    analyzed, samples = padded(make(), 3)
    verdict = verify(analyzed, planned(analyzed, Mesh(cp=3), RingAttention(), REPLICAS), samples)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        (Mesh(cp=3), ["ring", "ddp"]),
        (Mesh(dp_replicate=2, cp=2), ["ring", "batch_split", "ddp"]),
        (Mesh(dp_shard=2, cp=2), ["ring", "batch_split", "zero"]),
    ],
    ids=str,
)
def test_a_mesh_without_strategies_gets_a_ring_along_cp(mesh: Mesh, names: list[str]):
    plan = make_plan(analyzed_llama(), JOB, mesh, micro_batch=1)
    assert [each.name for each in plan.strategies] == names
    equal(analyzed_llama(), plan)


def test_the_sequence_analysis_runs_when_a_strategy_needs_it():
    analyzed = analyze(Own(), batches(1, NUM_SAMPLES)[0])
    assert planned(analyzed, Mesh(dp_replicate=2), BatchSplit(), DDP()).model_spec.sequence_info is None
    assert "tokens" not in vars(analyzed)
    assert (
        planned(analyzed, Mesh(cp=2), RingAttention(), REPLICAS).model_spec.sequence_info
        is analyzed.sequence_info
    )


def test_ranks_with_different_numbers_of_tokens_recompute_the_same_blocks():
    plan = planned(
        analyzed_llama(num_hidden_layers=4),
        Mesh(cp=2),
        RingAttention(),
        REPLICAS,
        MemoryBudget(),
        micro_batch=1,
    )
    again = [
        {action.subject for action in plan.for_rank(rank).actions if action.kind == "RECOMPUTE"}
        for rank in range(2)
    ]
    assert again[0] == again[1]
    assert 0 < len(again[0]) < 5
    equal(analyzed_llama(num_hidden_layers=4), plan)
