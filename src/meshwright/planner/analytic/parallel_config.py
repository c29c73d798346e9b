"""How the work is laid out, as a planner counts it: so many ranks along each axis, and what runs on each.

A layout is a plan before it is one: sizes without weights, so that thousands of them are priced in a second. The one that is
chosen becomes a plan (mesh, strategies, program), which is checked, priced action by action and proved.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Literal

from meshwright.plan.job.errors import Diagnostic
from meshwright.planner.analytic.model_shape import ModelShape

# scores by torch; with one kernel for their softmax; never written out, by kernels as old as the device is new, or newer
AttentionKernel = Literal["eager", "softmax", "flash1", "flash2", "flash3"]
RecomputeMode = Literal[
    "none", "attention", "operators", "layers"
]  # operators: all but attention and every second product


@dataclass(frozen=True)
class ScheduleProfile:
    """How ranks along pp take turns: what they wait, (pp - 1) (f F + b B + w W), where all of B is I + W.

    `held` is how many micro-batches the first of them keeps at once, in units of pp; `even`: all of them keep as many;
    `folded`: chunks go there and back, and the first rank has the head as well as the embedding. `both`: micro-batches enter at
    both ends, so that every part lies on two ranks, and ranks wait for half of the others. `fills`: those W are put where ranks
    would wait; few micro-batches have few of them.
    """

    f: float = 1.0
    b: float = 1.0
    w: float = 0.0
    in_flight: float = 1.0
    uniform_memory: bool = False
    is_folded: bool = False
    is_bidirectional: bool = False
    fills_bubbles: bool = False


# W fills what a rank would wait: F + I - W is left (arXiv 2401.10241, ZB-H1, whose B is I)
ZB_H1 = ScheduleProfile(1.0, 1.0, -2.0, uniform_memory=True, fills_bubbles=True)
# in two chunks, there and back, nothing is left but how much later the last rank begins than the first (ZB-V)
ZB_V = ScheduleProfile(1.0, 0.0, 0.0, uniform_memory=True, is_folded=True, fills_bubbles=True)
GPIPE = ScheduleProfile(
    in_flight=inf
)  # all forwards, then all backwards: the first rank keeps every micro-batch (arXiv 1811.06965)
DUALPIPE = ScheduleProfile(
    1.0, 1.0, -2.0, uniform_memory=True, is_bidirectional=True, fills_bubbles=True
)  # F + I - W, of half of the ranks (arXiv 2412.19437, 3.2.1)


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks by axis (`dp`: copies, `tp`, `pp`, `cp`), `chunks` of layers per rank along pp, and the micro-batches.

    `micro_batch` rows go through at once, `micros` times per step. Of what copies hold alike, each keeps a share: with `shards` 1
    of moments, with 2 of gradients too, with 3 of weights too; `within` says among how many of the copies shares lie, where not
    among all: those groups hold the same. `sequence`: between matrices tokens lie on tensor ranks. `swaps` ranks along cp, side
    by side, exchange tokens for heads in attention; keys go round the others (1: round all). Tensor ranks stand side by side, and
    copies beyond them; with `outside` it is the other way round. `dtype`
    is what products are made in, `sums` the bytes of a gradient that is summed over copies, `gathers` those of a weight that is
    gathered. `kernel` of attention, `fused`: norms are one kernel, `compiled`: so is what lies between products. `reruns`: what
    backward computes once more, in `rerun_share` of the layers. `hidden`: the share of what tensor ranks and copies send that the
    code runs beside products. `piecewise`: weights in shards are gathered one by one, each when it is needed.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero_stage: int = 0
    virtual_stages: int = 1
    micro_batch: float = 1
    num_microbatches: float = 1
    recompute: RecomputeMode = "none"
    sequence_parallel: bool = False
    schedule_profile: ScheduleProfile = ScheduleProfile()
    dtype: str = "bfloat16"
    grad_reduce_itemsize: int = 2
    param_gather_itemsize: int = 2
    attention_kernel: AttentionKernel = "flash2"
    fused_norms: bool = True
    compiled: bool = False
    overlap_fraction: float = 0.0
    gathers_per_param: bool = False
    recompute_fraction: float = 1.0
    zero_group_size: int = 0
    ulysses_degree: int = 1
    tp_across_hosts: bool = False

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def data_parallel_size(self) -> int:
        """The ranks that hold the same weights and sum their gradients."""
        return self.dp * self.cp

    @property
    def zero_shard_size(self) -> int:
        """The ranks among which shares of the same states lie."""
        return (self.zero_group_size or self.dp) * self.cp

    @property
    def tp_stride(self) -> int:
        """How far tensor ranks stand from each other."""
        return self.data_parallel_size if self.tp_across_hosts else 1

    @property
    def dp_stride(self) -> int:
        """How far copies stand from each other."""
        return 1 if self.tp_across_hosts else self.tp

    def local_tokens(self, shape: ModelShape) -> float:
        """Of a micro-batch, on one rank along cp."""
        return self.micro_batch * shape.sequence / self.cp

    def max_layers_per_rank(self, shape: ModelShape) -> float:
        """Of the rank along pp that has most; the embedding and the head count as a layer each where that comes out even."""
        if shape.layers % self.pp == 0:
            return shape.layers / self.pp
        both = shape.layers + 2
        return both / self.pp if both % self.pp == 0 else shape.layers // self.pp + 1

    def diagnostics(self, shape: ModelShape) -> Iterator[Diagnostic]:
        """What keeps it from being a plan for `shape`."""
        if shape.heads % self.tp:
            text = f"tp {self.tp} ranks share {shape.heads} heads"
            yield Diagnostic(text, "each takes as many: choose a divisor of the heads", "tp")
        if self.pp * self.virtual_stages > shape.layers:
            text = f"pp {self.pp} x {self.virtual_stages} chunks for {shape.layers} layers"
            yield Diagnostic(text, "each chunk has a layer: choose fewer", "pp")
        if self.cp % self.ulysses_degree or shape.heads // self.tp % self.ulysses_degree:
            text = f"{self.ulysses_degree} of cp {self.cp} ranks exchange tokens for {shape.heads // self.tp} heads"
            yield Diagnostic(
                text, "groups are equal, and each rank takes as many heads: choose a divisor of both", "swaps"
            )
        if self.zero_group_size and (self.dp % self.zero_group_size or not self.zero_stage):
            text = f"shares among {self.zero_group_size} of dp {self.dp} copies at stage {self.zero_stage}"
            yield Diagnostic(
                text, "groups of copies are equal: choose a divisor of dp, and a stage of 1 to 3", "within"
            )
        if self.schedule_profile.is_bidirectional and (self.pp % 2 or self.num_microbatches < 2):
            text = f"pp {self.pp} and {self.num_microbatches:g} micro-batches from both ends"
            yield Diagnostic(
                text, "half of both go each way: choose an even number of ranks, and two micro-batches", "pp"
            )
        if (
            self.virtual_stages > 1
            and not self.schedule_profile.is_folded
            and self.num_microbatches % self.pp
        ):
            text = f"{self.num_microbatches:g} micro-batches in chunks on pp {self.pp}"
            yield Diagnostic(text, "interleaving takes a multiple of pp", "micros")
