"""The weights that all ranks compute with where they gather codes of them, by definition and in one process.

    logical weights -> slice of a rank along tp ... -> flat parameter of its group -> shards -> value of each
                    <- slice                        <- flat parameter              <-

A technique states the value of a shard (`Strategy.gathered_values`). Where its blocks begin depends on what
lies in the flat parameter, so the plan of each rank decides. Copies (along tp, over pipeline stages) have
equal values. The verifier uses it (verifier/reference.py); no rank does.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from meshwright.engine.params.tensor_parallel_slices import copy_slice_into
from meshwright.model.tensor_parallel.split_proposal import slice_dims
from meshwright.plan.model_spec.param_dim_split import DimRanges
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.flat_param import FlatParamSpec


@dataclass(frozen=True)
class _GatheredGroup:
    """A flat parameter that some ranks gather, and the ranges of each parameter that they hold."""

    spec: FlatParamSpec
    spans: Mapping[str, tuple[DimRanges, ...]]


class GatheredWeights:
    """What `plan` gathers in place of the exact weights; False if it gathers those."""

    def __init__(self, plan: Plan) -> None:
        self._values: Callable[[torch.Tensor], torch.Tensor | None] = lambda shard: None
        for strategy in plan.strategies:
            if strategy.gathered_values(torch.zeros(1)) is not None:
                self._values = strategy.gathered_values
        self._groups = list(_gathered_groups(plan))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def values(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns what ranks receive of the logical `weights`, by name; those that are gathered as they are
        stay equal.
        """
        found = {name: weight.clone() for name, weight in weights.items()}
        for group in self._groups:
            first = weights[group.spec.params[0][0]]
            flat, locals_ = first.new_zeros(group.spec.numel), dict[str, torch.Tensor]()
            for name, numel, start in group.spec.params:
                locals_[name] = slice_dims(weights[name], group.spans[name])
                flat[start : start + numel] = locals_[name].reshape(-1)
            for shard in flat.view(group.spec.num_ranks, -1):
                values = self._values(shard)
                shard.copy_(shard if values is None else values)
            for name, numel, start in group.spec.params:
                local = flat[start : start + numel].view(locals_[name].shape)
                copy_slice_into(found[name], group.spans[name], local)
        return found


def _gathered_groups(plan: Plan) -> Iterator[_GatheredGroup]:
    """Yields each flat parameter whose gathers are carried by other messages, once for all its shards."""
    for role in plan.program.roles:
        carried = {
            action.tensors[0]
            for action in role.actions
            if action.kind == "UNSHARD" and action.transfer is not None and action.transfer.carried_by
        }
        for rank in role.ranks if carried else ():
            view = plan.rank_view(rank)
            shardings = {each.param.name: each for each in view.logical_param_shardings}
            for spec in view.flat_param_specs.values():
                names = [name for name, _, _ in spec.params]
                if names[0] in carried and not plan.mesh.index(view.coordinate, spec.axes):
                    spans = {
                        name: tuple(each.dim_ranges for each in view.dim_shards(shardings[name]))
                        for name in names
                    }
                    yield _GatheredGroup(spec, spans)
