"""Framework memory of the code bases of published runs, and the planner's memory estimate of a run with it.

The framework memory of a code base (planner/analytic/memory_coefficients.py) is read in its source or its
paper; numbers that were fitted on runs are named here:

    Aleph-Alpha     the head gathers all logits on every tensor rank, and another microbatch's output waits:
                    14 + 2 bytes; inputs of matrices are kept gathered; norms are one kernel or several.
                    Fitted on pairs of runs of which one fits: 3.75 bytes of the residual stream that no line
                    of code explains, 12.75 more without the fused norm (8 by the code, 4 its input, and again
                    a small part that no line explains). Without a fused kernel 8 bytes per logit more are
                    reserved: three runs ran out although similar ones ran with it, and any value from 5 to 12
                    predicts these right
    Megatron        with dropout and its own softmax (arXiv 2205.05198, table 2): 34 + 5 a s / h, float32
                    gradients, tied embedding
    DeepSpeed       the same under ZeRO 1, whose float32 gradients are sharded, with buckets of 5e8 elements
    nanotron        full float32 sums of gradients, inputs of matrices gathered, logits in float32 and their
                    softmax in place
    torchtitan      all states sharded in float32, recomputing by operator; since 2025 a compiled loss,
                    without float32 logits
    Megatron core   fused attention, gate and loss; composer: a fused loss, GPT blocks under FSDP
    Sailor          the pipeline of DeepSpeed: five numbers by regression on its own runs, not explained
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.published_runs.rows import Run
from meshwright.planner.analytic.closed_form_memory import MemoryEstimate, estimate_memory
from meshwright.planner.analytic.memory_coefficients import GIB, MESHWRIGHT_MEMORY, FrameworkMemory
from meshwright.planner.analytic.parallel_config import ParallelConfig

USABLE = 79.25 / 80  # share of the nominal memory of a device that torch reports
MARGIN = 1.06
NONE = (0.0, 0.0, 0.0)

MEGATRON = FrameworkMemory(
    gradients=4,
    residual=6,
    unfused_norm_extra=0,
    gated_mlp=6,
    fused_softmax_scores=5,
    fixed_buffers=GIB,
    fragmentation=1.0,
    driver_context=NONE,
    layer_split="layers",
)  # residual 6: with the masks of two dropouts
CORE = FrameworkMemory(
    gradients=2,
    unfused_norm_extra=0,
    gated_mlp=6,
    logits=8,
    fixed_buffers=GIB,
    fragmentation=1.0,
    driver_context=(2.5 * GIB, 0, 0),
)
SHARDED = FrameworkMemory(
    weights=4,
    gradients=4,
    optimizer_states=8,
    unfused_norm_extra=0,
    unreduced_layers=1,
    keeps_ends_gathered=True,
)
TITAN = replace(
    SHARDED,
    attention_qkv=10,
    keeps_gathered_inputs=True,
    sharded_logits_extra=6,
    recomputes_per_operator=True,
    full_boundary=True,
    keeps_layers_gathered=True,
    fragmentation=1.015,
    driver_context=NONE,
    layer_split="ends",
)
ALEPH = FrameworkMemory(
    gradients=2,
    residual=7.75,
    unfused_norm_extra=12.75,
    keeps_gathered_inputs=True,
    flash_attention_extra=2,
    eager_scores=6,
    fused_softmax_scores=4,
    waiting_logits=2,
    shards_logits=False,
    logits_fragmentation=8,
    score_fragmentation=8,
    layer_split="norm",
)
MEGATRON_SOURCES = (
    "Zero Bubble",
    "Narayanan",
    "Korthikanti",
    "MT-NLG",
    "Alpa",
    "DeepSpeed",
    "microsoft/Megatron",
)


@dataclass(frozen=True)
class CodeBase:
    """A code base: its framework memory, and whether embedding and head are tied if rows do not state it."""

    memory: FrameworkMemory
    tied: bool = False


CODE_BASES: tuple[tuple[str, CodeBase], ...] = (
    ("Aleph-Alpha", CodeBase(ALEPH)),
    (
        "bigscience",
        CodeBase(
            replace(
                MEGATRON,
                gradients=2,
                sharded_optimizer_extra=4,
                fixed_buffers=2 * GIB,
                fragmentation=1.11,
                driver_context=(3.5 * GIB, 0, 0),
            ),
            tied=True,
        ),
    ),
    ("torchtitan", CodeBase(TITAN)),
    ("foundation", CodeBase(TITAN)),
    (
        "mosaic",
        CodeBase(
            replace(SHARDED, logits=4, prefetched_layers=3, fragmentation=1.0, driver_context=(2 * GIB, 0, 0))
        ),
    ),
    (
        "nanotron",
        CodeBase(
            FrameworkMemory(
                gradients=4,
                unfused_norm_extra=0,
                keeps_gathered_inputs=True,
                attention_qkv=12,
                logits=8,
                block_backward=0,
                fragmentation=1.0,
                driver_context=NONE,
                layer_split="cost",
            )
        ),
    ),
    (
        "eth-easl",
        CodeBase(
            replace(
                MEGATRON,
                gradients=8.8,
                residual=10,
                attention_qkv=60,
                mlp=13,
                fused_softmax_scores=1.3,
                logits=28,
                fixed_buffers=3.8 * GIB,
                layer_split="ends",
            ),
            tied=True,
        ),
    ),
    ("NVIDIA", CodeBase(CORE)),
    ("NeMo", CodeBase(CORE)),
    ("Megatron-LM", CodeBase(MEGATRON, tied=True)),
    ("Megatron", CodeBase(CORE)),
    *((name, CodeBase(MEGATRON, tied=True)) for name in MEGATRON_SOURCES),
    ("", CodeBase(MESHWRIGHT_MEMORY)),
)
COMPILED_LOSS = "202501"  # torchtitan compiles the loss from this month on: 16-bit logits and their gradient
TIED_BELOW_FFN = 10_000  # nanotron: models with a narrower MLP than this have a tied embedding


def code_base_of(run: Run) -> CodeBase:
    """Returns the code base of `run`, as it was at its date."""
    code = next(code for name, code in CODE_BASES if run.source.startswith(name))
    memory = code.memory
    if run.source.startswith("torchtitan"):
        date = re.search(r"_(\d{6})_", run.full_source)
        memory = replace(memory, logits=4) if date and date[1] >= COMPILED_LOSS else memory
    if "fp32 grad" in run.precision:
        memory = replace(memory, gradients=6)  # float32 sums in addition
    tied = run.shape.ffn_dim < TIED_BELOW_FFN if run.source.startswith("nanotron") else code.tied
    return CodeBase(memory, tied)


def estimate_run(
    run: Run, change: Callable[[FrameworkMemory], FrameworkMemory] = lambda memory: memory
) -> MemoryEstimate:
    """Returns the memory estimate of the fullest device of `run`; `change` edits the framework memory."""
    code = code_base_of(run)
    return estimate_memory(replace(run.shape, tied=code.tied), layout_of(run), change(code.memory))


def layout_of(run: Run) -> ParallelConfig:
    """Returns the layout of `run`; Megatron core always shards optimizer states and uses sequence
    parallelism.
    """
    layout = replace(run.layout, num_microbatches=max(1, round(run.layout.num_microbatches)))
    if code_base_of(run).memory.logits == CORE.logits and run.source.startswith(
        ("NVIDIA", "NeMo", "Megatron")
    ):
        return replace(layout, zero_stage=max(1, layout.zero_stage), sequence_parallel=layout.tp > 1)
    return layout


def is_torch_metric(run: Run) -> bool:
    """Whether the peak of `run` was measured by torch, which does not count the driver's context."""
    return (
        any(word in run.metric for word in ("torch", "reserved", "peak memory")) and "Table" not in run.metric
    )


def predicted_nbytes(run: Run) -> float:
    """Returns the predicted bytes in the row's metric."""
    found = estimate_run(run)
    return found.reserved if is_torch_metric(run) else found.total


def usable_nbytes(run: Run) -> float:
    """Returns the usable bytes of a device of `run`."""
    return run.machine.device.memory * USABLE
