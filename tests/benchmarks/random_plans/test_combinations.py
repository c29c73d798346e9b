"""Of the plans with two techniques, at least the reviewed share is not refused, for every two that meet."""

import re

from benchmarks.random_plans.combinations import of_pairs, reviewed, short_of
from benchmarks.random_plans.random_plans import planned


def test_every_pair_of_techniques_keeps_the_share_that_is_reviewed():
    wanted = reviewed()
    rows = planned(wanted.seed, range(wanted.count))
    assert [row for row in rows if row["outcome"] not in ("matched", "refused")] == []
    assert list(short_of(of_pairs(rows), wanted)) == [], (
        f"seed {wanted.seed}; see python -m benchmarks.random_plans.random_plans --shares"
    )


def test_every_reviewed_refusal_says_why_and_no_two_have_one_name():
    refusals = reviewed().refusals
    assert all(refusal.reason and refusal.why and re.compile(refusal.says) for refusal in refusals)
    assert len({refusal.reason for refusal in refusals}) == len(refusals)
