"""Tensor parallelism, 1-D (Megatron): pairs of matrices, the first sharded by columns, the second by rows.

Why it works: in y = f(x A) B the columns of A are independent as long as f works element by element, or head
by head. So each rank has some columns of A and the same rows of B, and computes a summand of y; one sum over
the ranks ends the pair.

    x ----I -> R----> x A_0 -> f -> ... B_0 ---P -> I---> y + b         rank 0
    x ----I -> R----> x A_1 -> f -> ... B_1 ---P -> I---> y + b         rank 1
      backward: sum                     backward: nothing

    weights: A S(out), B S(in), its bias I (added once, after the sum); residual stream I: replicated
    forward: one all_reduce for each of the m sums in which pairs end
    backward: one for each of the d tensors that colwise layers take (q, k and v share one)
    sent per rank, microbatch and layer: 2 (m + d) b s h (t-1)/t elements = 4 k b s h (t-1)/t, k = (m + d)/2
    weights, gradients and optimizer states of the pairs: 1/t; norms, embedding and LM head: replicated

Consecutive pairs end in sums of their own: k = 2 in a Llama layer. Parallel pairs, x + attention(n x) +
mlp(n x), end in one if a trial shows that their outputs meet in additions alone: the first layer passes its
summand to the last and returns zeros, the last sums both (joint_sum.py). So m = 1, and d = 1 with one
norm n (Falcon 7B, Cohere, Phi: k = 1), or 2 with a norm for each (NeoX, later Falcons: k = 3/2). Dropout or
a factor before the sum keeps m = 2.

Sharded units are whole heads (groups of heads that share a key) and single features; they need not divide by
the number of ranks: the first ranks get one more. With fewer groups than ranks, single heads are sharded
(local_attention_heads.py). Packed matrices (q k v, gate and up) are sharded section by section. A parameter
between the two layers (a norm over single heads) is used by every rank with its own features: its gradient is
a sum over the ranks. If a user declares colwise layers without a rowwise one, their output is gathered.
Cost: the sums are exposed, one or two per layer and direction: this needs fast links, inside a host; on slow
ones they may travel as codes (activation_compression.py).
Backward hides them behind the gradients of weights; forward, with `num_overlap_chunks`, behind other samples
(comm_overlap.py).
Limits: a layer whose features another one needs in full is not sharded, nor is one that does not run on
slices (`meshwright inspect` says which). Not sharded either: what is multiplied by a trained gate of the
residual stream or by a parameter of the block, or has a norm for each single head: a rank would have another
gradient than one device.
Paper: Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053 (section 3).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from meshwright.parallel.tensor.collective_insertion import add_planned_comm, reduce_token_count_along
from meshwright.parallel.tensor.layer_split_checks import (
    check_gathered_layers,
    check_layer_pairs,
    check_sharded_once,
    check_units,
)
from meshwright.parallel.tensor.local_attention_heads import (
    bind_local_heads,
    shared_kv_shardings,
    with_kv_row_selection,
)
from meshwright.parallel.tensor.sharded_layer import (
    WIDTH_SHARD,
    LayerSharding,
    LayerShardings,
    Redistribution,
    bind_layers,
    layer_key,
    module_forward,
    shard_params,
)
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least, one_of
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import I, P, R
from meshwright.plan.step.program import Program
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase


@dataclass(frozen=True)
class TensorParallel(Strategy):
    """Shards pairs of linear layers along `axis`.

    Rowwise layers compute and send their output in `num_overlap_chunks` chunks of samples, each while the one
    before is sent.
    """

    name: ClassVar[str] = "tensor_parallel"
    mode: ClassVar[str] = "1d"
    phase: ClassVar[StrategyPhase] = "shard"
    axis: str = field(default="tp", metadata=one_of("tp"))
    num_overlap_chunks: int = field(
        default=1,
        metadata=at_least(1, "write a number from 1 up; 1 sends the whole output at once"),
    )

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location = "strategies.tensor_parallel"
        yield from check_sharded_once(sharding, self.axis, location)
        yield from check_layer_pairs(sharding.model_spec, location)
        yield from check_units(sharding, self.layer_shardings(sharding))
        yield from check_gathered_layers(sharding, self.axis)

    def layer_shardings(self, sharding: ShardingPlan) -> LayerShardings:
        """Returns the layer shardings by role; the residual stream has the placement of `sharding`."""
        stream = sharding.residual_layout.placement(self.axis)
        columns = LayerSharding(
            {self.axis: "out"},
            input_redistribution=Redistribution(self.axis, stream, R, codable=True),
            regather=sharding.regather,
        )
        shared = (self.axis,) if sharding.sequence_sliced_calls else ()
        rows = LayerSharding(
            {self.axis: "in"},
            output_redistribution=Redistribution(self.axis, P, stream, codable=True),
            shared_param_axes=shared,
            num_chunks=self.num_overlap_chunks,
        )
        whole_input = Redistribution(self.axis, I, R, codable=True)
        whole = replace(columns, input_redistribution=whole_input, regather=False)
        apart = (
            call
            for call in sharding.model_spec.layer_calls
            if call.role == "colwise" and sharding.residual_placement([call], self.axis) != stream
        )
        inside = LayerSharding({self.axis: "out"}, shared_param_axes=(self.axis,), compute=module_forward)
        gathered = replace(
            columns, output_redistribution=Redistribution(self.axis, WIDTH_SHARD, stream, codable=True)
        )  # columns without rows: the user asked for them
        layer_shardings = {
            "colwise": columns,
            "rowwise": rows,
            "between_pair": inside,
            "colwise_gather_output": gathered,
            **{layer_key(call.name): whole for call in apart},
        }
        return layer_shardings | shared_kv_shardings(sharding, self.axis, layer_shardings)

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        return shard_params(sharding, self.layer_shardings(sharding))

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return reduce_token_count_along(
            add_planned_comm(program, self.layer_shardings(view.plan), view, job), self.axis
        )

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        view = runtime.state.plan.view
        bind_layers(runtime, with_kv_row_selection(view, self.axis, self.layer_shardings(view.plan)))
        bind_local_heads(runtime, self.axis)
        return {}
