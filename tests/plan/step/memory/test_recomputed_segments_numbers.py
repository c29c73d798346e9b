"""Segments end with the bits of the plan without them: what drops its input is made again from the first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan, verify
from meshwright.comm.backends.threads import single_rank_world
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.plan.job.job import Job
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.memory.recomputed_segments import RecomputedSegment, recompute_segments
from meshwright.plan.step.program import Action, Program
from meshwright.plan.strategy_interface import Strategy, StrategyPhase
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits
from tests.model.hf.test_captured_outputs import EXAMPLE_BATCH as ROUTED
from tests.model.hf.test_captured_outputs import build as router
from tests.model.hf.test_captured_outputs import with_z
from tests.parallel.memory.test_activation_checkpointing_numbers import InPlace, Stateful
from tests.tiny_model import (
    VOCABULARY,
    WIDTH,
    Layer,
    analyzed_model,
    case_of,
    executor_of,
    tiny_job,
    token_samples,
    verdict_of,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class OneSegment(Strategy):
    """Runs `block_calls` again as one segment."""

    name: ClassVar[str] = "one_segment"
    phase: ClassVar[StrategyPhase] = "memory"
    block_calls: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        segment = RecomputedSegment(self.block_calls, frozenset(self.saved))
        return program.edit(lambda actions: recompute_segments(actions, [segment]))


def trained(
    analyzed: AnalyzedModel, plan: Plan, batch: dict[str, torch.Tensor], steps: int = 3
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Parameters and buffers after some steps on one device."""
    executor = executor_of(analyzed, plan, single_rank_world(CPU))
    for _ in range(steps):
        executor.step({key: value[: plan.local_batch] for key, value in batch.items()})
    buffers = dict(executor.state.trained_module.module.named_buffers())
    found = bits(executor.gather_parameters()), bits(buffers)
    executor.close()
    return found


def assert_same_bits(
    build: Callable[[], nn.Module],
    calls: Sequence[str],
    saved: Sequence[str] = (),
    micro_batch: int = 0,
    batch: dict[str, torch.Tensor] | None = None,
    usually: tuple[Strategy, ...] = (),
) -> None:
    batch = batch or token_samples()
    example = {
        key: value[:2].float() if value.is_floating_point() else value[:2] for key, value in batch.items()
    }
    analyzed = analyze(build, example, loss=token_cross_entropy())
    lean, usual = (
        make_plan(analyzed, tiny_job(), Mesh(), mine, micro_batch)
        for mine in ((OneSegment(tuple(calls), tuple(saved)),), usually)
    )
    assert static_checks(lean) == []
    assert trained(analyzed, lean, batch) == trained(analyzed, usual, batch)


class Deep(nn.Module):
    """Layers with dropout between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer(0.3) for _ in range(6))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


LAYERS = [f"layers.{number}" for number in range(6)]


@pytest.mark.parametrize("saved", [(), ("layers.2",), ("layers.1", "layers.2", "layers.3")], ids=str)
@pytest.mark.parametrize("micro_batch", [0, 4])
def test_layers_with_dropout(saved: tuple[str, ...], micro_batch: int):
    assert_same_bits(Deep, LAYERS[1:5], saved, micro_batch)


def test_a_segment_from_the_embedding_to_the_head():
    assert_same_bits(Deep, ["embed", *LAYERS, "head"], ["layers.3"])


@pytest.mark.parametrize("micro_batch", [0, 4])
@pytest.mark.parametrize("saved", [(), ("layers.1",)], ids=str)
def test_blocks_that_write_buffers_and_attributes(saved: tuple[str, ...], micro_batch: int):
    calls = ["layers.0", "layers.1", "layers.0#2"]
    assert_same_bits(lambda: Stateful(whole=not micro_batch), calls, saved, micro_batch)


def test_a_model_that_writes_in_place_keeps_its_inputs():
    assert_same_bits(InPlace, LAYERS[:3])


class Skipping(Deep):
    """A later layer reads what an earlier one has returned, and so does the loss."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        kept = [x]
        for number, layer in enumerate(self.layers):
            x = layer(x + kept[-2] if number in (3, 5) else x)
            kept.append(x)
        return self.head(x + kept[1] * 0.5)


