"""Unmodified models run in stages: loss and all gradients equal those of one backward, for every division."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.models.custom_models import ResNet, Translator, TwoTowers, UNet
from meshwright.model.analysis.forward_graph_trace import ForwardGraphCache
from meshwright.model.blocks.block_forward_backward import ForwardDriver
from meshwright.model.pipeline.stage_forward import run_stage
from meshwright.model.rng.stateless_dropout import StatelessDropout
from meshwright.model.rng.stateless_rng import StatelessRNG
from tests.model.block_backward import analyze_model
from tests.model.blocks.test_block_forward_backward_families import PADDED, PAIRS, TOKENS, build
from tests.model.pipeline.staged_model import (
    Normed,
    Ranks,
    Total,
    num_values_and_nbytes_crossing,
    ranks,
    same,
    stage_divisions,
    steps,
)

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "use_cache": False,
}
WIDE = {**SIZES, "intermediate_size": 24}
GROUPED = {**WIDE, "num_key_value_heads": 2}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "vocab_size": 61,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "resid_pdrop": 0,
    "embd_pdrop": 0,
    "attn_pdrop": 0,
}
T5 = {
    "vocab_size": 61,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
MIXTRAL = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
EMBEDDING, HEAD = {"vocab_size": 61, "use_cache": False}, {"use_cache": False}
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, torch.Tensor], int]] = {
    "llama": ("Llama", "ForCausalLM", GROUPED, PADDED, 1),
    "qwen3": ("Qwen3", "ForCausalLM", {**GROUPED, "head_dim": 8}, PADDED, 1),
    "gemma2": ("Gemma2", "ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}, PADDED, 1),
    "gpt-neox with parallel branches": ("GPTNeoX", "ForCausalLM", WIDE, PADDED, 1),
    "gpt2, whose head is tied to its embedding": (
        "GPT2",
        "LMHeadModel",
        {**GPT2, **HEAD},
        {"input_ids": TOKENS},
        1,
    ),
    "mixtral, whose router logits are captured": (
        "Mixtral",
        "ForCausalLM",
        MIXTRAL,
        {"input_ids": TOKENS},
        4,
    ),
    "bert": ("Bert", "ForMaskedLM", {**WIDE, **STILL}, PADDED, 1),
    "t5, whose decoder layers all take the end of the encoder": (
        "T5",
        "ForConditionalGeneration",
        {**T5, **HEAD},
        PAIRS,
        4,
    ),
}
IMAGE = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)}


def weighed(outputs: Any) -> torch.Tensor:
    """A scalar of the logits, and of the auxiliary loss where there is one."""
    total = outputs.logits.sin().sum()
    return total + 3 * outputs.aux_loss if "aux_loss" in outputs else total


def analyzed_and_checked(
    build: Callable[[], nn.Module],
    example: dict[str, torch.Tensor],
    blocks: Sequence[str] | None = None,
    total: Total = weighed,
    most: int = 4,
) -> Ranks:
    """The model, after every border alone and some divisions into 3 and 4 parts gave the gradients of one
    backward.
    """
    one = ranks(build, example, blocks, total)
    found = one.boundaries.open_boundaries()
    assert found == one.boundaries.block_calls[1:]
    for boundaries in stage_divisions(found, most):
        assert one.error(boundaries) < 1e-12, boundaries
    assert one.error(found[:: max(1, len(found) // 3)], lean=True) < 1e-12
    return one


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_in_stages_has_the_gradients_of_one_backward(name: str):
    family, head, sizes, example, most = FAMILIES[name]
    one = analyzed_and_checked(build(family, head, sizes), example)
    assert num_values_and_nbytes_crossing(one.boundaries, 2)[0] == most


def test_vit_hands_one_value_from_layer_to_layer():
    one = analyzed_and_checked(
        build("ViT", "ForImageClassification", {**WIDE, **STILL, "image_size": 8, "patch_size": 4}), IMAGE
    )
    assert num_values_and_nbytes_crossing(one.boundaries, 2)[0] == 1


def squared(outputs: torch.Tensor) -> torch.Tensor:
    """A scalar of outputs that are one tensor."""
    return outputs.square().sum()


def test_a_u_net_sends_its_skips_past_every_stage():
    one = analyzed_and_checked(UNet, {"x": IMAGE["pixel_values"]}, total=squared)
    live = {
        boundary: [str(value) for value in one.boundaries.live_values(boundary)]
        for boundary in one.boundaries.open_boundaries()
    }
    assert [len(values) for values in live.values()] == [1, 2, 3, 2, 1]


def test_two_towers_join_after_both():
    samples = torch.linspace(-1, 1, 96).view(3, 32)
    one = analyzed_and_checked(TwoTowers, {"left": samples[:, :16], "right": samples[:, 16:]}, total=squared)
    assert [value.consumers for value in one.boundaries.values if value.producer.startswith("left")][-1] == (
        one.boundaries.block_calls[-1],
    )


def test_an_encoder_decoder_calls_its_embedding_twice_and_passes_a_mean_to_every_decoder_layer():
    pairs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :5]}
    one = analyzed_and_checked(Translator, pairs, total=lambda outputs: outputs.sin().sum())
    mean = next(value for value in one.boundaries.values if value.op == "mean")
    assert mean.shape(7) == (7, 1, 16)  # it is sent before it is expanded
    assert mean.consumers == ("encoder.1", "decoder.0")


def test_a_residual_network():
    analyzed_and_checked(ResNet, {"x": IMAGE["pixel_values"]}, total=squared)


def test_batch_norms_write_their_statistics_in_their_own_stage_only():
    blocks = [f"layers.{n}" for n in range(4)]
    one = analyzed_and_checked(Normed, {"x": torch.linspace(-2, 2, 30).view(5, 6).sin()}, blocks, squared)
    assert [value.op for value in one.boundaries.values] == ["add"] * 3


def test_fine_blocks_send_the_residual_once():
    sizes = {**WIDE, "num_hidden_layers": 2, "num_key_value_heads": 2}
    fine = [f"model.layers.{n}.{part}" for n in range(2) for part in ("input_layernorm", "self_attn", "mlp")]
    one = analyzed_and_checked(
        build("Llama", "ForCausalLM", sizes), PADDED, ["model.embed_tokens", *fine, "lm_head"], most=3
    )
    live = {
        boundary: len(one.boundaries.live_values(boundary)) for boundary in one.boundaries.open_boundaries()
    }
    assert live["model.layers.0.self_attn"] == 2  # what is normed, and the residual
    assert live["model.layers.1.input_layernorm"] == 1


def test_other_batch_sizes_and_lengths_than_in_the_trial():
    other = {
        "input_ids": torch.arange(35).view(5, 7) * 3 % 61,
        "attention_mask": torch.ones(5, 7, dtype=torch.long),
    }
    one = ranks(build("Llama", "ForCausalLM", GROUPED), PADDED, total=weighed, samples=other)
    assert one.error(one.boundaries.open_boundaries()[1:4]) < 1e-12
    wide = ranks(
        build("T5", "ForConditionalGeneration", {**T5, **HEAD}), PAIRS, total=weighed, samples={**PAIRS}
    )
    assert wide.error(wide.boundaries.open_boundaries()[2:5]) < 1e-12


@pytest.mark.parametrize("name", ["llama", "t5, whose decoder layers all take the end of the encoder"])
def test_an_evaluation_in_stages_gives_the_same_outputs(name: str):
    family, head, sizes, example, _ = FAMILIES[name]
    one = ranks(build(family, head, sizes), example, total=weighed)
    module = one.analyzed.make_module("cpu", torch.float64)[0].eval()
    with torch.no_grad():
        expected = module(**one.inputs)
    found = one.evaluated(
        one.boundaries.open_boundaries()[1::2], ForwardGraphCache(one.analyzed, torch.float64)
    )
    assert same(found.logits, expected.logits)


def test_tied_weights_get_a_partial_gradient_in_each_stage_that_uses_them():
    one = ranks(build("GPT2", "LMHeadModel", {**GPT2, **HEAD}), {"input_ids": TOKENS}, total=weighed)
    tied = one.analyzed.model_spec.params[0]
    assert tied.block_calls == ("transformer.wte", "lm_head")
    parts = one.boundaries.stages(["lm_head"])
    gradients, _ = steps(
        one, parts, [one.analyzed.make_module("cpu", torch.float64) for _ in parts], lean=False
    )
    shares = [each[tied.name] for each in gradients]
    assert all(share.abs().max() > 0 for share in shares)
    torch.testing.assert_close(sum(shares), one.truth[tied.name], rtol=0, atol=1e-12)


def test_dropout_masks_are_those_of_the_whole_model():
    sizes = {**GPT2, **HEAD, "resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.1}
    analyzed = analyze_model(build("GPT2", "LMHeadModel", sizes), {"input_ids": TOKENS})
    graph = ForwardGraphCache(analyzed, torch.float64).get({"input_ids": TOKENS})
    rng = StatelessRNG(3, analyzed.draw_sites)
    module, blocks, _ = analyzed.make_module("cpu", torch.float64)
    drive = ForwardDriver(blocks)
    store: dict[str, torch.Tensor] = {}
    with StatelessDropout(rng):
        rng.begin_forward(0, torch.tensor([4, 9]))
        expected = drive.forward(rng.enter_block, lambda: module(input_ids=TOKENS))[0].logits
        for part in graph.boundaries.stages(
            ["transformer.wpe", "transformer.h.0", "transformer.h.2", "lm_head"]
        ):
            rng.begin_forward(0, torch.tensor([4, 9]))
            ran = run_stage(
                lambda: module(input_ids=TOKENS),
                drive,
                graph,
                part,
                2,
                store,
                before_block=rng.enter_block,
                on_skipped_call=rng.enter_block,
            )
            store |= ran.sent_values
    assert torch.equal(ran.outputs.logits, expected)
