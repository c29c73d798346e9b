"""Routers take recorded experts, with the scores of their own; what chooses otherwise is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.experts.mixture_models import MIXTURES
from meshwright.model.recording.router_replay import replay_routes, route_diagnostics
from meshwright.nn import ExpertChoice, GShard, MixtureOfExperts, Routing, SigmoidGroups, Switch, TopK
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import ExpertsCall

SAMPLES, TOKENS, WIDTH, EXPERTS = 2, 6, 8, 6


def call(layer: nn.Module, num_experts: int, top_k: int) -> ExpertsCall:
    """The call of the experts of `layer`."""
    params = tuple(f"experts.{name}" for name, _ in layer.experts.named_parameters())
    return ExpertsCall("experts", "", params, num_experts, top_k, TOKENS, WIDTH)


def replaying(layer: nn.Module, num_experts: int, routes: torch.Tensor) -> None:
    """Makes `layer`, the only one of a model, take `routes` (samples, tokens, k)."""

    def wrap(name: str, wrapper: Any) -> None:
        module = layer.get_submodule(name)
        own = module.forward
        module.forward = lambda *args, **kwargs: wrapper(own, *args, **kwargs)

    calls = [call(layer, num_experts, routes.shape[-1])]
    replay_routes(wrap, calls, calls, lambda: routes.unsqueeze(2))


def given_experts(layer: nn.Module) -> list[torch.Tensor]:
    """What the experts of `layer` are given: index and weights of each call, from now on."""
    found = list[torch.Tensor]()

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.extend([*args, *kwargs.values()][1:])

    layer.experts.register_forward_pre_hook(note, with_kwargs=True)
    return found


@pytest.mark.parametrize(
    "family",
    [name for name in MIXTURES if not name.startswith("llama") and "Llama4" not in name],
)
def test_routers_of_transformers_weight_recorded_experts_by_their_scores(family: str):
    """Their own choice, rotated by one expert at every second token, and recorded at every third."""
    torch.manual_seed(0)
    model: Any = MIXTURES[family]()
    layer = next(module for module in model.modules() if "experts" in dict(module.named_children()))
    experts = next(iter(layer.experts.parameters())).shape[0]
    found = given_experts(layer)
    hidden = torch.randn(SAMPLES, TOKENS, model.config.hidden_size)
    layer(hidden)
    index, weights = found
    routes = index.clone()
    routes[::2] = (routes[::2] + 1) % experts
    recorded = routes.clone()
    recorded[2::3] = -1
    routes[2::3] = index[2::3]
    replaying(layer, experts, recorded.view(SAMPLES, TOKENS, -1))
    found.clear()
    layer(hidden)
    assert torch.equal(found[0], routes)
    same = (routes == index).all(1)
    assert torch.equal(found[1][same], weights[same])
    assert same.any()
    assert not torch.allclose(found[1][~same], weights[~same], rtol=1e-3)
    assert found[1].requires_grad


@pytest.mark.parametrize("routing", [TopK(2), TopK(2, normalized=False), SigmoidGroups(2, 3, 2)])
def test_routings_of_the_layer_replay_too(routing: Routing):
    torch.manual_seed(0)
    layer = MixtureOfExperts(WIDTH, 12, EXPERTS, routing)
    routes = torch.rand(SAMPLES, TOKENS, EXPERTS).argsort(-1)[..., :2]
    found, hidden = given_experts(layer), torch.randn(SAMPLES, TOKENS, WIDTH)
    replaying(layer, EXPERTS, routes)
    layer(hidden)
    assert torch.equal(found[0], routes.flatten(0, 1))
    if isinstance(routing, TopK):
        scores = layer.router(hidden).softmax(-1).gather(-1, routes)
        expected = scores / scores.sum(-1, keepdim=True) if routing.normalized else scores
        torch.testing.assert_close(found[1], expected.flatten(0, 1))


@pytest.mark.parametrize("routing", [Switch(1.0), GShard(1.0), ExpertChoice(1.0)])
def test_routings_with_capacity_are_refused(routing: Routing):
    torch.manual_seed(0)
    layer = MixtureOfExperts(WIDTH, 12, EXPERTS, routing)
    k = 1 if isinstance(routing, Switch) else 2
    replaying(layer, EXPERTS, torch.zeros(SAMPLES, TOKENS, k, dtype=torch.int64))
    with pytest.raises(PlanError, match="'experts' are given another choice than the recorded one"):
        layer(torch.randn(SAMPLES, TOKENS, WIDTH))


def test_calls_without_one_choice_per_token_have_a_reason():
    layer = MixtureOfExperts(WIDTH, 12, EXPERTS)
    one = call(layer, EXPERTS, 2)
    texts = [str(each) for each in route_diagnostics([one, one], "loss")]
    assert len(texts) == 1
    assert "'experts' are called 2 times in a forward" in texts[0]
