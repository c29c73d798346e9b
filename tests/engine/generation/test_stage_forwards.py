"""Each rank of a pipeline runs its own blocks; what it lacks is NaN and is noticed, never a wrong number."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from meshwright.comm.collectives.group import Work
from meshwright.engine.generation import generation_step, stage_forwards
from meshwright.engine.generation.stage_forwards import StageForwards
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from tests.engine.generation import test_generate
from tests.engine.generation.test_generate import EXPERTS, LAYOUTS, PROMPTS, answers_of, check_greedy, truth
from tests.parallel.tensor.odd_llama import HEADS, SIZES

STAGES = LAYOUTS["pipeline"]


class Skips(nn.Module):
    """What the first block returns is needed by all others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Sums(), nn.Linear(8, 67)
        self.layers = nn.ModuleList(Both() for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(input_ids)
        for layer in self.layers:
            x, first = layer(first, x)
        return self.head(x)


class Sums(nn.Module):
    """Of the vectors of each token and those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(67, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids).cumsum(1)


class Scaled(Skips):
    """What a block takes, glue has made of what the one before returned."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = 2 * layer(x, x)[0]
        return self.head(x)


class Both(nn.Module):
    """It returns one of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, first: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.linear(x + first)), first


def of_router_logits() -> nn.Module:
    """A mixture whose blocks hand router logits on behind what they return."""
    config = transformers.MixtralConfig(**SIZES, **HEADS, **EXPERTS, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


@pytest.fixture
def made(monkeypatch) -> list[StageForwards | None]:
    """What runs the stages of each rank, as it is made."""
    found, make = list[StageForwards | None](), stage_forwards.make_stage_forwards

    def noted(*given: Any) -> StageForwards | None:
        found.append(make(*given))
        return found[-1]

    monkeypatch.setattr(generation_step, "make_stage_forwards", noted)
    return found


def check_next_tokens(family: str, mesh: Mesh) -> None:
    """Each token is the most likely one behind those before it."""
    model = test_generate.reference_model(family)
    for answers in answers_of(family, (mesh, None)):
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            whole = torch.tensor([[*prompt, *answer.tokens]])
            expected = model(whole)[0, len(prompt) - 1 : -1].argmax(-1)
            assert list(answer.tokens) == expected.tolist()


@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(pp=3)], ids=str)
def test_values_that_skip_stages_arrive(mesh: Mesh, made: list[Any], monkeypatch):
    monkeypatch.setitem(test_generate.FAMILIES, "skips", Skips)
    check_next_tokens("skips", mesh)
    assert all(each is not None for each in made)


def test_virtual_stages_go_round_the_ranks(made: list[Any]):
    layout = Mesh(pp=2), (Pipeline(schedule="interleaved", virtual_stages=2),)
    for answers in answers_of("llama", layout):
        check_greedy(answers, "llama")
    assert all(each is not None for each in made)


def test_router_logits_are_not_asked_for(made: list[Any], monkeypatch):
    monkeypatch.setitem(test_generate.FAMILIES, "router logits", of_router_logits)
    for answers in answers_of("router logits", STAGES):
        check_greedy(answers, "router logits")
    assert all(each is not None for each in made)


def test_what_glue_makes_for_another_rank_runs_in_lockstep(made: list[Any], monkeypatch):
    monkeypatch.setitem(test_generate.FAMILIES, "scaled", Scaled)
    check_next_tokens("scaled", Mesh(pp=2))
    assert made == [None, None]


def test_a_number_that_no_rank_has_sent_is_refused(monkeypatch):
    monkeypatch.setattr(stage_forwards._StagePlan, "receivers", lambda self, name: [])
    with pytest.raises(PlanError, match="the logits of prompt 0 at position 6 are not finite"):
        answers_of("llama", STAGES)


def stay_short(self: StageForwards, cache: Any, num_tokens: int) -> None:
    """Layers of other ranks stay as short as they are."""
    right_end(self, None, num_tokens)


def own_tokens(self: StageForwards, ids: torch.Tensor) -> Work:
    """Each rank goes on with the tokens that it has."""
    return right_share(self, ids.clone())


right_end: Callable[..., None] = StageForwards.end
right_share: Callable[..., Work] = StageForwards.share_tokens


@pytest.mark.parametrize(("name", "fault"), [("end", stay_short), ("share_tokens", own_tokens)])
def test_short_caches_and_tokens_that_are_not_shared_are_noticed(name: str, fault: Any, monkeypatch):
    monkeypatch.setattr(StageForwards, name, fault)
    expected = truth("llama")[0]
    try:
        found = answers_of("llama", STAGES)
    except (PlanError, RuntimeError, IndexError):
        return  # a shape that does not fit
    assert any([list(each.tokens) for each in answers] != expected for answers in found)
