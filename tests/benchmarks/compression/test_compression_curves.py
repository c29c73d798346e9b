"""The curves of codecs: what is compared with what, and when the claim holds."""

import json
from collections.abc import Mapping

import pytest

from benchmarks.compression.compression_curves import (
    CODECS,
    EXACT_STEPS,
    STEPS,
    make_request,
    result,
    share_of_bar,
    verdicts,
)
from meshwright.parallel import STRATEGIES
from meshwright.verifier.loss_curves import LossCurve

EXACT = (2.0, 2.02, 1.98)


def curves(gaps: Mapping[str, float]) -> list[tuple[str, LossCurve]]:
    """Curves whose exact runs end at EXACT, Adafactor's 1.0 below, and each codec a share of 2.0 above."""
    exact = {CODECS[name].exact: 0.0 for name in gaps}
    return [
        (name, LossCurve(seed, name in exact, (5.0, last), (5.0, last)))
        for seed, end in enumerate(EXACT)
        for name, gap in {**exact, **gaps}.items()
        for last in [end - ("adafactor" in name) + 2.0 * gap]
    ]


def test_each_codec_is_compared_with_the_exact_run_of_its_seed():
    found = verdicts(curves({"int8": 0.01, "sign": -0.01, "sign, adafactor": 0.02}), 2)
    assert list(found) == ["int8", "sign", "sign, adafactor"]
    assert found["int8"].gaps == pytest.approx([0.01] * 3)
    assert found["sign"].gap == pytest.approx(-0.01)
    assert found["int8"].spread == pytest.approx(0.02)
    assert found["sign, adafactor"].gap == pytest.approx(0.04)  # of 1.0


def test_bars_are_the_spread_or_a_share_of_the_loss():
    found = verdicts(curves({"int8": 0.01, "sign, adafactor": 0.005, "powersgd": 0.02, "int4": -0.1}), 2)
    shares = {name: share_of_bar(name, each) for name, each in found.items()}
    assert shares == pytest.approx({"int8": 0.5, "sign, adafactor": 0.5, "powersgd": 2.0, "int4": 0.0})


@pytest.mark.parametrize(("powersgd", "holds"), [(0.009, True), (0.011, False)])
def test_the_claim_holds_if_every_codec_with_a_bar_is_below_it(powersgd: float, holds: bool):
    gaps = {"int8": 0.001, "int4": 0.5, "sign": 0.5, "topk": 0.001, "powersgd": powersgd}
    gaps |= {"topk, adafactor": 0.5, "sign, adafactor": 0.001}
    found = result(verdicts(curves(gaps), STEPS), verdicts(curves({"int8": 0.02}), STEPS))
    assert found.holds is holds
    assert found.median == pytest.approx(powersgd / 0.01)
    assert json.dumps(found.detail)
    assert found.detail["codecs"]["int4"]["bar"] is None
    assert found.detail["25.6 M, one seed, 90 steps"]["int8"]["gap"] == pytest.approx(0.02)


def test_codecs_that_exist_take_their_options(tmp_path):
    modes = STRATEGIES["compress"]
    for codec in CODECS.values():
        assert modes[codec.mode](**codec.options).mode == codec.mode
    request = make_request(tmp_path, 1, STEPS)
    assert (request.job.train.seed, request.job.train.steps) == (1, STEPS)
    assert EXACT_STEPS < STEPS / 5
