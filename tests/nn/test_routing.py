"""Routings against published models: the same weights give the same output."""

import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

from meshwright.nn import MixtureOfExperts, SigmoidGroups, TopK

WIDTH, INTERMEDIATE, NUM_EXPERTS = 16, 12, 8
NAMES = {"gate.": "router.", "e_score_correction_bias": "choice_bias", "shared_experts.": "shared."}


def mixtral() -> tuple[torch.nn.Module, MixtureOfExperts]:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INTERMEDIATE, "num_local_experts": NUM_EXPERTS}
    config = transformers.MixtralConfig(**sizes, num_experts_per_tok=3)
    ours = MixtureOfExperts(WIDTH, INTERMEDIATE, NUM_EXPERTS, TopK(3))
    return MixtralSparseMoeBlock(config), ours


def olmoe() -> tuple[torch.nn.Module, MixtureOfExperts]:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INTERMEDIATE, "num_experts": NUM_EXPERTS}
    config = transformers.OlmoeConfig(**sizes, num_experts_per_tok=3, norm_topk_prob=False)
    ours = MixtureOfExperts(WIDTH, INTERMEDIATE, NUM_EXPERTS, TopK(3, normalized=False))
    return OlmoeSparseMoeBlock(config), ours


def deepseek_v3() -> tuple[torch.nn.Module, MixtureOfExperts]:
    config = transformers.DeepseekV3Config(
        hidden_size=WIDTH,
        moe_intermediate_size=INTERMEDIATE,
        n_routed_experts=NUM_EXPERTS,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    ours = MixtureOfExperts(
        WIDTH,
        INTERMEDIATE,
        NUM_EXPERTS,
        SigmoidGroups(3, 4, 2, scale=2.5),
        shared_intermediate=2 * INTERMEDIATE,
    )
    return DeepseekV3MoE(config), ours


@pytest.mark.parametrize("family", [mixtral, olmoe, deepseek_v3], ids=lambda each: each.__name__)
def test_the_layer_computes_what_a_published_model_does_with_the_same_weights(family):
    theirs, ours = family()
    theirs.experts.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(1)
    state = {}
    for name, value in theirs.state_dict().items():
        numbers = torch.randn(value.shape, generator=generator)
        state[name] = numbers.abs() * 0.1 if name.endswith("bias") else numbers
    theirs.load_state_dict(state)
    for old, new in NAMES.items():
        state = {name.replace(old, new): value for name, value in state.items()}
    ours.load_state_dict(state)
    hidden = torch.randn(3, 5, WIDTH, generator=generator)
    torch.testing.assert_close(ours(hidden), theirs(hidden.clone()), rtol=1e-4, atol=1e-4)
