"""The page of benchmarks, from small results."""

import json
from pathlib import Path

import pytest

from docs.generator.benchmarks.benchmark_page import CLAIMS, PAGE, RESULTS, benchmark_page

BASE = {
    "command": "make bench NAME=x",
    "date": "2026-11-20T18:03:00+00:00",
    "commit": "c" * 40,
    "machine": {"cpu": "AMD EPYC", "cores": 2, "memory_gib": 23.5, "system": "Linux"},
    "versions": {"torch": "2.13"},
    "repeats": 24,
    "discarded": 3,
}
RATIO = {"median": 0.9, "low": 0.85, "high": 0.95}
ROW = {
    "cpu": {"ratio": RATIO, "aa": {"median": 1.0, "low": 0.99, "high": 1.01}, "bar": 1.0, "holds": True},
    "wall": {"ratio": RATIO},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / RESULTS).mkdir(parents=True)
    (tmp_path / CLAIMS).parent.mkdir(parents=True)
    (tmp_path / CLAIMS).write_text(
        '[a_b]\ngroup = "Speed"\nsays = "Ours beside theirs"\nunit = "ratio"\nnote = "A note."\n'
    )
    measured = {
        "claim": "old words",
        "values": [0.8, 1.0],
        "median": 0.9,
        "spread": [0.85, 0.95],
        "bar": 1.0,
        "holds": True,
    }
    (tmp_path / RESULTS / "a_b.json").write_text(
        json.dumps({**BASE, **measured, "detail": {"large step": ROW, "seed": 7}})
    )
    return tmp_path


def test_a_claim_has_its_figure_spread_bar_date_and_command(root: Path):
    page = benchmark_page(root)[PAGE]
    assert "| [Ours beside theirs](#a-b) | 0.900 [0.850, 0.950] | 1.000 | yes | 2026-11-20 |" in page
    row = "| large step | 0.900 [0.850, 0.950] | 1.000 [0.990, 1.010] | 1 | 0.900 [0.850, 0.950] | yes |"
    assert row in page
    assert "A note." in page
    assert "- Command: `make bench NAME=x`" in page
    assert (
        "- Measured: 24 rounds, 3 more discarded because the machine was busy; 2 values from 0.8 to 1" in page
    )


def test_a_result_that_no_claim_names_is_shown_with_its_own_words(root: Path):
    measured = {
        "claim": "what it says",
        "values": [1.0],
        "median": 5.0,
        "spread": [5.0, 5.0],
        "bar": 6.0,
        "holds": False,
        "detail": {},
    }
    (root / RESULTS / "other.json").write_text(json.dumps({**BASE, **measured}))
    page = benchmark_page(root)[PAGE]
    assert "### Others" in page
    assert "| [what it says](#other) | 5.000 | 6.000 | no | 2026-11-20 |" in page


def test_without_results_there_is_no_page(tmp_path: Path):
    assert benchmark_page(tmp_path) == {}
