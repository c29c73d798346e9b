"""Tensor parallelism, mode 3d: results of one device, and the paper's bytes and memory."""

from math import prod

import pytest

from meshwright.api import verify
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor import cube_3d
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.parallel.tensor import model_families
from tests.parallel.tensor.even_llama import INNER, WIDTH, analyzed_even_llama, elements_received, shards
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.odd_llama import TOKENS, batches, planned

BATCH_SPLIT = BatchSplit(axis="dp_shard")
EIGHT = Mesh(dp_shard=2, tp_depth=2, tp=2)
BLOCKS = (TensorParallel3D(), BATCH_SPLIT, ZeRO(gather="microbatch"))
AGAIN = (BATCH_SPLIT, ZeRO(), TensorParallel3D(), ActivationCheckpointing())
WIDE = {"hidden_size": 48, "num_attention_heads": 12, "intermediate_size": 56, "num_hidden_layers": 1}
HSDP = (BatchSplit(), BATCH_SPLIT, ZeRO(replicate_axis="dp_replicate"))


@pytest.mark.parametrize(
    ("mesh", "strategies", "micro"),
    [
        (EIGHT, BLOCKS, 1),
        (EIGHT, AGAIN, 0),
        (Mesh(dp_replicate=2, dp_shard=2, tp_depth=2, tp=2), (TensorParallel3D(), *HSDP), 0),
    ],
)
def test_it_equals_one_device(mesh: Mesh, strategies: tuple[Strategy, ...], micro: int):
    samples = 2 * mesh.dp_replicate * mesh.dp_shard
    analyzed, plan = planned(
        analyzed_even_llama(attention_bias=True, mlp_bias=True), mesh, strategies, micro, samples
    )
    assert_exact(analyzed, plan, batches(2, samples), fake=strategies == AGAIN)


def test_a_tied_head_sums_the_gradients_of_its_slices():
    analyzed, plan = planned(
        analyzed_even_llama(tie_word_embeddings=True, attention_dropout=0.2), EIGHT, BLOCKS
    )
    assert_exact(analyzed, plan, batches(2))


@pytest.mark.parametrize(
    ("family", "more"),
    [
        (
            "gpt2",
            {"n_embd": 48, "n_head": 12, "n_inner": 56, "n_layer": 1, "resid_pdrop": 0.1, "attn_pdrop": 0.1},
        ),
        ("gpt-neox", WIDE),
        ("qwen3", {**WIDE, "num_key_value_heads": 4}),
        ("phi3", {**WIDE, "num_key_value_heads": 4}),
        (
            "falcon, alibi",
            {name: WIDE[name] for name in WIDE if name != "intermediate_size"} | {"ffn_hidden_size": 56},
        ),
    ],
)
def test_packed_interleaved_and_normed_heads_equal_one_device(family: str, more: dict[str, object]):
    analyzed = model_families.analyze_family(family, vocab_size=62, **more)
    assert_exact(analyzed, model_families.planned(analyzed, EIGHT, BLOCKS), model_families.batches(family, 2))


@pytest.mark.parametrize("q", [2, 3])
def test_a_layer_receives_the_papers_elements(q: int):
    mesh, layers = Mesh(dp_shard=q, tp_depth=q, tp=q), 2
    sizes = (
        {"hidden_size": 72, "head_dim": 1, "num_attention_heads": 72, "num_key_value_heads": 36}
        if q == 3
        else {}
    )
    analyzed, plan = planned(analyzed_even_llama(**sizes), mesh, BLOCKS, samples=q)
    wide = 72 if q == 3 else WIDTH
    into = layers * q * TOKENS * (3 * wide + INNER)
    out = layers * q * TOKENS * (4 * wide + 2 * INNER)  # q, k and v of half its width, o and down; gate, up
    norms = (
        2 * layers * TOKENS * (q - 1)
    )  # a number per token, along tp of one slice, along tp_depth of q of them; and back
    assert elements_received(plan, ("F", "B"), "tp") == pytest.approx(
        2 * (q - 1) / q**3 * into + 2 * q * norms
    )
    assert elements_received(plan, ("F", "B"), "tp_depth") == pytest.approx(
        2 * (q - 1) / q**3 * out + 2 * norms
    )
    weights = 2 * (q - 1) * shards(analyzed, q**3, "layers")
    assert elements_received(plan, ("UNSHARD", "REDUCE"), "dp_shard") == weights
    for param_sharding in plan.rank_view(0).param_shardings:
        assert prod(param_sharding.param.shape) * q**2 == next(
            w.numel for w in analyzed.model_spec.params if w.name == param_sharding.param.name
        )


def test_a_slice_in_the_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        cube_3d, "_refined_cut", lambda cut, parts: cut
    )  # outputs lie over b alone, so c gets a neighbour's
    analyzed, plan = planned(analyzed_even_llama(), EIGHT, BLOCKS)
    assert not verify(analyzed, plan, batches(1)).passed


@pytest.mark.parametrize(
    ("mesh", "strategies", "more", "message"),
    [
        (
            Mesh(dp_shard=2, tp=4),
            BLOCKS,
            {},
            r"parallel mesh is dp_shard 2 x tp_depth 1 x tp 4;.*\n.*mesh.tp_depth = 2, mesh.tp = 2",
        ),
        (EIGHT, BLOCKS, {"num_key_value_heads": 6}, r"6 units .* on 4 ranks\n.*or make it 4 or 8 units"),
        (EIGHT, BLOCKS, {"vocab_size": 67}, r"67 units .* on 2 ranks"),
        (EIGHT, (TensorParallel3D(), BATCH_SPLIT), {}, r"no strategy shards weights along dp_shard"),
        (
            EIGHT,
            (*BLOCKS, VocabParallel()),
            {},
            (r"sharded over tp_depth too\n.*remove name = " r'"vocab_parallel"'),
        ),
    ],
)
def test_meshes_and_sizes_that_do_not_fit_3d_are_refused(
    mesh: Mesh, strategies: tuple[Strategy, ...], more: dict, message: str
):
    with pytest.raises(PlanError, match=message):
        planned(analyzed_even_llama(**more), mesh, strategies, samples=8)
