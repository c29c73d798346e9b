"""A model of declared pairs whose first layers share an input, and plans of it along tp with coded sums."""

from functools import cache

import torch
from torch import nn

import meshwright as mw
from meshwright.model.loading.loader import Model
from meshwright.parallel.compression.activation_compression import ActivationCompression
from meshwright.plan.job.job import OptimizerConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.strategy_interface import Strategy
from tests.tiny_model import VOCABULARY, tiny_job

WIDTH, INNER, LENGTH, BATCH = 35, 47, 6, 6
ROLES = {"layers.*.gate": "colwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}


class GatedLayer(nn.Module):
    """A residual block: norm, two first layers that take the same tensor, their product, a last layer.

    `parallel`: each first layer has a last layer of its own, and the outputs of both end in one sum.
    """

    def __init__(self, p: float, *, parallel: bool) -> None:
        super().__init__()
        self.norm, self.parallel = nn.LayerNorm(WIDTH), parallel
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, INNER),
            nn.Linear(WIDTH, INNER, bias=False),
            nn.Linear(INNER, WIDTH),
        )
        self.drop = nn.Dropout(p)
        if parallel:
            self.other = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = self.norm(x)
        if self.parallel:
            return x + self.other(torch.tanh(self.up(taken))) + self.down(torch.tanh(self.gate(taken)))
        return x + self.drop(self.down(torch.tanh(self.gate(taken)) * self.up(taken)))


class Gated(nn.Module):
    """Embedding, two gated layers, head."""

    def __init__(self, p: float = 0.0, *, parallel: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(GatedLayer(p, parallel=parallel) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(count: int = BATCH, seed: int = 2) -> dict[str, torch.Tensor]:
    """Random samples."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randint(VOCABULARY, (count, LENGTH), generator=generator) for _ in range(2)]
    return {"input_ids": found[0], "labels": found[1]}


@cache
def analyzed_gated(p: float = 0.0, *, parallel: bool = False) -> mw.AnalyzedModel:
    """The analyzed model, cached."""
    roles = ROLES | ({"layers.*.other": "rowwise"} if parallel else {})
    return mw.analyze(lambda: Model(Gated(p, parallel=parallel), layer_roles=roles), tokens(2))


def gated_plan(
    coding: ActivationCompression | None,
    ranks: int,
    *strategies: Strategy,
    mesh: mw.Mesh | None = None,
    micro_batch: int = 2,
    p: float = 0.0,
    parallel: bool = False,
    **job: object,
) -> Plan:
    """The plan over `ranks` tensor-parallel ranks, or `mesh`."""
    job.setdefault("train", TrainConfig(batch=BATCH, clip=0.5))
    job.setdefault("optimizer", OptimizerConfig("sgd", lr=0.1))
    every = (mw.TensorParallel(), *strategies, *([] if coding is None else [coding]))
    given = tuple({(each.name, str(each)): each for each in every[::-1]}.values())[::-1]
    if sum(each.name == "tensor_parallel" for each in given) > 1:
        given = given[1:]  # one with other options stands in its place
    return mw.make_plan(
        analyzed_gated(p, parallel=parallel), tiny_job(**job), mesh or mw.Mesh(tp=ranks), given, micro_batch
    )
