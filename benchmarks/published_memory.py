"""What the code bases of published runs hold in memory, and what the planner says of a run with that.

Each code base has its habits (planner/habits.py), read in its source or its paper; where runs had to be asked, it says so:

    Aleph-Alpha     the head gathers all logits on every tensor rank, and another micro-batch's output waits: 14 + 2 bytes;
                    inputs of matrices are kept gathered; norms are one kernel or several. From pairs of runs of which one
                    fitted: 3.75 bytes of the stream that no line explains, 12.75 more without the fused norm (8 by the code,
                    4 its input, and again a bit that no line explains). Without a fused kernel 8 bytes per logit more are
                    reserved: three runs ran out whose like ran with one, and anything from 5 to 12 says so of these
    Megatron        with dropout and its own softmax (arXiv 2205.05198, table 2): 34 + 5 a s / h, float32 gradients, tied words
    DeepSpeed       the same under ZeRO 1, whose float32 gradients are in shards, with buckets of 5e8 elements
    nanotron        float32 sums of gradients whole, inputs of matrices gathered, logits in float32 and their softmax in place
    torchtitan      all in shards of float32, recomputing by operator; since 2025 a compiled loss, without float32 logits
    Megatron core   fused attention, gate and loss; composer: a fused loss, GPT blocks under FSDP
    Sailor          the pipeline of DeepSpeed: five numbers by regression on its own runs, not explained
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.published import Run
from meshwright.planner.analytic.framework_memory import GIB, OURS, Habits
from meshwright.planner.analytic.memory import Footprint, footprint
from meshwright.planner.analytic.parallel_config import Layout

USABLE = 79.25 / 80  # of the memory that a device is sold with: what torch reports
SPARE = 1.06
NONE = (0.0, 0.0, 0.0)

MEGATRON = Habits(
    gradients=4, stream=6, unfused=0, gated=6, softmax=5, fixed=GIB, gaps=1.0, context=NONE, cut="layers"
)  # 6: with the masks of two dropouts
CORE = Habits(gradients=2, unfused=0, gated=6, logit=8, fixed=GIB, gaps=1.0, context=(2.5 * GIB, 0, 0))
SHARDED = Habits(weights=4, gradients=4, moments=8, unfused=0, behind=1, ends=True)
TITAN = replace(
    SHARDED,
    inner=10,
    gathered=True,
    across=6,
    opwise=True,
    handed=True,
    stays=True,
    gaps=1.015,
    context=NONE,
    cut="ends",
)
ALEPH = Habits(
    gradients=2,
    stream=7.75,
    unfused=12.75,
    gathered=True,
    flash=2,
    eager=6,
    softmax=4,
    waiting=2,
    divided=False,
    pinned=8,
    split=8,
    cut="norm",
)
OLD = ("Zero Bubble", "Narayanan", "Korthikanti", "MT-NLG", "Alpa", "DeepSpeed", "microsoft/Megatron")


@dataclass(frozen=True)
class Code:
    """A code base: its habits, and whether embedding and head are one where rows do not say it."""

    habits: Habits
    tied: bool = False


CODES: tuple[tuple[str, Code], ...] = (
    ("Aleph-Alpha", Code(ALEPH)),
    (
        "bigscience",
        Code(
            replace(MEGATRON, gradients=2, shared=4, fixed=2 * GIB, gaps=1.11, context=(3.5 * GIB, 0, 0)),
            tied=True,
        ),
    ),
    ("torchtitan", Code(TITAN)),
    ("foundation", Code(TITAN)),
    ("mosaic", Code(replace(SHARDED, logit=4, ahead=3, gaps=1.0, context=(2 * GIB, 0, 0)))),
    (
        "nanotron",
        Code(
            Habits(
                gradients=4,
                unfused=0,
                gathered=True,
                inner=12,
                logit=8,
                inside=0,
                gaps=1.0,
                context=NONE,
                cut="cost",
            )
        ),
    ),
    (
        "eth-easl",
        Code(
            replace(
                MEGATRON,
                gradients=8.8,
                stream=10,
                inner=60,
                plain=13,
                softmax=1.3,
                logit=28,
                fixed=3.8 * GIB,
                cut="ends",
            ),
            tied=True,
        ),
    ),
    ("NVIDIA", Code(CORE)),
    ("NeMo", Code(CORE)),
    ("Megatron-LM", Code(MEGATRON, tied=True)),
    ("Megatron", Code(CORE)),
    *((name, Code(MEGATRON, tied=True)) for name in OLD),
    ("", Code(OURS)),
)
COMPILED_LOSS = "202501"  # torchtitan, from when on the loss is compiled: 16-bit logits and their gradient
SMALL = 10_000  # nanotron: models of a narrower MLP than this are tied


def code_of(run: Run) -> Code:
    """The code base of `run`, as it was then."""
    code = next(code for name, code in CODES if run.source.startswith(name))
    habits = code.habits
    if run.source.startswith("torchtitan"):
        date = re.search(r"_(\d{6})_", run.cited)
        habits = replace(habits, logit=4) if date and date[1] >= COMPILED_LOSS else habits
    if "fp32 grad" in run.precision:
        habits = replace(habits, gradients=6)  # sums in float32, besides
    tied = run.shape.inner < SMALL if run.source.startswith("nanotron") else code.tied
    return Code(habits, tied)


def held(run: Run, change: Callable[[Habits], Habits] = lambda habits: habits) -> Footprint:
    """What the planner says that the fullest device of `run` holds; `change` makes habits other ones."""
    code = code_of(run)
    return footprint(replace(run.shape, tied=code.tied), layout_of(run), change(code.habits))


def layout_of(run: Run) -> Layout:
    """That of `run`, with what Megatron core always does: moments in shards, tokens on tensor ranks."""
    layout = replace(run.layout, micros=max(1, round(run.layout.micros)))
    if code_of(run).habits.logit == CORE.logit and run.source.startswith(("NVIDIA", "NeMo", "Megatron")):
        return replace(layout, shards=max(1, layout.shards), sequence=layout.tp > 1)
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
