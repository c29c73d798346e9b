"""The peak of the allocator against the plan, of one rank.

planned    parameters, gradients, masters and states to the byte; activations as the memory trial found
allocated  the peak by tensors                 reserved   the peak that the allocator took of the device
retries    how often it had to free its cache; more than none says that segments did not fit
"""

from benchmarks.gpu.llamas import AUTOCAST, BF16, FP32, LlamaSize, make_llama_plan, open_trainer
from benchmarks.gpu.setting import Setting, clear_memory
from meshwright.device.device_memory import allocator_statistics, process_nbytes
from meshwright.oom_advice import planned_nbytes
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.strategy_interface import Strategy

LARGE, TINY = LlamaSize(1024, 12, 8, 16000, 8, 1024), LlamaSize(48, 2, 4, 64, 2, 16)
NUM_STEPS = 2
LAYOUTS: dict[str, tuple[PrecisionConfig, tuple[Strategy, ...]]] = {
    "fp32": (FP32, ()),
    "autocast": (AUTOCAST, ()),
    "bf16 + fp32 master": (BF16, ()),
    "autocast, activation checkpointing": (AUTOCAST, (ActivationCheckpointing(),)),
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
