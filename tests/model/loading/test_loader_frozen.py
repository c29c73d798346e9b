"""Parameters that are not trained: named by patterns, left out of all that training does, exact."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import analyze
from meshwright.model.loading.loader import load_factory, load_model
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import bits, sample_range
from tests.model.unknown_loss import unknown_loss
from tests.tiny_model import (
    Tiny,
    analyzed_model,
    case_of,
    executor_of,
    plan_of,
    tiny_job,
    token_samples,
    verdict_of,
)

FACTORY = (
    "import sys\nfrom tests.tiny_model import Tiny\n\ndef tied():\n    return Tiny(tied=True)\n\n"
    "def build():\n    return Tiny()\n"
)


def trained(folder: Path, frozen: Sequence[str], function: str = "build") -> list[str]:
    """The names that are trained when those that match `frozen` are not."""
    (folder / "model.py").write_text(FACTORY)
    loaded = load_model(ModelConfig(f"{folder / 'model.py'}:{function}", frozen=tuple(frozen)), seed=0)
    return [
        weight.name
        for weight in analyze(loaded, token_samples(2), unknown_loss("labels")).model_spec.trainable
    ]


def test_parameters_that_match_a_pattern_are_not_trained(tmp_path):
    everything = trained(tmp_path, ())
    assert trained(tmp_path, ["embed.*"]) == [name for name in everything if name != "embed.weight"]
    left = trained(tmp_path, ["layers.[01].*", "*.bias"])
    assert left == ["embed.weight", "layers.2.norm.weight", "layers.2.linear.weight", "head.weight"]


def test_a_tied_parameter_is_frozen_under_any_of_its_names(tmp_path):
    for name in ("embed.weight", "head.weight"):
        assert "embed.weight" not in trained(tmp_path, [name], "tied")


def test_patterns_that_match_nothing_are_refused_one_by_one(tmp_path):
    with pytest.raises(PlanError) as caught:
        trained(tmp_path, ["embed.*", "hed.weight", "nothing.*"])
    diagnostics = caught.value.diagnostics
    assert [diagnostic.location for diagnostic in diagnostics] == ["model.frozen"] * 2
    assert diagnostics[0].problem == "'hed.weight' matches no parameter of the model"
    assert diagnostics[0].fix.startswith("did you mean 'head.weight'?")
    assert "'module.*' matches all parameters of a module" in diagnostics[1].fix


def test_a_model_that_is_frozen_whole_is_refused():
    loaded = load_factory(Tiny, 0, "tiny", frozen=("*",))
    analyzed = analyze(loaded, token_samples(2), unknown_loss("labels"))
    with pytest.raises(PlanError, match=r"none of the \d+ parameters of tiny is trained"):
        plan_of(analyzed, 1)


class Adapted(nn.Module):
    """A linear whose weight stays, and two small matrices that are trained in its stead (LoRA)."""

    def __init__(self, linear: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, linear.in_features))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.normal_(self.down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def adapted() -> nn.Module:
    """`Tiny` as peft leaves a model: everything frozen, adapters inside the layers."""
    model = Tiny().requires_grad_(False)
    for layer in model.layers:
        layer.linear = Adapted(layer.linear)
    return model


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_with_frozen_parts_equals_one_device(ranks: int):
    for analyzed in (
        analyze(
            load_factory(Tiny, 0, "tiny", frozen=("embed.*", "layers.1.*")),
            token_samples(2),
            unknown_loss("labels"),
        ),
        analyze(load_factory(adapted, 0, "adapted"), token_samples(2), unknown_loss("labels")),
    ):
        verdict = verdict_of(case_of(analyzed, plan_of(analyzed, ranks)))
        assert verdict.passed, verdict


def test_only_adapters_are_trained_sent_and_kept_in_the_optimizer():
    analyzed = analyze(load_factory(adapted, 0, "adapted"), token_samples(2), unknown_loss("labels"))
    names = [f"layers.{i}.linear.{name}" for i in range(3) for name in ("down", "up")]
    assert sorted(weight.name for weight in analyzed.model_spec.trainable) == names
    plan = plan_of(analyzed, 3, job=tiny_job(optimizer=OptimizerConfig("adamw", lr=0.1)))
    numel = sum(weight.numel for weight in analyzed.model_spec.trainable)

    def rank(world: World) -> tuple[set[str], set[str], float]:
        executor = executor_of(analyzed, plan, world)
        before = bits({name: p.clone() for name, p in executor.state.trained_module.parameters.items()})
        world.ledger.is_recording = True
        for _ in range(2):
            executor.step(sample_range(token_samples(), 4 * world.rank, 4 * world.rank + 4))
        after = bits(executor.state.trained_module.parameters)
        moved = {name for name in after if after[name] != before[name]}
        moments = {
            name.rpartition("/")[2] for name in executor.state_dict() if name.startswith("optimizer/exp_avg/")
        }
        executor.close()
        sent = sum(entry.nbytes for entry in world.ledger.entries if entry.action.startswith("REDUCE"))
        return moved, moments, sent

    for moved, moments, sent in run_on_threads(rank, plan.mesh):
        assert moved == set(names)
        assert moments == set(names)
        assert sent == 2 * 8 * numel


def test_a_frozen_model_s_plan_has_another_hash():
    analyzed = analyzed_model()
    plan = plan_of(analyzed, 1)
    other = replace(plan.job, model=replace(plan.job.model, frozen=("embed.*",)))
    assert replace(plan, job=other).hash != plan.hash
    assert plan.mesh == Mesh()
