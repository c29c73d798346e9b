"""Expert load: how many tokens choose each expert of a layer, in the global batch of a step.

    totals of a step, summed over ranks     [ loss | layer 0: expert 0 .. E-1, none | layer 1: ... ]

The counts travel with the sum of the loss, so they cost no message of their own. A choice of no expert was
dropped: by a router with capacity. Dummy microbatches, recomputation and evaluation do not count.
Limits: nothing is counted where the residual stream is sharded along other axes than the tokens' (sequence
parallelism, 2-D and 3-D tensor parallelism); where a rank of context parallelism has a single token, its
padding counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add

from meshwright.plan.model_spec.model_spec import ExpertsCall
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.sharding.sharding_plan import ShardingPlan

EXPERT_LOAD = 1.6  # pairs of the busiest rank over the mean: see planner/analytic/expert_time.py


@dataclass(frozen=True)
class ExpertLoad:
    """The choices of a layer in one or several steps: `counts` by expert, and `num_dropped` of no expert."""

    layer: str
    counts: tuple[int, ...]
    num_dropped: int

    def __add__(self, other: "ExpertLoad") -> "ExpertLoad":
        counts = tuple(map(add, self.counts, other.counts))
        return ExpertLoad(self.layer, counts, self.num_dropped + other.num_dropped)

    def rank_counts(self, ranges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        """Returns the choices of the experts of each rank; `ranges` are these experts."""
        return tuple(sum(self.counts[first:end]) for first, end in ranges)


def busiest(counts: Sequence[int]) -> float:
    """Returns the largest of `counts` over their mean; 1 if all are 0."""
    return max(counts) * len(counts) / sum(counts) if any(counts) else 1.0


def counted_experts_calls(sharding: ShardingPlan) -> dict[str, ExpertsCall]:
    """Returns the experts whose load is counted, by the name of their module, in the order of their calls."""
    if sharding.residual_layout.axes_with("S"):
        return {}
    return {call.name: call for call in sharding.model_spec.experts_calls}


def load_count_begins(sharding: ShardingPlan) -> dict[str, int]:
    """Returns where the counts of each layer begin among all."""
    found, begin = dict[str, int](), 0
    for name, call in counted_experts_calls(sharding).items():
        found[name] = begin
        begin += call.num_experts + 1
    return found


def num_load_counts(sharding: ShardingPlan) -> int:
    """Returns how many counts a step has: for each layer those of its experts, and of none."""
    return sum(call.num_experts + 1 for call in counted_experts_calls(sharding).values())


def expert_loads(sharding: ShardingPlan, counts: Sequence[float]) -> tuple[ExpertLoad, ...]:
    """Returns the load of each layer, from the counts of all."""
    begins, found = load_count_begins(sharding), list[ExpertLoad]()
    for name, call in counted_experts_calls(sharding).items():
        *of_experts, dropped = map(int, counts[begins[name] : begins[name] + call.num_experts + 1])
        found.append(ExpertLoad(name, tuple(of_experts), dropped))
    return tuple(found)


def expert_ranges(num_experts: int, num_ranks: int) -> list[tuple[int, int]]:
    """Returns the first expert of each rank, and the one after its last: as their weights are sliced."""
    split = DimSplit(0, num_experts, (num_experts,))
    return [split.units_of(rank, num_ranks) for rank in range(num_ranks)]


def expert_ranges_by_layer(sharding: ShardingPlan) -> Mapping[str, list[tuple[int, int]]]:
    """Returns the experts of each rank by layer; layers that no axis divides are left out."""
    axes = {
        name: [axis for axis, dim in each.sliced_dims.items() if dim == 0]
        for each in sharding.param_shardings
        for name in each.param.names
    }
    sizes = {
        name: sharding.mesh.group_size(axes.get(call.params[0], []))
        for name, call in counted_experts_calls(sharding).items()
    }
    return {
        name: expert_ranges(call.num_experts, sizes[name])
        for name, call in counted_experts_calls(sharding).items()
        if sizes[name] > 1
    }
