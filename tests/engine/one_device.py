"""One device: the executor beside an ordinary training loop, and a model whose forward a test can choose."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshwright.api import analyze, make_plan
from meshwright.comm.backends.threads import single_rank_world
from meshwright.engine.optim.make_optimizers import OptimizerFactory
from meshwright.engine.runtime.build_module import make_stateless_rng, make_trained_module
from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.loss.loss_definition import IGNORE_INDEX, Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from tests.tiny_model import TOKENS, VOCABULARY, Tiny, analyzed_model, token_samples

FLOAT64 = PrecisionConfig("float64", "float64", "float64")
Batch = dict[str, torch.Tensor]


def job_of(batch: int = 12, steps: int = 20, clip: float = 0.0, **parts: Any) -> Job:
    """A job in float64 with SGD at 0.1; `parts` replace its parts."""
    job = Job(
        ModelConfig("tiny.py:Tiny"), DataConfig("example", sequence=TOKENS), TrainConfig(steps, batch, clip)
    )
    return replace(
        job, **{"precision": FLOAT64, "optimizer": OptimizerConfig("sgd", lr=0.1, weight_decay=0.0), **parts}
    )


@dataclass
class Pair:
    """An executor, and a copy of its model from before it began, to train by hand."""

    executor: StepExecutor
    model: nn.Module
    loss: Loss

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The executor's logical parameters."""
        return self.executor.state.trained_module.parameters

    def loss_alone(self, batch: Batch) -> torch.Tensor:
        """The loss of a whole batch, with its graph, in the copy."""
        inputs = {key: value for key, value in batch.items() if key not in self.loss.targets}
        return self.loss.total(self.model(**inputs), batch) / max(float(self.loss.count(batch)), 1.0)

    def step_alone(
        self, optimizer: torch.optim.Optimizer, batch: Batch, clip: float = 0.0
    ) -> tuple[float, float]:
        """One ordinary step of the copy; returns loss and gradient norm."""
        optimizer.zero_grad()
        loss = self.loss_alone(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip or float("inf"))
        optimizer.step()
        return loss.item(), norm.item()

    @property
    def error(self) -> float:
        """The largest difference between a parameter of the executor and its twin in the copy."""
        twins = dict(self.model.named_parameters())
        return max((value - twins[name]).abs().max().item() for name, value in self.parameters.items())


def pair(
    build: Callable[[], nn.Module] = Tiny,
    example: Mapping[str, torch.Tensor] | None = None,
    job: Job | None = None,
    micro_batch: int = 0,
    optimizer: OptimizerFactory | None = None,
    loss: Loss | None = None,
) -> Pair:
    """An executor of the model that `build` makes, alone on this device."""
    known = build is Tiny and example is None and loss is None
    job, loss = job or job_of(), loss or token_cross_entropy()
    analyzed = (
        analyzed_model()
        if known
        else analyze(build, token_samples(2) if example is None else example, loss=loss)
    )
    plan = make_plan(analyzed, job, micro_batch=micro_batch)
    subject = make_trained_module(analyzed, torch.device("cpu"), getattr(torch, job.precision.parameters))
    model = copy.deepcopy(subject.module)
    return Pair(
        StepExecutor(
            plan.for_rank(0),
            RankState(subject, single_rank_world(torch.device("cpu")), loss),
            optimizer,
            make_stateless_rng(analyzed, plan),
        ),
        model,
        loss,
    )


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The exact content of every tensor, to compare bitwise."""
    return {
        name: value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, value in tensors.items()
    }


def sample_range(batch: Batch, start: int, stop: int) -> Batch:
    """Rows `start` to `stop`."""
    return {key: value[start:stop] for key, value in batch.items()}


def ignored(batch: Batch, *some: int) -> Batch:
    """`batch` with all labels of the samples `some` ignored; of every sample when none is named."""
    labels = batch["labels"].clone()
    labels[list(some) if some else slice(None)] = IGNORE_INDEX
    return {**batch, "labels": labels}


class Custom(nn.Module):
    """Embedding, three linears and a head, whose forward is `rule(model, x)` on the embedded tokens."""

    def __init__(self, rule: Callable[["Custom", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.rule = rule
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.rule(self, self.embed(input_ids))
