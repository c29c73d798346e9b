"""What a benchmark of many cases has found, row by row: a run goes on where another one of the same commit
has ended.
"""

import json
from collections.abc import Mapping

from benchmarks.harness.result import ROOT, commit


class Kept:
    """The rows of the benchmark `name` at this commit, in benchmarks/scratch; each says its `case`."""

    def __init__(self, name: str) -> None:
        self._path = ROOT / "benchmarks" / "scratch" / f"{name}-{commit()}.jsonl"

    def read(self) -> dict[str, dict[str, object]]:
        """What is there, by case."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return {row["case"]: row for row in map(json.loads, lines)}

    def add(self, row: Mapping[str, object]) -> None:
        """Keep one more."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
