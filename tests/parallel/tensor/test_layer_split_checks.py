"""Tensor-parallel plans that cannot work are refused before any process starts, with all diagnostics
at once.
"""

from ast import literal_eval
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM
from typer.testing import CliRunner

from meshwright.api import analyze, make_plan, verify
from meshwright.cli import app
from meshwright.model.loading.loader import Model
from meshwright.model.trial.shardable_layers import MIXED_REASON
from meshwright.parallel.expert.expert_tensor_parallel import ExpertTensorParallel
from meshwright.parallel.tensor.layer_split_checks import uneven_split_notes
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, ParamGroupConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.sharding.mesh import Mesh
from tests.parallel.expert.mixture_model import SIZES, batch_of, gpt_oss, sgd_job
from tests.parallel.tensor.odd_llama import llama, planned

TOKENS = torch.zeros(4, 6, dtype=torch.long)
NET = """
import meshwright
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.up, self.down = nn.Conv1d(16, 16, 1), nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x):
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(self.up(x).relu().flip(-1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(256, 16), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 256)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def convolution():
    roles = {"layers.*.conv": "colwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
    return meshwright.Model(Net(), layer_roles=roles)


def missing():
    return meshwright.Model(Net(), layer_roles={"layers.*.upp": "colwise", "layer.*.down": "rowwise"})


def declared():
    return meshwright.Model(Net(), layer_roles={"layers.*.up": "colwise", "layers.*.down": "rowwise"})
"""
CONFIG = """
[model]
source = "net.py:Net"
[data]
source = "text.txt"
sequence = 8
[train]
batch = 4
"""


class Convolutions(nn.Module):
    """No linear layer but the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(11, 8), nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.transpose(1, 2))


def faults(
    model: nn.Module | Model, mesh: Mesh, strategies: tuple = (TensorParallel(),), **job: object
) -> tuple[Diagnostic, ...]:
    analyzed = analyze(lambda: model, {"input_ids": TOKENS, "labels": TOKENS.roll(1, -1)})
    said = Job(ModelConfig("net"), DataConfig("random", sequence=6), TrainConfig(batch=4), **job)
    with pytest.raises(PlanError) as raised:
        make_plan(analyzed, said, mesh, strategies)
    return raised.value.diagnostics


def test_a_model_of_convolutions_is_refused_by_name():
    (said,) = faults(Convolutions(), Mesh(tp=2))
    assert "no pair of linear layers of model is known to split" in said.problem
    assert "layers.*: a convolution: only linear layers and embeddings can be sharded" in said.problem
    assert "meshwright.Model(make_it(), layer_roles=" in said.fix
    assert "meshwright inspect" in said.fix


def test_a_layer_role_that_is_impossible_is_refused():
    (said,) = faults(Model(Convolutions(), layer_roles={"layers.*": "colwise"}), Mesh(tp=2))
    assert said.location == "model.layer_roles"
    assert said.problem == (
        "layers.* is declared as colwise, and that cannot be: a convolution: only linear layers "
        "and embeddings can be sharded"
    )


class Flip(nn.Module):
    """An operation of which the feature flow knows nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1)


