"""Tensor parallelism, mode 2d, equals one device: alone, with data parallelism and activation checkpointing,
with any head and norm.
"""

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import parallelize, trace, verify
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor import optimus_2d
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sharded_layer import Redistribution
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.parallel.data.tokenwise_model import TokenSharding
from tests.parallel.tensor import model_families
from tests.parallel.tensor.even_llama import EVEN, LargestNorm, analyzed_even_llama, even_llama
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.odd_llama import batches, planned

BATCH_SPLIT = BatchSplit(axis="dp_shard")
SQUARE = (TensorParallel2D(), BATCH_SPLIT, ZeRO())
HSDP = (BatchSplit(), BATCH_SPLIT, ZeRO(replicate_axis="dp_replicate"))
CASES: dict[str, tuple[Mesh, tuple[Strategy, ...], int, int]] = {
    "2 x 2": (Mesh(dp_shard=2, tp=2), SQUARE, 4, 1),
    "3 x 3": (Mesh(dp_shard=3, tp=3), SQUARE, 6, 0),
    "inputs kept": (Mesh(dp_shard=3, tp=3), (TensorParallel2D(regather=False), BATCH_SPLIT, ZeRO()), 6, 1),
    "with hsdp": (Mesh(dp_replicate=2, dp_shard=2, tp=2), (*HSDP, TensorParallel2D()), 8, 1),
    "activation_checkpointing": (Mesh(dp_shard=2, tp=2), (*SQUARE, ActivationCheckpointing()), 4, 0),
    "vocab_parallel": (Mesh(dp_shard=2, tp=2), (VocabParallel(), *SQUARE), 4, 0),
    "vocab_parallel last": (Mesh(dp_shard=3, tp=3), (*SQUARE, VocabParallel()), 6, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_one_device(case: str):
    mesh, strategies, samples, micro = CASES[case]
    words = {"vocab_size": 73} if VocabParallel() in strategies else {}
    analyzed, plan = planned(
        analyzed_even_llama(attention_bias=True, mlp_bias=True, **words), mesh, strategies, micro, samples
    )
    assert_exact(analyzed, plan, batches(2, samples), fake=case == "activation_checkpointing")


@pytest.mark.parametrize("strategies", [SQUARE, (*SQUARE, VocabParallel())])
def test_a_tied_head_sums_the_gradients_of_its_slices(strategies: tuple[Strategy, ...]):
    analyzed, plan = planned(
        analyzed_even_llama(tie_word_embeddings=True), Mesh(dp_shard=2, tp=2), strategies
    )
    assert_exact(analyzed, plan, batches(2))


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("gpt2", {"n_inner": 28, "n_layer": 1, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
        ("gpt-neox", {"intermediate_size": 28, "num_hidden_layers": 1}),
        ("falcon, alibi", {"ffn_hidden_size": 28, "num_hidden_layers": 1}),
        ("phi3", {"intermediate_size": 28, "num_key_value_heads": 2, "num_hidden_layers": 1}),
    ],
)
def test_packed_and_interleaved_heads_equal_one_device(family: str, more: dict[str, object]):
    analyzed = model_families.analyze_family(family, **more)  # its 61 words do not divide
    plan = model_families.planned(analyzed, Mesh(dp_shard=2, tp=2), (*SQUARE, VocabParallel()))
    assert_exact(analyzed, plan, model_families.batches(family, 2))


def test_an_embedding_called_with_more_than_token_ids_equals_one_device():
    sizes = {
        "vocab_size": 67,
        "hidden_size": 24,
        "ffn_dim": 28,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
    }
    config = transformers.OPTConfig(
        **sizes, word_embed_proj_dim=24, max_position_embeddings=16, use_cache=False
    )  # positions: a mask
    analyzed, plan = planned(
        transformers.OPTForCausalLM(config), Mesh(dp_shard=2, tp=2), (*SQUARE, VocabParallel())
    )
    assert_exact(analyzed, plan, batches(2))


def test_norms_of_single_heads_are_replicated_and_their_gradients_summed():
    sizes = {**EVEN, "num_hidden_layers": 2, "use_cache": False, "tie_word_embeddings": False}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    analyzed, plan = planned(model, Mesh(dp_shard=2, tp=2), SQUARE)
    held = {
        param_sharding.param.name: param_sharding.param.shape
        for param_sharding in plan.rank_view(0).param_shardings
    }
    assert held["model.layers.0.self_attn.q_norm.weight"] == (2,)
    assert held["model.layers.0.input_layernorm.weight"] == (24,)
    assert_exact(analyzed, plan, batches(2))


@pytest.mark.parametrize("norm", [nn.LayerNorm, LargestNorm])
def test_a_norm_sums_statistics_over_slices_or_gathers_its_input(norm: type[nn.Module]):
    model = even_llama()
    for layer in model.get_submodule("model.layers").children():
        layer.post_attention_layernorm = norm(48)
    analyzed, plan = planned(model, Mesh(dp_shard=3, tp=3), SQUARE, samples=6)
    assert_exact(analyzed, plan, batches(2, 6))


def test_statistics_of_a_slice_alone_are_noticed(monkeypatch: pytest.MonkeyPatch):
    def alone(runtime: object, tensor: torch.Tensor, move: Redistribution) -> torch.Tensor:
        return torch.cat([tensor] * 2, -1)  # as if the other rank had the same

    monkeypatch.setattr(optimus_2d, "apply_redistribution", alone)
    analyzed, plan = planned(analyzed_even_llama(), Mesh(dp_shard=2, tp=2), SQUARE)
    assert not verify(analyzed, plan, batches(1)).passed


def trained(world: World, analyzed: AnalyzedModel, plan: Plan) -> float:
    """The loss of a second step."""
    with parallelize(analyzed, plan, world=world) as engine:
        return [engine.step(engine.local_batch(batch)).loss for batch in batches(2)][-1]


@pytest.mark.parametrize(
    "precision",
    [PrecisionConfig(compute="bfloat16"), PrecisionConfig("bfloat16", "bfloat16", "float32", "float32")],
)
def test_in_half_precision_statistics_are_sent_in_float32(precision: PrecisionConfig):
    analyzed, plan = planned(analyzed_even_llama(), Mesh(dp_shard=2, tp=2), SQUARE, precision=precision)
    assert {move.dtype for action in plan.program.actions("pp0") for move in action.inner_transfers} == {
        "bfloat16",
        "float32",
    }
    assert trace(analyzed, plan, fake=False).passed
    losses = set(run_on_threads(lambda world: trained(world, analyzed, plan), plan.mesh))
    assert len(losses) == 1
    assert torch.tensor(losses.pop()).isfinite()


def test_context_parallelism_is_refused():
    strategies = (TensorParallel2D(), BATCH_SPLIT, TokenSharding(), ZeRO())
    with pytest.raises(
        PlanError,
        match=(
            r"strategies\.tensor_parallel: ranks along cp have some of the tokens of a sample "
            r"each, and 2-D"
        ),
    ):
        planned(analyzed_even_llama(), Mesh(dp_shard=2, cp=2, tp=2), strategies)
