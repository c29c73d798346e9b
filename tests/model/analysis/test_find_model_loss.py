"""The forward that tells the loss of a model is also the second of two that are compared."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import analyze
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.analyze import analyze as analyze_model
from meshwright.model.analysis.find_model_loss import LabelledForward, run_with_labels
from meshwright.model.loading.loader import load_factory
from meshwright.plan.job.errors import PlanError
from tests.parallel.tensor.model_families import FAMILIES, batches
from tests.tiny_model import VOCABULARY, WIDTH, token_samples

Scale = Callable[[torch.Tensor], object]


class Scaled(nn.Module):
    """A residual block that multiplies by what a function makes of its input."""

    def __init__(self, scale: Scale, p: float) -> None:
        super().__init__()
        self.linear, self.drop, self.scale = nn.Linear(WIDTH, WIDTH), nn.Dropout(p), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.linear(x)) * self.scale(x)


class Labelled(nn.Module):
    """A model that computes its own loss, and attends nowhere."""

    def __init__(self, scale: Scale = lambda x: 1.0, *, p: float = 0.0, positions: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.ones(positions, WIDTH)) if positions else None
        self.layers = nn.ModuleList(Scaled(scale, p) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> object:
        x = self.embed(input_ids)
        x = x if self.positions is None else x + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def labelled(build: Callable[[], nn.Module], batch: dict[str, torch.Tensor]) -> LabelledForward:
    return run_with_labels(load_factory(build, 0, "model"), batch)


def findings(analyzed: AnalyzedModel) -> list[object]:
    sites = analyzed.draw_sites
    shapes = {site: sites.full_shape(site) for site in sites.layouts}
    layouts = {site: sites.layout(site) for site in sites.layouts}
    return [analyzed.model_spec, analyzed.sequence_info, layouts, shapes, analyzed.attention_calls]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_the_analysis_is_that_of_forwards_of_its_own(name: str):
    batch, build = batches(name, 1)[0], FAMILIES[name]
    with_it = analyze(build, batch)
    without = with_it.for_example(with_it.loss.prepare(batch))
    assert not without.on_two_lengths
    one, other = findings(with_it), findings(without)
    assert one == other


def forwards_of(build: Callable[[], nn.Module], batch: dict[str, torch.Tensor]) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []

    def note(module: nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))

    def counted() -> nn.Module:
        module = build()
        module.register_forward_pre_hook(note, with_kwargs=True)
        return module

    analyzed = analyze(counted, batch)
    assert analyzed.sequence_info is not None
    analyzed.measure_memory(torch.float32, torch.float32)
    return shapes


def test_a_decoder_is_analyzed_in_four_forwards_of_two_and_more_lengths():
    found = forwards_of(FAMILIES["llama"], batches("llama", 1, length=12)[0])
    assert found == [(7, 5), (3, 12), (3, 11), (31, 12)]


def test_a_block_that_computes_with_the_length_is_found_by_a_further_forward():
    for scale in (
        lambda x: 1 / (x.shape[1] + 1),
        lambda x: math.log(x.shape[1]),
        lambda x: x.shape[1] * 2,
    ):
        found = analyze(partial(Labelled, scale), token_samples(2)).sequence_info
        assert found is not None
        reasons = [each.not_sequence_parallel for each in found.block_calls if "layers" in each.block_call]
        assert all("number of tokens" in reason for reason in reasons), reasons


def test_a_model_of_one_length_tells_its_loss_too():
    batch = token_samples(2)
    length = batch["input_ids"].shape[1]
    found = labelled(partial(Labelled, positions=length), batch)
    assert found.loss is not None
    assert found.resized is None
    assert analyze(partial(Labelled, positions=length), batch).model_spec.targets


def test_a_forward_that_reads_a_clock_is_refused():
    with pytest.raises(PlanError, match="reads a clock, or the system: 'mul' takes"):
        analyze(partial(Labelled, lambda x: time.perf_counter()), token_samples(2))


def test_a_draw_that_reaches_no_operation_is_a_note():
    found = analyze(partial(Labelled, lambda x: 1.0 if random.random() < 2 else 0.0), token_samples(2))
    assert any("draws numbers from Python's random" in note for note in found.model_spec.notes)


def test_another_operation_or_another_draw_does_not_pass_for_the_same():
    batch = token_samples(2)
    found = labelled(partial(Labelled, p=0.5), batch).resized
    assert found is not None
    operations, sites = list(found.operations), found.sites
    assert found.find_same(operations[:-1], 7) == operations[:-1]
    index = next(at for at, each in enumerate(operations) if each.name == "dropout")
    assert found.find_same([*operations[:index], *operations[index + 1 :]], 7) is None
    other = operations[index]._replace(constants=("0.25",))
    assert found.find_same([*operations[:index], other], 7) is None
    outputs = [torch.empty(7, *found.output_shapes[0][1:])]
    assert found.confirm_draws(replace(sites), outputs, 7)
    more = replace(sites, layouts={**sites.layouts, "layers.9/0": ("dim0",)})
    assert not found.confirm_draws(more, outputs, 7)


def test_loss_and_shapes_come_from_one_forward():
    analyzed = analyze(Labelled, token_samples(2))
    assert "labels" in analyzed.loss.targets
    assert analyzed.on_two_lengths.keys() >= {"layers.0", "layers.1"}
    again = analyze_model(analyzed.loaded_model, token_samples(2), analyzed.loss)
    assert again.model_spec == analyzed.model_spec
