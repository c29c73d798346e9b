"""Describes a sum of codes: how many ranks take part, and which elements of which parameters it holds.

    all_reduce of a bucket, reduce_scatter of a flat parameter      whole parameters (slices under tensor
                                                                    parallelism), in their shapes
    all_reduce of a shard over replicas (hybrid sharding)           the elements of the shard: others on the
                                                                    ranks of every other shard

A program is one list for all ranks of a role, so its messages have one size for all shards: what a codec
sends must fit the shard that needs most. `shards` has the parts of each; `parts` are those of this rank.
"""

from dataclasses import dataclass
from itertools import accumulate

from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ParamSpec
from meshwright.plan.sharding.flat_param import FlatParamSpec
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.program import Action, Transfer


@dataclass(frozen=True)
class CodedPart:
    """Elements `begin` to `end` of the flattened parameter `name`, which has `shape` on its ranks; they lie
    at `offset` in the operand.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    offset: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.end - self.begin


@dataclass(frozen=True)
class CodedSum:
    """The sum `transfer` over `num_ranks` ranks, of the parts of the shard at `shard_index`."""

    transfer: Transfer
    num_ranks: int
    shards: tuple[tuple[CodedPart, ...], ...] = ((),)
    shard_index: int = 0

    @classmethod
    def of(cls, action: Action, transfer: Transfer, view: RankView) -> "CodedSum":
        """Returns the sum that `action` makes by `transfer`, as the rank of `view` takes part in it."""
        num_ranks, params = transfer.num_ranks(view.plan.mesh), _params(action, view)
        flat = next(
            (each for each in view.flat_param_specs.values() if action.tensors[0] in _names(each)), None
        )
        if flat is None:
            ends = accumulate(view.plan.packed_numel((param,)) for param in params)
            places = zip(params, (0, *ends), strict=False)
            whole = tuple(CodedPart(each.name, each.shape, 0, each.numel, at) for each, at in places)
            return cls(transfer, num_ranks, (whole,))
        shapes = {param.name: param.shape for param in params}
        if transfer.collective == "reduce_scatter":
            whole = tuple(CodedPart(name, shapes[name], 0, numel, at) for name, numel, at in flat.params)
            return cls(transfer, num_ranks, (whole,))
        shards = tuple(
            tuple(
                CodedPart(each.name, shapes[each.name], each.begin, each.end, each.shard_offset)
                for each in flat.param_shards(index)
            )
            for index in range(flat.num_ranks)
        )
        return cls(transfer, num_ranks, shards, view.plan.mesh.index(view.coordinate, flat.axes))

    @property
    def numel(self) -> int:
        """The elements that each rank puts in, padding included."""
        return self.transfer.nbytes // FLOAT_NBYTES[self.transfer.dtype]

    @property
    def wide_nbytes(self) -> int:
        """The bytes of a number in which sums are made: float32, or wider where gradients are."""
        return 8 if self.transfer.dtype == "float64" else 4

    @property
    def is_scattered(self) -> bool:
        """Whether each rank ends with its slice of the sum only."""
        return self.transfer.collective == "reduce_scatter"

    @property
    def parts(self) -> tuple[CodedPart, ...]:
        """The parts of this rank."""
        return self.shards[self.shard_index]


def _params(action: Action, view: RankView) -> list[ParamSpec]:
    found = {each.param.name: each.param for each in view.param_shardings}
    return [found[name] for name in action.tensors]


def _names(flat: FlatParamSpec) -> set[str]:
    return {name for name, _, _ in flat.params}
