"""torch.compile is taken off, wherever a user put it, and a note says so."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.api import analyze, verify
from meshwright.model.loading.compiled_modules import compile_notes, find_compiled, remove_compile
from tests.tiny_model import Tiny, plan_of, token_samples

# of torch itself, when it is asked to compile for the first time
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


class Decorated(Tiny):
    """Tiny with a forward that its class compiles."""


def decorated() -> nn.Module:
    Decorated.forward = torch.compile(Tiny.forward)
    return Decorated()


def whole() -> nn.Module:
    return torch.compile(Tiny())


def call_of_the_whole() -> nn.Module:
    model = Tiny()
    model.compile()
    return model


def layers() -> nn.Module:
    model = Tiny()
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer)
    return model


def calls_of_layers() -> nn.Module:
    model = Tiny()
    for layer in model.layers:
        layer.compile()
    return model


def function() -> nn.Module:
    model = Tiny()
    model.forward = torch.compile(model.forward)
    return model


PLACES = {
    whole: "Tiny",
    call_of_the_whole: "Tiny",
    layers: "Layer and 2 more modules",
    calls_of_layers: "Layer and 2 more modules",
    function: "Tiny",
    decorated: "Decorated",
}


@pytest.mark.parametrize("build", PLACES)
@pytest.mark.parametrize("from_factory", [False, True])
def test_a_compiled_model_is_analyzed_under_its_own_names_with_a_note(
    build: Callable[[], nn.Module], from_factory: bool
):
    analyzed = analyze(build if from_factory else build(), token_samples(2))
    assert analyzed.block_names == ("embed", "layers.0", "layers.1", "layers.2", "head")
    assert analyzed.model_spec.notes == (
        f"torch.compile was taken off {PLACES[build]}: blocks run as they are written, or compiled one by "
        'one where the plan has the strategy "compile"',
    )
    if not from_factory:
        assert analyzed.model_spec.name == ("Decorated" if build is decorated else "Tiny")


def test_a_compiled_function_runs_the_copy_and_not_the_model_it_was_made_of():
    model = function()
    analyzed = analyze(model, token_samples(2))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    verdict = verify(analyzed, plan_of(analyzed, 2), [token_samples(12)] * 2)
    assert verdict.passed, verdict
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_a_module_that_is_not_compiled_stays_as_it_is():
    model = Tiny()
    assert find_compiled(model) == []
    assert list(compile_notes([])) == []
    assert remove_compile(model) is model
    assert "forward" not in vars(model)
