"""Draws of compiled graphs: the numbers of an uncompiled run, for every function and any length."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from tqdm import tqdm

from meshwright.model.rng.compiled_draws import draws_as_inputs, make_drawing_call
from meshwright.model.rng.stateless_dropout import StatelessDropout
from meshwright.model.rng.stateless_rng import DrawSites, StatelessRNG
from meshwright.plan.job.errors import PlanError

NUM_DRAWS = 5


def drawing(x: torch.Tensor) -> torch.Tensor:
    """Dropout, numbers in place and of another tensor, a comparison, attention with dropout."""
    y = F.dropout(x, 0.3) * torch.empty_like(x).bernoulli_(0.7)
    z = y * torch.rand_like(x) + torch.bernoulli(torch.full_like(x, 0.5))
    return F.scaled_dot_product_attention(z[:, None], z[:, None], z[:, None], dropout_p=0.1)[:, 0]


def generator() -> StatelessRNG:
    sites = DrawSites({f"block/{number}": ("dim0",) for number in range(NUM_DRAWS)})
    return StatelessRNG(3, sites)


def run(rng: StatelessRNG, function: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    """Returns the result and the gradient of `function`."""
    x = x.clone().requires_grad_()
    rng.begin_forward(5, torch.arange(4, 4 + len(x)))
    rng.enter_block("block")
    with StatelessDropout(rng):
        y = function(x)
    y.square().sum().backward()
    assert rng.num_draws == NUM_DRAWS
    return [y.detach(), x.grad]


def test_a_compiled_graph_draws_what_an_uncompiled_run_draws_at_three_lengths_in_two_graphs(
    monkeypatch: pytest.MonkeyPatch,
):
    import torch._dynamo

    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # its thread would outlive the test
    rng, num_graphs = generator(), 0

    def backend(graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nonlocal num_graphs
        num_graphs += 1
        graph, draws = draws_as_inputs(graph_module)
        assert len(draws) == NUM_DRAWS
        return make_drawing_call(graph, draws, torch._dynamo.lookup_backend("aot_eager"), inputs, lambda: rng)

    compiled = torch.compile(drawing, backend=backend, fullgraph=True)
    for length in (3, 5, 6):
        x = torch.randn(2, length, 4, dtype=torch.float64)
        for found, expected in zip(run(rng, compiled, x), run(rng, drawing, x), strict=True):
            assert torch.equal(found, expected)
    assert num_graphs == 2


def test_a_random_function_without_a_stateless_form_is_refused_by_name():
    import torch._dynamo

    caught: list[PlanError] = []

    def backend(graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with pytest.raises(PlanError) as refused:
            draws_as_inputs(graph_module)
        caught.append(refused.value)
        return lambda *inputs: inputs[:1]

    with StatelessDropout(generator()):
        torch.compile(lambda x: x + torch.randn_like(x), backend=backend, fullgraph=True)(torch.ones(2))
    assert "randn_like draws random numbers in training" in str(caught[0])
