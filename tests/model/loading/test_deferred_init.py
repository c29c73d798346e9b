"""Deferred initialization: a recorded constructor is replayed parameter by parameter."""

import copy
import threading

import pytest
import torch
import transformers
from torch import nn

from meshwright.model.loading.deferred_init import defer_init
from meshwright.model.loading.init_recorder import is_meta
from meshwright.plan.job.errors import PlanError
from tests.model.loading.meta_models import assert_alike, made, only

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
CAUSAL = transformers.AutoModelForCausalLM
FAMILIES = {
    "llama": (CAUSAL, transformers.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "gpt2": (
        CAUSAL,
        transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=64, **ENDS),
    ),
    "bert": (transformers.AutoModelForMaskedLM, transformers.BertConfig(**SMALL)),
    "t5": (
        transformers.AutoModelForSeq2SeqLM,
        transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=100),
    ),
    "vit": (
        transformers.AutoModelForImageClassification,
        transformers.ViTConfig(
            **{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=32, patch_size=8
        ),
    ),
    "bart": (
        transformers.AutoModelForSeq2SeqLM,
        transformers.BartConfig(
            d_model=64, encoder_layers=2, decoder_layers=1, vocab_size=100, max_position_embeddings=64
        ),
    ),
    "qwen3": (
        CAUSAL,
        transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16, max_window_layers=2),
    ),
    "gpt_neox": (CAUSAL, transformers.GPTNeoXConfig(**SMALL)),
    "falcon": (
        CAUSAL,
        transformers.FalconConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100, **ENDS
        ),
    ),
    "opt": (
        CAUSAL,
        transformers.OPTConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=100,
            ffn_dim=128,
            word_embed_proj_dim=64,
        ),
    ),
    "gemma2": (CAUSAL, transformers.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=16)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformers_model_has_the_values_of_its_ordinary_construction_in_distribution(family: str):
    auto, config = FAMILIES[family]
    drawn, module = made(lambda: auto.from_config(copy.deepcopy(config)))
    assert all(map(is_meta, drawn.instantiate().parameters()))
    torch.manual_seed(0)
    assert_alike(module, auto.from_config(copy.deepcopy(config)))


def test_gpt2_scales_the_projections_that_end_a_residual_branch():
    _, module = made(lambda: CAUSAL.from_config(copy.deepcopy(FAMILIES["gpt2"][1])))
    block = module.transformer.h[0]
    assert block.attn.c_proj.weight.std().item() == pytest.approx(0.02 / 2, rel=0.06)
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.06)


def test_values_depend_on_the_seed_and_the_name_only():
    def two() -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

    def swapped() -> nn.Module:
        return nn.ModuleDict({"b": nn.Linear(8, 8), "more": nn.Linear(3, 3), "a": nn.Linear(8, 8)})

    first, second = defer_init(two, 0), defer_init(swapped, 0)
    assert torch.equal(first.initial_value("a.weight"), second.initial_value("a.weight"))
    assert torch.equal(first.initial_value("b.weight"), second.initial_value("b.weight"))
    assert not torch.equal(first.initial_value("a.weight"), first.initial_value("b.weight"))
    assert not torch.equal(first.initial_value("a.weight"), defer_init(two, 1).initial_value("a.weight"))


def test_every_precision_starts_from_the_same_numbers():
    drawn = defer_init(lambda: nn.Linear(30, 30).double(), 0)
    single, double = drawn.initial_value("weight"), drawn.initial_value("weight", torch.float64)
    assert torch.equal(single.double(), double)
    assert torch.equal(single.bfloat16(), drawn.initial_value("weight", torch.bfloat16))


