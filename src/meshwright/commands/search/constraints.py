"""What `--fix WORD=VALUE` gives of a layout: words of the mesh and of the strategies, as a user knows them.

dp tp pp cp dp_shard       ranks along an axis; dp_shard: the copies among which shards lie
zero micro chunks          the stage, rows of a micro-batch, parts of the model per rank along pp
schedule recompute         by name; layers or none
method                     ring, ulysses or hybrid: how attention is divided along cp
inside                     tp (the usual) or dp: whose ranks stand side by side on a host
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from meshwright.plan.job.errors import Diagnostic, suggest_name
from meshwright.planner.analytic.parallel_config import ALL, BOTH, FOLDED, HALVES, Layout, Order, Rerun
from meshwright.planner.search.request import RERUNS, Wish

# what ranks along pp wait and hold under each schedule (strategies/pipeline), and the chunks it needs; 0: any
SCHEDULES: Mapping[str, tuple[Order, int]] = {
    "1f1b": (Order(), 1),
    "interleaved": (Order(), 0),
    "zb_h1": (HALVES, 1),
    "zb_v": (FOLDED, 2),
    "gpipe": (ALL, 1),
    "dualpipe": (BOTH, 1),
}
# gpipe waits as long as 1f1b and holds more, dualpipe waits longer than zb_v and holds weights twice: for those who fix them
SEARCHED_SCHEDULES = ("1f1b", "interleaved", "zb_h1", "zb_v")
NUMBER_KEYS = {name: name for name in ("dp", "tp", "pp", "cp", "micro", "chunks")} | {
    "dp_shard": "within",
    "zero": "shards",
}
CONTEXT_METHODS: Mapping[str, Literal["none", "all", "some"]] = {
    "ring": "none",
    "ulysses": "all",
    "hybrid": "some",
}
NAME_CHOICES: Mapping[str, Sequence[str]] = {
    "schedule": tuple(SCHEDULES),
    "recompute": RERUNS,
    "method": tuple(CONTEXT_METHODS),
    "inside": ("tp", "dp"),
}


@dataclass(frozen=True)
class SearchConstraints:
    """What a user has fixed: numbers by the planner's words, and names by the user's."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def apply(self, request: Wish) -> Wish:
        """`wish`, of which this is given."""
        schedule, method = self.names.get("schedule"), self.names.get("method")
        shown = (schedule,) if schedule else SEARCHED_SCHEDULES
        reruns: dict[str, tuple[Rerun, ...]] = {name: (name,) for name in RERUNS}
        pipes = ("pp",) if schedule or "chunks" in self.sizes else ()
        base = replace(request.base, outside=self.names.get("inside") == "dp")
        return replace(
            request,
            orders={name: SCHEDULES[name] for name in shown},
            fixed=self.sizes,
            divided=(*pipes, *(("cp",) if method else ())),
            exchange=CONTEXT_METHODS[method] if method else "",
            reruns=reruns.get(self.names.get("recompute", ""), RERUNS),
            least=1 if method else request.least,
            base=base,
        )


def parse_constraints(assignments: Sequence[str], diagnostics: list[Diagnostic]) -> SearchConstraints:
    """What `words` fix; `faults` learns of those that are not understood."""
    numbers, names = dict[str, int](), dict[str, str]()
    for word in assignments:
        name, _, value = word.partition("=")
        diagnostics += _faults(word, name, value)
        before = numbers.get(NUMBER_KEYS.get(name, "")) if name in NUMBER_KEYS else names.get(name)
        if before is not None and str(before) != value:
            diagnostics.append(
                Diagnostic(f"{name} is fixed at {before} and at {value}", "fix it once", "--fix")
            )
        if name in NUMBER_KEYS and value.isdecimal():
            numbers[NUMBER_KEYS[name]] = int(value)
        elif name in NAME_CHOICES and value in NAME_CHOICES[name]:
            names[name] = value
    return SearchConstraints(numbers, names)


def _faults(word: str, name: str, value: str) -> Iterator[Diagnostic]:
    if name not in NUMBER_KEYS and name not in NAME_CHOICES:
        yield Diagnostic(
            f"'{word}' fixes nothing that is known",
            suggest_name(name, (*NUMBER_KEYS, *NAME_CHOICES)),
            "--fix",
        )
    elif not value:
        usual = ("3" if name == "zero" else "8") if name in NUMBER_KEYS else NAME_CHOICES[name][0]
        yield Diagnostic(f"'{word}' fixes nothing", f"write WORD=VALUE, for example {name}={usual}", "--fix")
    elif name in NUMBER_KEYS and not value.isdecimal():
        yield Diagnostic(f"{name} is '{value}'", f"write a whole number, for example {name}=2", "--fix")
    elif name in NAME_CHOICES and value not in NAME_CHOICES[name]:
        yield Diagnostic(f"{name} is '{value}'", suggest_name(value, NAME_CHOICES[name]), "--fix")


def schedule_costs(schedule: str) -> Order | None:
    """What ranks along pp wait and hold under a schedule; None for one that a search does not know."""
    return SCHEDULES[schedule][0] if schedule in SCHEDULES else None


def base_config(dtypes: Mapping[str, float]) -> Layout:
    """What every layout has on devices with such peaks: products in bfloat16, or in float16 where there is nothing else."""
    return Layout(dtype="float16" if "float16" in dtypes and "bfloat16" not in dtypes else "bfloat16")
