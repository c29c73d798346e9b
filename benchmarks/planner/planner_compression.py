"""Plans with compressed gradients, weights and activations on this machine: seconds of a step and peak
bytes, predicted against measured.

As in `planner_here`, whose benches, model sizes and interleaved rounds these are. The links of this machine
are fast, so that a prediction has to count the seconds to code; `compression_links` has slow links.

    seconds     median of the clean rounds, of the slowest rank              at most 10 % off
    bytes       peak of live bytes in a step, by rank                        at most 5 % off

    python -m benchmarks.planner.planner_compression                 10 minutes, on a quiet machine
    python -m benchmarks.planner.planner_compression --only int8     these plans alone; writes nothing
    python -m benchmarks.planner.planner_compression --quick         a few steps of each; writes nothing
"""

import sys

from benchmarks.planner.planner_here import BYTES_BAR, predict_and_measure_all
from benchmarks.planner.twelve_plans import COMPRESSED_CASES

NAME = "planner_compression"
CLAIM = (
    "after `bench device` and `bench network`, the step time of six plans with compressed gradients, weights "
    "and activations is predicted within 10 % of measured, and the peak of live bytes within 5 %"
)


if __name__ == "__main__":
    predict_and_measure_all(NAME, CLAIM, COMPRESSED_CASES, BYTES_BAR, sys.argv[1:])
