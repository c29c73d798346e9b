"""The recorded script of a stage, replayed on other inputs: bitwise equal to its forward, or not recorded."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from meshwright.model.blocks.block_forward_backward import ForwardDriver, backward
from meshwright.model.pipeline.microbatch_replay import ScriptCache
from meshwright.model.pipeline.stage_forward import StageResult, run_stage
from meshwright.model.tensors.pytree import tree_tensors
from tests.model.block_backward import Chain, Forward, weigh
from tests.model.pipeline.staged_model import Ranks, chained, ranks, same


def other(value: torch.Tensor) -> torch.Tensor:
    """Other numbers of the same kind."""
    return value * 0.5 + 0.1 if value.is_floating_point() else value.flip(-1)


def stage_gradients(ran: StageResult, parameters: dict[str, nn.Parameter]) -> list[torch.Tensor | None]:
    """Those of a part whose gifts are weighed; they are taken off the parameters."""
    if ran.outputs is not None:
        weigh(ran.outputs).backward()
    for leaf in ran.sent_values.values():
        leaf.grad = torch.ones_like(leaf) if leaf.requires_grad else None
    backward(ran.closing_call)
    for block_call in reversed(ran.forward_pass.block_calls.values()):
        backward(block_call)
    found = [parameter.grad for parameter in parameters.values()] + [
        leaf.grad for leaf in ran.received_values.values()
    ]
    for parameter in parameters.values():
        parameter.grad = None
    return found


def reasons_not_recorded(one: Ranks, boundaries: Sequence[str] = ()) -> list[str]:
    """Returns why nothing was written down of each part of `one`, "" where something was, and gave what a
    forward gives.
    """
    module, blocks, parameters = one.analyzed.make_module("cpu", torch.float64)
    drive, scripts, why = (
        ForwardDriver(blocks, in_place=one.analyzed.model_spec.writes_in_place),
        ScriptCache(module, blocks),
        [],
    )
    first, second = one.inputs, {key: other(value) for key, value in one.inputs.items()}
    stores: dict[bool, dict[str, torch.Tensor]] = {False: {}, True: {}}
    calls: list[object] = []
    module.register_forward_pre_hook(lambda *given: calls.append(given))
    for part in one.boundaries.stages(boundaries):

        def played(
            inputs: Any, store: dict[str, torch.Tensor], scripts: ScriptCache | None, part: Any = part
        ) -> StageResult:
            received = {value.name: store[value.name].clone() for value in part.inputs}
            given, reach = {"script_cache": scripts, "inputs": inputs}, lambda block_call: None
            samples = len(next(iter(inputs.values())))
            return run_stage(
                partial(module, **inputs),
                drive,
                one.graph,
                part,
                samples,
                received,
                before_block=reach,
                **given,
            )

        written = played(first, stores[False], scripts)
        truth = played(second, stores[True], None)
        calls.clear()
        again = played(second, stores[True], scripts)
        why.append(next(iter(scripts.failure_reasons.values()), ""))
        assert bool(calls) == bool(why[-1])
        scripts.failure_reasons.clear()
        assert same([truth.sent_values, truth.outputs], [again.sent_values, again.outputs])
        stores[False] |= {name: leaf.detach() for name, leaf in written.sent_values.items()}
        stores[True] |= {name: leaf.detach() for name, leaf in truth.sent_values.items()}
        expected, found = stage_gradients(truth, parameters), stage_gradients(again, parameters)
        assert [tensor is None for tensor in expected] == [tensor is None for tensor in found]
        assert same([t for t in expected if t is not None], [t for t in found if t is not None])
    drive.detach()
    return why


def simple(model: Chain, x: torch.Tensor) -> object:
    scale = torch.arange(6, dtype=x.dtype).cos()
    h = model.layers[0](x * scale)
    twice = h[:, :] * 2
    return model.head(model.layers[2](model.layers[1](h) + scale) + twice)


@pytest.mark.parametrize(
    "boundaries", [(), ("layers.1",), ("layers.1", "layers.2"), ("layers.1", "layers.2", "head")]
)
def test_glue_and_blocks_are_replayed_on_other_inputs(boundaries: tuple[str, ...]):
    assert reasons_not_recorded(chained(simple), boundaries) == [""] * (len(boundaries) + 1)


def reads(model: Chain, x: torch.Tensor) -> object:
    h = model.layers[0](x)
    return model.head(h * (2.0 if float(x.sum()) > 0 else 3.0))


def picks(model: Chain, x: torch.Tensor) -> object:
    return model.head(model.layers[0](x) * len(x[x > 0]))


KEPT = torch.ones(6, dtype=torch.float64)


def keeps(model: Chain, x: torch.Tensor) -> object:
    return model.head(model.layers[0](x) * KEPT)


def aside(model: Chain, x: torch.Tensor) -> object:
    for layer in model.layers:
        layer.extra = x.sum()
    return model.head(model.layers[0](x))


def counts(model: Chain, x: torch.Tensor) -> object:
    total = torch.zeros(6, dtype=x.dtype)
    total += x.sum(0)
    return model.head(model.layers[0](x) + total)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> torch.Tensor:
        return gradient[0] * 2


def function(model: Chain, x: torch.Tensor) -> object:
    return model.head(Doubled.apply(model.layers[0](x)))


def fills(model: Chain, x: torch.Tensor) -> object:
    return model.head(model.layers[0](x) + torch.full_like(x, x.detach().sum()))


def casts(model: Chain, x: torch.Tensor) -> object:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x * x.sum()
    return model.head(model.layers[0](x) + y)


@pytest.mark.parametrize(
    ("glue", "message"),
    [
        (reads, "glue reads a number"),
        (picks, "glue reads a number"),
        (keeps, "a tensor has an unknown origin"),
        (counts, "writes into a tensor that other microbatches use too"),
        (function, "is called without gradients on what needs one"),
        (fills, "glue reads a number"),
        (casts, "is called in a context of its own"),
    ],
)
def test_a_forward_that_could_differ_is_not_recorded(glue: Forward, message: str):
    assert any(message in why for why in reasons_not_recorded(chained(glue)))


def test_a_block_that_reads_an_attribute_is_not_recorded():
    def block(layer: Any, x: torch.Tensor) -> torch.Tensor:
        extra = layer.__dict__.get("extra")
        return torch.tanh(layer.linear(x)) if extra is None else torch.tanh(layer.linear(x)) * extra

    reasons = reasons_not_recorded(chained(aside, block))
    assert any("computes with tensors that are not among its arguments" in why for why in reasons)


def whole(one: Ranks, hook: Any = None) -> tuple[ScriptCache, Any]:
    """The scripts of one part that is the whole model, and what runs it on inputs: with scripts,
    or as ever.
    """
    module, blocks, _ = one.analyzed.make_module("cpu", torch.float64)
    if hook is not None:
        next(iter(blocks.values())).register_forward_hook(hook)
    drive, scripts, (part,) = ForwardDriver(blocks), ScriptCache(module, blocks), one.boundaries.stages(())

    def play(inputs: Any, *, truly: bool = False) -> Any:
        given = {"script_cache": None if truly else scripts, "inputs": inputs}
        return run_stage(
            partial(module, **inputs),
            drive,
            one.graph,
            part,
            4,
            {},
            before_block=lambda block_call: None,
            **given,
        ).outputs

    return scripts, play


def counter(model: Chain, x: torch.Tensor) -> object:
    model.times = vars(model).get("times", 0) + 1
    return model.head(model.layers[0](x) * model.times)


def mean(model: Chain, x: torch.Tensor) -> object:
    before = vars(model).get("means", [])
    model.means = [*before, x.detach().mean(0)]
    return model.head(model.layers[0](x) + sum(before))


@pytest.mark.parametrize("glue", [counter, mean])
def test_a_forward_that_leaves_something_behind_runs_each_time(glue: Forward):
    one = chained(glue)
    (scripts, play), (_, truth) = whole(one), whole(one)
    for _ in range(3):
        assert same(truth(one.inputs, truly=True), play(one.inputs))
    assert len(scripts.failure_reasons) == 1


def test_a_value_cached_by_the_first_forward_does_not_prevent_replay():
    def cached(model: Chain, x: torch.Tensor) -> object:
        if "table" not in vars(model):
            model.table = 2.0
        return model.head(model.layers[0](x) * model.table)

    one = chained(cached)
    scripts, play = whole(one)
    first, second, third = (play(one.inputs) for _ in range(3))
    assert same([first, first], [second, third])
    assert len(scripts._scripts) == 1


def test_a_hook_of_a_block_is_not_applied_twice():
    one = chained(simple)
    scripts, play = whole(one, lambda block, given, output: output * 2)
    play(one.inputs)
    inputs = {key: other(value) for key, value in one.inputs.items()}
    assert same(play(inputs, truly=True), play(inputs))
    assert [why.partition(" ")[2] for why in scripts.failure_reasons.values()] == [
        "has hooks, or something is captured in it"
    ]


def test_a_tensor_that_comes_as_two_inputs_is_not_taken_for_both_afterwards():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) + y)

    x = torch.linspace(-2, 2, 24, dtype=torch.float64).view(4, 6)
    scripts, play = whole(ranks(Two, {"x": x, "y": x.clone()}))
    play({"x": x, "y": x})
    inputs = {"x": x * 2, "y": x + 1}
    assert same(play(inputs, truly=True), play(inputs))
    assert list(scripts.failure_reasons.values()) == ["two inputs are one tensor"]


def test_inputs_of_the_same_shapes_and_other_names_have_another_script():
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(
            self, x: torch.Tensor, plus: torch.Tensor | None = None, minus: torch.Tensor | None = None
        ) -> torch.Tensor:
            y = self.first(x)
            return self.second(y + plus if plus is not None else y - minus)

    x = torch.linspace(-2, 2, 24, dtype=torch.float64).view(4, 6)
    _, play = whole(ranks(Either, {"x": x, "plus": x.clone()}))
    play({"x": x, "plus": x + 1})
    inputs = {"x": x * 2, "minus": x + 1}
    assert same(play(inputs, truly=True), play(inputs))


def test_a_constant_that_somebody_writes_into_is_not_used_again():
    one = chained(simple)
    scripts, play = whole(one)
    key = (one.boundaries.stages(())[0].block_calls[0], "x", (one.inputs["x"].shape, one.inputs["x"].dtype))
    play(one.inputs)
    script = scripts.find(key)
    assert script is not None
    script.constants[0][0].mul_(2)
    assert scripts.find(key) is None


@pytest.mark.parametrize("masked", [False, True])
def test_a_llama_is_replayed(masked: bool):
    config = transformers.LlamaConfig(
        vocab_size=13,
        hidden_size=12,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        use_cache=False,
    )
    ids = torch.arange(20).view(4, 5) % 13
    samples = {"input_ids": ids} | ({"attention_mask": torch.ones(4, 5, dtype=torch.int64)} if masked else {})
    one = ranks(lambda: transformers.LlamaForCausalLM(config), samples)
    why = reasons_not_recorded(one, ("model.layers.1", "model.layers.2"))
    assert len(tree_tensors(list(one.inputs.values()))) == 1 + masked
    assert all("reads a number" in each for each in why) if masked else why == [""] * 3
