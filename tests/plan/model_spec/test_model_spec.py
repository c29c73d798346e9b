"""What a plan knows of a model: counts, owners, and the visit that completes a gradient."""

from dataclasses import replace

import pytest

from meshwright.plan.model_spec.dim_split import Cut
from meshwright.plan.model_spec.layer_calls import Call, Number, Portion
from meshwright.plan.model_spec.model_spec import ROOT, Anatomy, Weight

TIED = Weight("embed.weight", (5, 2), ("embed", "head"), aliases=("head.weight",))
MIDDLE = Weight("layer.weight", (2, 3), ("layer",))
FROZEN = Weight("layer.table", (4,), ("layer",), trainable=False)
GLUE = Weight("scale", (), (ROOT,))
MODEL = Anatomy("model", ("embed", "layer", "head"), (TIED, MIDDLE, FROZEN, GLUE), (1, 1, 1), (1, 1, 1))


def test_tied_parameters_are_counted_once():
    assert MODEL.numel == 10 + 6 + 4 + 1


def test_frozen_parameters_receive_no_gradient():
    assert MODEL.trainable == (TIED, MIDDLE, GLUE)


def test_a_tied_parameter_belongs_to_both_its_visits():
    assert [MODEL.of(visit) for visit in MODEL.visits] == [(TIED,), (MIDDLE, FROZEN), (TIED,)]


@pytest.mark.parametrize(
    ("weights", "last"),
    [([MIDDLE], "layer"), ([TIED], "embed"), ([MIDDLE, TIED], "embed"), ([GLUE], None), ([MIDDLE, GLUE], None)],
)
def test_the_earliest_user_in_the_forward_completes_the_gradient(weights: list[Weight], last: str | None):
    assert MODEL.last_backward(weights) == last


def test_a_scalar_has_one_element():
    assert GLUE.numel == 1


def test_a_tied_parameter_is_held_by_the_modules_of_all_its_names():
    assert TIED.names == ("embed.weight", "head.weight")
    assert TIED.layers == ("embed", "head")
    assert GLUE.layers == ("",)


HEADS = Cut(0, 2, (2,))
NUMBERS = tuple(Number(module, "heads", HEADS) for module in ("one.attention", "two", "twofold", "positions"))
DIVIDED = Anatomy(
    *("model", ("one", "two", "twofold"), (), (1,) * 3, (1,) * 3),
    numbers=NUMBERS,
    portions=(Portion("one", 1, HEADS), Portion("two", 1, HEADS)),
)


def test_a_part_has_the_numbers_of_its_own_blocks_and_of_glue():
    part = DIVIDED.within(["two"])
    assert [number.module for number in part.numbers] == ["two", "positions"]
    assert [portion.block for portion in part.portions] == ["two"]


def test_a_module_of_two_blocks_has_its_numbers_in_the_part_of_either():
    shared = Call("one.attention.query", "two", "columns", source=0, into=1, out=1)
    part = replace(DIVIDED, calls=(shared,)).within(["two"])
    assert [number.module for number in part.numbers] == ["one.attention", "two", "positions"]
