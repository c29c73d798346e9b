"""On which ways values go between stages, and that what one rank sends another is received in that order."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

from benchmarks.models.custom_models import UNet
from meshwright.api import analyze, make_plan, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Loss
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.model_spec.stage_transfers import StageBoundaries, StageValue, stage_transfers
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.program import Action, Program
from meshwright.verifier.static_checks import static_checks
from tests.tiny_model import VOCABULARY, tiny_job, token_samples

BLOCK_CALLS = tuple("abcdef")
CHAIN = tuple(
    StageValue(made, made, (used,), ((0, 1), (4, 0)), "float32") for made, used in pairwise(BLOCK_CALLS)
)
DISTANCE = Loss(
    total=lambda outputs, batch: (outputs - batch["target"]).square().sum(),
    count=lambda batch: torch.tensor(batch["target"].numel()),
    targets=("target",),
)
IMAGES = torch.linspace(-1, 1, 10 * 3 * 64).sin().view(10, 3, 8, 8)
MICROS = 5


def of_z(made: str, used: str, ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    """The hops of a value beside the chain, where each visit is a stage and part k lies on `ranks[k]`."""
    z = StageValue("z", made, tuple(used), ((0, 1),), "float32")
    parts = StageBoundaries(BLOCK_CALLS, (*CHAIN, z)).stages(BLOCK_CALLS[1:])
    return [(hop.source, hop.target) for hop in stage_transfers(parts, ranks) if hop.value is z]


def test_a_value_goes_past_those_who_do_not_use_it_and_is_forwarded_by_those_who_do():
    alone = tuple(range(6))
    assert of_z("a", "e", alone) == [(0, 4)]
    assert of_z("a", "cdf", alone) == [(0, 2), (2, 3), (3, 5)]


def test_a_rank_that_has_a_value_hands_it_to_its_other_parts():
    assert of_z("a", "bcd", (0, 1, 0, 1, 0, 1)) == [(0, 1), (0, 2), (1, 3)]
    assert of_z("a", "f", (0, 1, 2, 2, 1, 0)) == [(0, 5)]  # a V: from rank 0 to itself


class Layer(nn.Module):
    """A residual block that may take a second value in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, said: torch.Tensor | None = None) -> torch.Tensor:
        return x + torch.tanh(self.linear(x if said is None else x * said))


class Pair(nn.Module):
    """An encoder whose end every layer of a decoder takes in."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.ModuleList(Layer() for _ in range(number)) for number in (2, 5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y, x)
        return y


@cache
def pair() -> AnalyzedModel:
    samples = torch.linspace(-1, 1, 120).sin().view(10, 12)
    return analyze(Pair, {"x": samples[:, :6], "y": samples[:, 6:], "target": samples[:, 3:9]}, loss=DISTANCE)


@cache
def u_net() -> AnalyzedModel:
    return analyze(UNet, {"x": IMAGES, "target": IMAGES.flip(-1)}, loss=DISTANCE)


def planned(analyzed: AnalyzedModel, ranks: int, pipeline: Pipeline) -> Plan:
    job = Job(
        ModelConfig("model"),
        DataConfig("example"),
        TrainConfig(batch=MICROS, clip=0.5),
        OptimizerConfig("sgd", lr=0.1),
    )
    return make_plan(analyzed, job, Mesh(pp=ranks), (pipeline,), 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_values_that_later_ones_overtake_come_in_the_order_in_which_they_were_sent(ranks: int):
    analyzed = pair()
    batches = [{key: value[step::2] for key, value in analyzed.example.items()} for step in range(2)]
    plan = planned(analyzed, ranks, Pipeline(schedule="interleaved", virtual_stages=2))
    assert not static_checks(plan)
    verdict = verify(analyzed, plan, batches, loss=DISTANCE)
    assert verdict.passed, verdict


@pytest.mark.parametrize("model", [pair, u_net])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_every_schedule_what_is_sent_is_received_in_order(
    schedule: str, model: Callable[[], AnalyzedModel]
):
    found = [fault.problem for fault in static_checks(planned(model(), 2, Pipeline(schedule=schedule)))]
    assert not [what for what in found if "another order" in what]


def test_receives_that_wait_until_they_are_needed_are_found_out_on_paper():
    class Late(Pipeline):
        """Receives right before it needs, as if nothing else had been sent before."""

        def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
            done = super().rewrite(program, view, job)

            def late(actions: list[Action]) -> list[Action]:
                receives = {each.name: each for each in actions if each.stream == "recv"}
                rest = [each for each in actions if each.stream != "recv"]
                return [
                    each for one in rest for each in (*(receives[w] for w in one.waits if w in receives), one)
                ]

            return done.edit(late)

    found = [
        fault.problem
        for fault in static_checks(planned(u_net(), 2, Late(schedule="interleaved", virtual_stages=2)))
    ]
    assert any("is received in another order" in what for what in found), found
    assert not static_checks(planned(u_net(), 2, Pipeline(schedule="interleaved", virtual_stages=2)))


def test_a_value_is_passed_on_before_the_part_runs_and_is_sent_once_to_each_rank():
    plan = planned(pair(), 3, Pipeline())
    middle = [action.name for action in plan.program.actions("pp1")]
    said = next(name for name in middle if name.startswith("SEND(encoder.1 to 2"))
    between = middle[middle.index("RECV(encoder.1 to 1, 0)") + 1 : middle.index(said)]
    assert all(name.startswith("RECV(") for name in between)
    local = planned(pair(), 2, Pipeline(schedule="zb_v"))
    sent = [action for role in local.program.roles for action in role.actions if action.kind == "SEND"]
    for name in {action.tensors[0] for action in sent}:
        assert len([action for action in sent if action.tensors == (name,) and action.microbatch == 0]) == 1


class Everywhere(nn.Module):
    """The output of the table is used by every layer, and is part of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(input_ids)
        for layer in self.layers:
            x = torch.tanh(layer(x + first))
        return torch.cat([x, first, x[..., :1]], -1)


def test_a_gradient_that_comes_for_one_part_is_not_taken_by_a_later_one_that_uses_the_same_value():
    analyzed = analyze(Everywhere, {key: value[:2] for key, value in token_samples(4).items()})
    plan = make_plan(
        analyzed, tiny_job(batch=4), Mesh(pp=3), (Pipeline(schedule="interleaved", virtual_stages=2),), 4
    )
    verdict = verify(analyzed, plan, [token_samples(4)] * 2)
    assert verdict.passed, verdict
