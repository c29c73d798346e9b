"""Seconds of a search for a configuration: 400 B weights on 4,096 devices, and on 100,000; on one core, from
sizes alone.

    400 B       layers 126, hidden 16384, heads 128, 8 key heads: Llama 3's (arXiv 2407.21783); 2,048 samples
                of 8,192 tokens
    4,096       H100, hosts of 8: the search of `meshwright plan`, and the fastest configuration without a
                memory limit
    100,000     the same, 100,000 samples; the model's sizes share few divisors with 100,000, so 98,304
                (3 x 2^15) is timed too

CPU seconds of this process, each the median of its repeats; the slower of the two large cases counts. The
result of the search is checked: configurations that fit, on all devices.

    python -m benchmarks.planner.planner_speed
"""

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf
from statistics import median

from benchmarks.harness.result import Result
from meshwright.commands.search.constraints import SearchConstraints
from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.planner.machine.machine import make_machine
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import SearchResult, search

NAME = "planner_speed"
CLAIM = "400 B weights: a plan for 4,096 devices in 10 s of one core, for 100,000 in 30 s"
SHAPE = "400b: layers 126 hidden 16384 heads 128 kv_heads 8 ffn 53248 vocab 128256 sequence 8192 gated"
REPEATS = 3
CASES: Mapping[str, tuple[int, int, float]] = {
    "4,096 devices": (4096, 2048, 10.0),
    "98,304 devices": (98304, 98304, 30.0),
    "100,000 devices": (100000, 100000, 30.0),
}


def search_request(devices: int, num_samples: int) -> SearchRequest:
    """Returns the request of `meshwright plan`."""
    return SearchConstraints().apply(
        SearchRequest(parse_shape(SHAPE), make_machine("h100", devices), num_samples)
    )


def run_searches(request: SearchRequest) -> Iterator[SearchResult]:
    """Yields the results of the searches: the configurations that fit, and the fastest one without
    a memory limit.
    """
    yield search(request, 8)
    yield search(
        replace(
            request, machine=replace(request.machine, device=replace(request.machine.device, memory=inf))
        ),
        1,
    )


def seconds(devices: int, num_samples: int) -> tuple[float, SearchResult]:
    """Returns the CPU seconds of one plan, and the result of the search.

    Raises ValueError if a configuration leaves a device out, or does not fit.
    """
    request = search_request(devices, num_samples)
    begin = time.process_time()
    best, _ = run_searches(request)
    taken = time.process_time() - begin
    wrong = [
        each
        for each in best.best
        if each.config.num_ranks != devices or each.memory.total > request.usable_memory
    ]
    if wrong or not best.best:
        raise ValueError(
            f"{devices} devices: {wrong[:1] or 'nothing'} was found; needed are configurations that fit: "
            f"repair the search"
        )
    return taken, best


def main() -> None:
    """Times all cases, and writes the result."""
    detail: dict[str, object] = {}
    shares: dict[str, list[float]] = {}
    for name, (devices, num_samples, bar) in CASES.items():
        runs = [seconds(devices, num_samples) for _ in range(REPEATS)]
        times = [taken for taken, _ in runs]
        shares[name] = [taken / bar for taken in times]
        best = runs[0][1]
        first = best.best[0]
        detail[name] = {
            "seconds": [round(each, 2) for each in times],
            "bar_s": bar,
            "estimated": best.num_estimated,
            "step_s": first.seconds,
        }
        print(
            f"{name}: {median(times):.1f} s CPU of {bar:.0f}, {best.num_estimated} configurations; "
            f"{first.config}",
            file=sys.stderr,
        )
    slowest = max(shares, key=lambda name: median(shares[name]))
    values = shares[slowest]
    figure, spread = median(values), (min(values), max(values))
    result = Result.of(
        NAME,
        CLAIM,
        values=values,
        median=figure,
        spread=spread,
        bar=1.0,
        holds=max(max(each) for each in shares.values()) <= 1.0,
        repeats=REPEATS,
        detail={"slowest": slowest, "cases": detail},
    )
    print(result.write(NAME))


if __name__ == "__main__":
    main()
