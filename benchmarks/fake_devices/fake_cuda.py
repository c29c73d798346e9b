"""Every technique, precision and optimizer, and families of transformers, trained on a fake CUDA device.

A rank of the plan is made as a user makes it; it takes two steps, evaluates, is saved and restored, on fake
CUDA tensors in a CPU build of torch (benchmarks/harness/fake_device.py); the other ranks are a fake world.
It passes if nothing raises and no tensor is on the wrong device.
Attention counts as the kernels of the formula: this build has none of the fused ones.

What a rank asks of the device in each phase is counted, and stored in counts.json beside this module:

    build, first step, step, evaluation, save, restore:    kernels / host reads / copies / collectives

The counts are ratchets. A change that lowers one renews the file; one that raises one is refused, unless
`--higher` says that it is meant.

    python -m benchmarks.fake_devices.fake_cuda                    runs all, writes counts and result
    python -m benchmarks.fake_devices.fake_cuda --renew PATTERN..  renews the counts of some, no result
"""

import json
import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch

from benchmarks.fake_devices.combinations import Combination, combinations
from benchmarks.fake_devices.rank_on_fake_cuda import Counts, count_rank
from benchmarks.harness.cuda_guard import end_process, run_with_fake_cuda
from benchmarks.harness.fake_device import pretend_cuda
from benchmarks.harness.result import Result
from meshwright.device.platforms import CUDA
from meshwright.model.analysis import forward_graph_trace, plan_for_model
from meshwright.plan.hardware.device_specs import available_cores

NAME, LEAST = "fake_cuda", 300
CLAIM = (
    "every technique, precision, optimizer and family of transformers trains, evaluates, is saved and "
    "restored on fake CUDA tensors without a tensor on the wrong device, and asks no more of the device "
    "than is stored"
)
COUNTS = Path(__file__).with_name("counts.json")
KINDS = ("kernels", "host reads", "copies", "collectives")
Found = dict[str, str]  # "combination, rank 3" -> counts in one line, or what was raised


def matching(patterns: Iterable[str]) -> dict[str, Combination]:
    """Returns the combinations whose name matches one of `patterns`; all without patterns."""
    patterns = tuple(patterns) or ("*",)
    return {
        name: each for name, each in combinations().items() if any(fnmatch(name, glob) for glob in patterns)
    }


def count(names: Iterable[str]) -> Found:
    """Returns the counts of the ranks of the combinations `names`; needs the guard and `pretend_cuda`."""
    found = Found()
    for name in names:
        combination = combinations()[name]
        for rank in combination.ranks:
            key = f"{name}, rank {rank}"
            try:
                found[key] = as_text(count_rank(combination.analyzed, combination.plan(), rank))
            except Exception:
                found[key] = traceback.format_exc()
            print(key, file=sys.stderr)
    return found


def count_in_subprocesses(names: Sequence[str], num_processes: int = 1) -> Found:
    """Returns the counts of the ranks of the combinations `names`, from processes with the guard."""
    parts = [part for part in (names[first::num_processes] for first in range(num_processes)) if part]

    def run(part: Sequence[str]) -> Found:
        command = ["-m", "benchmarks.fake_devices.fake_cuda", "--count", *part]
        return json.loads(run_with_fake_cuda(command).splitlines()[-1])

    with ThreadPoolExecutor(num_processes) as pool:
        return {key: text for found in pool.map(run, parts) for key, text in found.items()}


def as_text(counts: Counts) -> str:
    """Returns the counts in one line: "step 12/3/4/5, evaluation 6/1/2/0"."""
    return ", ".join(f"{phase} {'/'.join(map(str, numbers))}" for phase, numbers in counts.items())


def as_numbers(text: str) -> dict[str, int]:
    """Returns the numbers of such a line: "kernels of step" -> 12."""
    rows = (part.rpartition(" ") for part in text.split(", "))
    return {
        f"{kind} of {phase}": int(number)
        for phase, _, numbers in rows
        for kind, number in zip(KINDS, numbers.split("/"), strict=True)
    }


def is_counted(text: str) -> bool:
    """Returns whether the rank passed: whether its line has counts, not what was raised."""
    return "\n" not in text


@dataclass(frozen=True)
class Difference:
    """A count of a rank that is not the stored one: by how much it is higher, and both in words."""

    rank: str
    change: int
    text: str

    def __str__(self) -> str:
        return f"{self.rank}: {self.text}"


def differences(found: Mapping[str, str], stored: Mapping[str, str]) -> Iterator[Difference]:
    """Yields each count that is not the stored one, and the ranks that raised or have nothing stored."""
    for rank, text in found.items():
        if not is_counted(text):
            yield Difference(rank, sys.maxsize, text)
        elif rank not in stored:
            yield Difference(rank, -1, "nothing is stored")
        else:
            before, now = as_numbers(stored[rank]), as_numbers(text)
            for name in [*now, *(before.keys() - now.keys())]:
                if change := now.get(name, 0) - before.get(name, 0):
                    stated = f"{now.get(name, 0)} {name}, and {before.get(name, 0)} are stored"
                    yield Difference(rank, change, stated)


def stored_counts() -> dict[str, str]:
    """Returns the stored counts; none before the first run."""
    return json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}


def renew(found: Mapping[str, str], *, drop_others: bool, higher: bool) -> list[Difference]:
    """Stores the counts of the ranks in `found`, and returns what keeps a rank from being stored: it raised,
    or a count is higher, unless `higher`. With `drop_others`, no other rank stays stored.
    """
    stored = stored_counts()
    refused = [each for each in differences(found, stored) if each.change > 0]
    refused = [each for each in refused if not higher or not is_counted(found[each.rank])]
    ranks = {each.rank for each in refused}
    rows = {rank: text for rank, text in stored.items() if rank in ranks or not drop_others}
    rows |= {rank: text for rank, text in found.items() if rank not in ranks}
    COUNTS.write_text(json.dumps(dict(sorted(rows.items())), indent=0) + "\n", encoding="utf-8")
    return refused


def result(found: Mapping[str, str], stored: Mapping[str, str]) -> Result:
    """Returns the result: how many combinations pass on all their ranks, no count above the stored one."""
    higher = [each for each in differences(found, stored) if each.change > 0]
    failed = {each.rank for each in higher}
    values: dict[str, float] = {}
    for rank in found:
        name = rank.rpartition(", rank ")[0]
        values[name] = max(values.get(name, 0.0), float(rank in failed))
    detail = {"ranks": len(found), "failures": [str(each) for each in higher]}
    return Result.of_count(NAME, CLAIM, list(values.values()), limit=0.0, bar=LEAST, detail=detail)


def main() -> None:
    """Run all, renew the stored counts, and write the result; see the module."""
    parser = ArgumentParser()
    parser.add_argument("--count", nargs="+", help="prints the counts of these; needs the guard")
    parser.add_argument("--renew", nargs="+", metavar="PATTERN", help="renews the counts of these alone")
    parser.add_argument("--higher", action="store_true", help="higher counts are stored too")
    options = parser.parse_args()
    if options.count:
        pretend_cuda()
        forward_graph_trace.local_platform = lambda: CUDA
        plan_for_model.target_platform = lambda hardware: CUDA
        torch.set_num_threads(1)
        print(json.dumps(count(options.count)))
        end_process()
    found = count_in_subprocesses(list(matching(options.renew or ())), available_cores())
    refused = renew(found, drop_others=not options.renew, higher=options.higher)
    print(*refused, sep="\n")
    if not options.renew:
        print(result(found, stored_counts()).write(NAME))


if __name__ == "__main__":
    main()
