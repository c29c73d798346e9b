"""Batches as data loaders yield them: what is read of them, and what is refused by name."""

import inspect
import re
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from meshwright.model.loss.as_batch import check_constants, parse_batch
from meshwright.plan.job.errors import PlanError

X, Y = torch.ones(2, 3), torch.zeros(2)


def parameters(function: object) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)  # type: ignore[arg-type]


ONE = parameters(lambda x: x)
OPTIONAL = parameters(lambda x, mask=None: x)
ANY = parameters(lambda x, **options: x)


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


NamedPair = namedtuple("NamedPair", ["x", "y"])


@pytest.mark.parametrize(
    "given",
    [
        {"x": X, "y": Y},
        {"x": X, "y": Y, "mask": None},
        BatchEncoding({"x": X, "y": Y}),
        Pair(X, Y),
        NamedPair(X, Y),
        (X, Y),
        [X, Y],
    ],
    ids=lambda given: type(given).__name__,
)
def test_dicts_encodings_dataclasses_and_tuples_are_tensors_by_name(given: object):
    parsed = parse_batch(given, ONE, ("y",))
    assert set(parsed.tensors) == {"x", "y"}
    assert parsed.tensors["x"] is X
    assert parsed.tensors["y"] is Y
    assert parsed.constants == {}


def test_a_bare_tensor_is_the_only_argument_of_the_forward():
    assert list(parse_batch(X, ONE, ("y",)).tensors) == ["x"]


def test_outputs_of_a_model_are_a_batch_of_another():
    parsed = parse_batch(BaseModelOutput(last_hidden_state=X), parameters(lambda last_hidden_state: 0))
    assert list(parsed.tensors) == ["last_hidden_state"]


def test_numbers_that_the_forward_takes_are_constants():
    assert parse_batch({"x": X, "mask": 3}, OPTIONAL).constants == {"mask": 3}
    assert parse_batch({"x": X, "use_cache": False, "scale": 0.5}, ANY).constants == {
        "use_cache": False,
        "scale": 0.5,
    }


def test_strings_lists_and_numbers_that_no_argument_takes_are_refused_by_name_and_all_at_once():
    with pytest.raises(PlanError) as error:
        parse_batch({"x": X, "text": "a b", "ids": ["a", "b"], "index": 7}, ONE)
    text = str(error.value)
    assert "batch.text: is a str; a batch holds tensors, numbers and None" in text
    assert "batch.ids: is a list of str" in text
    assert "batch.index: is a int, which the forward does not take" in text
    assert text.count("repair:") == 3


@pytest.mark.parametrize("given", [(X, Y), (X, Y, X)])
def test_a_tuple_that_can_be_read_in_two_ways_is_refused(given: tuple[torch.Tensor, ...]):
    with pytest.raises(
        PlanError, match="without names; the forward takes x, mask, of which x must be given, and the loss"
    ):
        parse_batch(given, OPTIONAL, ("y",))


def test_a_tuple_with_more_tensors_than_arguments_and_targets_is_refused():
    with pytest.raises(PlanError, match="a batch of 3 tensors without names"):
        parse_batch((X, Y, Y), ONE, ("y",))


def test_a_batch_of_other_things_is_refused():
    with pytest.raises(PlanError, match="a batch is a list of str"):
        parse_batch(["a"], ONE)
    with pytest.raises(PlanError, match="a batch is a int"):
        parse_batch(3, ONE)


def test_a_batch_with_other_constants_than_the_example_is_refused():
    check_constants({"n": 1}, {"n": 1})
    with pytest.raises(
        PlanError, match=re.escape("the constants {'n': 2}; the model was analyzed with {'n': 1}")
    ):
        check_constants({"n": 2}, {"n": 1})
