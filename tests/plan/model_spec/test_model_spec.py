"""A model specification: counts, owners, and the block call that completes a gradient."""

from dataclasses import replace

import pytest

from meshwright.plan.model_spec.model_spec import ROOT, ModelSpec, ParamSpec
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall, PerHeadInput, SizeAttribute

TIED = ParamSpec("embed.weight", (5, 2), ("embed", "head"), aliases=("head.weight",))
MIDDLE = ParamSpec("layer.weight", (2, 3), ("layer",))
FROZEN = ParamSpec("layer.table", (4,), ("layer",), trainable=False)
GLUE = ParamSpec("scale", (), (ROOT,))
MODEL = ModelSpec("model", ("embed", "layer", "head"), (TIED, MIDDLE, FROZEN, GLUE), (1, 1, 1), (1, 1, 1))


def test_tied_parameters_are_counted_once():
    assert MODEL.numel == 10 + 6 + 4 + 1


def test_frozen_parameters_receive_no_gradient():
    assert MODEL.trainable == (TIED, MIDDLE, GLUE)


def test_a_tied_parameter_belongs_to_both_its_block_calls():
    assert [MODEL.params_of(block_call) for block_call in MODEL.block_calls] == [
        (TIED,),
        (MIDDLE, FROZEN),
        (TIED,),
    ]


@pytest.mark.parametrize(
    ("weights", "last"),
    [
        ([MIDDLE], "layer"),
        ([TIED], "embed"),
        ([MIDDLE, TIED], "embed"),
        ([GLUE], None),
        ([MIDDLE, GLUE], None),
    ],
)
def test_the_earliest_user_in_the_forward_completes_the_gradient(weights: list[ParamSpec], last: str | None):
    assert MODEL.last_backward(weights) == last


def test_a_scalar_has_one_element():
    assert GLUE.numel == 1


def test_a_tied_parameter_belongs_to_the_modules_of_all_its_names():
    assert TIED.names == ("embed.weight", "head.weight")
    assert TIED.layers == ("embed", "head")
    assert GLUE.layers == ("",)


HEADS = DimSplit(0, 2, (2,))
NUMBERS = tuple(
    SizeAttribute(module, "heads", HEADS) for module in ("one.attention", "two", "twofold", "positions")
)
DIVIDED = ModelSpec(
    *("model", ("one", "two", "twofold"), (), (1,) * 3, (1,) * 3),
    size_attributes=NUMBERS,
    per_head_inputs=(PerHeadInput("one", 1, HEADS), PerHeadInput("two", 1, HEADS)),
)


def test_a_stage_has_the_size_attributes_of_its_blocks_and_of_glue():
    part = DIVIDED.restricted_to(["two"])
    assert [number.module for number in part.size_attributes] == ["two", "positions"]
    assert [portion.block for portion in part.per_head_inputs] == ["two"]


def test_a_module_of_two_blocks_has_its_size_attributes_in_both_stages():
    shared = LayerCall("one.attention.query", "two", "colwise", input_id=0, in_numel=1, out_numel=1)
    part = replace(DIVIDED, layer_calls=(shared,)).restricted_to(["two"])
    assert [number.module for number in part.size_attributes] == ["one.attention", "two", "positions"]
