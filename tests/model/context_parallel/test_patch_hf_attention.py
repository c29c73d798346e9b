"""transformers' attention interface: the same results, grouped heads as they are, the user's config
unchanged.
"""

import pytest
import torch
import transformers
from torch import nn

from meshwright.model.context_parallel.patch_hf_attention import (
    ATTENTION_NAME,
    patch_attention,
    sharded_attention,
)
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.plan.job.errors import PlanError

SIZES = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 13,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
T5 = {"vocab_size": 67, "d_model": 8, "d_kv": 2, "d_ff": 8, "num_layers": 2, "num_heads": 3}


def llama(attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config).eval()


def nowhere(queries: int, keys: int) -> None:
    """All tokens are here."""


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_plugged_model_computes_the_same_with_and_without_padding(attention: str) -> None:
    model, ids = llama(attention), torch.arange(14).view(2, 7)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    before = [model(input_ids=ids, attention_mask=each).logits for each in (None, mask)]
    plugged = patch_attention(model, nowhere)
    assert model.model.layers[0].self_attn.config._attn_implementation == ATTENTION_NAME
    torch.testing.assert_close(
        [model(input_ids=ids, attention_mask=each).logits for each in (None, mask)], before
    )
    plugged.restore()
    assert model.model.layers[0].self_attn.config._attn_implementation == attention


def test_keys_and_values_are_not_repeated_beside_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], nn.functional.scaled_dot_product_attention

    def noted(query, key, value, **more):
        seen.append((query.shape[1], key.shape[1], more["enable_gqa"]))
        return real(query, key, value, **more)

    model = llama()
    patch_attention(model, nowhere)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", noted)
    model(input_ids=torch.arange(14).view(2, 7), attention_mask=torch.tensor([[1] * 7, [1] * 5 + [0] * 2]))
    assert seen == [(4, 2, True)] * 2


def test_the_config_of_the_user_is_unchanged_and_submodules_still_share_it() -> None:
    model = llama()
    config = model.config
    patch_attention(model, nowhere)
    assert config._attn_implementation == "sdpa"
    assert model.config is model.model.config is model.model.layers[1].self_attn.config is not config


def test_a_model_that_asks_for_the_name_of_the_function_keeps_it() -> None:
    config = transformers.FalconConfig(
        vocab_size=67, hidden_size=16, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.FalconForCausalLM(config)
    patch_attention(model, nowhere)
    assert model.config._attn_implementation == "sdpa"


def test_modules_of_others_are_left_alone() -> None:
    assert patch_attention(nn.Sequential(nn.Linear(2, 2)), nowhere).saved_attributes == ()


def test_a_bias_has_rows_of_local_queries_and_columns_of_all_keys() -> None:
    model = transformers.T5EncoderModel(transformers.T5Config(**T5))
    attention = model.encoder.block[0].layer[0].SelfAttention
    whole = attention.compute_bias(9, 9)
    share = TokenShard(9, ((0, 2), (7, 9)))
    plugged = patch_attention(model, lambda queries, keys: (share, share))
    rows = attention.compute_bias(4, 4)
    assert torch.equal(rows, share.take_padded(whole, 2))
    table = attention.relative_attention_bias.weight
    grads = [
        torch.autograd.grad(each.square().sum(), table)[0] for each in (rows, share.take_padded(whole, 2))
    ]
    torch.testing.assert_close(*grads)
    plugged.restore()
    assert torch.equal(attention.compute_bias(9, 9), whole)


def test_a_decoder_s_bias_forbids_what_comes_behind() -> None:
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0))
    share = TokenShard(5, ((1, 3),))
    patch_attention(model, lambda queries, keys: (share, share))
    bias = model.decoder.block[0].layer[0].SelfAttention.compute_bias(2, 2)
    assert (bias[0, 0] > torch.finfo(torch.float32).min).tolist() == [
        [True] * 2 + [False] * 3,
        [True] * 3 + [False] * 2,
    ]


def test_attention_to_an_encoder_gets_a_bias_that_takes_no_memory_and_drops_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0))
    here = TokenShard(5, ((1, 3),)), TokenShard(8, ((0, 3),))
    plugged, cross = (
        patch_attention(model, lambda queries, keys: here),
        model.decoder.block[0].layer[1].EncDecAttention,
    )
    bias = cross.compute_bias(2, 3)
    assert (bias.shape, bias.untyped_storage().nbytes()) == ((1, 3, 2, 8), 4)
    monkeypatch.setattr(
        nn.functional,
        "scaled_dot_product_attention",
        lambda *heads, **more: heads[0].fill_(more["attn_mask"] is None),
    )
    assert sharded_attention(cross, *[torch.zeros(1, 3, 2, 2)] * 3, None, position_bias=bias)[0].all()
    plugged.restore()
    assert not cross.has_relative_attention_bias


def test_arguments_that_sdpa_does_not_have_are_refused() -> None:
    heads = torch.ones(1, 1, 2, 2)
    with pytest.raises(PlanError, match=r"attention takes .softcap., which F\.scaled"):
        sharded_attention(nn.Identity(), heads, heads, heads, None, softcap=30.0)
    with pytest.raises(PlanError, match="causal by a flag, and adds a bias"):
        sharded_attention(nn.Identity(), heads, heads, heads, None, position_bias=heads)
