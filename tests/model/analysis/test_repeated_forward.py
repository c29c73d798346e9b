"""A forward that draws outside of torch, or reads a clock, is refused by the line that computes with it."""

import random
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze
from meshwright.model.analysis.repeated_forward import MAX_RUNS
from meshwright.plan.job.errors import PlanError
from tests.parallel.tensor.odd_llama import batches
from tests.tiny_model import Tiny, token_samples

GENERATOR = np.random.default_rng(0)


class Scaled(Tiny):
    """Multiplies the output of a layer by a number; or leaves the layer out."""

    def __init__(self, scale: Callable[["Scaled"], float]) -> None:
        super().__init__()
        self.scale, self.calls = scale, 0
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)
        self.legacy = np.random.RandomState(0)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            if (scale := self.scale(self)) >= 0:
                x = x + layer(x) * scale  # this line
        return self.head(x)


def counted(model: Scaled) -> float:
    model.calls += 1
    return 1 / model.calls


def found(scale: Callable[[Scaled], float]) -> str:
    with pytest.raises(PlanError) as refused:
        analyze(lambda: Scaled(scale), token_samples(2))
    return str(refused.value)


SOURCES: dict[str, tuple[Callable[[Scaled], float], str]] = {
    "random": (lambda model: random.random(), "draws from Python's random"),
    "numpy": (lambda model: float(np.random.rand()), "draws from numpy.random"),
    "both": (lambda model: random.random() + np.random.rand(), "Python's random and numpy.random"),
    "its own": (lambda model: model.python.random(), "draws from a generator of its own"),
    "its own of numpy": (lambda model: model.numpy.random(), "draws from a generator of its own"),
    "its own of old numpy": (lambda model: model.legacy.rand(), "draws from a generator of its own"),
    "one of the file": (lambda model: GENERATOR.random(), "reads a clock, or the system"),
    "a clock": (lambda model: time.perf_counter(), "reads a clock, or the system"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_numbers_from_outside_of_torch_are_refused_by_the_line_that_takes_them(source: str):
    scale, reason = SOURCES[source]
    said = found(scale)
    assert f"when it runs again, because it {reason}" in said or f"because it draws from {reason}" in said
    assert ": 'mul' takes " in said
    assert "; test_repeated_forward.py:" in said
    assert "is x = x + layer(x) * scale  # this line\n  repair: " in said
    assert ("can be a key of the batch" in said) == ("clock" in reason)


def test_a_layer_drop_by_python_is_refused_by_the_layer_that_runs_instead():
    said = found(lambda model: float(random.random() < 0.5) - 0.5)
    assert "because it draws from Python's random: it comes to '" in said
    assert ".weight" in said
    assert ".py:" in said


def test_a_rare_draw_is_looked_for_in_more_runs(monkeypatch: pytest.MonkeyPatch):
    drawn = iter([*[1.0] * 3 * (MAX_RUNS - 2), *[2.0] * 99])

    def rarely(model: Scaled) -> float:
        random.random()
        return next(drawn)

    assert "'mul' takes 1.0, and then 2.0" in found(rarely)


@pytest.mark.parametrize(
    "scale",
    [
        counted,
        lambda model: min(1.0, time.time()),
        lambda model: float(torch.rand(()).item() >= 0),
        lambda model: (random.seed(1), random.random())[1],
    ],
    ids=["a counter", "a clock that reaches nothing", "a draw of torch", "a seed in the forward"],
)
def test_what_does_not_vary_is_accepted(scale: Callable[[Scaled], float]):
    analyze(lambda: Scaled(scale), token_samples(2))


def test_what_is_computed_once_and_kept_is_accepted():
    kept: list[torch.Tensor] = []

    class Keeping(Tiny):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            if not kept:
                kept.append(torch.arange(3).float().cos())
            return super().forward(input_ids)

    analyze(Keeping, token_samples(2))
    assert len(kept) == 1


def test_a_draw_that_reaches_no_operation_is_a_note():
    (note,) = analyze(
        lambda: Scaled(lambda model: 1.0 if random.random() < 2 else 0.0), token_samples(2)
    ).model_spec.notes
    assert note == "the forward draws numbers from Python's random: no operation took one in a trial"


SMALL = {"hidden_size": 16, "ffn_dim": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.0}


def opt(layerdrop: float) -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=67, word_embed_proj_dim=16, max_position_embeddings=32, layerdrop=layerdrop, **SMALL
    )
    return transformers.OPTForCausalLM(config)


def test_a_layer_drop_by_torch_is_refused_by_the_branch_and_its_setting_turns_it_off():
    with pytest.raises(PlanError) as refused:
        analyze(lambda: opt(0.1), batches(1)[0])
    said = str(refused.value)
    assert "for other draws of torch: " in said
    assert "; modeling_opt.py:" in said
    assert "is if dropout_probability < self.layerdrop:\n" in said
    assert "set the layer drop to 0 (in transformers' configs: layerdrop, " in said
    analyze(lambda: opt(0.0), batches(1)[0])
