"""verify compares the experts that tokens choose before numbers, and names the token that chose others."""

from functools import partial
from typing import Any

import pytest
import torch

import meshwright as mw
from tests.parallel.expert.mixture_model import (
    TOKENS,
    analyzed_mixtral,
    batch_of,
    expert_strategies,
    mixtral,
    sgd_job,
)

SAMPLES, MARGIN = 12, 2.0**-24
SAMPLE, POSITION = 3, 5  # of the token that chooses another expert
IDS = batch_of(SAMPLES)["input_ids"][SAMPLE].tolist()


def near_tie() -> torch.nn.Module:
    """A mixture in which one token gets expert 4 in place of 1 where not all samples run together."""
    model = mixtral()
    gate = model.model.layers[1].mlp.gate
    gate.forward = partial(_choose, gate, seen := {})
    model.register_forward_pre_hook(partial(_see, seen), with_kwargs=True)
    return model


def _see(seen: dict[str, torch.Tensor], module: Any, args: Any, kwargs: Any) -> None:
    seen["ids"] = kwargs["input_ids"]


def _choose(gate: Any, seen: dict[str, torch.Tensor], hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
    weights = torch.tensor([0.5, 0.25]).to(logits) + 0 * logits[:, :2]
    index = torch.tensor([0, 1]).expand(len(logits), -1)
    is_other = (seen["ids"] == torch.tensor(IDS)).all(1, keepdim=True)
    is_other = (is_other & (torch.arange(TOKENS) == POSITION)).reshape(-1, 1)
    if len(logits) < SAMPLES * TOKENS:
        index = torch.where(is_other, torch.tensor([0, 4]), index)
        weights = torch.where(is_other, weights + torch.tensor([0, MARGIN]).to(weights), weights)
    return logits, weights, index


@pytest.mark.parametrize(("mesh", "micro_batch"), [(mw.Mesh(ep=2), 2), (mw.Mesh(dp_replicate=2), 3)], ids=str)
def test_the_token_is_named_with_its_experts_and_margin(mesh: mw.Mesh, micro_batch: int):
    analyzed = mw.analyze(near_tie, batch_of(4))
    strategies = expert_strategies() if mesh.ep > 1 else None
    plan = mw.make_plan(analyzed, sgd_job(), mesh, strategies, micro_batch)
    verdict = mw.verify(analyzed, plan, [batch_of(SAMPLES)])
    assert not verdict.passed
    assert verdict.cause == "choice of experts"
    assert str(verdict.first_difference).startswith(
        "step 0: the choice of experts of model.layers.1.mlp.experts, sample 3, position 5 (experts [0, 1] "
        "on one device, [0, 4] under the plan, margin 6e-08) differs on rank "
    )


def test_every_token_is_compared_where_ranks_share_samples(monkeypatch: pytest.MonkeyPatch):
    compared = list[tuple[int, int]]()

    def record(found: Any, expected: Any, samples: list[int], positions: list[int]) -> str:
        compared.extend((sample, position) for sample in samples for position in positions)
        expected_index = expected.index[samples][:, positions]
        assert torch.equal(found.index.sort(-1).values, expected_index.sort(-1).values)
        return ""

    monkeypatch.setattr("meshwright.verifier.parity.first_other_choice", record)
    analyzed = analyzed_mixtral()
    plan = mw.make_plan(analyzed, sgd_job(), mw.Mesh(dp_replicate=2, cp=3))
    assert mw.verify(analyzed, plan, [batch_of(SAMPLES)]).passed
    tokens = [(sample, position) for sample in range(SAMPLES) for position in range(TOKENS)]
    assert sorted(compared) == sorted(2 * tokens), "once in each of two layers"
