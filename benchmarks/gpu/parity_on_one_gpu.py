"""Ranks as threads on one GPU against one device, and the GPU against the CPU, in fp32 and bf16.

All ranks share the device and its default stream, and exchange through the backend of threads, so this is
about kernels and dtypes of the device, not about streams (delayed_collectives.py) and not about NCCL. A
backward runs in the thread of its rank: that of the device, which all would share, may wait for no other.

Loss and gradient norm of three steps are compared. Sums in another order differ by some roundings, which the
optimizer carries on: the limits are those of the dtype.
"""

from collections.abc import Iterator

import torch

from benchmarks.gpu.llamas import AUTOCAST, FP32, SMALL, make_llama_plan, open_trainer
from benchmarks.gpu.setting import Setting
from meshwright.comm.collectives.group import World
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
        with torch.autograd.set_multithreading_enabled(False), open_trainer(SMALL, plan, world) as trainer:
            steps = [trainer.step(trainer.local_batch(SMALL.samples())) for _ in range(NUM_STEPS)]
            return [(step.loss, step.grad_norm) for step in steps]

    return run_on_threads(rank, plan.mesh, device=device)[0]


def relative_difference(curve: Curve, reference: Curve) -> float:
    """Returns the largest relative difference of two curves."""
    pairs = zip(curve, reference, strict=True)
    return max(
        abs(mine - other) / abs(other) for one, two in pairs for mine, other in zip(one, two, strict=True)
    )
