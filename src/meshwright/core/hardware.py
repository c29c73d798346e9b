"""What known devices can do at most, so that a speed can be said as a share of it (mfu, model FLOPs utilisation).

Peaks are those of the makers for dense matrix products, in TFLOP/s, as collected in github.com/stas00/ml-engineering
(compute/accelerator, commit 744d01e) and github.com/cli99/llm-analysis (gpu_configs). A device that is not in the table,
every CPU among them, has no peak here: then a speed is shown as it is, in FLOP/s, and no share is made up.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """A device: what its driver calls it (a pattern), and its TFLOP/s by dtype of the operands."""

    pattern: str
    tflops: Mapping[str, float]


# the first that matches: GH200 before H200, PCIe before SXM
PEAKS = (
    Peak(r"V100-SXM", {"float16": 125, "float32": 15.7}),
    Peak(r"A[18]00\b", {"bfloat16": 312, "float16": 312, "float32": 19.5}),
    Peak(r"H100 PCIe", {"bfloat16": 756, "float16": 756, "float32": 51}),
    Peak(r"H100 (80GB HBM3|SXM)|H800(?! PCIe)|GH200|H200(?! NVL)", {"bfloat16": 989, "float16": 989, "float32": 67}),
    Peak(r"GB[23]00", {"bfloat16": 2500, "float16": 2500, "float32": 80}),
    Peak(r"\bB[23]00", {"bfloat16": 2250, "float16": 2250, "float32": 80}),
    Peak(r"MI300X", {"bfloat16": 1307, "float16": 1307, "float32": 163.4}),
    Peak(r"MI325X", {"bfloat16": 1300, "float16": 1300, "float32": 163.4}),
)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def peak_flops(device: str, dtype: str) -> float | None:
    """The most floating-point operations per second of the device that its driver calls `device`; None when unknown.

    A slice of a device (MIG) can do less than the whole, so it is unknown.
    """
    found = next((peak for peak in PEAKS if re.search(peak.pattern, device) and "MIG" not in device), None)
    tflops = None if found is None else found.tflops.get(dtype)
    return None if tflops is None else tflops * 1e12
