"""A model built without being held: what its constructor did is done again, parameter by parameter."""

import copy
import threading

import pytest
import torch
import transformers
from torch import nn

from meshwright.core.errors import PlanError
from meshwright.model.blueprint import Blueprint, blueprint
from meshwright.model.recorder import is_meta

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
CAUSAL = transformers.AutoModelForCausalLM
FAMILIES = {
    "llama": (CAUSAL, transformers.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "gpt2": (CAUSAL, transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=64, **ENDS)),
    "bert": (transformers.AutoModelForMaskedLM, transformers.BertConfig(**SMALL)),
    "t5": (
        transformers.AutoModelForSeq2SeqLM,
        transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=100),
    ),
    "vit": (
        transformers.AutoModelForImageClassification,
        transformers.ViTConfig(**{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=32, patch_size=8),
    ),
    "bart": (
        transformers.AutoModelForSeq2SeqLM,
        transformers.BartConfig(d_model=64, encoder_layers=2, decoder_layers=1, vocab_size=100, max_position_embeddings=64),
    ),
    "qwen3": (CAUSAL, transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16, max_window_layers=2)),
    "gpt_neox": (CAUSAL, transformers.GPTNeoXConfig(**SMALL)),
    "falcon": (
        CAUSAL,
        transformers.FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100, **ENDS),
    ),
    "opt": (
        CAUSAL,
        transformers.OPTConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100, ffn_dim=128, word_embed_proj_dim=64
        ),
    ),
    "gemma2": (CAUSAL, transformers.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=16)),
}


def made(build, seed: int = 0) -> tuple[Blueprint, nn.Module]:
    drawn = blueprint(build, seed)
    module = drawn.instance()
    drawn.materialize(module)
    return drawn, module


def only(module: nn.Module, parameter: nn.Parameter) -> nn.Module:
    module.weight = parameter
    return module


def assert_same_distributions(found: nn.Module, ordinary: nn.Module):
    """Shapes, constants, zeros and buffers equal; random parameters alike in mean and deviation (6 standard errors)."""
    expected = dict(ordinary.named_parameters())
    assert list(dict(found.named_parameters())) == list(expected)
    for name, value in found.named_parameters():
        other = expected[name]
        assert value.shape == other.shape, name
        assert value.requires_grad == other.requires_grad, name
        deviation = other.detach().std().item() if other.numel() > 1 else 0.0
        if deviation == 0:
            assert torch.equal(value, other), name
            continue
        assert torch.equal(value == 0, other == 0), name
        assert value.std().item() == pytest.approx(deviation, rel=6 / (2 * value.numel()) ** 0.5), name
        assert abs(value.mean().item() - other.mean().item()) < 9 * deviation / value.numel() ** 0.5, name
    for (name, buffer), (_, other) in zip(found.named_buffers(), ordinary.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformers_model_has_the_values_of_its_ordinary_construction_in_distribution(family: str):
    auto, config = FAMILIES[family]
    drawn, module = made(lambda: auto.from_config(copy.deepcopy(config)))
    assert all(map(is_meta, drawn.instance().parameters()))
    torch.manual_seed(0)
    assert_same_distributions(module, auto.from_config(copy.deepcopy(config)))


def test_gpt2_scales_the_projections_that_end_a_residual_branch():
    _, module = made(lambda: CAUSAL.from_config(copy.deepcopy(FAMILIES["gpt2"][1])))
    block = module.transformer.h[0]
    assert block.attn.c_proj.weight.std().item() == pytest.approx(0.02 / 2, rel=0.06)
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.06)


