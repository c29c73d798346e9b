"""The benchmark itself, on two mistakes: one of the command line and one of a script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright import cli

ROOT = Path(__file__).parents[3]
NAMES = ("a key is misspelt on the command line", "labels outside of the vocabulary")


@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_is_refused_and_its_repair_works(name: str):
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "benchmarks.first_hour.first_hour_mistakes", name]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert f"case: {name}\n" in done.stderr
    assert "{'refused with a repair that works': 1}" in done.stderr
