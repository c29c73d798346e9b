"""What was weighed falls to ranks as their elements do, and a backward's scratch stands beside the gradients that it makes."""

from dataclasses import replace

import pytest

from meshwright.plan.job.job import Job
from meshwright.plan.job.precision import Precision
from meshwright.plan.model_spec.dim_split import Cut
from meshwright.plan.model_spec.model_spec import Anatomy, Weight
from meshwright.plan.model_spec.op_costs import Line, Load, Weighed
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.param_sharding import Home
from meshwright.plan.sharding.placement import Layout, S
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.activation_memory import Taken, taken
from meshwright.plan.step.single_device import SCRATCH, one_after_another, one_device

BODY, HEAD = Weight("body.weight", (3, 2), ("body",)), Weight("head.weight", (5, 2), ("head",))
PLAIN = Anatomy("model", ("body", "head"), (BODY, HEAD), (20, 8), (50, 80), inside_numel=(25, 4), loss_numel=8)
LOADS = (
    Load("body", Line(0, 80), Line(12, 100), Line(0, 200), Line(0, 210)),
    Load("head", Line(0, 32), Line(0, 16), Line(0, 0), Line(0, 0)),
)
WEIGHED = replace(PLAIN, weighed=Weighed(LOADS, glue=Line(7, 1), loss=Line(0, 64)))


def test_bytes_that_are_there_once_and_those_of_each_row_add_up_and_go_nowhere_below_zero():
    line = Line(10, 10)
    assert (line.at(1), line.at(10), (line + line).at(1), (line - Line(3, 1)).at(2)) == (20, 110, 40, 25)
    assert Line(-5, 1).at(2) == 0


def test_without_weighing_a_visit_takes_its_elements_in_the_dtype_of_compute():
    found = taken(Space.one_device(Mesh(), PLAIN), Job(precision=Precision("float32", "bfloat16")), 3)
    assert found == {"body": Taken(20 * 3 * 2, 25 * 3 * 2), "head": Taken(8 * 3 * 2, 4 * 3 * 2)}


def test_what_was_weighed_counts_instead_and_glue_is_there_from_the_first_visit_to_its_backward():
    found = taken(Space.one_device(Mesh(), WEIGHED), Job(), 3)
    assert found == {"body": Taken(240 + 10, 312, 600, 630), "head": Taken(96, 48)}


@pytest.mark.parametrize(
    ("added", "new", "scratch"),
    [(0, 0, 600), (700, 0, 700), (0, 24, 606), (0, 1000, 0), (50, 1000, 50)],
    ids=["nothing", "a larger gradient is added", "gradients are made", "as many as there is room", "and one is added"],
)
def test_a_backward_has_for_itself_what_was_weighed_less_the_gradients_that_it_leaves(added: int, new: int, scratch: int):
    assert Taken(0, 0, backward=600, learning=630).scratch(added, new) == scratch


def test_what_is_as_large_as_weights_is_divided_as_they_are_whatever_becomes_of_the_rest():
    head = replace(HEAD, cuts=(Cut(0, 5, (5,)),))
    load = Load("head", Line(0, 32), Line(0, 16, 40), Line(0, 4, 40), Line(1, 4, 80))
    known = replace(WEIGHED, weights=(BODY, head), weighed=Weighed((LOADS[0], load), Line(), Line()))
    space = Space(Mesh(tp=2), known, (Home(BODY), Home(head, Layout.of({"tp": S(0)}))))
    first, second = (taken(space.at(space.mesh.coordinate(rank)), Job(), 3) for rank in (0, 1))
    assert first["body"] == second["body"] == Taken(240, 312, 600, 630)
    assert first["head"] == Taken(96, 48 + 24, 12 + 24, 13 + 48)  # three of five words
    assert second["head"] == Taken(96, 48 + 16, 12 + 16, 13 + 32)


def test_the_program_holds_what_was_weighed():
    actions = one_device(Space.one_device(Mesh(), WEIGHED), Job(), 2, one_after_another(WEIGHED.visits, 2)).actions("stage0")
    held = {action.name: {hold.name: hold.nbytes for hold in action.takes} for action in actions}
    assert held["F(body, 0)"] == {"stream(body, 0)": 160 + 9, "inside(body, 0)": 212}
    assert held["LOSS(0)"][SCRATCH] == 128
    assert held["B(body, 0)"][SCRATCH] == 420 - 6 * 4
    assert held["B(body, 1)"][SCRATCH] == 400
