"""Ranks as threads on one GPU against one device, and the GPU against the CPU, in fp32 and bf16.

All ranks share the device and its default stream, and exchange through the backend of threads, so this is
about kernels and dtypes of the device, not about streams (delayed_collectives.py) and not about NCCL. A
backward runs in the thread of its rank: that of the device, which all would share, may wait for no other.

Loss and gradient norm of three steps are compared. Sums in another order differ by some roundings, which the
optimizer carries on: the limits are those of the dtype.

And random plans of all techniques, in float64, beside one ordinary PyTorch loop on the CPU, as `random_plans`
compares them (benchmarks/random_plans/random_plans.py): samples, loss, every gradient, the norm, every
parameter and every message, to 1e-10. What differs is the device of the ranks: its kernels, its streams, the
copies of offload, and tensors that were left on the CPU. Several processes share the GPU.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import count, islice
from multiprocessing import get_context
from time import monotonic

import torch

from benchmarks.compression import activation_parity, compression_parity, zero_plus_plus_parity
from benchmarks.gpu.llamas import AUTOCAST, FP32, SMALL, make_llama_plan, open_trainer
from benchmarks.gpu.setting import Setting
from benchmarks.random_plans.combinations import FINDINGS, Row
from benchmarks.random_plans.random_draws import Draw, draw
from benchmarks.random_plans.random_plans import try_plan
from meshwright.comm.collectives.group import World
from meshwright.device.local_device import use_device
from meshwright.plan.hardware.device_specs import available_cores
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads

NUM_STEPS = 3
LAYOUTS = {
    "ddp": Mesh(dp_replicate=3),
    "zero 3": Mesh(dp_shard=3),
    "tensor parallel": Mesh(tp=3),
    "ring attention": Mesh(cp=3),
    "1f1b": Mesh(pp=3),
    "zero 3 x tensor parallel": Mesh(dp_shard=3, tp=2),
}
PRECISIONS = {"fp32": (FP32, 1e-4), "autocast": (AUTOCAST, 0.03)}  # relative differences that are allowed
SEED, MAX_RANKS = 26, 12
RUN_S, TINY_RUN_S = 20.0, 1.0
MAX_PROCESSES = 10  # each has a context of its own on the device
PLAN_LIMIT_S = 30.0
MAX_FINDINGS = 12

Curve = list[tuple[float, float]]


def parity(setting: Setting) -> dict[str, object]:
    """Returns the largest relative difference of each layout and precision, and of the GPU to the CPU."""
    found: dict[str, float] = {}
    excess = []
    for name, limit, difference in _differences(setting):
        found[name] = difference
        setting.keep({"differences": found})
        if not difference <= limit:
            excess.append(f"{name}: {difference:.1e}, at most {limit:g}")
    return {"ok": not excess, "differences": found, "above the limit": excess}


def _differences(setting: Setting) -> Iterator[tuple[str, float, float]]:
    layouts = setting.size(LAYOUTS, {"zero 3": LAYOUTS["zero 3"]})
    for word, (precision, limit) in PRECISIONS.items():
        alone = _train(make_llama_plan(SMALL, precision), setting.device)
        host = _train(make_llama_plan(SMALL, precision), torch.device("cpu"))
        yield f"one device, {word}, against the CPU", limit, relative_difference(alone, host)
        for name, mesh in layouts.items():
            plan = make_llama_plan(SMALL, precision, mesh, micro_batch=1)
            yield f"{name}, {word}", limit, relative_difference(_train(plan, setting.device), alone)


def _train(plan: Plan, device: torch.device) -> Curve:
    def rank(world: World) -> Curve:
        with open_trainer(SMALL, plan, world) as trainer:
            steps = [trainer.step(trainer.local_batch(SMALL.samples())) for _ in range(NUM_STEPS)]
            return [(step.loss, step.grad_norm) for step in steps]

    return run_on_threads(rank, plan.mesh, device=device)[0]


def relative_difference(curve: Curve, reference: Curve) -> float:
    """Returns the largest relative difference of two curves."""
    pairs = zip(curve, reference, strict=True)
    return max(
        abs(mine - other) / abs(other) for one, two in pairs for mine, other in zip(one, two, strict=True)
    )


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
                if row["outcome"] == "new reason":  # such as too small a tensor for codes
                    row["outcome"] = "refused"
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
