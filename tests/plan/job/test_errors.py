"""Faults: three parts each, all of them at once, and the nearest known word."""

import inspect

import pytest

from meshwright.plan.job.errors import (
    Diagnostic,
    PlanError,
    collect_diagnostics,
    raise_diagnostics,
    suggest_name,
)


def test_a_fault_says_where_what_and_how_to_repair_it():
    assert str(Diagnostic("3 ranks", "use 4", "mesh.tp")) == "mesh.tp: 3 ranks\n  repair: use 4"
    assert str(Diagnostic("3 ranks", "use 4")) == "3 ranks\n  repair: use 4"


def test_an_error_cannot_be_made_without_a_repair():
    assert inspect.signature(PlanError).parameters["fix"].default is inspect.Parameter.empty
    with pytest.raises(TypeError, match="fix"):
        PlanError("3 ranks")


def test_all_faults_are_reported_at_once_and_in_order():
    faults = [Diagnostic(f"fault {i}", f"repair {i}", f"key{i}") for i in range(3)]
    with pytest.raises(PlanError) as caught:
        raise_diagnostics(iter(faults))
    assert caught.value.diagnostics == tuple(faults)
    assert str(caught.value) == "\n".join(map(str, faults))


def test_without_a_fault_nothing_is_raised():
    raise_diagnostics(iter(()))


def test_the_nearest_word_is_offered_or_else_all_words():
    assert suggest_name("replicte", ["batch", "replicate"]) == "did you mean 'replicate'?"
    assert suggest_name("xyz", ["replicate", "batch"]) == "choose one of: batch, replicate"


def test_what_is_refused_is_gathered_and_what_is_made_is_handed_on():
    def half(number: int) -> int:
        raise_diagnostics(Diagnostic(f"{number} is odd", "take an even one") for _ in range(number % 2))
        return number // 2

    faults = [Diagnostic("before", "that")]
    assert collect_diagnostics(faults, half, 4) == 2
    assert collect_diagnostics(faults, half, 3) is None
    assert [fault.problem for fault in faults] == ["before", "3 is odd"]
