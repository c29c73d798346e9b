"""What the code bases of published runs hold in memory, and what the planner says of a run with that.

Each code base has its habits (planner/habits.py), read in its source or its paper; where runs had to be
asked, it says so:

    Aleph-Alpha     the head gathers all logits on every tensor rank, and another microbatch's output waits:
                    14 + 2 bytes;
                    inputs of matrices are kept gathered; norms are one kernel or several. From pairs of
                        runs of which one
                    fitted: 3.75 bytes of the stream that no line explains, 12.75 more without the fused
                        norm (8 by the code,
                    4 its input, and again a bit that no line explains). Without a fused kernel 8 bytes
                        per logit more are
                    reserved: three runs ran out whose like ran with one, and anything from 5 to 12 says
                        so of these
    Megatron        with dropout and its own softmax (arXiv 2205.05198, table 2): 34 + 5 a s / h, float32
                    gradients, tied words
    DeepSpeed       the same under ZeRO 1, whose float32 gradients are in shards, with buckets of 5e8 elements
    nanotron        float32 sums of gradients whole, inputs of matrices gathered, logits in float32 and their
                    softmax in place
    torchtitan      all in shards of float32, recomputing by operator; since 2025 a compiled loss, without
                    float32 logits
    Megatron core   fused attention, gate and loss; composer: a fused loss, GPT blocks under FSDP
    Sailor          the pipeline of DeepSpeed: five numbers by regression on its own runs, not explained
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.published_runs.rows import Run
from meshwright.planner.analytic.framework_memory import GIB, MESHWRIGHT_MEMORY, FrameworkMemory
from meshwright.planner.analytic.memory import MemoryEstimate, estimate_memory
from meshwright.planner.analytic.parallel_config import ParallelConfig

USABLE = 79.25 / 80  # of the memory that a device is sold with: what torch reports
SPARE = 1.06
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
)  # 6: with the masks of two dropouts
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
OLD = ("Zero Bubble", "Narayanan", "Korthikanti", "MT-NLG", "Alpa", "DeepSpeed", "microsoft/Megatron")


@dataclass(frozen=True)
class Code:
    """A code base: its habits, and whether embedding and head are one where rows do not say it."""

    habits: FrameworkMemory
    tied: bool = False


CODES: tuple[tuple[str, Code], ...] = (
    ("Aleph-Alpha", Code(ALEPH)),
    (
        "bigscience",
        Code(
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
    ("torchtitan", Code(TITAN)),
    ("foundation", Code(TITAN)),
    (
        "mosaic",
        Code(
            replace(SHARDED, logits=4, prefetched_layers=3, fragmentation=1.0, driver_context=(2 * GIB, 0, 0))
        ),
    ),
    (
        "nanotron",
        Code(
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
        Code(
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
    ("NVIDIA", Code(CORE)),
    ("NeMo", Code(CORE)),
    ("Megatron-LM", Code(MEGATRON, tied=True)),
    ("Megatron", Code(CORE)),
    *((name, Code(MEGATRON, tied=True)) for name in OLD),
    ("", Code(MESHWRIGHT_MEMORY)),
)
COMPILED_LOSS = "202501"  # torchtitan, from when on the loss is compiled: 16-bit logits and their gradient
SMALL = 10_000  # nanotron: models of a narrower MLP than this are tied


def code_of(run: Run) -> Code:
    """The code base of `run`, as it was then."""
    code = next(code for name, code in CODES if run.source.startswith(name))
    habits = code.habits
    if run.source.startswith("torchtitan"):
        date = re.search(r"_(\d{6})_", run.cited)
        habits = replace(habits, logits=4) if date and date[1] >= COMPILED_LOSS else habits
    if "fp32 grad" in run.precision:
        habits = replace(habits, gradients=6)  # sums in float32, besides
    tied = run.shape.ffn_dim < SMALL if run.source.startswith("nanotron") else code.tied
    return Code(habits, tied)


def held(
    run: Run, change: Callable[[FrameworkMemory], FrameworkMemory] = lambda habits: habits
) -> MemoryEstimate:
    """What the planner says that the fullest device of `run` holds; `change` makes habits other ones."""
    code = code_of(run)
    return estimate_memory(replace(run.shape, tied=code.tied), layout_of(run), change(code.habits))


def layout_of(run: Run) -> ParallelConfig:
    """That of `run`, with what Megatron core always does: moments in shards, tokens on tensor ranks."""
    layout = replace(run.layout, num_microbatches=max(1, round(run.layout.num_microbatches)))
    if code_of(run).habits.logits == CORE.logits and run.source.startswith(("NVIDIA", "NeMo", "Megatron")):
        return replace(layout, zero_stage=max(1, layout.zero_stage), sequence_parallel=layout.tp > 1)
    return layout


def by_torch(run: Run) -> bool:
    """Whether its peak is what torch counts, which knows no context."""
    return (
        any(word in run.metric for word in ("torch", "reserved", "peak memory")) and "Table" not in run.metric
    )


def said(run: Run) -> float:
    """Bytes, of what the row's metric shows."""
    found = held(run)
    return found.reserved if by_torch(run) else found.total


def room(run: Run) -> float:
    """Bytes that a device of `run` has to give."""
    return run.machine.device.memory * USABLE
