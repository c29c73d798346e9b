"""Models that recompute their own blocks: exact where nothing is communicated, refused elsewhere."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from meshwright.api import analyze, default_strategies, verify
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.parallel.tensor.odd_llama import batches, llama, planned

LAYERS = ("model.layers.0", "model.layers.1")


class RecomputedLayer(LlamaDecoderLayer):
    """A layer whose own code calls torch.utils.checkpoint, which no setting turns off."""

    reentrant: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(super().forward, **kwargs), *args, use_reentrant=self.reentrant)


def again(*, reentrant: bool) -> nn.Module:
    model: Any = llama()
    for layer in model.model.layers:
        layer.__class__, layer.reentrant = RecomputedLayer, reentrant
    return model


@pytest.mark.parametrize(
    ("mesh", "strategies", "reentrant"),
    [
        (Mesh(dp_replicate=2), (BatchSplit(), DDP()), False),
        (Mesh(dp_replicate=2), (BatchSplit(), DDP()), True),
        (Mesh(dp_shard=2), (BatchSplit(axis="dp_shard"), ZeRO(stage=3)), False),
        (Mesh(pp=2), (Pipeline(schedule="zb_h1"),), False),
    ],
    ids=str,
)
def test_recomputed_activations_have_the_dtype_of_the_forward(
    mesh: Mesh, strategies: tuple[Strategy, ...], reentrant: bool
):
    analyzed, plan = planned(again(reentrant=reentrant), mesh, strategies)
    assert analyzed.model_spec.user_checkpointed_calls == LAYERS
    verdict = verify(analyzed, plan, batches(2))
    assert verdict.passed, verdict


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_with_collectives_are_refused(reentrant: bool):
    with pytest.raises(
        PlanError,
        match=r"runs 'model.layers.0' and 1 more blocks again in backward .*\n.* strategy 'activation_ch",
    ):
        planned(again(reentrant=reentrant), Mesh(tp=2), (TensorParallel(),))


class Thinned(nn.Module):
    """Its layer draws where `within` says, by the one kind of dropout or the other."""

    def __init__(self, *, within: bool, reentrant: bool) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(67, 8), nn.Linear(8, 8), nn.Linear(8, 67)
        self.within, self.reentrant = within, reentrant

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        x = checkpoint(self._thin if self.within else self.layer, x, use_reentrant=self.reentrant)
        return self.head(x if self.within else F.dropout(x, 0.5))

    def _thin(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(self.layer(x), p=0.5, train=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_draws_that_backward_would_repeat_are_refused_before_anything_runs(reentrant: bool):
    with pytest.raises(PlanError, match=r"random numbers are drawn inside torch\.utils\.checkpoint"):
        analyze(Thinned(within=True, reentrant=reentrant), batches(1)[0])
    assert analyze(Thinned(within=False, reentrant=reentrant), batches(1)[0]).model_spec.has_dropout


class Again(nn.Module):
    """Calls each layer in torch.utils.checkpoint, from its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers, self.head = (
            nn.Embedding(67, 8),
            nn.ModuleList(nn.Linear(8, 8) for _ in range(4)),
            nn.Linear(8, 67),
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def test_a_block_recomputed_on_a_value_of_another_stage_is_refused_with_the_option_to_turn_off():
    analyzed, plan = planned(Again(), Mesh(pp=2), (Pipeline(split_points=("layers.2",)),))
    said = r"the block 'layers\.2' takes 'layers\.1', which comes from another stage, and runs again"
    with pytest.raises(PlanError, match=said) as caught:
        verify(analyzed, plan, batches(1))
    assert "turn the model's own checkpointing off" in str(caught.value)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_checkpointing_of_transformers_is_left_to_the_strategy(reentrant: bool):
    """Under tp its recomputation would repeat collectives: the setting is turned off, and the default
    strategies recompute instead.
    """
    model: Any = llama()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    analyzed = analyze(model, batches(1)[0])
    assert analyzed.model_spec.user_checkpointed_calls == ()
    assert "own activation checkpointing is turned off" in analyzed.model_spec.notes[0]
    assert model.is_activation_checkpointing
    mesh = Mesh(tp=2)
    strategies = default_strategies(mesh, analyzed.model_spec)
    assert ActivationCheckpointing() in strategies
    assert ActivationCheckpointing() not in default_strategies(
        mesh, analyze(llama(), batches(1)[0]).model_spec
    )
    plan = planned(analyzed, mesh, strategies)[1]
    assert {"F_CHECKPOINTED", "RECOMPUTE"} <= {action.kind for action in plan.for_rank(0).actions}
    verdict = verify(analyzed, plan, batches(2))
    assert verdict.passed, verdict


def test_models_without_checkpointing_have_no_user_checkpointed_calls():
    assert analyze(llama(), batches(1)[0]).model_spec.user_checkpointed_calls == ()
