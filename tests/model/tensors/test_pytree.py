"""Finding and replacing tensors in what a module takes and returns."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from meshwright.model.tensors.pytree import copy_containers, map_leaves, replace_tensors, tree_tensors

A, B, C = torch.ones(1), torch.zeros(1), torch.full((1,), 2.0)
NEW = {id(A): B}
Named = namedtuple("Named", "first second")


@dataclass
class Record:
    first: object
    second: object = 3
    unset: object = field(init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    first: object


NESTED = [
    (A,),
    [C, {"a": A, "b": (A, None, 3, "word")}],
    Named(A, [C]),
    Record(Frozen(A)),
    OrderedDict(x=C),
    {A.shape, "set"},
]


def test_tensors_come_in_order_and_as_often_as_they_stand():
    assert [id(t) for t in tree_tensors(NESTED)] == [id(t) for t in (A, C, A, A, A, C, A, C)]


@pytest.mark.parametrize("value", [None, 3, "word", Record, {1, 2}, object(), torch.Size([2])])
def test_objects_without_tensors_are_passed_on(value: object):
    assert tree_tensors(value) == []
    assert replace_tensors(value, NEW) is value


def test_tuples_are_made_anew_in_their_own_type():
    assert replace_tensors((A, (C, A)), NEW) == (B, (C, B))
    assert replace_tensors(Named(A, C), NEW) == Named(B, C)
    top = torch.max(torch.ones(2, 2), 0)
    swapped = replace_tensors(top, {id(top.values): A})
    assert type(swapped) is type(top)
    assert swapped.values is A


def test_a_tuple_in_which_nothing_changes_is_the_same_object():
    for value in (A.shape, (C, [C]), Named(C, C), torch.max(torch.ones(2, 2), 0)):
        assert replace_tensors(value, NEW) is value


def test_lists_dicts_and_dataclasses_are_changed_in_place():
    for value, first in (([A, C], 0), ({"x": A, "y": C}, "x"), (OrderedDict(x=A), "x")):
        assert replace_tensors(value, NEW) is value
        assert value[first] is B
    for record in (Record(A), Frozen(A)):
        assert replace_tensors(record, NEW) is record
        assert record.first is B


def test_a_list_inside_a_tuple_keeps_its_identity():
    inner = [A]
    outer = replace_tensors((inner, A), NEW)
    assert outer[0] is inner
    assert inner[0] is B


def test_a_model_output_agrees_with_its_attributes():
    output = BaseModelOutput(last_hidden_state=A, hidden_states=(C, A))
    replace_tensors(output, NEW)
    assert output.last_hidden_state is output["last_hidden_state"] is output[0] is B
    assert output.hidden_states == output["hidden_states"] == (C, B)


def test_a_model_output_is_remade_with_other_leaves_as_item_and_as_attribute():
    one = BaseModelOutput(last_hidden_state=A, hidden_states=(A, C))
    other = map_leaves(one, lambda leaf: B if leaf is A else leaf)
    assert type(other) is BaseModelOutput
    assert [other.last_hidden_state, other["last_hidden_state"], other[0]] == [B, B, B]
    assert other.hidden_states[0] is B
    assert other.attentions is None
    assert list(other) == ["last_hidden_state", "hidden_states"]
    other["attentions"] = C
    assert (one.attentions, one.last_hidden_state, "attentions" in one) == (None, A, False)


@pytest.mark.parametrize(
    "value", [OrderedDict(x=A, y=[C]), {"x": A}, [A, (C,)], defaultdict(list, x=A)], ids=str
)
def test_what_is_copied_is_equal_and_of_the_same_kind(value: dict | list):
    again = copy_containers(value)
    assert type(again) is type(value)
    assert again is not value
    assert repr(again) == repr(value)
