"""Diagnostics: three parts each, all at once, and the most similar known name."""

import inspect

import pytest

from meshwright.plan.job.errors import (
    Diagnostic,
    PlanError,
    collect_diagnostics,
    raise_diagnostics,
    suggest_choice,
    suggest_name,
)


def test_a_diagnostic_has_location_problem_and_repair():
    assert str(Diagnostic("3 ranks", "use 4", "mesh.tp")) == "mesh.tp: 3 ranks\n  repair: use 4"
    assert str(Diagnostic("3 ranks", "use 4")) == "3 ranks\n  repair: use 4"


def test_an_error_cannot_be_made_without_a_repair():
    assert inspect.signature(PlanError).parameters["fix"].default is inspect.Parameter.empty
    with pytest.raises(TypeError, match="fix"):
        PlanError("3 ranks")


def test_all_diagnostics_are_reported_at_once_and_in_order():
    diagnostics = [Diagnostic(f"fault {i}", f"repair {i}", f"key{i}") for i in range(3)]
    with pytest.raises(PlanError) as caught:
        raise_diagnostics(iter(diagnostics))
    assert caught.value.diagnostics == tuple(diagnostics)
    assert str(caught.value) == "\n".join(map(str, diagnostics))


def test_without_a_diagnostic_nothing_is_raised():
    raise_diagnostics(iter(()))


def test_the_most_similar_name_is_suggested_or_else_all_names():
    assert suggest_name("replicte", ["batch", "replicate"]) == "did you mean 'replicate'?"
    assert suggest_name("xyz", ["replicate", "batch"]) == "choose one of: batch, replicate"


def test_a_choice_that_differs_in_its_digits_only_is_not_suggested():
    assert suggest_choice("float8", ["float64", "float16"]) == "choose one of: float16, float64"
    assert suggest_choice("flaot64", ["float64", "float16"]) == "did you mean 'float64'?"


def test_diagnostics_are_collected_and_results_are_returned():
    def half(number: int) -> int:
        raise_diagnostics(Diagnostic(f"{number} is odd", "take an even one") for _ in range(number % 2))
        return number // 2

    diagnostics = [Diagnostic("before", "that")]
    assert collect_diagnostics(diagnostics, half, 4) == 2
    assert collect_diagnostics(diagnostics, half, 3) is None
    assert [diagnostic.problem for diagnostic in diagnostics] == ["before", "3 is odd"]
