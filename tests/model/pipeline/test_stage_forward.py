"""Runs of one stage of a plain module: errors about missing values, and how the forward is left."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.model.analysis.analyze import analyze
from meshwright.model.analysis.forward_graph_trace import ForwardGraphCache
from meshwright.model.blocks.block_forward_backward import ForwardDriver
from meshwright.model.loading.loader import Model, load_factory
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.pipeline.stage_forward import run_stage
from meshwright.plan.job.errors import PlanError
from tests.model.block_backward import Chain, Forward
from tests.model.pipeline.staged_model import X, chained, exact, ranks, run_one_stage, steps


def simple(model: Chain, x: torch.Tensor) -> object:
    first = model.layers[0](x)
    twice = first * 2
    return model.head(model.layers[2](model.layers[1](first)) + twice)


def test_a_value_that_is_not_received_is_named():
    one = chained(simple)
    part = one.boundaries.stages(["layers.1", "layers.2"])[2]
    module, blocks, _ = one.analyzed.make_module("cpu", torch.float64)
    with pytest.raises(
        PlanError,
        match=r"the stage of 'layers\.2' takes the value "
        r"'layers\.0\+0 \(mul at test_stage_forward\.py:\d+\)', which",
    ):
        run_stage(
            lambda: module(**one.inputs),
            ForwardDriver(blocks),
            one.graph,
            part,
            4,
            {},
            before_block=lambda block_call: None,
        )


@pytest.mark.parametrize("lost", ["layers.0", "layers.0+0", "layers.2+0"])
def test_a_value_missing_from_the_live_values_is_named(lost: str):
    one = chained(simple)
    kept = tuple(value for value in one.boundaries.values if value.name != lost)
    assert len(kept) == len(one.boundaries.values) - 1
    one.graph = replace(one.graph, boundaries=replace(one.boundaries, values=kept))
    at = {"layers.0": "layers.1", "layers.0+0": "layers.2", "layers.2+0": "head"}[lost]
    with pytest.raises(PlanError, match=rf"the value '{lost.replace('+', chr(92) + '+')}'.*did not receive"):
        one.error([at])


def test_a_tensor_written_by_another_stage_and_not_sent_is_noticed():
    def glue(model: Chain, x: torch.Tensor) -> object:
        kept = torch.zeros(3, len(x), 6, dtype=x.dtype)
        for place, layer in enumerate(model.layers):
            x = layer(x)
            kept[place] = x
        return model.head(kept.sum(0))

    one = chained(glue)
    gathered = "layers.1+0~"
    kept = tuple(value for value in one.boundaries.values if value.name != gathered)
    assert len(kept) == len(one.boundaries.values) - 1
    one.graph = replace(one.graph, boundaries=replace(one.boundaries, values=kept))
    with pytest.raises(
        PlanError,
        match=r"computes sum \(at test_stage_forward\.py:\d+\) "
        r"with the value 'layers\.1\+0~'.* did not receive",
    ):
        one.error(["layers.2"])


def test_a_forward_that_differs_from_its_recording_is_refused():
    one = chained(simple)
    part = one.boundaries.stages(["layers.1"])[1]
    module, blocks, _ = one.analyzed.make_module("cpu", torch.float64)
    received = {value.name: torch.zeros(value.shape(4), dtype=torch.float64) for value in part.inputs}

    def play(glue: Forward) -> None:
        module.glue = glue
        run_stage(
            lambda: module(**one.inputs),
            ForwardDriver(blocks),
            one.graph,
            part,
            4,
            received,
            before_block=lambda block_call: None,
        )

    with pytest.raises(
        PlanError,
        match=(
            r"computes exp \(at test_stage_forward\.py:\d+\) with 'layers\.0', which it did not use "
            r"in "
            r"the trial"
        ),
    ):
        play(lambda model, x: model.head(model.layers[0](x).exp()))
    module, blocks, _ = one.analyzed.make_module("cpu", torch.float64)
    with pytest.raises(
        PlanError, match=r"calls 'layers\.2' after 'layers\.0', which it did not in the trial"
    ):
        play(lambda model, x: model.layers[2](model.layers[0](x)))


def test_a_model_that_catches_every_exception_is_left_all_the_same():
    def glue(model: Chain, x: torch.Tensor) -> object:
        for layer in model.layers:
            try:
                x = layer(x)
            except BaseException:
                x = x * 0
        return model.head(x)

    exact(glue)


def test_parameters_that_glue_uses_get_a_gradient_in_each_stage():
    def glue(model: Chain, x: torch.Tensor) -> object:
        gain = model.scale.exp()
        for layer in model.layers:
            x = layer(x * gain)
        return F.linear(x, model.layers[0].linear.weight)

    roots = dict(exact(glue).root_params)
    assert roots["scale"] == ("layers.0", "layers.1")  # where what they make of it is used
    assert roots["layers.0.linear.weight"] == ("layers.2",)


def test_the_state_of_a_model_is_as_before_when_it_is_left():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.depth = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.depth += 1
            try:
                for layer in self.layers:
                    x = layer(x).tanh()
                return x
            finally:
                self.depth -= 1

    one = ranks(Counting, X)
    module, blocks, _ = one.analyzed.make_module("cpu", torch.float64)
    drive, part = ForwardDriver(blocks), one.boundaries.stages(["layers.1"])[0]
    ran = run_stage(
        lambda: module(**one.inputs), drive, one.graph, part, 4, {}, before_block=lambda block_call: None
    )
    drive.detach()
    assert module.depth == 0
    assert list(ran.sent_values) == ["layers.0+0"]
    assert torch.equal(module(**one.inputs), one.analyzed.make_module("cpu", torch.float64)[0](**one.inputs))


def test_a_gradient_that_is_not_sent_back_changes_those_of_one_backward():
    one = chained(simple)
    parts = one.boundaries.stages(["layers.1", "layers.2"])
    made = [one.analyzed.make_module("cpu", torch.float64) for _ in parts]
    assert one.error(["layers.1", "layers.2"]) < 1e-12
    lost = [
        replace(part, inputs=tuple(replace(v, needs_grad=v.name != "layers.0+0") for v in part.inputs))
        for part in parts
    ]
    gradients, _ = steps(one, lost, made, lean=False)
    difference = gradients[0]["layers.0.linear.weight"] - one.truth["layers.0.linear.weight"]
    assert difference.abs().max() > 1e-2


def test_a_graph_that_is_not_cut_within_a_stage_is_one_backward():
    one = chained(simple)
    first, last = one.boundaries.stages(["layers.2"])
    store: dict[str, torch.Tensor] = {}
    module, blocks, parameters = one.analyzed.make_module("cpu", torch.float64)
    drive = ForwardDriver(blocks, cut_graph=False)
    early = run_one_stage(one, first, module, drive, store)
    late = run_one_stage(
        one, last, module, drive, {name: tensor.detach() for name, tensor in early.sent_values.items()}
    )
    one.total(late.outputs).backward()
    names = list(early.sent_values)
    torch.autograd.backward(
        [early.sent_values[name] for name in names], [late.received_values[name].grad for name in names]
    )
    drive.detach()
    for name, parameter in parameters.items():
        truth = one.truth[name]
        assert (truth is None) == (parameter.grad is None)
        assert truth is None or torch.equal(parameter.grad, truth)


def test_an_output_that_the_loss_ignores_is_not_sent_and_raises_when_read():
    def glue(model: Chain, x: torch.Tensor) -> object:
        first = model.layers[0](x)
        return {"y": model.head(model.layers[1](first)), "first": first}

    decide = Loss(lambda outputs, batch: outputs["y"].sum(), lambda batch: torch.tensor(1), ())
    analyzed = analyze(load_factory(lambda: Model(Chain(glue), X), 0, "model"), X, decide)
    graph = ForwardGraphCache(analyzed).get(X)
    assert [value.name for value in graph.boundaries.live_values("head")] == ["layers.1"]
    module, blocks, _ = analyzed.make_module("cpu", torch.float32)
    store, drive = dict[str, torch.Tensor](), ForwardDriver(blocks)
    for part in graph.boundaries.stages(["head"]):
        ran = run_stage(
            lambda: module(**X), drive, graph, part, 4, store, before_block=lambda block_call: None
        )
        store |= ran.sent_values
    drive.detach()
    assert torch.equal(ran.outputs["y"], module(**X)["y"])
    assert ran.outputs["first"].shape == (4, 6)
    with pytest.raises(
        PlanError,
        match=r"after the forward, mul \(at test_stage_forward\.py:\d+\) "
        r"takes the value 'layers\.0', made after",
    ):
        ran.outputs["first"] * 2


def test_a_run_is_freed_when_its_result_is_dropped():
    one = chained(simple)
    parts = one.boundaries.stages(["layers.1", "layers.2"])
    module, blocks, _ = one.analyzed.make_module("cpu", torch.float64)
    drive, store = ForwardDriver(blocks), dict[str, torch.Tensor]()
    gc.disable()
    try:
        for part in parts:
            ran = run_one_stage(one, part, module, drive, store)
            store |= {name: tensor.detach() for name, tensor in ran.sent_values.items()}
            held = [
                weakref.ref(tensor) for tensor in (*ran.sent_values.values(), *ran.received_values.values())
            ]
            held += [
                weakref.ref(tensor)
                for block_call in ran.forward_pass.block_calls.values()
                for tensor, _ in block_call.outputs
            ]
            del ran
            assert [ref() for ref in held if ref() is not None] == []
    finally:
        gc.enable()
        drive.detach()
