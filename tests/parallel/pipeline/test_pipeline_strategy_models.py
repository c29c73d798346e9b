"""Models that are no chain of equal layers: what runs in stages as it is,
and what is refused with the repair.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.pipeline.pipeline_models import UNet
from meshwright.api import analyze, make_plan, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.verifier.verdict_and_cause import Verdict
from tests.model.pipeline.staged_model import Normed
from tests.parallel.pipeline.test_send_recv_insertion import DISTANCE, IMAGES

X = torch.linspace(-1, 1, 120).sin().view(10, 12)
PAIRS = {"x": X[:, :6], "target": X[:, 6:]}
PICTURES = {"x": IMAGES, "target": IMAGES.flip(-1)}
NUM_SAMPLES = 5


def planned(
    analyzed: AnalyzedModel, ranks: int, pipeline: Pipeline | None = None, micro_batch: int = 1
) -> Plan:
    job = Job(
        ModelConfig("model"),
        DataConfig("example"),
        TrainConfig(batch=NUM_SAMPLES, clip=0.5),
        OptimizerConfig("sgd", lr=0.1),
    )
    return make_plan(analyzed, job, Mesh(pp=ranks), (pipeline or Pipeline(),), micro_batch)


def verdict(analyzed: AnalyzedModel, plan: Plan, samples: dict[str, torch.Tensor]) -> Verdict:
    batches = [
        {key: value[at : at + NUM_SAMPLES] for key, value in samples.items()} for at in (0, NUM_SAMPLES)
    ]
    return verify(analyzed, plan, batches, loss=DISTANCE)


class Tree(nn.Module):
    """Layers as attributes: nothing says which of them are blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        y = x + torch.tanh(self.second(x))
        return self.last(torch.tanh(self.third(y)) + x)


class Reads(nn.Module):
    """Its third layer is called only where the sum of what the second gives is small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        if x.sum().item() < 1e9:
            x = self.layers[2](x)
        return self.layers[3](x)


@pytest.mark.parametrize(("ranks", "pipeline"), [(3, Pipeline()), (2, Pipeline(schedule="zb_v"))])
def test_a_u_net_with_skips_over_every_part(ranks: int, pipeline: Pipeline):
    analyzed = analyze(lambda: UNet(1), PICTURES, loss=DISTANCE)
    plan = planned(analyzed, ranks, pipeline)
    found = verdict(analyzed, plan, PICTURES)
    assert found.passed, found


def test_on_a_v_whose_cuts_mirror_each_other_the_skips_of_a_u_net_stay_on_their_rank():
    analyzed, mirrored = analyze(lambda: UNet(2), PICTURES, loss=DISTANCE), ("down.3", "up.0", "up.3")
    sent = {}
    for schedule in ("interleaved", "zb_v"):
        plan = planned(analyzed, 2, Pipeline(schedule=schedule, virtual_stages=2, split_points=mirrored))
        actions = (action for role in plan.program.roles for action in role.actions if action.kind == "SEND")
        sent[schedule] = {action.tensors[0] for action in actions}
    skips = {f"down.{number}" for number in range(6)}
    assert skips & sent["interleaved"] == skips - {"down.5"}  # which the glue of its own stage takes
    assert skips & sent["zb_v"] == {"down.2"}  # what stage 0 hands on anyway


def test_a_model_without_blocks_is_cut_at_those_that_are_declared():
    with pytest.raises(
        PlanError,
        match=r"cut into 1 stages(?s:.*)declare blocks: Model\(..., blocks=\['first', 'second', 'third'",
    ):
        planned(analyze(Tree, PAIRS, loss=DISTANCE), 2)
    blocks = ["first", "second", "third", "last"]
    analyzed = analyze(lambda: Model(Tree(), blocks=blocks), PAIRS, loss=DISTANCE)
    assert verdict(analyzed, planned(analyzed, 3), PAIRS).passed


def test_glue_that_reads_a_number_is_named_with_its_line_and_the_cuts_that_work():
    analyzed = analyze(Reads, PAIRS, loss=DISTANCE)
    said = (
        r"none can begin with 'layers.2': the glue after 'layers.1' reads the value of "
        r"layers.1\+0 \(item at "
        r"test_pipeline_strategy_mod"
    )
    with pytest.raises(PlanError, match=f"cut into 2 stages(?s:.*){said}(?s:.*)compute with tensors there"):
        planned(analyzed, 3)
    with pytest.raises(PlanError, match=r"no stage can begin with 'layers.3'(?s:.*)begin it with 'layers.1'"):
        planned(analyzed, 2, Pipeline(split_points=("layers.3",)))
    assert verdict(analyzed, planned(analyzed, 2), PAIRS).passed


@pytest.mark.parametrize(
    ("build", "samples"),
    [(Normed, PAIRS), (lambda: UNet(1, batch_norm=True), PICTURES)],
    ids=["linears", "U-Net"],
)
def test_batch_norms_take_one_micro_batch_and_are_refused_with_more(
    build: Callable[[], nn.Module], samples: dict[str, torch.Tensor]
):
    analyzed = analyze(build, samples, loss=DISTANCE)
    with pytest.raises(
        PlanError,
        match=r"batch norms (?s:.*)statistics of a part of the global batch \(1 ranks x 5 microbatches",
    ):
        planned(analyzed, 2)
    found = verdict(
        analyzed, planned(analyzed, 2, Pipeline(schedule="naive_model_parallel"), micro_batch=0), samples
    )
    assert found.passed, found
