"""What may be refused, and how often two techniques must match: the reviewed file beside this one, and rows
held against it.

    benchmarks/random_plans/combinations.toml
        seed, count       which plans the tests draw; `pairs` of techniques meet in them at least
        share             for every pair of techniques the least share of the plans with both that is not
                          refused
        [[exceptions]]    a pair for which it is another one, and why
        [[refusals]]      a reason: its words, a pattern of what a fault says, and why that is not simply made
                          to work

A plan that was spoilt on purpose counts for what can be refused, and not for shares.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".toml")
FINDINGS = ("crashed", "differs", "hangs", "no repair", "new reason")
Pair = tuple[str, str]
Row = dict[str, Any]  # what became of one plan


@dataclass(frozen=True)
class Refusal:
    """A reason for which plans may be refused: in words, a pattern of what the fault says,
    and why it is so.
    """

    reason: str
    says: str
    why: str


@dataclass(frozen=True)
class Reviewed:
    """What benchmarks/random_plans/combinations.toml says."""

    seed: int
    count: int
    pairs: int
    share: float
    exceptions: Mapping[str, float]
    refusals: tuple[Refusal, ...]

    def least(self, pair: str) -> float:
        """The share that this pair keeps."""
        return self.exceptions.get(pair, self.share)


@dataclass
class Met:
    """What became of the plans in which two techniques met: drawn and matched, those not spoilt, and why
    others were refused.
    """

    drawn: int = 0
    matched: int = 0
    straight: int = 0
    straight_matched: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """The share of those not spoilt that matched."""
        return self.straight_matched / self.straight if self.straight else 1.0


Pairs = dict[Pair, Met]


@cache
def reviewed() -> Reviewed:
    """The file, read once."""
    said = tomllib.loads(FILE.read_text(encoding="utf-8"))
    exceptions = {each["pair"]: each["share"] for each in said.get("exceptions", ()) if each["why"]}
    refusals = tuple(Refusal(**each) for each in said["refusals"])
    return Reviewed(said["seed"], said["count"], said["pairs"], said["share"], exceptions, refusals)


def reason_of(what: str) -> str:
    """The first reason whose pattern is found in what a fault says; nothing where there is none."""
    return next((refusal.reason for refusal in reviewed().refusals if re.search(refusal.says, what)), "")


def of_pairs(rows: Iterable[Row]) -> Pairs:
    """What became of each pair of techniques, in these rows."""
    found: Pairs = {}
    for row in rows:
        for one, other in combinations(sorted(row["techniques"]), 2):
            met = found.setdefault((one, other), Met())
            matched = row["outcome"] == "matched"
            met.drawn += 1
            met.matched += matched
            met.straight += not row["spoilt"]
            met.straight_matched += matched and not row["spoilt"]
            met.reasons.update(row.get("reasons", ()))
    return found


def refused_by(rows: Iterable[Row]) -> dict[str, int]:
    """How many of these rows were refused for each reason, the most frequent first; one may have several."""
    return dict(Counter(reason for row in rows for reason in row.get("reasons", ())).most_common())


def short_of(found: Pairs, wanted: Reviewed) -> Iterator[str]:
    """What is wrong with these pairs, in sentences: a share that is too small, too few that meet, an
    exception of none.
    """
    met = {" + ".join(pair): each for pair, each in found.items() if each.straight}
    for pair, each in sorted(met.items()):
        if each.share < wanted.least(pair):
            reasons = ", ".join(each.reasons)
            text = f"{pair}: {each.straight_matched} of {each.straight} plans are not refused"
            yield f"{text}; needed is a share of {wanted.least(pair)} ({reasons})"
    if len(met) < wanted.pairs:
        yield f"{len(met)} pairs of techniques meet; needed are {wanted.pairs}"
    yield from (
        f"{pair}: an exception for two that never meet" for pair in sorted(set(wanted.exceptions) - set(met))
    )
