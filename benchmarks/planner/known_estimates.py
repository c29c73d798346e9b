"""Well-known estimates, derived by the planner's own functions.

Every step of the derivation is printed:

    GPT-3 on one V100   6 FLOPs per weight and token, over 28 TFLOP/s: arXiv 2005.14165 (300 G tokens); arXiv
                        2104.04473 speaks of hundreds of years
    a video model       Kinetics in 49 h 55 min, and in 14 min 13 s on 1,536 GPUs: arXiv 1910.00932. The
                        speedup is the ratio of the two times; beside it stands the share that data-parallel
                        replicas reach at least, by the planner's time of their gradient all-reduces
    ZeRO's table        bytes per rank at every stage, from plans, as in
                        benchmarks/data_parallel/zero_states.py

    python -m benchmarks.planner.known_estimates
"""

import sys
from collections.abc import Mapping

from benchmarks.data_parallel.zero_states import analytic, cells
from benchmarks.harness.result import Result
from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.planner.machine.machine import make_machine
from meshwright.planner.machine.roofline import all_gather_seconds

NAME = "known_estimates"
CLAIM = (
    "GPT-3 on one V100 at 28 TFLOP/s takes 355 years, 1,536 GPUs train a video model 211 "
    "times faster, ZeRO's table holds"
)
GPT3 = "GPT-3: layers 96 hidden 12288 heads 96 vocab 50257 sequence 2048 tied"
TOKENS, RATE, YEAR = 300e9, 28e12, 365.25 * 86400
YEARS, SPEEDUP = 355, 211
LONG_S, SHORT_S, GPUS = 49 * 3600 + 55 * 60, 14 * 60 + 13, 1536
HOST, CLIPS = 6, 12288  # devices on a host of Summit; clips of a step
WEIGHTS, MACS = 24.3e6, 33e9  # of ResNet-50 with shifts, on eight frames (arXiv 1811.08383, table 2)
SHARE = 0.4  # of the peak, reached by its convolutions in float32: an assumption


def gpt3() -> dict[str, float]:
    """Returns the years of GPT-3's training on one device at `RATE`, with the numbers that they come from."""
    shape = parse_shape(GPT3)
    weights = shape.layers * shape.layer_numel + shape.embedding_numel
    flops = 6 * weights * TOKENS
    return {"weights": weights, "tokens": TOKENS, "flops": flops, "rate": RATE, "years": flops / RATE / YEAR}


def video() -> dict[str, float]:
    """Returns the speedup of 1,536 devices over the slower run, and the share of their rate that gradient
    all-reduces leave.
    """
    summit = make_machine("V100", GPUS, host_size_override=HOST)
    peak = summit.peak_flops("float32")
    computed = 3 * 2 * MACS * CLIPS / GPUS / (peak * SHARE)
    summed = 2 * all_gather_seconds(summit, 4 * WEIGHTS, GPUS, 1, GPUS)
    return {
        "speedup": LONG_S / SHORT_S,
        "hosts": GPUS / HOST,
        "of_one_host_each": LONG_S / SHORT_S / (GPUS / HOST),
        "computed_s": computed,
        "all_reduce_s": summed,
        "share_at_least": computed / (computed + summed),
    }


def result(
    gpt3_estimate: Mapping[str, float], video_estimate: Mapping[str, float], table: list[dict[str, object]]
) -> Result:
    """Returns the number of estimates that are reproduced: years and speedup to the unit, each cell of the
    table to its last digit.
    """
    values = [
        abs(gpt3_estimate["years"] - YEARS),
        abs(video_estimate["speedup"] - SPEEDUP),
        *(float(str(row["off"])) for row in table),
    ]
    detail = {"gpt3": dict(gpt3_estimate), "video": dict(video_estimate), "zero": table}
    return Result.of_count(NAME, CLAIM, values, limit=1.0, bar=len(values), detail=detail)


def main() -> None:
    """Prints the derivations, and writes the result."""
    gpt, clips, table = gpt3(), video(), list(analytic(cells()))
    print(
        f"GPT-3: 6 x {gpt['weights']:.4g} weights x {gpt['tokens']:.3g} tokens = {gpt['flops']:.3g} FLOP; "
        f"over {gpt['rate']:.3g} FLOP/s {gpt['flops'] / gpt['rate']:.4g} s = {gpt['years']:.1f} years",
        f"video: {LONG_S:,} s / {SHORT_S} s = {clips['speedup']:.1f} times; if the slower run had one host "
        f"of {HOST}, {clips['of_one_host_each']:.0%} of {clips['hosts']:.0f} hosts' rate; computed "
        f"{clips['computed_s']:.2f} s and all-reduced in {clips['all_reduce_s']:.3f} s a step give "
        f"{clips['share_at_least']:.0%} if nothing hides the all-reduces (an estimate)",
        *(
            (
                f"ZeRO: {row['model']} stage {row['stage']} on {row['ranks']}: {row['plan']:.3f} GB, "
                f"{row['printed']}"
            )
            for row in table
        ),
        sep="\n",
        file=sys.stderr,
    )
    found = result(gpt, clips, table)
    print(found.write(NAME))


if __name__ == "__main__":
    main()
