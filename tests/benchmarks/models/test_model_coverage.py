"""Five different families of the coverage benchmark; the rest run with `make bench`."""

from pathlib import Path

import pytest

from benchmarks.models.model_coverage import BAR, TOLERANCE, check_family, named
from benchmarks.models.model_families import FAMILIES

SHOWN = {
    "gemma2": ("nothing", "5 (model.layers.0 .. 1)"),
    "qwen3_moe": ("nothing", "5 (model.layers.0 .. 1)"),
    "bert": ("example batch", "4 (bert.encoder.layer.0 .. 1)"),
    "t5": ("example batch", "9"),
    "U-Net with skips": ("example batch", "6"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_family_equals_one_device_on_two_and_on_three_ranks(name: str, tmp_path: Path):
    (family,) = named([name])
    row = check_family(family, tmp_path)
    assert set(row["errors"]) == {"2", "3"}
    assert max(row["errors"].values()) <= TOLERANCE
    assert (row["declared"], row["blocks"]) == SHOWN[name]
    assert row["notes"] == []


def test_more_families_are_measured_than_claimed_and_none_twice():
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names) > BAR
