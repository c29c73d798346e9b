"""The peak of the allocator against the plan, of one rank.

planned    parameters, gradients, masters and states to the byte; activations as the memory trial found
allocated  the peak by tensors                 reserved   the peak that the allocator took of the device
retries    how often it had to free its cache; more than none says that segments did not fit

And offload: the bits, the time and the peak of a step with states and activations on the host beside the plan
without. Copies run on streams of their own beside the kernels, from pinned memory. Where the same kernels
step, the parameters have the same bits; where the host steps, they differ by roundings of AdamW.
"""

import os
from collections.abc import Sequence

import torch

from benchmarks.gpu.llamas import (
    AUTOCAST,
    BF16,
    FP32,
    LlamaSize,
    make_llama_plan,
    open_trainer,
    saved_tensors,
)
from benchmarks.gpu.setting import Setting, clear_memory, same_bits, seconds_of
from meshwright.device.device_memory import allocator_statistics, process_nbytes
from meshwright.oom_advice import planned_nbytes
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.training.deterministic_kernels import deterministic_kernels

LARGE, TINY = LlamaSize(1024, 12, 8, 16000, 8, 1024), LlamaSize(48, 2, 4, 64, 2, 16)
OFFLOADED = LlamaSize(1024, 6, 8, 16000, 8, 1024)  # copied to the host and compared
NUM_STEPS = 2
LAYOUTS: dict[str, tuple[PrecisionConfig, tuple[Strategy, ...]]] = {
    "fp32": (FP32, ()),
    "autocast": (AUTOCAST, ()),
    "bf16 + fp32 master": (BF16, ()),
    "autocast, activation checkpointing": (AUTOCAST, (ActivationCheckpointing(),)),
}
CHECKPOINTING = "activation checkpointing"
# a plan: its strategies, the plan with which it shares the bits, and whether it does
PLANS: dict[str, tuple[tuple[Strategy, ...], str, bool]] = {
    "no offload": ((), "no offload", True),
    CHECKPOINTING: ((ActivationCheckpointing(),), CHECKPOINTING, True),
    "states, device steps": ((Offload(),), "no offload", True),
    "states, host steps": ((Offload(step_on="host"),), "no offload", False),
    "activations": ((ActivationOffload(),), "no offload", True),
    "checkpointed activations": (
        (ActivationCheckpointing(), ActivationOffload()),
        CHECKPOINTING,
        True,
    ),
}


def memory(setting: Setting) -> dict[str, object]:
    """Returns planned and measured bytes of each layout, and their ratio."""
    size, rows = setting.size(LARGE, TINY), {}
    for name, (precision, strategies) in LAYOUTS.items():
        plan = make_llama_plan(size, precision, strategies=strategies, micro_batch=max(1, size.batch // 2))
        clear_memory(setting.device)
        before = process_nbytes(setting.device)
        with open_trainer(size, plan, setting.device) as trainer:
            for _ in range(NUM_STEPS):
                trainer.step(trainer.local_batch(size.samples()))
            live = trainer.executor.memory_by_category()
        planned, found = planned_nbytes(plan, 0), allocator_statistics(setting.device)
        rows[name] = {"planned": planned, "live after the step": live}
        if found is not None:
            allocated = found.peak_allocated - before
            rows[name] |= {
                "allocated": allocated,
                "reserved": found.peak_reserved,
                "retries": found.num_retries,
                "allocated / planned": allocated / sum(planned.values()),
            }
        del trainer
        setting.keep({"layouts": rows})
    return {"ok": True, "layouts": rows}


def offload(setting: Setting) -> dict[str, object]:
    """Returns seconds, bytes and the comparison of bits of each plan."""
    size, rows = setting.size(OFFLOADED, TINY), dict[str, dict[str, object]]()
    saved: dict[str, list[torch.Tensor]] = {}
    with deterministic_kernels(os.environ):
        for name, (strategies, other, _) in PLANS.items():
            rows[name], tensors = _measured(size, strategies, setting)
            saved.setdefault(other, tensors)
            rows[name]["same bits"] = same_bits(tensors, saved[other])
            rows[name]["largest difference"] = _largest_difference(tensors, saved[other])
            setting.keep({"plans": rows})
    ok = all(rows[name]["same bits"] for name, (_, _, is_exact) in PLANS.items() if is_exact)
    return {"ok": ok, "plans": rows}


def _measured(
    size: LlamaSize, strategies: Sequence[Strategy], setting: Setting
) -> tuple[dict[str, object], list[torch.Tensor]]:
    plan = make_llama_plan(size, AUTOCAST, strategies=strategies, micro_batch=size.batch)
    clear_memory(setting.device)
    with open_trainer(size, plan, setting.device) as trainer:
        batch = trainer.local_batch(size.samples())
        for _ in range(NUM_STEPS):
            trainer.step(batch)
        tensors = saved_tensors(trainer)
        found = allocator_statistics(setting.device)
        seconds = seconds_of(lambda: trainer.step(batch), setting.device, setting.size(5, 1))
    return {"s": seconds, "peak": found and found.peak_allocated}, tensors


def _largest_difference(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    pairs = zip(tensors, others, strict=True)
    return max(
        (
            (one.double() - two.double()).abs().max().item()
            for one, two in pairs
            if one.numel() and one.shape == two.shape
        ),
        default=0.0,
    )
