"""Shardable layers: their kinds, their roles by declaration, by model or by kind, and refusals."""

import pytest
import torch
import transformers
from torch import nn

from meshwright.model.loading.loader import Model, load_factory
from meshwright.model.tensor_parallel.layer_roles import (
    ROLES,
    LayerRole,
    check_roles,
    find_layer_roles,
    hidden_matrices,
    matches_pattern,
)
from meshwright.nn import MixtureOfExperts
from meshwright.plan.job.errors import PlanError

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}


class Net(nn.Module):
    """One module of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.free = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Parameter(torch.zeros(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.conv, self.attend = nn.Conv1d(4, 4, 1), nn.MultiheadAttention(4, 2)


class Experts(nn.Module):
    """Stacked weights, as mixtures of experts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(3, 8, 4)), nn.Parameter(torch.zeros(3, 4, 8))


class TinyRouter(nn.Module):
    """A router by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4))


class Places(nn.Module):
    """Two tables with leading dims of one, as image models have them: no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.others = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.zeros(1, 9, 4))


def by_name(module: nn.Module, declared: dict[str, str] | None = None) -> dict[str, LayerRole]:
    return {socket.name: socket for socket in find_layer_roles(module, declared)}


def of(family: str, head: str, **sizes: object) -> dict[str, LayerRole]:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **sizes})
    return by_name(getattr(transformers, f"{family}{head}")(config))


def test_every_module_with_its_own_weights_is_a_shardable_layer():
    kinds = {name: socket.kind for name, socket in by_name(Net()).items()}
    linears = dict.fromkeys(["layers.0", "layers.1", "layers.2", "attend.out_proj"], "linear")
    assert kinds == {
        "": "weights",
        "embed": "embedding",
        "norm": "norm",
        "conv": "convolution",
        "attend": "attention",
        **linears,
    }
    assert sum(socket.numel for socket in find_layer_roles(Net())) == sum(
        parameter.numel() for parameter in Net().parameters()
    )


def test_experts_and_routers_are_known_and_tables_are_no_experts():
    moe = MixtureOfExperts(4, 3, 2, shared_intermediate=3)
    roles = {
        name: (socket.kind, socket.role)
        for name, socket in by_name(nn.ModuleList([Experts(), TinyRouter(), Places(), moe])).items()
    }
    linears = {f"3.shared.{name}_proj": ("linear", "") for name in ("gate", "up", "down")}
    assert roles == {
        "0": ("experts", "experts"),
        "1": ("router", "replicated"),
        "2": ("weights", ""),
        "3.router": ("router", "replicated"),
        "3.experts": ("experts", "experts"),
        **linears,
    }


def test_the_plan_that_a_transformers_model_declares_gives_its_roles():
    found = of("Llama", "ForCausalLM", num_key_value_heads=2)
    roles = {socket.pattern: (socket.role, socket.source) for socket in found.values()}
    assert roles["model.layers.*.self_attn.q_proj"] == ("colwise", "declared by the model")
    assert roles["model.layers.*.mlp.down_proj"] == ("rowwise", "declared by the model")
    assert roles["model.layers.*.input_layernorm"] == ("replicated", "by its kind")
    assert roles["model.embed_tokens"] == ("", "")
    assert found["lm_head"].kind == "head"
    assert found["lm_head"].role == "colwise"


def test_a_family_without_a_declared_plan_has_shardable_layers_without_roles():
    found = of("GPT2", "LMHeadModel", n_embd=16, n_layer=2, n_head=4)
    assert {socket.kind for socket in found.values()} == {"embedding", "norm", "linear", "head"}
    assert found["transformer.h.1.attn.c_attn"].shape == (16, 48)
    assert [socket.name for socket in found.values() if not socket.role][:2] == [
        "transformer.wte",
        "transformer.wpe",
    ]
    assert not found["transformer.h.0.mlp.c_fc"].role


def test_experts_have_a_role_for_each_of_their_weights():
    found = of("Mixtral", "ForCausalLM", num_key_value_heads=2, num_local_experts=3)
    assert found["model.layers.0.mlp.experts"].kind == "experts"
    assert found["model.layers.0.mlp.experts"].role == "gate_up_proj packed_colwise, down_proj rowwise"
    assert found["model.layers.0.mlp.gate"].kind == "router"


def test_what_the_user_declares_wins():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    found = by_name(model, {"model.layers.*.self_attn.q_proj": "replicated", "model.embed_tokens": "vocab"})
    assert (found["model.layers.1.self_attn.q_proj"].role, found["model.embed_tokens"].role) == (
        "replicated",
        "vocab",
    )
    assert found["model.layers.1.self_attn.q_proj"].source == "declared by you"
    assert found["model.layers.1.self_attn.k_proj"].source == "declared by the model"


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("layers.*.up", "layers.10.up", True),
        ("layers.*.up", "layers.1.mlp.up", False),
        ("layers.1.up", "layers.2.up", False),
        ("*", "layers.1", False),
    ],
)
def test_a_star_matches_one_name_component(pattern: str, name: str, fits: bool):
    assert matches_pattern(pattern, name) is fits


def test_a_pattern_that_names_nothing_is_refused_with_the_nearest():
    with pytest.raises(
        PlanError, match=r"^model\.layer_roles: 'layer\.\*' names no module or parameter(?s:.*)'layers\.\*'"
    ):
        load_factory(lambda: Model(Net(), layer_roles={"layer.*": "rowwise"}), 0, "net")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"norm": "colwize"}, "'norm' has the role 'colwize'\n  repair: did you mean 'colwise'"),
        (["norm"], r"layer_roles are \['norm'\]"),
    ],
)
def test_an_unknown_role_is_refused(declared: object, message: str):
    with pytest.raises(PlanError, match=message):
        load_factory(lambda: Model(Net(), layer_roles=declared), 0, "net")


def test_every_role_may_be_declared():
    check_roles(dict.fromkeys(ROLES, "rowwise") | {f"layers.{role}": role for role in ROLES})
    assert load_factory(lambda: Model(Net(), layer_roles={"layers.*": "rowwise"}), 0, "net").layer_roles == {
        "layers.*": "rowwise"
    }


class Plain(nn.Module):
    """Says nothing of itself: an embedding, hidden layers, a head, which may share the embedding's weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(7, 4), nn.MultiheadAttention(4, 2)
        self.layers, self.table = (
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
            nn.Parameter(torch.zeros(3, 4)),
        )
        self.conv, self.head = nn.Conv1d(4, 4, 1), nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("tied", [False, True])
def test_hidden_matrices_are_those_of_linear_layers_between_embedding_and_head(tied: bool):
    assert hidden_matrices(Plain(tied)) == {
        "attend.in_proj_weight",
        "attend.out_proj.weight",
        "layers.0.weight",
    }


def test_the_head_is_what_the_model_declares():
    with torch.device("meta"):
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))
        base = transformers.GPT2Model(transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=4))
    found = hidden_matrices(llama)
    assert len(found) == 2 * 7
    assert all(name.startswith("model.layers.") for name in found)
    hidden = {
        f"h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")
    }  # the last one is taken for a head
    assert hidden_matrices(base) == hidden
