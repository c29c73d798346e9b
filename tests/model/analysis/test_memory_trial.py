"""The activation memory of block calls, in bytes, as measured by a trial on fake tensors."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
import transformers
from torch import nn

from meshwright.api import analyze
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Loss
from meshwright.plan.model_spec.op_sizes_and_memory import BlockMemory, LinearInSamples, ModelMemory
from tests.model.block_backward import Block, Chain
from tests.parallel.tensor.odd_llama import batches, llama

TOKENS, HEADS, WORDS = 40, 6, 67
MASK = TOKENS * TOKENS * 4  # bytes of what torch's kernel makes of one of bools, per row


def squares() -> Loss:
    """Of the outputs, so that the loss needs nothing else."""
    return Loss(
        lambda outputs, batch: outputs.square().sum(),
        lambda batch: torch.tensor(float(len(batch["x"]))),
        targets=(),
    )


def chained(block, glue=None) -> ModelMemory:
    chain = glue or (lambda model, x: model.head(model.layers[1](model.layers[0](x))))
    analyzed = analyze(
        lambda: Chain(chain, block).float(), {"x": torch.linspace(-2, 2, 24).view(4, 6)}, loss=squares()
    )
    return measured(analyzed)


def measured(analyzed: AnalyzedModel, compute: torch.dtype = torch.float32) -> ModelMemory:
    found = analyzed.measure_memory(torch.float32, compute)
    assert found is not None
    assert [load.block_call for load in found.block_calls] == list(analyzed.model_spec.block_calls)
    return found


def layer_of(analyzed: AnalyzedModel, compute: torch.dtype = torch.float32) -> BlockMemory:
    return next(
        load for load in measured(analyzed, compute).block_calls if load.block_call == "model.layers.0"
    )


def test_saved_activations_count_once_and_the_backward_adds_its_own():
    def block(block: Block, x: torch.Tensor) -> torch.Tensor:
        return block.linear(x).exp().sin()

    first = chained(block).block_calls[0]
    assert first.output == first.saved_activations == LinearInSamples(0, 6 * 4)
    assert first.backward == LinearInSamples(
        0, 3 * 6 * 4
    )  # of what comes out, of sin, of exp; then exp's and its own output are gone


def test_tensors_made_by_glue_and_saved_by_a_block_count_as_glue():
    def block(block: Block, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return block.linear(x) * scale

    def glue(model: Chain, x: torch.Tensor) -> torch.Tensor:
        scale = x.exp()
        return model.head(model.layers[1](model.layers[0](x, scale), scale))

    found = chained(block, glue)
    assert found.glue == LinearInSamples(0, 6 * 4)
    assert found.block_calls[0].saved_activations == LinearInSamples(
        0, 0
    )  # what is multiplied is not needed, for the scale has no gradient


def test_a_mask_that_only_tracing_needs_is_not_counted():
    plain = {
        "input_ids": batches(1, length=TOKENS)[0]["input_ids"],
        "labels": batches(1, length=TOKENS)[0]["labels"],
    }
    padded = {**plain, "attention_mask": torch.ones(4, TOKENS, dtype=torch.long)}
    hidden = {
        **plain,
        "attention_mask": torch.ones(4, TOKENS, dtype=torch.long).index_fill(1, torch.tensor([0]), 0),
    }
    first, second, third = (layer_of(analyze(llama(), batch)) for batch in (plain, padded, hidden))
    assert first == second
    assert third.saved_activations.per_sample - first.saved_activations.per_sample >= MASK


def test_attention_scores_computed_by_the_model_are_counted():
    eager, fused = (
        layer_of(analyze(llama(attn_implementation=how), batches(1, length=TOKENS)[0]))
        for how in ("eager", "sdpa")
    )
    assert eager.saved_activations.per_sample - fused.saved_activations.per_sample > HEADS * MASK
    assert eager.backward.per_sample > fused.backward.per_sample


def test_half_precision_halves_floats_and_casts_weights_for_any_number_of_samples():
    analyzed = analyze(llama(), batches(1, length=TOKENS)[0])
    wide, mixed = layer_of(analyzed), layer_of(analyzed, torch.bfloat16)
    assert wide.saved_activations.fixed == wide.saved_activations.weight_sized == 0
    cast = sum(p.numel() for name, p in llama().named_parameters() if "layers.0" in name and p.ndim == 2) * 2
    assert mixed.saved_activations.weight_sized == pytest.approx(cast, rel=0.01)
    assert (
        0.5 * wide.saved_activations.per_sample
        < mixed.saved_activations.per_sample
        < wide.saved_activations.per_sample
    )


def test_activations_have_the_dtypes_of_the_device_that_trains():
    def block(block: Block, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(block.linear(x), (6,))

    glue = lambda model, x: model.head(model.layers[1](model.layers[0](x)))  # noqa: E731
    analyzed = analyze(
        lambda: Chain(glue, block).float(), {"x": torch.linspace(-2, 2, 24).view(4, 6)}, loss=squares()
    )
    outputs = {
        device: analyzed.measure_memory(torch.float32, compute, device).block_calls[0].output.per_sample
        for device, compute in (("cpu", torch.bfloat16), ("cuda", torch.bfloat16))
    }
    assert outputs == {"cpu": 6 * 2, "cuda": 6 * 4}
    plain = analyzed.measure_memory(torch.float32, torch.float32)
    assert analyzed.measure_memory(torch.float32, torch.float32, "cuda") == plain


def test_weight_gradients_are_measured_separately_also_those_of_a_tied_embedding():
    batch = batches(1, length=TOKENS)[0]
    untied, tied = (
        measured(analyze(llama(tie_word_embeddings=tied), batch)).block_calls[0] for tied in (False, True)
    )
    table = WORDS * llama().config.hidden_size * 4
    assert (untied.backward.weight_sized, untied.backward_with_grads.weight_sized) == (0, table)
    assert tied.backward.weight_sized == table  # made anew, then added to what is there


def test_a_loss_holds_logits_its_own_tensors_and_their_gradient():
    found = measured(analyze(llama(), batches(1, length=TOKENS)[0]))
    logits = TOKENS * WORDS * 4
    assert found.loss.per_sample == pytest.approx(2 * logits, rel=0.05)


def test_nothing_is_measured_for_a_forward_that_reads_values_or_an_unknown_loss():
    def glue(model: Chain, x: torch.Tensor) -> torch.Tensor:
        y = model.layers[0](x)
        return model.head(y if y.sum() > 0 else -y)

    looking = analyze(
        lambda: Chain(glue, None).float(), {"x": torch.linspace(-2, 2, 24).view(4, 6)}, loss=squares()
    )
    assert looking.measure_memory(torch.float32, torch.float32) is None
    whole = Loss(
        lambda outputs, batch: outputs.sum(), lambda batch: torch.tensor(1.0), targets=(), whole_batch=True
    )
    assert (
        analyze(nn.Sequential(nn.Linear(6, 6)), {"input": torch.ones(4, 6)}, loss=whole).measure_memory(
            torch.float32, torch.float32
        )
        is None
    )


def test_a_model_that_is_one_block_is_measured_too():
    analyzed = analyze(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
        {"input": torch.ones(4, 6)},
        loss=Loss(
            lambda outputs, batch: F.mse_loss(outputs, torch.zeros_like(outputs), reduction="sum"),
            lambda batch: torch.tensor(1.0),
            targets=(),
        ),
    )
    assert measured(analyzed).block_calls


def test_it_is_measured_once_for_each_pair_of_dtypes(monkeypatch: pytest.MonkeyPatch):
    analyzed = analyze(llama(), batches(1)[0])
    first = analyzed.measure_memory(torch.float32, torch.float32)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", None)
    assert analyzed.measure_memory(torch.float32, torch.float32) is first


def mixtral(experts: str = "grouped_mm") -> nn.Module:
    """A mixture whose experts are large beside its tokens."""
    sizes = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(
        vocab_size=WORDS, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, **sizes
    )
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation(experts)
    return model


def test_experts_keep_the_activations_of_their_tokens_and_no_copies_of_weights():
    """Weights that are gathered by token, as in other trials, would be 20 times as large."""
    layer = layer_of(analyze(mixtral(), batches(1, length=TOKENS)[0]))
    tokens = 2 * TOKENS  # each goes to two experts
    products = tokens * (16 + 2 * 64 + 64 + 64 + 2 * 16) * 4
    assert layer.saved_activations.weight_sized == 0
    assert products < layer.saved_activations.per_sample < 1.5 * products


def test_experts_that_gather_weights_by_the_users_own_setting_are_counted_so():
    gathered, grouped = (
        layer_of(analyze(mixtral(experts), batches(1, length=TOKENS)[0])).saved_activations.per_sample
        for experts in ("batched_mm", "eager")
    )
    copies = 2 * TOKENS * 3 * 64 * 16 * 4
    assert gathered > copies > 5 * grouped
