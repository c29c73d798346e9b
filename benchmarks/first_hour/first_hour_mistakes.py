"""Mistakes of the first hour: each is refused or warned of, and the printed repair works when it is followed.

Every mistake is made twice in a folder of its own: as a new user makes it, and after what the message says.
It is data (`benchmarks/first_hour/*_mistakes.toml`): a command with its files or a short script, words of the
diagnosis and of the repair that must be printed, and the change that follows the repair.

    refused with a repair that works   exit code 2 or a PlanError (verify: 1), with the expected words; the
                                       changed command succeeds
    warned                             the command does what was meant, and says so; after the change it is
                                       not said
    silent, traceback, hangs, another diagnosis, repair does not work      faults: the claim does not hold

Nothing is timed, and no case needs a GPU or a network.
"""

import socket
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from benchmarks.first_hour.mistake import Mistake, read_mistakes
from benchmarks.first_hour.outcome import preload
from benchmarks.first_hour.verdict import GOOD, try_mistake
from benchmarks.harness.result import ROOT, Result

NAME, BAR = "first_hour_mistakes", 60
CLAIM = (
    "at least 60 mistakes that a new user makes in the first hour are refused with a repair that works when "
    "it is followed, or warned of; none is silent, and none ends in a traceback"
)
GROUPS = ("config", "file", "model", "script", "trainer")
MAX_MESSAGE = 1200  # characters of a message that the result keeps


def check(mistake: Mistake) -> dict[str, str]:
    """Returns the verdict on a mistake, with the message."""
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        folder = Path(name).resolve()
        found = try_mistake(mistake, folder)
        message = _without_machine(found.message, folder)
    if found.verdict == "warned":  # among lines that say other things
        first = max(0, message.find(mistake.says[0]) - MAX_MESSAGE // 4)
        message = message[first:]
    row = {"case": mistake.name, "group": mistake.group, "done": mistake.run or mistake.script}
    row |= {"verdict": found.verdict, "message": message[:MAX_MESSAGE]}
    if found.verdict not in GOOD:
        row["afterwards"] = _without_machine(found.afterwards, folder)[:MAX_MESSAGE]
    return row


def _without_machine(message: str, folder: Path) -> str:
    """Returns a message in one line without the names of folders and of the host."""
    for place in (f"{folder}/", f"{ROOT}/", f"{sys.prefix}/"):
        message = message.replace(place, "")
    message = message.replace(str(folder), ".")
    return " ".join(message.replace(f" on host {socket.gethostname()}", " on host node0").split())


def main(only: str = "") -> None:
    """Check every mistake, and write the result; or only those whose name or group contains `only`."""
    torch.set_num_threads(1)
    preload()
    rows: list[dict[str, str]] = []
    for mistake in read_mistakes():
        if only == mistake.group or (only in mistake.name and only not in GROUPS):
            rows.append(check(mistake))
            print("\n".join(f"{key}: {value}" for key, value in rows[-1].items()), "\n", file=sys.stderr)
    verdicts = Counter(row["verdict"] for row in rows)
    print(dict(verdicts), file=sys.stderr)
    if not only:
        faults = [float(row["verdict"] not in GOOD) for row in rows]
        detail = {"verdicts": dict(verdicts), "mistakes": rows}
        print(Result.of_count(NAME, CLAIM, faults, limit=0.0, bar=BAR, detail=detail).write(NAME))


if __name__ == "__main__":
    main(*sys.argv[1:])
