"""Model shapes: weights against real models, FLOPs against the paper, and all errors of a shape at once."""

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from meshwright.plan.job.errors import PlanError
from meshwright.planner.analytic.closed_form_memory import estimate_memory
from meshwright.planner.analytic.layer_time import layer_collectives, layer_compute
from meshwright.planner.analytic.model_shape import ModelShape, parse_shape
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.machine import make_machine


def matrices(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters() if weight.ndim > 1)


def test_the_weights_of_a_llama_are_counted():
    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=200,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_hidden_layers=3,
        vocab_size=130,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert ModelShape("llama", 3, 96, 6, 2, 200, 130, gated=True).numel == matrices(model)


def test_the_weights_of_a_gpt_2_are_counted_with_its_head_once():
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=48, n_head=4, n_layer=2, vocab_size=77, n_positions=10))
    assert ModelShape("gpt2", 2, 48, 4, vocab=77, tied=True).numel == matrices(model) - 10 * 48


def test_gpt_3_has_175_billion_weights():
    assert parse_shape("175b: layers 96 hidden 12288 heads 96").numel == pytest.approx(175e9, rel=0.01)


def test_flops_are_those_of_the_formula():
    """Of arXiv 2104.04473, section 5.1, without rerun: 72 B s l h^2 (1 + s / 6h + V / 12 l h)."""
    shape = ModelShape("gpt", 24, 2304, 24, vocab=51200, sequence=1024)
    h, s, layers, words = shape.hidden, shape.sequence, shape.layers, shape.vocab
    paper = 72 * 7 * s * layers * h * h * (1 + s / (6 * h) + words / (12 * layers * h))
    assert shape.flops(7 * s) == pytest.approx(paper, rel=1e-12)


def test_sizes_are_read_in_any_order_and_spelling():
    said = parse_shape("mine: heads=8, layers 4 hidden 512 gated kv_heads 2 ffn 1_408 tied")
    assert said == ModelShape("mine", 4, 512, 8, 2, 1408, gated=True, tied=True)


def test_all_errors_of_a_shape_are_reported_at_once():
    with pytest.raises(PlanError) as raised:
        parse_shape("bad: layer 4 hidden many heads 3")
    text = str(raised.value)
    assert "'layer' is not a size of a model" in text
    assert "did you mean 'layers'?" in text
    assert "hidden without a whole number after it" in text
    assert "no value for layers, hidden" in text


def test_sizes_that_no_model_has_are_refused():
    with pytest.raises(PlanError, match="hidden 100 is not a multiple of heads 3"):
        parse_shape("odd: layers 2 hidden 100 heads 3")
    with pytest.raises(PlanError, match="kv_heads 4 do not divide heads 6"):
        parse_shape("odd: layers 2 hidden 96 heads 6 kv_heads 4")
    with pytest.raises(PlanError, match="layers is 0, and must be a whole number above 0"):
        parse_shape("odd: layers 0 hidden 96 heads 6")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("twice: layers 2 hidden 96 heads 3 layers 4", "layers is given twice"),
        ("less: layers -2 hidden 96 heads 3", "layers without a whole number after it, but '-2'"),
        ("odd: layers \u00b2 hidden 96 heads 3", "layers without a whole number after it, but '\u00b2'"),
        ("under: layers 2_ hidden 96 heads 3", "layers without a whole number after it, but '2_'"),
    ],
)
def test_a_size_that_is_no_number_or_is_said_twice_is_refused(text: str, message: str):
    with pytest.raises(PlanError) as raised:
        parse_shape(text)
    assert raised.value.diagnostics[0].problem == message


@pytest.mark.parametrize(
    "text",
    [
        "x: LAYERS 32 Hidden 4096 heads 32",
        "x: layers 32, hidden 4,096, heads=32",
        "x: layers 32,hidden 4_096 heads 32",
    ],
)
def test_capitals_and_commas_are_read(text: str):
    assert parse_shape(text) == ModelShape("x", 32, 4096, 32)
    assert parse_shape(f"{text} sequence 1,048,576").sequence == 1 << 20


def test_a_head_wider_than_hidden_over_heads_counts_with_its_width():
    usual = parse_shape("a: layers 4 hidden 2560 heads 32 kv_heads 8")
    same, wide = replace(usual, head=80), parse_shape("a: layers 4 hidden 2560 heads 32 kv_heads 8 head 128")
    assert (same.layer_numel, same.flops(8)) == (usual.layer_numel, usual.flops(8))
    assert wide.layer_numel - usual.layer_numel == 2560 * 32 * 48 * 2.5
    given, layout = make_machine("H100", 8), ParallelConfig(tp=2, cp=2, ulysses_degree=2)
    for long in (2048, 40_960):
        less, more = (replace(each, sequence=long) for each in (usual, wide))
        assert layer_compute(more, layout, given).total > layer_compute(less, layout, given).total
        assert layer_collectives(more, layout, given).total > layer_collectives(less, layout, given).total
        assert estimate_memory(more, layout).activations > estimate_memory(less, layout).activations
    scores = [
        layer_compute(replace(each, sequence=1 << 24), layout, given).total for each in (usual, wide)
    ]  # attention alone counts
    assert scores[1] / scores[0] == pytest.approx(1.6, rel=0.01)


def test_heads_of_a_given_width_need_not_divide_the_hidden_size():
    assert parse_shape("a: layers 4 hidden 100 heads 8 head 16").attention_dim == 128
