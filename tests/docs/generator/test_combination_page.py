"""The page of combinations, from a small result."""

import json
from pathlib import Path

import pytest

from docs.generator.combination_page import PAGE, RESULT, REVIEWED, SOURCE, combination_page

PAIRS = {
    "ring + zero 3": {"drawn": 4, "matched": 3, "refused": {"odd": 1}},
    "ring + tensor_parallel 2d": {"drawn": 2, "matched": 0, "refused": {"all tokens": 2}},
}
KINDS = {"zero 1": "zero", "zero 3": "zero", "tensor_parallel 2d": "tensor_parallel 2d", "ring": "ring"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / SOURCE).parent.mkdir()
    (tmp_path / SOURCE).write_text('"""Random plans."""\n')
    (tmp_path / REVIEWED).write_text(
        '[[refusals]]\nreason = "all tokens"\nsays = "x"\nwhy = "it shards their width"\n'
    )
    return tmp_path


def test_a_pair_is_allowed_refused_with_its_reason_or_not_tried(root: Path):
    assert combination_page(root) == {}
    detail = {
        "seed": 8,
        "drawn": 6,
        "matched": 3,
        "refused": 3,
        "by_reason": {"all tokens": 2},
        "worst": 1e-15,
    }
    stored = {
        "holds": True,
        "date": "2026-11-22T15:00:00",
        "commit": "a" * 40,
        "detail": {**detail, "pairs": PAIRS, "kinds": KINDS},
    }
    (root / RESULT).write_text(json.dumps(stored))
    page = combination_page(root)[PAGE]
    assert "Random plans." in page
    assert (
        "It holds: of 6 plans under seed 8, 3 matched and 3 were refused; the worst difference is 1.0e"
        in page
    )
    assert "| ring | zero 3 | tensor\\_parallel 2d (all tokens) | zero 1 |" in page
    assert "| zero 1 |  |  | tensor\\_parallel 2d, ring |" in page
    assert "| all tokens | 2 | it shards their width |" in page
