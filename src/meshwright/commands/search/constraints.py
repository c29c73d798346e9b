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

from meshwright.plan.job.errors import Fault, nearest
from meshwright.planner.analytic.parallel_config import ALL, BOTH, FOLDED, HALVES, Layout, Order, Rerun
from meshwright.planner.search.request import RERUNS, Wish

# what ranks along pp wait and hold under each schedule (strategies/pipeline), and the chunks it needs; 0: any
ORDERS: Mapping[str, tuple[Order, int]] = {
    "1f1b": (Order(), 1),
    "interleaved": (Order(), 0),
    "zb_h1": (HALVES, 1),
    "zb_v": (FOLDED, 2),
    "gpipe": (ALL, 1),
    "dualpipe": (BOTH, 1),
}
# gpipe waits as long as 1f1b and holds more, dualpipe waits longer than zb_v and holds weights twice: for those who fix them
SEARCHED = ("1f1b", "interleaved", "zb_h1", "zb_v")
NUMBERS = {name: name for name in ("dp", "tp", "pp", "cp", "micro", "chunks")} | {"dp_shard": "within", "zero": "shards"}
METHODS: Mapping[str, Literal["none", "all", "some"]] = {"ring": "none", "ulysses": "all", "hybrid": "some"}
NAMES: Mapping[str, Sequence[str]] = {
    "schedule": tuple(ORDERS),
    "recompute": RERUNS,
    "method": tuple(METHODS),
    "inside": ("tp", "dp"),
}


@dataclass(frozen=True)
class Fixed:
    """What a user has fixed: numbers by the planner's words, and names by the user's."""

    numbers: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def of(self, wish: Wish) -> Wish:
        """`wish`, of which this is given."""
        schedule, method = self.names.get("schedule"), self.names.get("method")
        shown = (schedule,) if schedule else SEARCHED
        reruns: dict[str, tuple[Rerun, ...]] = {name: (name,) for name in RERUNS}
        pipes = ("pp",) if schedule or "chunks" in self.numbers else ()
        base = replace(wish.base, outside=self.names.get("inside") == "dp")
        return replace(
            wish,
            orders={name: ORDERS[name] for name in shown},
            fixed=self.numbers,
            divided=(*pipes, *(("cp",) if method else ())),
            exchange=METHODS[method] if method else "",
            reruns=reruns.get(self.names.get("recompute", ""), RERUNS),
            least=1 if method else wish.least,
            base=base,
        )


def fixed(words: Sequence[str], faults: list[Fault]) -> Fixed:
    """What `words` fix; `faults` learns of those that are not understood."""
    numbers, names = dict[str, int](), dict[str, str]()
    for word in words:
        name, _, value = word.partition("=")
        faults += _faults(word, name, value)
        before = numbers.get(NUMBERS.get(name, "")) if name in NUMBERS else names.get(name)
        if before is not None and str(before) != value:
            faults.append(Fault(f"{name} is fixed at {before} and at {value}", "fix it once", "--fix"))
        if name in NUMBERS and value.isdecimal():
            numbers[NUMBERS[name]] = int(value)
        elif name in NAMES and value in NAMES[name]:
            names[name] = value
    return Fixed(numbers, names)


def _faults(word: str, name: str, value: str) -> Iterator[Fault]:
    if name not in NUMBERS and name not in NAMES:
        yield Fault(f"'{word}' fixes nothing that is known", nearest(name, (*NUMBERS, *NAMES)), "--fix")
    elif not value:
        usual = ("3" if name == "zero" else "8") if name in NUMBERS else NAMES[name][0]
        yield Fault(f"'{word}' fixes nothing", f"write WORD=VALUE, for example {name}={usual}", "--fix")
    elif name in NUMBERS and not value.isdecimal():
        yield Fault(f"{name} is '{value}'", f"write a whole number, for example {name}=2", "--fix")
    elif name in NAMES and value not in NAMES[name]:
        yield Fault(f"{name} is '{value}'", nearest(value, NAMES[name]), "--fix")


def order_of(schedule: str) -> Order | None:
    """What ranks along pp wait and hold under a schedule; None for one that a search does not know."""
    return ORDERS[schedule][0] if schedule in ORDERS else None


def base_of(dtypes: Mapping[str, float]) -> Layout:
    """What every layout has on devices with such peaks: products in bfloat16, or in float16 where there is nothing else."""
    return Layout(dtype="float16" if "float16" in dtypes and "bfloat16" not in dtypes else "bfloat16")
