"""The inputs that checkpointed block calls keep, apart from the other outputs of those who make them."""

from meshwright.plan.model_spec.stage_transfers import StageValue
from meshwright.plan.step.memory.kept_inputs import KeptInput, checkpointed_calls, split_kept_inputs
from meshwright.plan.step.memory.memory_names import kept_input_name, output_name
from meshwright.plan.step.program import Action, Allocation

VALUE = StageValue("a", "a", ("b",), ((0, 1), (3, 0)), "float32")
KEPT = KeptInput(VALUE, 6, ())
ACTIONS = [
    Action("F_CHECKPOINTED", "a", 0, allocations=(Allocation(output_name("a", 0), 40),)),
    Action("F_CHECKPOINTED", "b", 0),
    Action("F", "c", 0),
    Action("I", "a", 0),
    Action("W", "a", 0, frees=(output_name("a", 0),)),
]


def test_an_input_is_an_allocation_that_the_backward_of_its_producer_frees():
    assert checkpointed_calls(ACTIONS) == {"a", "b"}
    edited = split_kept_inputs(ACTIONS, {0: [KEPT]})
    name = kept_input_name("a", 0)
    assert edited[0].allocations == (Allocation(output_name("a", 0), 16), Allocation(name, 24))
    assert edited[-1].frees == (output_name("a", 0), name)
    assert edited[1:-1] == ACTIONS[1:-1]


def test_what_is_apart_stays_so_and_other_microbatches_are_left_alone():
    once = split_kept_inputs(ACTIONS, {0: [KEPT]})
    assert split_kept_inputs(once, {0: [KEPT]}) == once
    assert split_kept_inputs(ACTIONS, {1: [KEPT]}) == ACTIONS
