"""Plans with offload on this machine: seconds of a step and peak bytes, predicted against measured.

As in `planner_here`, whose benches, model sizes and interleaved rounds these are; beside them the disk is
measured: RATE_NBYTES are written and read by as many files at once as there are ranks, past the page cache,
and the plan on disk is predicted at this rate. On a CPU the device is the host: "copies over the host link"
are copies within one memory, at the rate that `bench device` measures.

    seconds     median of the clean rounds, of the slowest rank              at most 10 % off
    bytes       peak of live bytes in a step, of device and host together    at most 3 % off

    python -m benchmarks.planner.planner_offload                    10 minutes, on a quiet machine
    python -m benchmarks.planner.planner_offload --only "disk"      these plans alone; writes nothing
    python -m benchmarks.planner.planner_offload --quick            a few steps of each; writes nothing
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.planner.planner_here import BENCHES, parse, predict_and_measure, result_of, run_bench
from benchmarks.planner.twelve_plans import DISK_FOLDER, OFFLOADED_CASES
from meshwright.engine.params.rank_file import RankFile
from meshwright.engine.runtime.host_memory import page_aligned
from meshwright.run.measure.profile_files import read_profile, write_profile

NAME = "planner_offload"
CLAIM = (
    "after `bench device` and `bench network`, the step time of plans with offload to the host and to disk "
    "is predicted within 10 % of measured, and the peak of live bytes within 3 %"
)
BYTES_BAR = 0.03
RATE_NBYTES, RATE_PIECE, NUM_RATES = 256 << 20, 8 << 20, 3


def disk_rate(folder: str, num_files: int) -> float:
    """Returns bytes per second, of reads and writes alike, of each of `num_files` files at once: the best of
    NUM_RATES.
    """
    files = [RankFile(folder, RATE_NBYTES) for _ in range(num_files)]
    buffer, seconds = page_aligned(RATE_PIECE), list[float]()
    for file in files:
        file.tensor.fill_(1)
        file.drop_cache()
    for _ in range(NUM_RATES):
        began = perf_counter()
        works = [
            start(begin, buffer, "rate")
            for begin in range(0, RATE_NBYTES, RATE_PIECE)
            for file in files
            for start in (file.start_read, file.start_write)
        ]
        for work in works:
            work.wait()
        seconds.append(perf_counter() - began)
    for file in files:
        file.close()
    return 2 * RATE_NBYTES / min(seconds)


def main(arguments: Sequence[str]) -> None:
    """Runs the benches, predicts and measures all plans, and writes the result."""
    quick, only, window = parse(arguments)
    with TemporaryDirectory() as private:
        folder = Path(private)
        run_bench("network", folder, quick=quick)
        run_bench("device", folder, quick=quick)
        rate = disk_rate(DISK_FOLDER, max(case.mesh.world_size for case in OFFLOADED_CASES.values()))
        print(f"disk: {rate / 1e9:.2f} GB/s for each rank", file=sys.stderr, flush=True)
        profile = read_profile(folder / "device.toml")
        write_profile(replace(profile, disk_rate=rate), folder / "device.toml")
        rows = {name: predict_and_measure(name, folder, window) for name in OFFLOADED_CASES if only in name}
        if quick or only:
            return
        machine = {name: (folder / f"{name}.toml").read_text() for name in BENCHES}
    print(result_of(NAME, CLAIM, rows, BYTES_BAR, {"disk_rate": rate, **machine}).write(NAME))


if __name__ == "__main__":
    main(sys.argv[1:])
