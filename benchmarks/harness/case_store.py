"""The finished cases of a long benchmark, by commit: a later run of the same commit continues there."""

import json
from collections.abc import Mapping

from benchmarks.harness.result import ROOT, commit


class CaseStore:
    """The rows of the benchmark `name` at this commit, in benchmarks/scratch; each has a field `case`."""

    def __init__(self, name: str) -> None:
        self._path = ROOT / "benchmarks" / "scratch" / f"{name}-{commit()}.jsonl"

    def read(self) -> dict[str, dict[str, object]]:
        """Returns the stored rows by case."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return {row["case"]: row for row in map(json.loads, lines)}

    def add(self, row: Mapping[str, object]) -> None:
        """Appends a row."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
