"""A column-parallel layer without a row-parallel partner is sharded alone: its output is gathered."""

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.tensor import megatron_1d
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from tests.paper_model import FIRST_ROLE
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.odd_llama import NUM_SAMPLES, SIZES, TOKENS, batches

WIDTH = 6


class Block(nn.Module):
    """One linear layer, whose features are summed up at once."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(x)).cumsum(-1)


class Net(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(SIZES["vocab_size"], WIDTH),
            nn.Linear(WIDTH, SIZES["vocab_size"]),
        )
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def planned(mesh: Mesh, *more: object) -> tuple[AnalyzedModel, Plan]:
    analyzed = analyze(lambda: Model(Net(), layer_roles={"layers.*.mix": "colwise"}), batches(1)[0])
    job = Job(
        ModelConfig("net"),
        DataConfig("random", sequence=TOKENS),
        TrainConfig(batch=NUM_SAMPLES),
        OptimizerConfig("adamw", lr=0.1),
    )
    return analyzed, make_plan(analyzed, job, mesh, (TensorParallel(), *more))


@pytest.mark.parametrize(
    ("mesh", "more"),
    [(Mesh(tp=2), ()), (Mesh(tp=3), ()), (Mesh(dp_shard=2, tp=3), (BatchSplit(axis="dp_shard"), ZeRO()))],
)
def test_it_equals_one_device(mesh: Mesh, more: tuple[object, ...]):
    analyzed, plan = planned(mesh, *more)
    shapes = {
        param_sharding.param.name: param_sharding.param.shape
        for param_sharding in plan.rank_view(0).param_shardings
    }
    assert shapes["layers.0.mix.weight"] == (WIDTH // mesh.tp, WIDTH)
    assert_exact(analyzed, plan, batches(2), fake=mesh.world_size == 3)


def test_a_layer_gathers_its_output_and_sums_the_gradient_of_its_input():
    _, plan = planned(Mesh(tp=2))
    moves = [
        (action.kind, move.collective, move.nbytes)
        for action in plan.program.actions(FIRST_ROLE)
        for move in action.inner_transfers
        if action.subject == "layers.0"
    ]
    stream = NUM_SAMPLES * TOKENS * WIDTH * 4
    assert moves == [("F", "all_gather", stream // 2), ("B", "all_reduce", stream)]


def test_a_gradient_that_is_not_summed_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(megatron_1d, "R", megatron_1d.I)
    analyzed, plan = planned(Mesh(tp=2))
    assert not verify(analyzed, plan, batches(1)).passed


def test_features_that_do_not_divide_by_the_ranks_are_refused():
    said = r"layers\.0\.mix\.weight has 6 output features.*4 ranks(?s:.*)set mesh\.tp to 2 or 3 or 6"
    with pytest.raises(PlanError, match=said):
        planned(Mesh(tp=4))
