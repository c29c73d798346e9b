"""Bubble and peak memory of every schedule, simulated with equal stages, against the closed forms: exactly.

F, I, W are the times of a rank for one microbatch (forward, backward for inputs, for weights), T their sum;
p ranks, m microbatches, v virtual stages per rank, M the bytes that a rank keeps of a microbatch. The time of
a rank runs from the begin of its first action to the end of its last, as published rates count it; what is
above m T is its bubble. The rank with the longest time and the rank with the highest peak count.

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

All of M is kept until W, as in the closed forms. For ZB-2p the share 32 / 74 of it is kept from I to W, as in
the paper (34 h + 5 a s and 32 h of a layer, 5 a s = 40 h at its sizes): the last rank delays W for
(p - 1) (F + I) / W microbatches. If it kept all of M for so long, twice the memory of 1F1B would suffice only
for F = I = W.

DualPipe's own formula counts a forward and a backward that overlap as one action of time FB:
(p / 2 - 1) (FB + B - 3 W) with B = I + W. The simulation runs one after the other, so the output of the
forward leaves when the forward has ended, and the last rank waits I less.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.result import Result
from meshwright.parallel.pipeline import pipedream
from meshwright.parallel.pipeline.schedules import gpipe, interleaved, naive_model_parallel, one_f_one_b
from meshwright.parallel.pipeline.schedules.dualpipe import dualpipe_schedule, dualpipev_schedule
from meshwright.parallel.pipeline.schedules.list_scheduler import longest_rank_time
from meshwright.parallel.pipeline.schedules.schedule import Schedule, StageCosts, simulate
from meshwright.parallel.pipeline.schedules.zb_v import zb_v_half_schedule, zb_v_min_schedule, zb_v_schedule
from meshwright.parallel.pipeline.schedules.zero_bubble import zb_2p_schedule, zb_h1_schedule, zb_h2_schedule

NAME = "pipeline_formulas"
CLAIM = (
    "bubble and peak of every schedule, simulated with equal stages: exactly the closed form where "
    "there is one, at most 1 % where "
    "the paper says about zero"
)
ZERO = 0.01
RANKS, ROUNDS, VIRTUAL_STAGES = (2, 3, 4, 7, 8, 16), (1, 2, 3, 5), (2, 3, 4)
TIMES = ((12, 12, 12), (36, 36, 24), (36, 24, 12))  # F, I, W of a rank; a virtual stage takes 1 / v of them
EQUAL = TIMES[0]


@dataclass(frozen=True)
class Case:
    """Ranks, microbatches, virtual stages per rank, the times (F, I, W) of a rank, and the share of its
    memory of a microbatch that is kept from I to W.
    """

    p: int
    m: int
    v: int
    times: tuple[int, int, int]
    weight_grad_memory_share: float = 1.0

    @property
    def total(self) -> int:
        """The time that a rank computes for a microbatch."""
        return sum(self.times)

    @property
    def costs(self) -> StageCosts:
        """The costs of the stages; each keeps one unit of memory, so a rank keeps `v` of a microbatch."""
        num_stages = self.p * self.v
        return replace(
            StageCosts.uniform(num_stages, *(time / self.v for time in self.times)),
            weight_grad_memory=[self.weight_grad_memory_share] * num_stages,
        )


Form = Callable[[Case], float]


@dataclass(frozen=True)
class Law:
    """A schedule and its closed forms: `bubble` in the unit of the times, None for about zero, and `peak` in
    units of M.

    `exact` is False where they are upper bounds. `where`: for which cases they are stated; `v`: numbers of
    virtual stages per rank.
    """

    name: str
    make: Callable[[Case], Schedule]
    bubble: Form | None
    peak: Form
    where: Callable[[Case], bool] = lambda case: True
    v: tuple[int, ...] = (1,)
    exact: bool = True
    weight_grad_memory_share: float = 1.0


def _times_p_minus_1(law: Callable[[int, int, int], float]) -> Form:
    """Returns the form (p - 1) `law`(F, I, W)."""
    return lambda case: (case.p - 1) * law(*case.times)


LAWS = (
    Law(
        "model parallel",
        lambda c: naive_model_parallel.naive_model_parallel_schedule(c.p, c.m),
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
        v=VIRTUAL_STAGES,
    ),
    Law(
        "interleaved, p does not divide m",
        lambda c: interleaved.interleaved_schedule(c.p, c.m, c.v),
        lambda c: (c.p - 1) * c.total / c.v,
        lambda c: min(c.m, (max(interleaved.group_sizes(c.p, c.m)) * (c.v - 1) + 2 * c.p - 1) / c.v),
        where=lambda c: c.m % c.p != 0 and c.m > c.p,
        v=VIRTUAL_STAGES,
    ),
    Law(
        "ZB-H1",
        lambda c: zb_h1_schedule(c.p, c.m),
        _times_p_minus_1(lambda f, i, w: f + i - w),
        lambda c: c.p,
        lambda c: c.m >= 2 * c.p,
    ),
    Law(
        "ZB-H2",
        lambda c: zb_h2_schedule(c.p, c.m),
        _times_p_minus_1(lambda f, i, w: f + i - 2 * w),
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
        weight_grad_memory_share=32 / 74,
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
    """Yields the cases for which `law` is stated: m is a multiple of p, or one more."""
    for p in RANKS:
        for m in sorted({m for rounds in ROUNDS for m in (rounds * p, rounds * p + 1)}):
            for virtual_stages in law.v:
                yield from (
                    case
                    for times in TIMES
                    if law.where(case := Case(p, m, virtual_stages, times, law.weight_grad_memory_share))
                )


def compare_case(law: Law, case: Case) -> dict[str, Any]:
    """Returns bubble and peak of the simulated schedule beside the closed forms; `off` is 0 if they agree."""
    schedule = law.make(case)
    errors = list(schedule.errors())
    simulation = simulate(schedule, case.costs)
    bubble, peak = longest_rank_time(simulation) - case.m * case.total, max(simulation.peak_memory) / case.v
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
        "off": float("inf") if errors else off,
    }


def distance(value: float, stated: float, *, exact: bool) -> float:
    """Returns the distance of `value` from `stated`, as a share of it; 0 if it is only rounding."""
    gap = abs(value - stated) if exact else max(0.0, value - stated)
    return 0.0 if gap <= 1e-9 * max(1.0, abs(stated)) else gap / max(1.0, abs(stated))


def compare_all(laws: Sequence[Law] = LAWS) -> Iterator[dict[str, Any]]:
    """Yields the rows of all cases; prints one line per schedule to stderr."""
    for law in laws:
        rows = [compare_case(law, case) for case in cases(law)]
        wrong = [row for row in rows if row["off"]]
        kind = "closed forms" if law.exact and law.bubble else "at most what is stated"
        rates = [row["rate"] for row in rows]
        print(
            f"{law.name}: {len(rows) - len(wrong)} of {len(rows)} cases, {kind}; rates to {max(rates):.3f}",
            file=sys.stderr,
        )
        for row in wrong:
            print(f"   {row}", file=sys.stderr)
        yield from rows


def result(rows: Sequence[dict[str, Any]]) -> Result:
    """Returns the result of all cases: the number that agree."""
    detail: dict[str, list[str]] = {}
    for row in rows:
        detail.setdefault(row["schedule"], []).append(_line(row))
    return Result.of_count(
        NAME, CLAIM, [float(row["off"]) for row in rows], limit=0.0, bar=len(rows), detail=detail
    )


def _line(row: dict[str, Any]) -> str:
    """Formats a case as a line of the result: the simulated figures beside the stated ones."""
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
    """Simulates all cases, compares, and writes the result."""
    outcome = result(list(compare_all()))
    print(f"{outcome.median:g} of {outcome.bar:g} cases agree", file=sys.stderr)
    print(outcome.write(NAME))


if __name__ == "__main__":
    main()
