"""A parallel configuration in the planner's terms: ranks per axis, schedule, ZeRO stage, recomputation.

It is a plan without parameters, so thousands of them are estimated in a second. The chosen one becomes a plan
(mesh, strategies, program), which is checked, estimated action by action and verified.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.sharding.expert_load import EXPERT_LOAD
from meshwright.planner.analytic.model_shape import ModelShape

# eager: scores by torch; softmax: one kernel for their softmax; flash1 to flash3: fused kernels, by age
AttentionKernel = Literal["eager", "softmax", "flash1", "flash2", "flash3"]
RecomputeMode = Literal[
    "none", "attention", "operators", "layers"
]  # operators: all but attention and every second matmul
# model states in host memory or on disk, and who steps them (offload_cost.py)
OffloadMode = Literal["none", "device_step", "host_step", "gradients", "everything", "disk"]
OFFLOAD_MODES: tuple[OffloadMode, ...] = get_args(OffloadMode)
# codecs of gradients that a search may propose; "": exact sums (compression_cost.py)
GradientCodec = Literal["", "int8"]
GRADIENT_CODECS: tuple[GradientCodec, ...] = get_args(GradientCodec)


@dataclass(frozen=True)
class ScheduleProfile:
    """The cost of a pipeline schedule: idle time (pp - 1) (f F + b B + w W), where B = I + W.

    `in_flight` is how many microbatches the first rank keeps at once, in units of pp; `uniform_memory`: all
    ranks keep as many; `is_folded`: stages run down the ranks and back up (V schedule), so the first rank has
    both the embedding and the head. `is_bidirectional`: microbatches enter at both ends, so every stage is
    on two ranks, and ranks wait for half of the others. `fills_bubbles`: W fills idle time, and few
    microbatches have few of them.
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
# two virtual stages in a V: only the later start of the last rank is left (ZB-V)
ZB_V = ScheduleProfile(1.0, 0.0, 0.0, uniform_memory=True, is_folded=True, fills_bubbles=True)
# all forwards, then all backwards: the first rank keeps every microbatch (arXiv 1811.06965)
GPIPE = ScheduleProfile(in_flight=inf)
# F + I - W, of half of the ranks (arXiv 2412.19437, 3.2.1)
DUALPIPE = ScheduleProfile(1.0, 1.0, -2.0, uniform_memory=True, is_bidirectional=True, fills_bubbles=True)


