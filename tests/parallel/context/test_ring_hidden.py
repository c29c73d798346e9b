"""Queries whose keys are all masked by a large finite number still average over them: a ring weighs these
keys as one device does.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import analyze, make_plan, verify
from meshwright.parallel.context.block_mask import DenseMask
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.parallel.context.attention_answers import NUM_SAMPLES, case, largest_error

EXACT, LENGTH = 1e-13, 13
LOWEST = torch.finfo(torch.float64).min
AT = torch.arange(LENGTH)


def padded(deep: float, length: int = LENGTH) -> torch.Tensor:
    """A causal mask; of the second sample the first five tokens are hidden, so that those see nothing."""
    lead = torch.tensor([0, 5]).view(2, 1, 1, 1)
    seen = (AT[:length, None] >= AT[:length]) & (AT[:length] >= lead)
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, deep)


def near(deep: float, length: int = LENGTH) -> torch.Tensor:
    """The same beside a bias by head and distance."""
    return padded(deep, length) - 0.3 * (AT[:length, None] - AT[:length]).abs() * torch.tensor(
        [1.0, 0.5]
    ).view(2, 1, 1)


@pytest.mark.parametrize("deep", [LOWEST, -1e30, -1e12, -1e5, 1e12], ids=str)
@pytest.mark.parametrize("made", [padded, near], ids=lambda made: made.__name__)
@pytest.mark.parametrize("learned", [False, True])
def test_fully_masked_queries_equal_one_device(deep: float, made, learned: bool) -> None:
    given = case(2, 1, LENGTH, mask=made(deep).requires_grad_(learned))
    bound = (
        EXACT if abs(deep) < 1e6 or deep == LOWEST or not learned else 1e-3
    )  # what scores lose is not rounded alike
    assert largest_error(given, RingAttention(), Mesh(cp=3)) < bound


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        (RingAttention(load_balance="striped"), Mesh(cp=2)),
        (RingAttention(load_balance="contiguous"), Mesh(cp=4)),
        (HybridContextParallel(), Mesh(cp=4)),
        (HybridContextParallel(ulysses_degree=2, load_balance="striped"), Mesh(cp=6)),
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [LENGTH, 5])
def test_fully_masked_queries_equal_one_device_under_every_load_balance(
    strategy: Strategy, mesh: Mesh, length: int
) -> None:
    assert largest_error(case(2, 2, length, mask=padded(LOWEST, length)), strategy, mesh) < EXACT


def test_keys_that_are_masked_for_all_queries_have_equal_weight() -> None:
    keys = torch.full((NUM_SAMPLES, 1, 1, LENGTH), LOWEST, dtype=torch.float64)
    keys[0, ..., 2:7] = 0
    assert largest_error(case(2, 1, LENGTH, mask=keys), RingAttention(), Mesh(cp=3)) < EXACT


def test_a_sum_that_forgets_how_many_keys_there_are_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DenseMask, "row_offset", lambda self, rows: None)
    assert largest_error(case(2, 1, LENGTH, mask=padded(LOWEST)), RingAttention(), Mesh(cp=3)) > 1e-2


class Layer(nn.Module):
    """Attends with a mask, and drops weights."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        made = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=0.2 if self.training else 0.0
        )
        return x + self.out(made.transpose(1, 2).flatten(2))


class Padded(nn.Module):
    """Rows begin with as many hidden tokens as their first word says; these have labels."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(67, 8), nn.Linear(8, 67)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, at = self.words(input_ids), torch.arange(input_ids.shape[1])
        seen = (at[:, None] >= at) & (at >= (input_ids[:, :1] % 5)[:, None])
        mask = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)[:, None]
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def test_with_dropout_and_labels_a_model_is_that_of_one_device() -> None:
    thrown = torch.Generator().manual_seed(2)
    samples = [
        {key: torch.randint(1, 67, (4, 9), generator=thrown) for key in ("input_ids", "labels")}
        for _ in range(2)
    ]
    analyzed = analyze(Padded(), samples[0])
    job = Job(
        ModelConfig("own"),
        DataConfig("random", sequence=9),
        TrainConfig(batch=4),
        OptimizerConfig("sgd", lr=0.1),
    )
    verdict = verify(
        analyzed, make_plan(analyzed, job, Mesh(cp=3), (RingAttention(), DDP(axis="cp")), 2), samples
    )
    assert verdict.passed, verdict
