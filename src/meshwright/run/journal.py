"""The metrics of a run as JSON lines, one per global step, and the proof that a resumed run repeats it.

After a kill, a run goes on from its last checkpoint and plays some steps again. Their lines are in the file already: a
replayed step must give the same loss and gradient norm to the last bit, and the journal says whether it did. New lines
are appended; a line cut short by the kill is removed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXACT = ("loss", "grad_norm", "tokens")


@dataclass
class Replay:
    """How many steps were played again, and the first one that differed, with both lines."""

    steps: int = 0
    first: int | None = None
    differs: tuple[dict[str, Any], dict[str, Any]] | None = None

    def __str__(self) -> str:
        if not self.steps:
            return ""
        if self.differs is None:
            return f"{self.steps} steps were played again from step {self.first}: each equals its first playing to the last bit"
        old, new = self.differs
        pairs = ", ".join(f"{key} {old[key]!r} then, {new[key]!r} now" for key in EXACT)
        return f"step {old['step']} was played again and differs: {pairs}"


class Journal:
    """`metrics.jsonl` in the run's folder, written by rank 0. `known` are the steps that it held when it was opened."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self.known = self._read()
        self.replay = Replay()
        self._file = self.path.open("a")

    def write(self, line: dict[str, Any]) -> None:
        """Append the line of a step, or hold it against the line that the step has already."""
        old = self.known.get(line["step"])
        if old is None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            return
        self.replay.steps += 1
        self.replay.first = self.replay.first or line["step"]
        if self.replay.differs is None and any(old[key] != line[key] for key in EXACT):
            self.replay.differs = (old, line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self) -> dict[int, dict[str, Any]]:
        if not self.path.exists():
            return {}
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):  # the kill came in the middle of a line
            self.path.write_bytes(whole)
        lines = [json.loads(text) for text in whole.splitlines()]
        return {line["step"]: line for line in lines}