@dataclass(frozen=True)
class ExpertCosts:
    """What the code around experts costs (expert_time.py).

    `matmul`: the rate of their matmuls, over that of others of the same size. `row_passes`: how often rows
    are read or written to sort, weight and add them. `exposed`: the share of the rows' transfers that is
    waited for. `sends_per_expert`: a row is sent once per chosen expert, not once per rank; `sends_per_host`:
    once per host, and from there over its links.
    """

    matmul: float = 1.0
    row_passes: float = 6.0
    exposed: float = 1.0
    sends_per_expert: bool = False
    sends_per_host: bool = False


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks per axis (`dp`, `tp`, `pp`, `cp`), `virtual_stages` per pp rank, and the microbatches.

    `micro_batch` samples per microbatch, `num_microbatches` per step. `zero_stage` 1 shards optimizer states
    over the replicas, 2 gradients too, 3 weights too; `zero_group_size` is the number of replicas that share
    them (0: all). `sequence_parallel`: between matmuls tokens are sharded over tensor ranks. `ulysses_degree`
    neighbouring cp ranks exchange tokens for heads in attention; keys travel around the ring of the others
    (1: ring only). Tensor ranks are neighbours, and replicas further apart; with `tp_across_hosts` it is the
    other way round. `dtype` is that of matmuls, `grad_reduce_itemsize` the bytes of a reduced gradient,
    `param_gather_itemsize` those of a gathered weight. `attention_kernel`; `fused_norms`: a norm is one
    kernel; `compiled`: so are the operations between matmuls. `recompute`: what backward computes again, in
    `recompute_fraction` of the layers. `overlap_fraction`: the share of tensor and data parallel
    communication that the code overlaps with matmuls. `gathers_per_param`: sharded weights are gathered one
    by one, each when needed. `offload`: what rests in host memory or on disk, and who steps it;
    `activation_offload`: what blocks keep for their backward rests in host memory meanwhile. `compress`: the
    codec of gradients that are summed along the outermost data-parallel axis.

    `ep` ranks have different experts; they are among the replicas, so that `dp` counts them too (and `cp`, if
    dp has no such divisor), and with sequence parallelism among the tensor ranks as well (parallel folding).
    `ep_tp` of them are tensor ranks with the same tokens, which add up what their experts compute.
    `expert_tp` of the tensor ranks share the matrices of an expert; 1: each has whole ones. `expert_load`:
    the tokens of the busiest ep rank, over the mean. `expert_costs`: what the code around experts costs.
    `launches`: kernel launches of a layer, over those of a layer without experts or CUDA graphs.
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
    ep: int = 1
    ep_tp: int = 1
    expert_tp: int = 1
    expert_load: float = EXPERT_LOAD
    expert_costs: ExpertCosts = ExpertCosts()
    launches: float = 1.0
    offload: OffloadMode = "none"
    activation_offload: bool = False
    compress: GradientCodec = ""

    @property
    def is_lossy(self) -> bool:
        """Whether its steps are not those of one device."""
        return bool(self.compress)

    @property
    def num_zero_groups(self) -> float:
        """The groups of ranks with a set of shards each."""
        return self.data_parallel_size / self.zero_shard_size

    @property
    def uses_host(self) -> bool:
        """Whether anything rests in host memory."""
        return self.offload != "none" or self.activation_offload

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def shards_on_host(self) -> bool:
        """Whether shards of gradients rest in host memory: ZeRO makes them, also where one rank has all."""
        return self.offload in ("gradients", "everything")

    @property
    def data_parallel_size(self) -> int:
        """The ranks that hold the same weights and reduce their gradients."""
        return self.dp * self.cp

    @property
    def zero_shard_size(self) -> int:
        """The ranks over which the same states are sharded."""
        return (self.zero_group_size or self.dp) * self.cp

    @property
    def token_shards(self) -> int:
        """The tensor ranks among which the tokens that go to experts are divided."""
        return self.tp // self.expert_tp if self.sequence_parallel else 1

    @property
    def ep_dispatch(self) -> int:
        """The ranks among which tokens travel to their experts."""
        return self.ep // self.ep_tp

    @property
    def ep_dp(self) -> int:
        """Those of them that are data-parallel ranks; the others are along cp."""
        return self.ep_dispatch if self.dp % self.ep_dispatch == 0 else self.ep_dispatch // self.cp

    @property
    def layer_key(self) -> tuple[int, ...]:
        """What the time of a layer depends on, besides the microbatch."""
        return self.tp, self.cp, self.ulysses_degree, self.tp_stride, self.ep, self.ep_tp, self.expert_tp

    @property
    def expert_shard_size(self) -> float:
        """The ranks over which the states of the same experts are sharded."""
        return max(1.0, self.zero_shard_size * self.token_shards / self.ep_dispatch)

    @property
    def expert_stride(self) -> int:
        """The distance of neighbouring ranks with the same experts."""
        return self.ep_dispatch * (self.expert_tp if self.sequence_parallel else self.dp_stride)

    @property
    def tp_stride(self) -> int:
        """The distance of neighbouring tensor ranks."""
        return self.data_parallel_size if self.tp_across_hosts else 1

    @property
    def dp_stride(self) -> int:
        """The distance of neighbouring replicas."""
        return 1 if self.tp_across_hosts else self.tp

    def local_tokens(self, shape: ModelShape) -> float:
        """Returns the tokens of a microbatch on one cp rank."""
        return self.micro_batch * shape.sequence / self.cp

    def max_layers_per_rank(self, shape: ModelShape) -> float:
        """Returns the layers of the pp rank that has most.

        Embedding and head count as layers if that divides evenly.
        """
        if shape.layers % self.pp == 0:
            return shape.layers / self.pp
        both = shape.layers + 2
        return both / self.pp if both % self.pp == 0 else shape.layers // self.pp + 1

    def max_numel_per_rank(self, shape: ModelShape) -> float:
        """Returns the weights of the pp rank that has most, experts not counted."""
        is_bidirectional = self.schedule_profile.is_bidirectional
        tables = 2 if (self.pp == 1 and not shape.tied) or is_bidirectional else 1
        layers = self.max_layers_per_rank(shape) * (2 if is_bidirectional else 1)
        return (layers * shape.layer_dense_numel + tables * shape.embedding_numel) / self.tp

    def diagnostics(self, shape: ModelShape) -> Iterator[Diagnostic]:
        """Yields what keeps it from being a plan for `shape`."""
        if shape.heads % self.tp:
            text = f"tp {self.tp} does not divide {shape.heads} attention heads"
            yield Diagnostic(text, "each rank has as many heads: choose a divisor of their number", "tp")
        if self.pp * self.virtual_stages > shape.layers:
            text = f"pp {self.pp} x {self.virtual_stages} virtual stages for {shape.layers} layers"
            yield Diagnostic(text, "each stage has at least one layer: choose fewer stages", "pp")
        if self.cp % self.ulysses_degree or shape.heads // self.tp % self.ulysses_degree:
            text = (
                f"{self.ulysses_degree} of cp {self.cp} ranks exchange tokens for "
                f"{shape.heads // self.tp} attention heads"
            )
            yield Diagnostic(
                text, "groups are equal, and each rank gets as many heads: choose a divisor of both", "cp"
            )
        replicas = self.data_parallel_size * self.token_shards * self.ep_tp
        if self.ep > 1 and (self.ep > shape.experts or replicas % self.ep):
            text = f"ep {self.ep} for {shape.experts} experts on {self.data_parallel_size} replicas"
            yield Diagnostic(text, "choose a divisor of the replicas, with an expert for each rank", "ep")
        if self.zero_group_size and (self.dp % self.zero_group_size or not self.zero_stage):
            text = (
                f"ZeRO stage {self.zero_stage} in groups of {self.zero_group_size} of dp {self.dp} replicas"
            )
            fix = "groups are equal: choose a divisor of dp, and ZeRO stage 1, 2 or 3"
            yield Diagnostic(text, fix, "dp_shard")
        if self.schedule_profile.is_bidirectional and (self.pp % 2 or self.num_microbatches < 2):
            text = f"pp {self.pp} and {self.num_microbatches:g} microbatches with a bidirectional schedule"
            fix = "half of each runs in either direction: choose an even pp, and at least two microbatches"
            yield Diagnostic(text, fix, "pp")
        if (
            self.virtual_stages > 1
            and not self.schedule_profile.is_folded
            and self.num_microbatches % self.pp
        ):
            text = f"{self.num_microbatches:g} microbatches with virtual stages on pp {self.pp}"
            yield Diagnostic(text, "interleaving needs a multiple of pp: change batch or pp", "micro_batch")
