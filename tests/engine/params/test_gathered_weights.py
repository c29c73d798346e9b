"""The weights of codes in one process: block by block of the flat parameters that the ranks have."""

import torch

import meshwright as mw
from meshwright.engine.params.gathered_weights import GatheredWeights
from meshwright.model.analysis.analyze import AnalyzedModel
from tests.parallel.tensor.odd_llama import llama, planned
from tests.tiny_model import analyzed_model, tiny_job

SPLIT = mw.BatchSplit("dp_shard")


def weights_of(analyzed: AnalyzedModel) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        each.name: torch.randn(each.shape, generator=generator, dtype=torch.float64)
        for each in analyzed.model_spec.params
    }


def test_a_plan_that_gathers_weights_as_they_are_changes_none():
    analyzed = analyzed_model()
    plan = mw.make_plan(analyzed, tiny_job(), mw.Mesh(dp_shard=3), (SPLIT, mw.ZeRO()))
    assert not GatheredWeights(plan)


def test_a_shard_of_fewer_elements_than_a_block_has_one_scale():
    analyzed = analyzed_model()
    strategies = SPLIT, mw.ZeRO(), mw.QuantizedWeights()
    plan = mw.make_plan(analyzed, tiny_job(), mw.Mesh(dp_shard=3), strategies)
    weights = weights_of(analyzed)
    before = {name: each.clone() for name, each in weights.items()}
    found = GatheredWeights(plan).values(weights)
    assert all(torch.equal(before[name], each) for name, each in weights.items())
    embedding, gathered = weights["embed.weight"].view(-1), found["embed.weight"].view(-1)
    assert embedding.numel() == 78  # 26 of it on each rank
    for shard, values in zip(embedding.split(26), gathered.split(26), strict=True):
        scale = (shard.abs().max() / 127).float().double()
        assert torch.allclose(values, (shard / scale).round() * scale, rtol=1e-6, atol=0)
        assert not torch.equal(values, shard)


def test_slices_of_tensor_parallel_ranks_return_to_their_places_and_copies_agree():
    strategies = SPLIT, mw.ZeRO(), mw.TensorParallel(), mw.QuantizedWeights()
    analyzed, plan = planned(llama(intermediate_size=54), mw.Mesh(dp_shard=2, tp=3), strategies)
    gathered, weights = GatheredWeights(plan), weights_of(analyzed)
    found, largest = gathered.values(weights), max(each.abs().max() for each in weights.values())
    for name, weight in weights.items():
        assert (found[name] - weight).abs().max() <= largest / 254 * 1.001, name
        assert not torch.equal(found[name], weight)
    norm = "model.layers.0.input_layernorm.weight"
    copies = [each for each in gathered._groups if norm in each.spans]
    assert len(copies) == 3  # one for each rank along tp
    assert not any(spans for each in copies for spans in each.spans.values())  # no slice shares their blocks