class Initialised(nn.Module):
    """One of everything that torch.nn.init and tensor methods can do."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Linear(8, 12)
        nn.init.orthogonal_(self.orthogonal.weight, gain=2.0)
        self.identity = nn.Linear(8, 8)
        nn.init.eye_(self.identity.weight)
        self.dirac = nn.Conv1d(4, 4, 3)
        nn.init.dirac_(self.dirac.weight)
        self.recurrent = nn.LSTM(8, 8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.embedding = nn.Embedding(20, 8, padding_idx=3)
        self.truncated = nn.Linear(64, 64)
        nn.init.trunc_normal_(self.truncated.weight, std=1.0, a=-1.0, b=1.0)
        self.listed = nn.ParameterList([nn.Parameter(torch.full((3,), 0.25)), nn.Parameter(torch.ones(3))])
        self.named = nn.ParameterDict({"zeros": nn.Parameter(torch.zeros(2, 2))})
        self.register_parameter("counted", nn.Parameter(torch.arange(6.0).view(2, 3)))
        self.edited = nn.Linear(10, 20)
        with torch.no_grad():
            self.edited.bias.zero_()
            self.edited.bias[3:5] = torch.tensor([1.0, 2.0])
            self.edited.bias.add_(torch.arange(20.0))
            self.edited.weight.fill_(2.0)
            self.edited.weight.data[torch.tensor([True] * 5 + [False] * 15)] = 7.0
            self.edited.weight.mul_(torch.full((20, 10), 0.5))
        self.wide = nn.Linear(2, 2).double()
        self.to("cpu")


def test_every_initialiser_of_torch_is_recorded():
    _, module = made(Initialised)
    torch.manual_seed(0)
    assert_same_distributions(module, Initialised())
    weight = module.orthogonal.weight
    assert torch.allclose(weight.T @ weight, 4 * torch.eye(8), atol=1e-5)
    assert module.truncated.weight.abs().max() <= 1


def test_a_truncated_normal_imported_by_name_is_recorded():
    from torch.nn.init import trunc_normal_

    _, module = made(lambda: only(nn.Module(), trunc_normal_(nn.Linear(64, 64).weight, std=0.5, a=-0.5, b=0.5)))
    assert module.weight.std().item() == pytest.approx(0.27, rel=0.05)


def test_a_value_computed_before_registration_is_kept():
    _, module = made(lambda: only(nn.Module(), nn.Parameter(torch.randn(3) * 0.02 + torch.tensor([1.0, 2.0, 3.0]))))
    assert torch.allclose(module.weight, torch.tensor([1.0, 2.0, 3.0]), atol=0.2)
    assert torch.equal(
        module.weight, made(lambda: only(nn.Module(), nn.Parameter(torch.randn(3) * 0.02 + torch.arange(1.0, 4.0))))[1].weight
    )


def test_the_constructor_leaves_the_generator_of_torch_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    blueprint(lambda: only(nn.Module(), nn.Parameter(torch.randn(3))), 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_values_depend_on_the_seed_and_the_name_only():
    def two() -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

    def swapped() -> nn.Module:
        return nn.ModuleDict({"b": nn.Linear(8, 8), "more": nn.Linear(3, 3), "a": nn.Linear(8, 8)})

    first, second = blueprint(two, 0), blueprint(swapped, 0)
    assert torch.equal(first.value("a.weight"), second.value("a.weight"))
    assert torch.equal(first.value("b.weight"), second.value("b.weight"))
    assert not torch.equal(first.value("a.weight"), first.value("b.weight"))
    assert not torch.equal(first.value("a.weight"), blueprint(two, 1).value("a.weight"))


def test_every_precision_starts_from_the_same_numbers():
    drawn = blueprint(lambda: nn.Linear(30, 30).double(), 0)
    single, double = drawn.value("weight"), drawn.value("weight", torch.float64)
    assert torch.equal(single.double(), double)
    assert torch.equal(single.bfloat16(), drawn.value("weight", torch.bfloat16))


def test_a_whole_number_parameter_keeps_its_dtype():
    drawn = blueprint(lambda: only(nn.Module(), nn.Parameter(torch.arange(4), requires_grad=False)), 0)
    assert torch.equal(drawn.value("weight", torch.float64), torch.arange(4))
    assert not drawn.logical["weight"].requires_grad


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_names_are_one_logical_parameter_and_stay_tied():
    drawn, module = made(Tied)
    assert list(drawn.logical) == ["embedding.weight", "inner.weight", "inner.bias"]
    assert drawn.logical["embedding.weight"].aliases == ("head.weight",)
    assert module.head.weight is module.embedding.weight
    again = copy.deepcopy(drawn.instance())
    assert again.head.weight is again.embedding.weight
    assert torch.equal(drawn.value("head.weight"), module.embedding.weight)


def test_only_the_parameters_asked_for_become_real():
    drawn = blueprint(Tied, 0)
    module = drawn.instance()
    drawn.materialize(module, ["head"])
    assert not is_meta(module.embedding.weight)
    assert module.head.weight is module.embedding.weight
    assert is_meta(module.inner.weight)
    drawn.materialize(module, ["inner.bias"])
    assert is_meta(module.inner.weight)
    assert not is_meta(module.inner.bias)


def test_instances_share_nothing_but_their_initial_values():
    drawn = blueprint(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), 0)
    first, second = drawn.instance(), drawn.instance()
    for module in (first, second):
        drawn.materialize(module)
    first[0].weight.data.zero_()
    first[1].running_mean.fill_(9)
    assert torch.equal(second[0].weight, drawn.value("0.weight"))
    assert torch.equal(second[1].running_mean, torch.zeros(3))


def test_buffers_widen_for_float64_and_are_never_narrowed():
    drawn = blueprint(lambda: nn.BatchNorm1d(3), 0)
    wide, narrow = drawn.instance(), drawn.instance()
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


def test_other_threads_build_ordinary_modules_meanwhile():
    built: list[nn.Module] = []

    def build() -> nn.Module:
        other = threading.Thread(target=lambda: built.append(nn.Linear(4, 4)))
        other.start()
        other.join()
        return nn.Linear(2, 2)

    blueprint(build, 0)
    assert not is_meta(built[0].weight)


def test_everything_patched_is_restored_when_the_constructor_fails():
    original = nn.init._no_grad_trunc_normal_

    def fail() -> nn.Module:
        nn.Linear(2, 2)
        raise KeyError("no")

    with pytest.raises(KeyError):
        blueprint(fail, 0)
    assert nn.init._no_grad_trunc_normal_ is original
    assert not is_meta(nn.Linear(2, 2).weight)


def drops_half() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight.data.bernoulli_(0.5)
    return layer


def reads_a_value() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.scale = layer.weight.norm().item()
    return layer


def fills_a_buffer() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_buffer("seen", torch.zeros(4, 4))
    layer.seen.copy_(layer.weight.data)
    return layer


def makes_a_buffer() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_buffer("seen", layer.weight.detach().clone())
    return layer


def shares_memory() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.other = nn.Parameter(layer.weight.data)
    return layer


def shares_memory_beforehand() -> nn.Module:
    base, layer = torch.randn(4), nn.Linear(4, 4)
    layer.first, layer.second = nn.Parameter(base), nn.Parameter(base)
    return layer


def writes_behind() -> nn.Module:
    base, layer = torch.randn(4), nn.Linear(4, 4)
    layer.first = nn.Parameter(base)
    base.zero_()
    return layer


@pytest.mark.parametrize(
    ("build", "where", "words"),
    [
        (drops_half, "Linear.weight", "aten.bernoulli_.float on a parameter cannot be replayed"),
        (reads_a_value, "", "reads the value of a parameter"),
        (fills_a_buffer, "Linear.weight", "into an ordinary tensor or buffer"),
        (makes_a_buffer, "seen", "the buffer is computed from a parameter"),
        (shares_memory, "other", "shares its memory with weight"),
        (shares_memory_beforehand, "Linear.second", "shares its memory with Linear.first"),
        (writes_behind, "the tensor written by aten.zero_.default", "shares its memory with Linear.first"),
        (lambda: only(nn.Module(), nn.Parameter(torch.empty(3, 4))), "weight", "(3, 4) is never initialised"),
        (lambda: nn.LazyLinear(3), "LazyLinear.weight", "a lazy parameter"),
        (lambda: only(nn.Module(), nn.Parameter(torch.ones(3, 3).to_sparse())), "Module.weight", "layout torch.sparse_coo"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*Lazy modules are a new feature.*")
def test_what_cannot_be_replayed_is_refused_by_name(build, where: str, words: str):
    with pytest.raises(PlanError) as caught:
        blueprint(build, 0)
    assert caught.value.faults[0].where == where
    assert words in caught.value.faults[0].what


def test_all_parameters_that_are_never_initialised_are_reported_together():
    with pytest.raises(PlanError) as caught:
        blueprint(lambda: nn.ParameterList(nn.Parameter(torch.empty(2)) for _ in range(3)), 0)
    assert [fault.where for fault in caught.value.faults] == ["0", "1", "2"]


def test_a_parameter_filled_in_part_is_refused_when_its_value_is_asked_for():
    def build() -> nn.Module:
        module = only(nn.Module(), nn.Parameter(torch.empty(4, 3)))
        module.weight.data[:2].normal_()
        return module

    drawn = blueprint(build, 0)
    with pytest.raises(PlanError, match="weight: the initial value holds NaN"):
        drawn.value("weight")


def test_an_unknown_name_is_refused_with_the_nearest():
    drawn = blueprint(Tied, 0)
    with pytest.raises(PlanError, match=r"did you mean 'inner.weight'\?"):
        drawn.materialize(drawn.instance(), ["inner.wieght"])


def test_a_module_that_cannot_be_copied_is_refused():
    def build() -> nn.Module:
        layer = nn.Linear(2, 2)
        layer.lock = threading.Lock()
        return layer

    with pytest.raises(PlanError, match="a Linear cannot be copied"):
        blueprint(build, 0).instance()
