"""Patterns match blocks and their calls, and one that matches none is named with what it may mean."""

from meshwright.plan.model_spec.block_patterns import matches_any, unmatched_patterns
from tests.tiny_model import analyzed_model


def test_a_pattern_matches_a_block_and_its_calls():
    assert matches_any("layer#2", ["layer"])
    assert matches_any("layer#2", ["other", "layer#*"])
    assert not matches_any("layer", ["layer#2"])
    assert not matches_any("layer", [])


def test_a_pattern_that_matches_no_block_is_named():
    model_spec = analyzed_model().model_spec
    known = model_spec.block_calls[0]
    (found,) = unmatched_patterns([known, f"{known}x"], model_spec, "strategies.gist.blocks")
    assert found.problem.startswith(f"'{known}x' matches no block of")
    assert known in found.fix
    assert found.location == "strategies.gist.blocks"