def test_a_whole_number_parameter_keeps_its_dtype():
    drawn = defer_init(lambda: only(nn.Module(), nn.Parameter(torch.arange(4), requires_grad=False)), 0)
    assert torch.equal(drawn.initial_value("weight", torch.float64), torch.arange(4))
    assert not drawn.logical_params["weight"].requires_grad


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_names_are_one_logical_parameter_and_stay_tied():
    drawn, module = made(Tied)
    assert list(drawn.logical_params) == ["embedding.weight", "inner.weight", "inner.bias"]
    assert drawn.logical_params["embedding.weight"].aliases == ("head.weight",)
    assert module.head.weight is module.embedding.weight
    again = copy.deepcopy(drawn.instantiate())
    assert again.head.weight is again.embedding.weight
    assert torch.equal(drawn.initial_value("head.weight"), module.embedding.weight)


def test_only_the_parameters_asked_for_become_real():
    drawn = defer_init(Tied, 0)
    module = drawn.instantiate()
    drawn.materialize(module, ["head"])
    assert not is_meta(module.embedding.weight)
    assert module.head.weight is module.embedding.weight
    assert is_meta(module.inner.weight)
    drawn.materialize(module, ["inner.bias"])
    assert is_meta(module.inner.weight)
    assert not is_meta(module.inner.bias)


def test_instances_share_nothing_but_their_initial_values():
    drawn = defer_init(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), 0)
    first, second = drawn.instantiate(), drawn.instantiate()
    for module in (first, second):
        drawn.materialize(module)
    first[0].weight.data.zero_()
    first[1].running_mean.fill_(9)
    assert torch.equal(second[0].weight, drawn.initial_value("0.weight"))
    assert torch.equal(second[1].running_mean, torch.zeros(3))


def test_buffers_widen_for_float64_and_are_never_narrowed():
    drawn = defer_init(lambda: nn.BatchNorm1d(3), 0)
    wide, narrow = drawn.instantiate(), drawn.instantiate()
    drawn.materialize(wide, dtype=torch.float64)
    drawn.materialize(narrow, dtype=torch.bfloat16)
    assert wide.running_var.dtype == torch.float64
    assert narrow.running_var.dtype == torch.float32
    assert wide.num_batches_tracked.dtype == torch.int64


def test_a_copied_layer_starts_as_its_original():
    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        return nn.ModuleList([layer, copy.deepcopy(layer)])

    _, module = made(build)
    assert torch.equal(module[0].weight, module[1].weight)
    assert module[0].weight is not module[1].weight


def test_a_module_with_values_keeps_them():
    given = nn.TransformerEncoderLayer(8, 2, 16)
    _, module = made(lambda: copy.deepcopy(given))
    assert all(torch.equal(a, b) for a, b in zip(given.parameters(), module.parameters(), strict=True))


def test_a_normalised_weight_is_consistent_with_its_norm():
    _, module = made(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)))
    parts = module.parametrizations.weight
    assert torch.allclose(parts.original0[:, 0], parts.original1.norm(dim=1))
    assert torch.allclose(module.weight, parts.original1)


def test_a_parameter_filled_in_part_is_refused_when_its_value_is_asked_for():
    def build() -> nn.Module:
        module = only(nn.Module(), nn.Parameter(torch.empty(4, 3)))
        module.weight.data[:2].normal_()
        return module

    drawn = defer_init(build, 0)
    with pytest.raises(PlanError, match="weight: the initial value holds NaN"):
        drawn.initial_value("weight")


def test_an_unknown_name_is_refused_with_the_nearest():
    drawn = defer_init(Tied, 0)
    with pytest.raises(PlanError, match=r"did you mean 'inner.weight'\?"):
        drawn.materialize(drawn.instantiate(), ["inner.weigh"])


def test_a_module_that_cannot_be_copied_is_refused():
    def build() -> nn.Module:
        layer = nn.Linear(2, 2)
        layer.lock = threading.Lock()
        return layer

    with pytest.raises(PlanError, match="a Linear cannot be copied"):
        defer_init(build, 0).instantiate()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_module_compiled_by_torchscript_is_refused_once_by_its_name():
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh())))

    with pytest.raises(
        PlanError, match=r"^1: the module is compiled by TorchScript \(Sequential\)"
    ) as caught:
        defer_init(build, 0)
    assert len(caught.value.diagnostics) == 1
