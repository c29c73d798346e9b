"""The refusals that are allowed, and how often each pair of techniques must match: the reviewed file beside
this module, and rows compared with it.

    benchmarks/random_plans/combinations.toml
        seed, count       the plans that the tests draw; at least `pairs` pairs of
                          techniques occur in them
        share             for every pair of techniques: the least share of the plans with both that is not
                          refused
        [[exceptions]]    a pair with another share, and why
        [[refusals]]      a reason: its name, a pattern of the diagnostic's text, and why the combination is
                          not supported

A plan that was perturbed on purpose counts for the reasons of refusals, and not for shares.
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
Row = dict[str, Any]  # the outcome of one plan


@dataclass(frozen=True)
class Refusal:
    """A reason for which plans may be refused: its name, a pattern of the diagnostic's text, and why."""

    reason: str
    says: str
    why: str


@dataclass(frozen=True)
class Reviewed:
    """The contents of benchmarks/random_plans/combinations.toml."""

    seed: int
    count: int
    pairs: int
    share: float
    exceptions: Mapping[str, float]
    refusals: tuple[Refusal, ...]

    def min_share(self, pair: str) -> float:
        """The least share of the plans with this pair that is not refused."""
        return self.exceptions.get(pair, self.share)


@dataclass
class PairCount:
    """The outcomes of the plans with two techniques: how many were drawn and matched, the same without
    perturbed plans, and the reasons of refusals.
    """

    drawn: int = 0
    matched: int = 0
    unperturbed: int = 0
    unperturbed_matched: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """The share of the unperturbed plans that matched."""
        return self.unperturbed_matched / self.unperturbed if self.unperturbed else 1.0


Pairs = dict[Pair, PairCount]


@cache
def reviewed() -> Reviewed:
    """Reads the file, once."""
    contents = tomllib.loads(FILE.read_text(encoding="utf-8"))
    exceptions = {each["pair"]: each["share"] for each in contents.get("exceptions", ()) if each["why"]}
    refusals = tuple(Refusal(**each) for each in contents["refusals"])
    return Reviewed(
        contents["seed"], contents["count"], contents["pairs"], contents["share"], exceptions, refusals
    )


def reason_of(problem: str) -> str:
    """Returns the first reason whose pattern is found in the text of a diagnostic, "" if there is none."""
    return next((refusal.reason for refusal in reviewed().refusals if re.search(refusal.says, problem)), "")


def count_pairs(rows: Iterable[Row]) -> Pairs:
    """Returns the outcomes of each pair of techniques in these rows."""
    counts: Pairs = {}
    for row in rows:
        for one, other in combinations(sorted(row["techniques"]), 2):
            count = counts.setdefault((one, other), PairCount())
            matched = row["outcome"] == "matched"
            count.drawn += 1
            count.matched += matched
            count.unperturbed += not row["perturbation"]
            count.unperturbed_matched += matched and not row["perturbation"]
            count.reasons.update(row.get("reasons", ()))
    return counts


def count_reasons(rows: Iterable[Row]) -> dict[str, int]:
    """Returns the number of refused rows by reason, most frequent first; a row may have several reasons."""
    return dict(Counter(reason for row in rows for reason in row.get("reasons", ())).most_common())


def violations(counts: Pairs, limits: Reviewed) -> Iterator[str]:
    """Yields what is wrong with these pairs: a share that is too small, too few pairs, an exception for a
    pair that does not occur.
    """
    named = {" + ".join(pair): each for pair, each in counts.items() if each.unperturbed}
    for pair, each in sorted(named.items()):
        if each.share < limits.min_share(pair):
            reasons = ", ".join(each.reasons)
            text = f"{pair}: {each.unperturbed_matched} of {each.unperturbed} plans are not refused"
            yield f"{text}; needed is a share of {limits.min_share(pair)} ({reasons})"
    if len(named) < limits.pairs:
        yield f"{len(named)} pairs of techniques occur; needed are {limits.pairs}"
    yield from (
        f"{pair}: an exception for a pair that does not occur"
        for pair in sorted(set(limits.exceptions) - set(named))
    )