class Mixing(nn.Module):
    """A block whose features mix in `between`, between two linear layers."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(6, 12), between, nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self.up(x)))


class MixingNet(nn.Module):
    """Two such blocks between a table and a head."""

    def __init__(self, make_between: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(80, 6), nn.Linear(6, 80)
        self.layers = nn.ModuleList(Mixing(make_between()) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("make_between", "why"),
    [
        (lambda: nn.Softmax(-1), MIXED_REASON),
        (lambda: nn.Sequential(Flip(), nn.LayerNorm(12)), "layers.* does not run on slices: RuntimeError: "),
    ],
    ids=["softmax", "unknown, and a norm"],
)
def test_a_declared_pair_whose_features_mix_is_refused_and_trains_with_gathered_outputs(
    make_between: Callable[[], nn.Module], why: str
):
    def declared(**roles: str) -> Model:
        return Model(MixingNet(make_between), layer_roles={f"layers.*.{key}": roles[key] for key in roles})

    said = faults(declared(up="colwise", down="rowwise"), Mesh(tp=2))
    assert [each.problem.partition(" is declared as ")[0] for each in said] == [
        "layers.*.up",
        "layers.*.down",
    ]
    assert all(f"that cannot be: {why}" in each.problem for each in said), said
    assert 'declare "colwise" for it and its partners' in said[0].fix
    batch = {**batch_of(12), "labels": batch_of(12)["labels"].roll(1, -1)}
    analyzed = analyze(partial(declared, up="colwise", down="colwise"), batch)
    plan = make_plan(analyzed, sgd_job(), Mesh(tp=3))
    (up,) = (
        each.param for each in plan.rank_view(0).param_shardings if each.param.name == "layers.0.up.weight"
    )
    assert up.shape == (4, 6)
    verify(analyzed, plan, [batch]).raise_if_failed()


def olmoe() -> nn.Module:
    """An OLMoE: it normalizes all features of queries and keys at once, before they are heads."""
    return OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=5, num_experts_per_tok=2, eos_token_id=1))


@pytest.mark.parametrize("make", [olmoe, gpt_oss], ids=["olmoe", "gpt-oss"])
def test_a_model_trains_as_the_refusal_of_its_attention_says(make: Callable[[], nn.Module]):
    analyzed = analyze(make, batch_of(4))
    with pytest.raises(PlanError) as raised:
        make_plan(analyzed, sgd_job(), Mesh(tp=4))
    (said,) = raised.value.diagnostics
    assert "put expert_tensor_parallel in its place" in said.fix
    roles = literal_eval(said.fix.partition("layer_roles=")[2].partition(")")[0])
    declared = analyze(lambda: Model(make(), layer_roles=roles), batch_of(4))
    gathered = make_plan(declared, sgd_job(clip=0.5), Mesh(tp=4))
    shapes = {each.param.name: each.param.shape for each in gathered.rank_view(0).param_shardings}
    assert {shapes[f"model.layers.0.self_attn.{each}_proj.weight"] for each in "qkvo"} == {(4, 16)}
    experts = make_plan(analyzed, sgd_job(clip=0.5), Mesh(tp=3), (ExpertTensorParallel(),))
    for model, plan in ((declared, gathered), (analyzed, experts)):
        verify(model, plan, [batch_of(12), batch_of(12, 1)]).raise_if_failed()


def test_widths_with_fewer_features_than_ranks_name_the_plans_that_work():
    with pytest.raises(PlanError) as raised:
        planned(llama(intermediate_size=5), Mesh(tp=6), (TensorParallel(),))
    (said,) = raised.value.diagnostics
    assert said.location == "mesh.tp"
    assert said.problem.endswith("and 5 more divide into 5 units, and tp has 6 ranks")
    assert said.fix == "set mesh.tp to at most 5; mesh.tp = 3 and mesh.dp_shard = 2 are as many ranks"


def test_all_diagnostics_are_reported_at_once():
    group = OptimizerConfig("adamw", groups=(ParamGroupConfig("head.*", lr_factor=-1.0),))
    said = faults(
        Convolutions(), Mesh(tp=2, dp_shard=3), (TensorParallel(), SequenceParallel()), optimizer=group
    )
    text = "\n".join(map(str, said))
    for words in (
        "no pair of linear layers",
        "no strategy uses the axis dp_shard",
        "optimizer.groups",
        "strategies.sequence_parallel",
    ):
        assert words in text, text
    assert "tp: 2 ranks would do the same work" not in text  # its own strategy has said why


def test_sequence_parallel_without_tensor_parallel_is_refused():
    with pytest.raises(PlanError, match=r"strategies\.sequence_parallel: tokens are sharded between column"):
        planned(llama(), Mesh(tp=3), (SequenceParallel(),))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "text.txt").write_text("what a model reads. " * 40)
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("Net", ["--mesh.tp", "2"], "layers.*.conv: a convolution"),
        ("Net", ["--mesh.tp", "2"], "layer_roles={'layers.*.up': 'colwise', 'layers.*.down': 'colwise'}"),
        (
            "convolution",
            ["--mesh.tp", "2"],
            "layers.*.conv is declared as colwise, and that cannot be: a convolution",
        ),
        ("missing", ["--mesh.tp", "2"], "'layers.*.upp' names no module or parameter with weights"),
        ("missing", ["--mesh.tp", "2"], "did you mean 'layers.*.down'?"),
        (
            "declared",
            ["--mesh.tp", "48"],
            "set mesh.tp to at most 40; mesh.tp = 24 and mesh.dp_shard = 2 are as many ranks",
        ),
    ],
)
def test_the_command_refuses_before_anything_starts(
    config: Path, factory: str, options: list[str], message: str
):
    source = f"{config.parent / 'net.py'}:{factory}"
    done = CliRunner().invoke(app, ["plan", str(config), "--model.source", source, *options])
    assert done.exit_code == 2, done.output
    assert message in " ".join((done.output + done.stderr).split())


@pytest.mark.parametrize(("ranks", "is_noted"), [(2, False), (3, True), (4, False)])
def test_heads_that_the_ranks_do_not_divide_are_noted(ranks: int, is_noted: bool):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    analyzed = analyze(lambda: LlamaForCausalLM(config), batch)
    plan = make_plan(analyzed, Job(train=TrainConfig(batch=4)), Mesh(tp=ranks))
    notes = list(uneven_split_notes(plan.sharding))
    assert len(notes) == is_noted
    if is_noted:
        assert "have 4 heads, which do not divide by the 3 ranks along tp: the fullest has 2" in notes[0]
        assert notes[0].endswith("; mesh.tp = 2 or 4 divides them")
