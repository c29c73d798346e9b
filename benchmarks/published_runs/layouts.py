"""How published runs were laid out: a row's columns, and what its code base does that rows do not say.

scores         written out, with one kernel for their softmax, before fused attention; kernels written for the
device at NVIDIA NVIDIA's code  tokens on tensor ranks, moments in shards, sums and gathers beside products,
four layers or more in a chunk torch's        async TP runs about half of what tensor ranks send beside
products: by the bytes of arXiv 2205.05198 at 337 GB/s,
               70B runs with it are faster by 49 % of what they sent, 8B runs by 41 %
DeepSpeed's    stage 3 of 2021 gathers weight by weight, when it is needed. Steps of arXiv 2104.04473, table
2, are what they
               compute, their bytes at the cards' rate, and 14 us for each rank, gather and weight,
                   whatever the microbatch
recomputing    where a row says nothing of it, and the run would have needed half as much memory again as
there is: all layers,
               unless its devices read their host's memory at the rate of links, and keep activations there
by operator    torchtitan's "selective (op)" keeps attention and every second product, and runs all else again
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.planner.analytic.memory import estimate_memory
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import (
    ZB_H1,
    ZB_V,
    AttentionKernel,
    ParallelConfig,
    RecomputeMode,
    ScheduleProfile,
)
from meshwright.planner.machine.machine import Machine

COHERENT = (
    "GH",
    "GB",
)  # devices that read their host's memory at the rate of links, and keep activations there
BEYOND = 1.5  # of its memory: what no run without recomputing held
# orders by what a row calls them: the closed forms of their papers
ORDERS: Mapping[str, ScheduleProfile] = {
    "1f1b": ScheduleProfile(),
    "gpipe": ScheduleProfile(),
    "interleaved": ScheduleProfile(),
    "zb-1p": ZB_H1,
    "zb-2p": ScheduleProfile(0.0, 0.0, 0.0, 2.0, uniform_memory=True),
    "zb-v": ZB_V,
}


class Lacks(Exception):
    """What a row lacks."""


@dataclass(frozen=True)
class Habits:
    """What a code base does that its rows do not say; `chunks`: it interleaves layers wherever there are
    ranks along pp.
    """

    kernel: AttentionKernel = "flash2"
    fused: bool = True
    hidden: float = 0.0
    sums: int = 2
    dtype: str = "bfloat16"
    sequence: bool = False
    shards: int = 0
    chunks: bool = False


OLD = Habits(
    kernel="softmax", fused=True
)  # before fused attention: Megatron with its own softmax and norm kernels
CORE = Habits(kernel="flash3", hidden=1.0, sequence=True, shards=1, chunks=True)  # NVIDIA's recipes
# of what tensor ranks send, what torch's async TP runs beside products, where Megatron does all of it
ASYNC = 0.5
HABITS: tuple[tuple[str, Habits], ...] = (
    ("bigscience", replace(OLD, sums=4)),
    ("Narayanan", OLD),
    ("Korthikanti", OLD),
    ("Megatron-LM old", OLD),
    ("Zero Bubble", OLD),
    ("MT-NLG", OLD),
    ("Alpa", OLD),
    ("eth-easl", OLD),
    ("DeepSpeed", OLD),
    ("microsoft/Megatron", OLD),
    ("NVIDIA", CORE),
    ("NeMo", CORE),
    ("Megatron", CORE),
    ("mosaic", Habits(kernel="flash1")),
    ("torchtitan", Habits(fused=False)),
    ("", Habits()),
)


def layout_of(
    source: str, row: Mapping[str, str], shape: ModelShape, said: Mapping[str, float | None], host: int
) -> ParallelConfig:
    """That of a row; `said` are its numbers, `host` the devices of one.

    Raises Lacks where it says too little.
    """
    tp, pp, cp = (int(said.get(axis) or 1) for axis in ("tp", "pp", "cp"))
    dp = int(said.get("dp") or (said.get("gpus") or 0) // (tp * pp * cp))
    batch, micro, times = said.get("global_batch"), said.get("micro_batch"), said.get("grad_accum")
    if dp < 1:
        raise Lacks("no number of devices")
    if not micro and batch and times:
        micro = batch / dp / times
    if not batch and micro and times:
        batch = micro * dp * times
    if not micro or not batch:
        raise Lacks("no microbatch or no global batch")
    habits = next(habits for name, habits in HABITS if source.startswith(name))
    notes, states = row.get("notes", ""), row.get("zero_fsdp", "").lower()
    return ParallelConfig(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        zero_stage=max(habits.shards, _shards(states)),
        zero_group_size=_within(states, dp, max(1, host // (tp * cp))),
        virtual_stages=_chunks(
            source, habits, row.get("schedule", "").lower(), said.get("virtual_stages"), shape, pp
        ),
        micro_batch=micro,
        num_microbatches=batch / (micro * dp),
        recompute=_reruns(row.get("recompute", "").lower()),
        sequence_parallel=row.get("seq_parallel", "").startswith("yes")
        or (habits.sequence and tp > 1 and not row.get("seq_parallel")),
        schedule_profile=_order(row.get("schedule", "").lower()),
        param_gather_itemsize=1
        if source.startswith("torchtitan") and "fp8 tensorwise" in row.get("precision", "").lower()
        else 2,
        dtype=_dtype(row.get("precision", "").lower(), habits),
        grad_reduce_itemsize=habits.sums,
        attention_kernel=_kernel(notes, habits),
        fused_norms="RMS kernel" in notes
        if "kernel " in notes
        else habits.fused or row.get("compile", "") == "yes",
        compiled=row.get("compile", "") == "yes",
        overlap_fraction=habits.hidden or ASYNC * ("async tp" in notes.lower()),
        recompute_fraction=0.5 if "every 2nd" in row.get("recompute", "") else 1.0,
        gathers_per_param=source.startswith("Narayanan") and "zero-3" in states,
    )


def rerun(
    row: Mapping[str, str], shape: ModelShape, layout: ParallelConfig, machine: Machine
) -> ParallelConfig:
    """`layout`, or one that runs all layers again (see the module)."""
    if row.get("recompute") or row.get("status", "ok") != "ok" or machine.device.name.startswith(COHERENT):
        return layout
    needed = estimate_memory(
        shape, replace(layout, num_microbatches=max(1, round(layout.num_microbatches)))
    ).total
    return replace(layout, recompute="layers") if needed > BEYOND * machine.device.memory else layout


def _chunks(
    source: str, habits: Habits, schedule: str, said: float | None, shape: ModelShape, pp: int
) -> int:
    """Of layers per rank along pp.

    Where a row does not say it, NVIDIA's recipes, and runs that interleave, have four layers or more in a
    chunk; Zero Bubble PP's interleaved runs one (arXiv 2401.10241, section 5).
    """
    if said or pp == 1 or not (habits.chunks or "interleaved" in schedule):
        return int(said or 1)
    each = shape.layers // pp
    if source.startswith("Zero Bubble"):
        return max(1, round((shape.layers + 2) / pp))
    return next((n for n in range(each // 4, 0, -1) if each % n == 0), each)


def _shards(text: str) -> int:
    if any(word in text for word in ("zero-2", "grad_op", "reshard grads")):
        return 2
    if any(word in text for word in ("fsdp", "hsdp", "full_shard", "zero-3")):
        return 3
    return 1 if "zero-1" in text or "distributed optimizer" in text else 0


def _within(text: str, copies: int, beside: int) -> int:
    """Of how many of the copies shards are: so many as it says, or those `beside` each other on a host; 0:
    all of them.
    """
    found = re.search(r"\bx ?(\d+)|within (\d+)", text)
    each = int(found[1] or found[2]) if found else beside if "hsdp" in text or "hybrid" in text else copies
    return each if each < copies and copies % each == 0 else 0


def _reruns(text: str) -> RecomputeMode:
    if text.startswith(("full", "yes")) or "every 2nd" in text:
        return "layers"
    if "selective" not in text:
        return "none"
    return "operators" if "(op)" in text else "attention"


def _dtype(text: str, habits: Habits) -> str:
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
    return habits.dtype


def _order(text: str) -> ScheduleProfile:
    return next((order for name, order in ORDERS.items() if name in text), ORDERS["1f1b"])


def _kernel(notes: str, habits: Habits) -> AttentionKernel:
    found = re.search(r"kernel (\w+)", notes)
    word = found.group(1) if found else ""
    kernels: Mapping[str, AttentionKernel] = {
        "torch": "eager",
        "fused": "softmax",
        "flash_attentionv1": "flash1",
        "flash_attention": "flash1",
    }
    return kernels.get(word, "flash2" if word.startswith("flash") else habits.kernel)
