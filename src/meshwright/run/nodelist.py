"""SLURM's shorthand for hosts and for counts per host.

rack[1-2]n[03-05,9],login    hosts: rack1n03 first
4(x2),3                      tasks on each host in turn: 4 4 3
"""

import re

ENTRY = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")  # up to a comma that stands outside of brackets
FIRST = re.compile(r"\[(\w+)[^\]]*\]")
COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def first_host(nodes: str) -> str:
    """The first host of a list such as `node[01-04,07]`; "" of an empty list."""
    found = ENTRY.match(nodes)
    return FIRST.sub(r"\1", found.group()).strip() if found else ""


def repeated(counts: str) -> list[int]:
    """The counts per host of a list such as `4(x2),3`; [] where it is anything else."""
    found = [COUNT.fullmatch(part) for part in counts.split(",")]
    return [int(match[1]) for match in found if match for _ in range(int(match[2] or 1))] if all(found) else []
