"""Random plans whose ranks are threads on one GPU, in float64, beside one ordinary PyTorch loop on the CPU.

Every plan is compared as `random_plans` compares it (benchmarks/random_plans/random_plans.py): samples, loss,
every gradient, the norm, every parameter and every message, to 1e-10. What differs is the device of the
ranks: its kernels, its streams, the copies between host and device of offload, and tensors that were left on
the CPU. Several processes share the GPU; one stops when its time is over, and plans that ran are counted.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import count, islice
from multiprocessing import get_context
from time import monotonic

import torch

from benchmarks.compression import activation_parity, compression_parity, zero_plus_plus_parity
from benchmarks.gpu.setting import Setting
from benchmarks.random_plans.combinations import FINDINGS, Row
from benchmarks.random_plans.random_draws import Draw, draw
from benchmarks.random_plans.random_plans import try_plan
from meshwright.device.local_device import use_device
from meshwright.plan.hardware.device_specs import available_cores

SEED, MAX_RANKS = 26, 12
RUN_S, TINY_RUN_S = 40.0, 1.0
MAX_PROCESSES = 14  # each has a context of its own on the device
PLAN_LIMIT_S = 20.0
MAX_FINDINGS = 12


def drawn_plans(setting: Setting) -> dict[str, object]:
    """Returns how many plans matched, were refused or did not match, and what those are."""
    run_s = setting.size(RUN_S, TINY_RUN_S)
    num_processes = setting.size(min(MAX_PROCESSES, available_cores()), 1)
    outcomes, techniques, findings, errors = Counter[str](), Counter[str](), list[Row](), [0.0]
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        shares = [
            pool.submit(_share, index, num_processes, str(setting.device), run_s)
            for index in range(num_processes)
        ]
        for share in as_completed(shares):
            for row in share.result():
                outcomes[row["outcome"]] += 1
                techniques.update(row["techniques"] if row["outcome"] == "matched" else ())
                findings += [row] if row["outcome"] in FINDINGS else []
                errors += [row["error"]] if row["outcome"] == "matched" else []
            setting.keep({"outcomes": outcomes, "findings": findings[:MAX_FINDINGS]})
    found = {"outcomes": outcomes, "findings": findings[:MAX_FINDINGS], "worst error": max(errors)}
    return {"ok": outcomes["matched"] > 0 and not findings, "seed": SEED, "techniques": techniques, **found}


def _share(index: int, num_processes: int, device: str, run_s: float) -> list[Row]:
    """Returns the rows of every `num_processes`-th plan from `index` on, until `run_s` seconds are over."""
    end = monotonic() + run_s
    use_device(torch.device(device))
    rows = list[Row]()
    small = (each for each in mixed_draws() if each.mesh.world_size <= MAX_RANKS)
    for drawn in islice(small, index, None, num_processes):
        rows.append(try_plan(drawn, PLAN_LIMIT_S, torch.device(device)))
        if monotonic() > end:
            break
    return rows


def mixed_draws() -> Iterator[Draw]:
    """Yields random plans of all techniques, in turn: any, with compressed gradients, with coded weights,
    with compressed activations.
    """
    kinds = [
        (draw(SEED, number) for number in count()),
        compression_parity.draws(SEED),
        (draw(SEED + 1, number) for number in count()),
        zero_plus_plus_parity.draws(SEED),
        (draw(SEED + 2, number) for number in count()),
        activation_parity.draws(SEED),
    ]
    while True:
        for each in kinds:
            yield next(each)
