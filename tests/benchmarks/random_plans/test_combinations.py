"""For every pair of techniques that occurs, at least the reviewed share of the plans with both is not
refused.
"""

import re

from benchmarks.random_plans.combinations import count_pairs, reviewed, violations
from benchmarks.random_plans.random_plans import make_plans


def test_every_pair_of_techniques_keeps_the_share_that_is_reviewed():
    limits = reviewed()
    rows = make_plans(limits.seed, range(limits.count))
    assert [row for row in rows if row["outcome"] not in ("matched", "refused")] == []
    assert list(violations(count_pairs(rows), limits)) == [], (
        f"seed {limits.seed}; see python -m benchmarks.random_plans.random_plans --shares"
    )


def test_every_reviewed_refusal_has_a_why_and_a_unique_reason():
    refusals = reviewed().refusals
    assert all(refusal.reason and refusal.why and re.compile(refusal.says) for refusal in refusals)
    assert len({refusal.reason for refusal in refusals}) == len(refusals)
