"""A Llama with grouped queries whose sums along tp and exchanges along cp both travel as codes."""

import meshwright as mw
from meshwright.parallel.compression.activation_compression import ActivationCompression
from meshwright.verifier.static_checks import static_checks
from tests.parallel.tensor.odd_llama import analyzed_llama, batches, planned


def test_it_equals_one_device_and_issues_what_its_program_states():
    sums, heads = ActivationCompression(axis="tp", codec="int8"), ActivationCompression(axis="cp")
    strategies = mw.Ulysses(), mw.TensorParallel(), mw.DDP("cp"), sums, heads
    analyzed, plan = planned(analyzed_llama(), mw.Mesh(cp=2, tp=3), strategies, 2)
    assert static_checks(plan) == []
    verdict = mw.verify(analyzed, plan, batches(1))
    assert verdict.passed, verdict
    traced = mw.trace(analyzed, plan)
    assert traced.passed, traced