@pytest.mark.parametrize("saved", [(), ("layers.1", "layers.3")], ids=str)
def test_an_output_that_something_else_reads_keeps_its_gradient(saved: tuple[str, ...]):
    # a graph that is not cut adds up three gradients of such an output in another order
    assert_same_bits(Skipping, LAYERS, saved, usually=(ActivationCheckpointing(("*",)),))


def test_a_forward_that_leaves_out_blocks_of_a_segment():
    batch = token_samples()
    analyzed = analyze(Deep, token_samples(2), loss=token_cross_entropy())
    plans = [make_plan(analyzed, tiny_job(), Mesh(), mine) for mine in ((OneSegment(tuple(LAYERS)),), ())]
    found = []
    for plan in plans:
        executor = executor_of(analyzed, plan, single_rank_world(CPU))
        module = executor.state.trained_module.module
        for step in range(3):
            left_out = (0, 1, 3) if step % 2 else ()
            module.forward = partial(run_without, module, left_out=left_out)
            executor.step({key: value[: plan.local_batch] for key, value in batch.items()})
        found.append(bits(executor.gather_parameters()))
        executor.close()
    assert found[0] == found[1]


def run_without(module: nn.Module, input_ids: torch.Tensor, *, left_out: Sequence[int]) -> torch.Tensor:
    x = module.embed(input_ids)
    for number, layer in enumerate(module.layers):
        x = x if number in left_out else layer(x)
    return module.head(x)


def test_a_router_is_captured_once_in_a_segment_too():
    loss = Loss(with_z, token_cross_entropy().count)
    analyzed = analyze(lambda: Model(router(), loss=loss), ROUTED, loss=loss)
    layers = [call for call in analyzed.model_spec.block_calls if "layers" in call]
    assert len(layers) > 1
    plan = make_plan(analyzed, tiny_job(6), Mesh(), (OneSegment(tuple(layers)),))
    verdict = verify(analyzed, plan, [ROUTED, ROUTED], loss=loss)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("kind", ["resnet", "vit"])
def test_models_of_images(kind: str):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(12, 3, 16, 16, generator=generator, dtype=torch.float64)
    batch = {"pixel_values": pixels, "labels": torch.arange(12) % 5}
    build, calls = images(kind)
    assert_same_bits(build, calls, calls[1:2], batch=batch)


def images(kind: str) -> tuple[Callable[[], nn.Module], list[str]]:
    """A model, and the block calls of a segment."""
    if kind == "resnet":
        sizes = {"hidden_sizes": [4, 6, 8, 8], "depths": [2, 2, 2, 2], "embedding_size": 4, "num_labels": 5}
        config = transformers.ResNetConfig.from_dict({**sizes, "layer_type": "basic"})
        build = lambda: transformers.ResNetForImageClassification(config)  # noqa: E731
    else:
        sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "num_labels": 5}
        config = transformers.ViTConfig(**sizes, intermediate_size=24, image_size=16, patch_size=8)
        build = lambda: transformers.ViTForImageClassification(config)  # noqa: E731
    example = {"pixel_values": torch.zeros(2, 3, 16, 16), "labels": torch.zeros(2, dtype=torch.long)}
    calls = list(analyze(build, example, loss=token_cross_entropy()).model_spec.block_calls)
    return build, calls[1:5]


def test_it_equals_one_device_under_zero():
    analyzed = analyzed_model(p=0.3, tied=True)
    mine = OneSegment(("layers.0", "layers.1", "layers.2"), ("layers.1",))
    strategies = (BatchSplit("dp_shard"), ZeRO(), mine)
    plan = make_plan(analyzed, tiny_job(), Mesh(dp_shard=3), strategies, 2)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)


def test_a_rerun_without_its_input_is_an_error():
    analyzed = analyze(Deep, token_samples(2), loss=token_cross_entropy())
    plan = make_plan(analyzed, tiny_job(), Mesh(), (OneSegment(tuple(LAYERS)),))
    executor = executor_of(analyzed, plan, single_rank_world(CPU))

    def skipped(action: Action) -> None:
        pass

    executor._entries = [
        (action, skipped if action.name == "RECOMPUTE_OUTPUT(layers.1, 0)" else handler, waits)
        for action, handler, waits in executor._entries
    ]
    with pytest.raises(RuntimeError, match=r"layers\.2 is recomputed, and its input was dropped"):
        executor.step({key: value[: plan.local_batch] for key, value in token_samples().items()})
