"""A few cases of the parity benchmark; its drawn subset covers every pair of choices."""

from dataclasses import replace
from itertools import combinations

import pytest

from benchmarks.pipeline.pipeline_models import MODELS, Residual, UNet, find_model
from benchmarks.pipeline.pipeline_parity import (
    COMBINED_WITH,
    NUM_RANKS,
    TOLERANCE,
    Case,
    cases,
    compare,
    pairwise_subset,
    result,
)
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES

CASES = (
    Case(find_model("u-net"), "zb_v", 2, 0, "ZeRO-2", 3, 1),
    Case(find_model("two inputs"), "interleaved", 2, 2, "alone", 3, 1),
    Case(find_model("gpt2"), "1f1b", 3, 0, "alone", 4, 1),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pipelined_model_equals_one_device(case: Case):
    row = compare(case)
    assert float(str(row["error"])) <= TOLERANCE, row


def test_the_subset_covers_every_pair_of_choices():
    every = list(cases())
    assert len({str(case) for case in every}) == len(every)
    found = pairwise_subset(every)
    covered = {pair for case in found for pair in combinations(case.choices, 2)}
    assert covered == {pair for case in every for pair in combinations(case.choices, 2)}
    assert {case.schedule for case in found} == set(SCHEDULES)
    assert {case.model for case in found} == set(MODELS)
    assert {case.combined_with for case in found} == set(COMBINED_WITH)
    assert {case.num_ranks for case in found} == set(NUM_RANKS)
    assert found == pairwise_subset(every)
    assert sum(case.num_microbatches % case.num_ranks > 0 for case in every) > 0.9 * len(every)


def test_a_refused_plan_is_a_miss_and_is_counted_by_its_reason():
    refused = compare(
        replace(
            CASES[0],
            schedule="interleaved",
            virtual_stages=3,
            num_ranks=4,
            num_microbatches=4,
            combined_with="tensor_parallel, sequence_parallel",
        )
    )
    assert "refused" in refused
    assert result([refused], 1).holds is False
    exact: dict[str, object] = {"case": "one", "ranks": 2, "error": 1e-16}
    assert result([exact], 1).holds is True
    assert result([exact, refused], 2).median == 1
    assert list(result([exact, refused], 2).detail["refused"].values()) == [1]  # type: ignore[union-attr]


def test_the_u_net_has_a_skip_connection_from_every_down_block_to_an_up_block():
    net = UNet(2)
    down = [each for each in net.down if isinstance(each, Residual)]
    up = [each for each in net.up if isinstance(each, Residual)]
    assert len(down) == len(up) == 6
    skip_widths = [next(iter(partner.convolutions)).state_dict()["weight"].shape[0] for partner in down[::-1]]
    input_widths = [next(iter(block.convolutions)).state_dict()["weight"].shape[1] for block in up]
    assert all(width > skip for width, skip in zip(input_widths, skip_widths, strict=True))
