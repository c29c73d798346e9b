"""The table of operations: each name once, and what a name with underscores means."""

from collections import Counter

import pytest

from meshwright.model.recording.op_table import OPAQUE, ROWS, find_op, reads_values


def test_every_name_is_in_one_row():
    counts = Counter(name for _, names in ROWS for name in names.split())
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(
    ("name", "kind", "dims"),
    [
        ("__add__", "pointwise", "same"),
        ("add_", "pointwise", "same"),
        ("_softmax", "reduction", "along"),
        ("_unsafe_view", "view", "reshape"),
        ("matmul", "contraction", "product"),
        ("index_select", "lookup", "index"),
        ("index_put_", "update", "same"),
        ("__len__", "metadata", "none"),
        ("float", "pointwise", "same"),
        ("__float__", "read", "none"),
    ],
)
def test_names_of_torch_and_aten_are_found(name: str, kind: str, dims: str):
    op = find_op(name)
    assert (op.kind, op.dims) == (kind, dims)


def test_an_unknown_operation_is_opaque():
    assert find_op("fft_rfft") is OPAQUE


def test_dims_are_read_from_their_argument():
    assert find_op("softmax").dim == (1, -1)
    assert find_op("split").dim == (2, 0)
    assert find_op("relu").dim is None


def test_reading_a_value_is_told_with_and_without_underscores():
    assert all(map(reads_values, ("item", "bool", "__bool__", "numpy", "contains")))
    assert not any(map(reads_values, ("size", "add", "getitem")))
