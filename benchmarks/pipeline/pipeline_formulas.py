"""Bubbles and peaks of every schedule, played on paper with equal stages, held against the closed forms:
exactly.

F, I, W are the times of a rank for one microbatch (forward, backward for inputs, for weights), T their sum;
p ranks, m microbatches, v chunks per rank, M what a rank keeps of a microbatch. A rank's cost runs from its
first slot to its last, as published rates count it; what is above m T is its bubble. The costliest rank and
the fullest rank count.

                     bubble                              peak                       where
    model parallel   m (p - 1) T                         M
    GPipe            (p - 1) T                           m M
    1F1B, PipeDream  (p - 1) T                           min(p, m) M
    interleaved      (p - 1) T / v                       p M (1 + (p - 1) / (p v))  p divides m, or m >= p
    ZB-H1            (p - 1) (F + I - W)                 p M                        m >= 2 p
    ZB-H2            (p - 1) (F + I - 2 W)               (2 p - 1) M                m >= 2 p
    ZB-2p            at most 1 %                         at most 2 p M              m >= 3 p, W >= 2 F / 3
    ZB-V             at most 1 % (F = I = W)             p M                        m >= 2 p
    V-Half           at most (p - 1) T / 2 (F = I = W)   at most (p / 2 + 1) M      m >= 2 p
    V-Min            at most 2 (p - 1) T / 3             at most (p / 3 + 5 / 3) M  F = I = W
    DualPipe         (p / 2 - 1) (F + I - W)             (p + 1) M                  m >= 2 p, p and m even
    DualPipeV        (p - 1) (F + I - W) / 2             (p + 1 / 2) M              m >= 2 p

M stays until W, as the closed forms have it. For ZB-2p what stays from I to W is 32 / 74 of it, as in the
paper (34 h + 5 a s and 32 h of a layer, 5 a s = 40 h at its sizes): the last rank puts off W for (p - 1) (F +
I) / W microbatches, and had it to hold all of M so long, twice the memory of 1F1B would do only where F = I
= W.

DualPipe's own formula counts a forward and a backward that overlap as one act of FB: (p / 2 - 1) (FB + B - 3
W) with B = I + W. On paper one comes after the other, the forward's result leaves when the forward has ended,
and the last rank waits I less.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.result import Result
from meshwright.parallel.pipeline import pipedream
from meshwright.parallel.pipeline.schedules import gpipe, interleaved, model_parallel, one_f_one_b
from meshwright.parallel.pipeline.schedules.dualpipe import dualpipe_schedule, dualpipev_schedule
from meshwright.parallel.pipeline.schedules.list_scheduler import longest_rank_time
from meshwright.parallel.pipeline.schedules.schedule import Schedule, StageCosts, simulate
from meshwright.parallel.pipeline.schedules.zb_v import zb_v_half_schedule, zb_v_min_schedule, zb_v_schedule
from meshwright.parallel.pipeline.schedules.zero_bubble import zb_2p_schedule, zb_h1_schedule, zb_h2_schedule

NAME = "pipeline_formulas"
CLAIM = (
    "bubble and peak of every schedule, played with equal stages: exactly the closed form where "
    "there is one, at most 1 % where "
    "the paper says about zero"
)
ZERO = 0.01
RANKS, ROUNDS, CHUNKS = (2, 3, 4, 7, 8, 16), (1, 2, 3, 5), (2, 3, 4)
TIMES = ((12, 12, 12), (36, 36, 24), (36, 24, 12))  # F, I, W of a rank; a chunk takes a v-th of them
EQUAL = TIMES[0]


@dataclass(frozen=True)
class Case:
    """Ranks, microbatches, parts per rank, the times of a rank, and the share of what it keeps that stays
    from I to W.
    """

    p: int
    m: int
    v: int
    times: tuple[int, int, int]
    late: float = 1.0

    @property
    def total(self) -> int:
        """What a rank works for a microbatch."""
        return sum(self.times)

    @property
    def costs(self) -> StageCosts:
        """Of its parts; one keeps one unit, so a rank keeps `v` of a microbatch."""
        parts = self.p * self.v
        return replace(
            StageCosts.uniform(parts, *(time / self.v for time in self.times)),
            weight_grad_memory=[self.late] * parts,
        )


Form = Callable[[Case], float]


@dataclass(frozen=True)
class Law:
    """A schedule and its closed forms: `bubble` in the unit of the times, None for about zero, and `peak` in
    units of M.

    `exact` is False where they are upper bounds. `where` says for which cases they are stated; `v` how many
    parts a rank has.
    """

    name: str
    make: Callable[[Case], Schedule]
    bubble: Form | None
    peak: Form
    where: Callable[[Case], bool] = lambda case: True
    v: tuple[int, ...] = (1,)
    exact: bool = True
    late: float = 1.0


def _ends(law: Callable[[int, int, int], float]) -> Form:
    """A form that is a multiple of p - 1, from F, I and W."""
    return lambda case: (case.p - 1) * law(*case.times)


LAWS = (
    Law(
        "model parallel",
        lambda c: model_parallel.model_parallel_schedule(c.p, c.m),
        lambda c: c.m * (c.p - 1) * c.total,
        lambda c: 1,
    ),
    Law("GPipe", lambda c: gpipe.gpipe_schedule(c.p, c.m), lambda c: (c.p - 1) * c.total, lambda c: c.m),
    Law(
        "1F1B",
        lambda c: one_f_one_b.one_f_one_b_schedule(c.p, c.m),
        lambda c: (c.p - 1) * c.total,
        lambda c: min(c.p, c.m),
    ),
    Law(
        "PipeDream",
        lambda c: pipedream.pipedream_schedule(c.p, c.m),
        lambda c: (c.p - 1) * c.total,
        lambda c: min(c.p, c.m),
    ),
    Law(
        "interleaved",
        lambda c: interleaved.interleaved_schedule(c.p, c.m, c.v),
        lambda c: (c.p - 1) * c.total / c.v,
        lambda c: c.p * (1 + (c.p - 1) / (c.p * c.v)),
        where=lambda c: c.m % c.p == 0 and c.m > c.p,
        v=CHUNKS,
    ),
    Law(
        "interleaved, p does not divide m",
        lambda c: interleaved.interleaved_schedule(c.p, c.m, c.v),
        lambda c: (c.p - 1) * c.total / c.v,
        lambda c: min(c.m, (max(interleaved.group_sizes(c.p, c.m)) * (c.v - 1) + 2 * c.p - 1) / c.v),
        where=lambda c: c.m % c.p != 0 and c.m > c.p,
        v=CHUNKS,
    ),
    Law(
        "ZB-H1",
        lambda c: zb_h1_schedule(c.p, c.m),
        _ends(lambda f, i, w: f + i - w),
        lambda c: c.p,
        lambda c: c.m >= 2 * c.p,
    ),
    Law(
        "ZB-H2",
        lambda c: zb_h2_schedule(c.p, c.m),
        _ends(lambda f, i, w: f + i - 2 * w),
        lambda c: 2 * c.p - 1,
        lambda c: c.m >= 2 * c.p,
    ),
    Law(
        "ZB-2p",
        lambda c: zb_2p_schedule(c.p, c.m, c.costs),
        None,
        lambda c: 2 * c.p,
        where=lambda c: c.m >= 3 * c.p and 3 * c.times[2] >= 2 * c.times[0],
        exact=False,
        late=32 / 74,
    ),
    Law(
        "ZB-V",
        lambda c: zb_v_schedule(c.p, c.m),
        None,
        lambda c: c.p,
        lambda c: c.m >= 2 * c.p and c.times == EQUAL,
        (2,),
    ),
    Law(
        "V-Half",
        lambda c: zb_v_half_schedule(c.p, c.m),
        lambda c: (c.p - 1) * c.total / 2,
        lambda c: c.p / 2 + 1,
        where=lambda c: c.m >= 2 * c.p and c.times == EQUAL,
        v=(2,),
        exact=False,
    ),
    Law(
        "V-Min",
        lambda c: zb_v_min_schedule(c.p, c.m),
        lambda c: (c.p - 1) * c.total * 2 / 3,
        lambda c: c.p / 3 + 5 / 3,
        where=lambda c: c.m >= 2 * c.p and c.times == EQUAL,
        v=(2,),
        exact=False,
    ),
    Law(
        "DualPipe",
        lambda c: dualpipe_schedule(c.p, c.m),
        lambda c: (c.p / 2 - 1) * (c.times[0] + c.times[1] - c.times[2]),
        lambda c: c.p + 1,
        where=lambda c: c.m >= 2 * c.p and c.p % 2 == 0 and c.m % 2 == 0,
    ),
    Law(
        "DualPipeV",
        lambda c: dualpipev_schedule(c.p, c.m),
        lambda c: (c.p - 1) * (c.times[0] + c.times[1] - c.times[2]) / 2,
        lambda c: c.p + 1 / 2,
        where=lambda c: c.m >= 2 * c.p,
        v=(2,),
    ),
)


def cases(law: Law) -> Iterator[Case]:
    """The cases for which `law` is stated: m a multiple of p and one more."""
    for p in RANKS:
        for m in sorted({m for rounds in ROUNDS for m in (rounds * p, rounds * p + 1)}):
            for chunks in law.v:
                yield from (case for times in TIMES if law.where(case := Case(p, m, chunks, times, law.late)))


def measured(law: Law, case: Case) -> dict[str, Any]:
    """What the schedule of `case` takes and holds on paper, beside the forms; `off` is 0 where they agree."""
    order = law.make(case)
    faults = list(order.errors())
    found = simulate(order, case.costs)
    bubble, peak = longest_rank_time(found) - case.m * case.total, max(found.peak_memory) / case.v
    rate = bubble / (bubble + case.m * case.total)
    stated = law.bubble(case) if law.bubble else ZERO * (bubble + case.m * case.total)
    off = max(
        distance(bubble, stated, exact=law.exact and law.bubble is not None),
        distance(peak, law.peak(case), exact=law.exact),
    )
    row: dict[str, Any] = {"schedule": law.name, "p": case.p, "m": case.m, "v": case.v, "F, I, W": case.times}
    row |= {"bubble": bubble, "rate": round(rate, 5), "stated": round(stated, 6) if law.bubble else "about 0"}
    return row | {
        "peak": peak,
        "stated peak": round(law.peak(case), 6),
        "exact": law.exact,
        "off": float("inf") if faults else off,
    }


def distance(value: float, stated: float, *, exact: bool) -> float:
    """By how much `value` misses what is stated, as a share of it: 0 where rounding of floats alone is in
    between.
    """
    miss = abs(value - stated) if exact else max(0.0, value - stated)
    return 0.0 if miss <= 1e-9 * max(1.0, abs(stated)) else miss / max(1.0, abs(stated))


def rows_of(laws: Sequence[Law] = LAWS) -> Iterator[dict[str, Any]]:
    """All cases; one line per schedule goes to stderr."""
    for law in laws:
        found = [measured(law, case) for case in cases(law)]
        wrong = [row for row in found if row["off"]]
        kind = "closed forms" if law.exact and law.bubble else "at most what is stated"
        rates = [row["rate"] for row in found]
        print(
            f"{law.name}: {len(found) - len(wrong)} of {len(found)} cases, {kind}; rates to {max(rates):.3f}",
            file=sys.stderr,
        )
        for row in wrong:
            print(f"   {row}", file=sys.stderr)
        yield from found


def result(found: Sequence[dict[str, Any]]) -> Result:
    """The result of all cases: how many agree."""
    detail: dict[str, list[str]] = {}
    for row in found:
        detail.setdefault(row["schedule"], []).append(_line(row))
    return Result.of_count(
        NAME, CLAIM, [float(row["off"]) for row in found], limit=0.0, bar=len(found), detail=detail
    )


def _line(row: dict[str, Any]) -> str:
    """A case as a line of the result: what was played, beside what is stated."""
    at, sign = (
        f"p {row['p']}, m {row['m']}, v {row['v']}, F I W {row['F, I, W']}",
        "=" if row["exact"] else "<=",
    )
    stated = row["stated"] if row["stated"] == "about 0" else f"{sign} {row['stated']:g}"
    line = (
        f"{at}: bubble {row['bubble']:g} {stated} ({row['rate']:.2%}), peak {row['peak']:g} "
        f"{sign} {row['stated peak']:g}"
    )
    return line if not row["off"] else f"{line}: OFF"


def main() -> None:
    """Play all cases, compare, and write the result."""
    found = result(list(rows_of()))
    print(f"{found.median:g} of {found.bar:g} cases agree", file=sys.stderr)
    print(found.write(NAME))


if __name__ == "__main__":
    main()
