"""Layouts of published runs: the columns of a row, and the defaults of its code base.

Rows do not state these defaults:

    scores         materialized, with a fused softmax kernel, before fused attention; kernels written for the
                   device at NVIDIA
    NVIDIA's code  sequence parallelism, sharded optimizer states, reductions and gathers overlapped with
                   products, virtual stages of four layers or more
    torch's        async TP overlaps about half of what tensor ranks send with products: by the bytes of
                   arXiv 2205.05198 at 337 GB/s, 70B runs with it are faster by 49 % of what they sent, 8B
                   runs by 41 %
    DeepSpeed's    stage 3 of 2021 gathers weight by weight, when it is needed. Steps of arXiv 2104.04473,
                   table 2, take their computation, their bytes at the cards' rate, and 14 us for each rank,
                   gather and weight, at any microbatch size
    recomputing    if a row does not state it, and the run would have needed 1.5 times the device's memory:
                   all layers, unless the device reads its host's memory at the rate of links, and keeps
                   activations there
    by operator    torchtitan's "selective (op)" keeps attention and every second product, and recomputes all
                   else
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.planner.analytic.closed_form_memory import estimate_memory
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import (
    DUALPIPE,
    ZB_H1,
    ZB_V,
    AttentionKernel,
    ParallelConfig,
    RecomputeMode,
    ScheduleProfile,
)
from meshwright.planner.machine.machine import Machine

COHERENT_DEVICES = (
    "GH",
    "GB",
)  # devices that read their host's memory at the rate of links, and keep activations there
MAX_MEMORY_RATIO = 1.5  # of a device's memory: no run without recomputing needed more
# schedules by their name in a row: the closed forms of their papers
SCHEDULE_PROFILES: Mapping[str, ScheduleProfile] = {
    "1f1b": ScheduleProfile(),
    "gpipe": ScheduleProfile(),
    "interleaved": ScheduleProfile(),
    "zb-1p": ZB_H1,
    "zb-2p": ScheduleProfile(0.0, 0.0, 0.0, 2.0, uniform_memory=True),
    "zb-v": ZB_V,
    "dualpipe": DUALPIPE,
}


class MissingInfo(Exception):
    """Information that a row lacks."""


@dataclass(frozen=True)
class CodeBaseDefaults:
    """Defaults of a code base that its rows do not state.

    `interleaved`: it uses virtual stages whenever pp > 1; `micro_batch`: samples of a microbatch.
    """

    kernel: AttentionKernel = "flash2"
    fused_norms: bool = True
    overlap_fraction: float = 0.0
    grad_reduce_itemsize: int = 2
    dtype: str = "bfloat16"
    sequence_parallel: bool = False
    zero_stage: int = 0
    interleaved: bool = False
    micro_batch: float | None = None


BEFORE_FLASH = CodeBaseDefaults(
    kernel="softmax", fused_norms=True
)  # before fused attention: Megatron with its own softmax and norm kernels
MEGATRON_CORE = CodeBaseDefaults(
    kernel="flash3", overlap_fraction=1.0, sequence_parallel=True, zero_stage=1, interleaved=True
)  # NVIDIA's recipes
DEEPSEEK = CodeBaseDefaults(kernel="flash3", overlap_fraction=1.0, zero_stage=1, micro_batch=1)
# share of what tensor ranks send that torch's async TP overlaps with products; Megatron overlaps all of it
ASYNC_TP_OVERLAP = 0.5
DEFAULTS_BY_SOURCE: tuple[tuple[str, CodeBaseDefaults], ...] = (
    ("bigscience", replace(BEFORE_FLASH, grad_reduce_itemsize=4)),
    ("Narayanan", BEFORE_FLASH),
    ("Korthikanti", BEFORE_FLASH),
    ("Megatron-LM old", BEFORE_FLASH),
    ("Zero Bubble", BEFORE_FLASH),
    ("MT-NLG", BEFORE_FLASH),
    ("Alpa", BEFORE_FLASH),
    ("eth-easl", BEFORE_FLASH),
    ("DeepSpeed", BEFORE_FLASH),
    ("microsoft/Megatron", BEFORE_FLASH),
    ("NVIDIA", MEGATRON_CORE),
    ("NeMo", MEGATRON_CORE),
    ("Megatron", MEGATRON_CORE),
    ("yanring", replace(MEGATRON_CORE, micro_batch=1)),
    ("DeepSeek", DEEPSEEK),
    ("Insights into DeepSeek", DEEPSEEK),
    ("mosaic", CodeBaseDefaults(kernel="flash1")),
    ("torchtitan", CodeBaseDefaults(fused_norms=False)),
    ("", CodeBaseDefaults()),
)


def layout_of(
    source: str, row: Mapping[str, str], shape: ModelShape, numbers: Mapping[str, float | None], host: int
) -> ParallelConfig:
    """Returns the layout of a row; `numbers`: its numeric columns, `host`: the devices per host.

    Raises MissingInfo if the row states too little.
    """
    tp, pp, cp = (int(numbers.get(axis) or 1) for axis in ("tp", "pp", "cp"))
    dp = int(numbers.get("dp") or (numbers.get("gpus") or 0) // (tp * pp * cp))
    batch, micro, times = numbers.get("global_batch"), numbers.get("micro_batch"), numbers.get("grad_accum")
    if dp < 1:
        raise MissingInfo("no number of devices")
    defaults = next(defaults for name, defaults in DEFAULTS_BY_SOURCE if source.startswith(name))
    if not micro and batch and times:
        micro = batch / dp / times
    micro = micro or defaults.micro_batch
    if not batch and micro and times:
        batch = micro * dp * times
    if not micro or not batch:
        raise MissingInfo("no microbatch or no global batch")
    notes, states = row.get("notes", ""), row.get("zero_fsdp", "").lower()
    return ParallelConfig(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        zero_stage=max(defaults.zero_stage, _zero_stage(states)),
        zero_group_size=_zero_group_size(states, dp, max(1, host // (tp * cp))),
        virtual_stages=_virtual_stages(
            source, defaults, row.get("schedule", "").lower(), numbers.get("virtual_stages"), shape, pp
        ),
        micro_batch=micro,
        num_microbatches=batch / (micro * dp),
        recompute=_recompute_mode(row.get("recompute", "").lower()),
        sequence_parallel=row.get("seq_parallel", "").startswith("yes")
        or (defaults.sequence_parallel and tp > 1 and not row.get("seq_parallel")),
        schedule_profile=_schedule_profile(row.get("schedule", "").lower()),
        param_gather_itemsize=1
        if source.startswith("torchtitan") and "fp8 tensorwise" in row.get("precision", "").lower()
        else 2,
        dtype=_dtype(row.get("precision", "").lower(), defaults),
        grad_reduce_itemsize=defaults.grad_reduce_itemsize,
        attention_kernel=_kernel(notes, defaults),
        fused_norms="RMS kernel" in notes
        if "kernel " in notes
        else defaults.fused_norms or row.get("compile", "") == "yes",
        compiled=row.get("compile", "") == "yes",
        overlap_fraction=defaults.overlap_fraction or ASYNC_TP_OVERLAP * ("async tp" in notes.lower()),
        recompute_fraction=0.5 if "every 2nd" in row.get("recompute", "") else 1.0,
        gathers_per_param=source.startswith("Narayanan") and "zero-3" in states,
    )


def with_assumed_recompute(
    row: Mapping[str, str], shape: ModelShape, layout: ParallelConfig, machine: Machine
) -> ParallelConfig:
    """Returns `layout`, or one that recomputes all layers if the run could not have fitted
    (see the module).
    """
    if (
        row.get("recompute")
        or row.get("status", "ok") != "ok"
        or machine.device.name.startswith(COHERENT_DEVICES)
    ):
        return layout
    needed = estimate_memory(
        shape, replace(layout, num_microbatches=max(1, round(layout.num_microbatches)))
    ).total
    return (
        replace(layout, recompute="layers") if needed > MAX_MEMORY_RATIO * machine.device.memory else layout
    )


def _virtual_stages(
    source: str, defaults: CodeBaseDefaults, schedule: str, numbers: float | None, shape: ModelShape, pp: int
) -> int:
    """Returns the virtual stages per rank along pp.

    If a row does not state them, NVIDIA's recipes, and runs with an interleaved schedule, have four layers or
    more per virtual stage; Zero Bubble PP's interleaved runs have one (arXiv 2401.10241, section 5).
    """
    if numbers or pp == 1 or not (defaults.interleaved or "interleaved" in schedule):
        return int(numbers or 1)
    each = shape.layers // pp
    if source.startswith("Zero Bubble"):
        return max(1, round((shape.layers + 2) / pp))
    return next((n for n in range(each // 4, 0, -1) if each % n == 0), each)


def _zero_stage(text: str) -> int:
    if any(word in text for word in ("zero-2", "grad_op", "reshard grads")):
        return 2
    if any(word in text for word in ("fsdp", "hsdp", "full_shard", "zero-3")):
        return 3
    return 1 if "zero-1" in text or "distributed optimizer" in text else 0


def _zero_group_size(text: str, num_replicas: int, replicas_per_host: int) -> int:
    """Returns over how many of the replicas states are sharded: the number in `text`, or the replicas of a
    host; 0: all of them.
    """
    found = re.search(r"\bx ?(\d+)|within (\d+)", text)
    each = (
        int(found[1] or found[2])
        if found
        else replicas_per_host
        if "hsdp" in text or "hybrid" in text
        else num_replicas
    )
    return each if each < num_replicas and num_replicas % each == 0 else 0


def _recompute_mode(text: str) -> RecomputeMode:
    if text.startswith(("full", "yes")) or "every 2nd" in text:
        return "layers"
    if "selective" not in text:
        return "none"
    return "operators" if "(op)" in text else "attention"


def _dtype(text: str, defaults: CodeBaseDefaults) -> str:
    if "fp4" in text:
        return "float4"
    if "fp8" in text:
        return (
            "float8_rowwise"
            if "row" in text
            else "float8_blocks"
            if "mx" in text.partition("(")[0]
            else "float8"
        )
    return defaults.dtype


def _schedule_profile(text: str) -> ScheduleProfile:
    return next(
        (order for name, order in SCHEDULE_PROFILES.items() if name in text), SCHEDULE_PROFILES["1f1b"]
    )


def _kernel(notes: str, defaults: CodeBaseDefaults) -> AttentionKernel:
    found = re.search(r"kernel (\w+)", notes)
    word = found.group(1) if found else ""
    kernels: Mapping[str, AttentionKernel] = {
        "torch": "eager",
        "fused": "softmax",
        "flash_attentionv1": "flash1",
        "flash_attention": "flash1",
    }
    return kernels.get(word, "flash2" if word.startswith("flash") else defaults.kernel)
