"""Layers that are given a number of rows that depends on values are found, and stay whole on all ranks."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import analyze, make_plan, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.model_report import make_model_report
from meshwright.model.recording.forward_recording import AtenOp
from meshwright.model.trial.shardable_layers import VALUE_DEPENDENT_REASON
from meshwright.model.trial.value_dependent_sizes import ValueDependentSizes
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from tests.model.recording.recorded_functions import record_function
from tests.tiny_model import TOKENS, VOCABULARY, tiny_job, token_samples

WIDTH, EXPERTS = 8, 3
X = torch.linspace(-1, 1, 35).view(7, 5)  # its rows 4 to 6 are above 0


def has_such_rows(compute: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Returns whether rows of what is computed of X depend on values."""
    recording, sizes = record_function(lambda: compute(X)), ValueDependentSizes()
    for event in recording.events:
        if isinstance(event, AtenOp):
            sizes.read_op(event)
    return sizes.has_such_rows(recording.outputs)


@pytest.mark.parametrize(
    "select",
    [
        lambda x: x[torch.where(x[:, 0] > 0)[0]],
        lambda x: x[x[:, 0] > 0],
        lambda x: x.index_select(0, (x[:, 0] > 0).nonzero()[:, 0]) * 2,
        lambda x: x[torch.where(x[:, 0] > 0)].view(-1, 5).clone(),
        lambda x: x.new_zeros(3, 5) + x[x[:, 0] > 0],
    ],
)
def test_what_is_made_of_some_rows_has_their_number(select: Callable[[torch.Tensor], torch.Tensor]):
    assert has_such_rows(select)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * 2,
        lambda x: x[:3],
        lambda x: x[torch.arange(3)],
        lambda x: torch.zeros(7, 5).index_add(0, torch.where(x[:, 0] > 0)[0], x[x[:, 0] > 0]),
        lambda x: x.index_put((torch.where(x[:, 0] > 0)[0],), torch.ones(())),
        lambda x: x[x[:, 0] > 0].sum(0, keepdim=True),
        lambda x: torch.where(x > 0, x, -x),
    ],
)
def test_what_has_rows_of_its_own_has_not(compute: Callable[[torch.Tensor], torch.Tensor]):
    assert not has_such_rows(compute)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Routed(nn.Module):
    """Attention, if it is `attending`, and linear experts that get the tokens of a router."""

    def __init__(self, *, attending: bool) -> None:
        super().__init__()
        self.attention = Attention() if attending else nn.Identity()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        outputs = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            outputs = outputs.index_add(0, rows, expert(tokens[rows]) * weights[rows, None])
        return x + outputs.view_as(x)


class Experts(nn.Module):
    def __init__(self, *, attending: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Routed(attending=attending) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def analyzed_experts(*, attending: bool) -> AnalyzedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return analyze(Experts(attending=attending), token_samples(2))


def test_linear_experts_stay_whole_beside_sharded_attention():
    """Sharded, they would send other bytes than planned."""
    analyzed = analyzed_experts(attending=True)
    roles = {weight.name: weight.role for weight in analyzed.model_spec.params}
    reasons = {weight.name: weight.not_shardable_reason for weight in analyzed.model_spec.params}
    assert roles["layers.0.attention.q.weight"] == "colwise"
    assert roles["layers.0.experts.1.up.weight"] == ""
    assert reasons["layers.0.experts.1.up.weight"] == VALUE_DEPENDENT_REASON
    plan = make_plan(analyzed, tiny_job(), Mesh(tp=2))
    samples = token_samples(24)
    halves = [{key: value[at : at + 12] for key, value in samples.items()} for at in (0, 12)]
    verdict = verify(analyzed, plan, halves)
    assert verdict.passed, verdict
    assert samples["input_ids"].shape[1] == TOKENS


def test_a_model_with_no_other_layers_is_refused_with_the_reason_and_no_role_to_declare():
    analyzed = analyzed_experts(attending=False)
    with pytest.raises(PlanError) as refused:
        make_plan(analyzed, tiny_job(), Mesh(tp=2))
    said = str(refused.value)
    assert f"layers.*.experts.*.up: {VALUE_DEPENDENT_REASON}" in said
    assert "repair: set mesh.tp = 1: mesh.dp_shard shards the weights of experts too" in said


def test_inspect_does_not_advise_to_declare_roles_for_them():
    analyzed = analyzed_experts(attending=True)
    advice = make_model_report(analyzed.loaded_model, analyzed.example, analyzed.loss).advice
    assert not any("experts" in each.problem for each in advice)
