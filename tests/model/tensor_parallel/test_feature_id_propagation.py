"""Feature indices follow the layout of their tensors, and operations on several tensors tie their features
together.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.model.tensor_parallel.feature_id_propagation import (
    NO_FEATURE,
    CarriedFeatures,
    FeatureTies,
    component_labels,
    drop_constant_dims,
    output_features,
    view_features,
)
from tests.model.recording.recorded_functions import record_of


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((2, 5, 12), (2, 5, 3, 4)),
        ((2, 5, 3, 4), (2, 5, 12)),
        ((2, 3, 5, 4), (6, 5, 4)),
        ((1, 12, 1), (3, 4)),
        ((6, 5, 4), (2, 3, 5, 4)),
    ],
)
def test_a_view_of_feature_indices_follows_the_tensor(old: tuple[int, ...], new: tuple[int, ...]):
    whole = np.broadcast_to(np.arange(old[-1]), old) if old[-1] > 1 else np.arange(12).reshape(old)
    assert np.array_equal(
        np.broadcast_to(view_features(drop_constant_dims(whole), old, new), new), whole.reshape(new)
    )


def test_dims_along_which_indices_are_constant_have_size_one():
    assert drop_constant_dims(np.broadcast_to(np.arange(4), (3, 5, 4))).shape == (1, 1, 4)
    assert output_features(7, 3, 2).tolist() == [[7, 8, 9]]


def test_a_sum_ties_its_summands_and_ignores_no_feature():
    ties = FeatureTies()
    one = ties.tie_along(np.array([[0, 1], [2, NO_FEATURE]]), [1])
    assert one.tolist() == [[1], [2]]
    assert component_labels(np.arange(3), ties.tied_pairs).tolist() == [0, 0, 2]
    ties.tie(one, np.array([[NO_FEATURE], [NO_FEATURE]]))
    assert component_labels(np.arange(3), ties.tied_pairs).tolist() == [0, 0, 2]


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=40))
def test_classes_are_the_connected_components_of_ties(pairs: list[tuple[int, int]]):
    both = [(np.array([a]), np.array([b])) for a, b in pairs]
    label = component_labels(np.arange(20), both)
    one_by_one = np.arange(20)
    for pair in both:
        one_by_one = component_labels(one_by_one, [pair])
    assert one_by_one.tolist() == label.tolist()
    groups = [{i} for i in range(20)]
    for a, b in pairs:
        first, second = (next(group for group in groups if each in group) for each in (a, b))
        if first is not second:
            groups.remove(second)
            first |= second
    assert label.tolist() == [min(next(group for group in groups if i in group)) for i in range(20)]


def test_a_tensor_beside_features_ties_along_the_dims_in_which_it_changes():
    carried, numbers = CarriedFeatures(), np.arange(6).reshape(1, 2, 3)
    assert carried.tie_to_other(numbers, record_of(torch.ones(3)), 3).shape == (1, 2, 1)
    assert carried.tie_to_other(numbers, record_of(torch.ones(4, 1, 1)), 3).shape == (1, 2, 3)
    constant = record_of(torch.ones(4, 2, 3))
    carried.set_constant(constant)
    assert carried.tie_to_other(numbers, constant, 3).shape == (1, 2, 3)
