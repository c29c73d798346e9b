"""Faults: three parts each, all of them at once, and the nearest known word."""

import inspect

import pytest

from meshwright.core.errors import Fault, PlanError, nearest, raise_faults


def test_a_fault_says_where_what_and_how_to_repair_it():
    assert str(Fault("3 ranks", "use 4", "mesh.tp")) == "mesh.tp: 3 ranks\n  repair: use 4"
    assert str(Fault("3 ranks", "use 4")) == "3 ranks\n  repair: use 4"


def test_an_error_cannot_be_made_without_a_repair():
    assert inspect.signature(PlanError).parameters["fix"].default is inspect.Parameter.empty
    with pytest.raises(TypeError, match="fix"):
        PlanError("3 ranks")


def test_all_faults_are_reported_at_once_and_in_order():
    faults = [Fault(f"fault {i}", f"repair {i}", f"key{i}") for i in range(3)]
    with pytest.raises(PlanError) as caught:
        raise_faults(iter(faults))
    assert caught.value.faults == tuple(faults)
    assert str(caught.value) == "\n".join(map(str, faults))


def test_without_a_fault_nothing_is_raised():
    raise_faults(iter(()))


def test_the_nearest_word_is_offered_or_else_all_words():
    assert nearest("replicte", ["batch", "replicate"]) == "did you mean 'replicate'?"
    assert nearest("xyz", ["replicate", "batch"]) == "choose one of: batch, replicate"
