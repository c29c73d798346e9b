"""Sums the outputs of several sharded layers in one collective.

Layers whose outputs meet in additions alone (model/tensor_parallel/shared_sum_trace.py) end in one
collective. Each passes its summand on and returns zeros, and the last one sums what all have added up:

    a = A(x)     summand of a, on every rank ----+             returns zeros
    m = M(x)     summand of m, on every rank ----+--> sum --> + the biases of both
    y = x + a + m                                              (the model's own line, unchanged)

Cost: zeros of the size of the residual stream, and the summand while it waits.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from meshwright.plan.sharding.tensor_placements import Placement


@dataclass
class JointSum:
    """The summands that `layers`, in the order in which they run, have contributed in one forward of their
    block.
    """

    layers: tuple[str, ...]
    contributors: tuple[str, ...] = ()
    summand: torch.Tensor | None = None
    biases: tuple[torch.Tensor, ...] = ()

    def clear(self) -> None:
        """Forgets all contributions."""
        self.contributors, self.summand, self.biases = (), None, ()


@dataclass(frozen=True)
class JointSumMember:
    """One layer of a joint sum."""

    layer: str
    joint_sum: JointSum

    @property
    def defers_sum(self) -> bool:
        """Whether a later layer runs the sum."""
        return self.layer != self.joint_sum.layers[-1]

    def contribute(
        self, summand: torch.Tensor, biases: Iterable[torch.Tensor], placement: Placement, num_ranks: int
    ) -> torch.Tensor:
        """Returns zeros in place of the output of the layer; they may be written into.

        Args:
            summand: the layer's product, whose sum over `num_ranks` ranks would have `placement`.
            biases: added once, to the sum.
        """
        joint = self.joint_sum
        if self.layer == joint.layers[0]:  # a forward that has failed may have left something
            joint.clear()
        joint.contributors += (self.layer,)
        joint.summand = add_summand(summand, joint.summand)
        joint.biases += tuple(biases)
        shape = list(summand.shape)
        if placement.dim is not None:
            shape[placement.dim] //= num_ranks
        return summand.new_zeros(shape)

    def collect(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Returns the summands of the other layers since the first of them ran, added up, and their
        biases.
        """
        joint = self.joint_sum
        given, summand, biases = joint.contributors, joint.summand, joint.biases
        joint.clear()
        if summand is None or given != joint.layers[:-1]:
            text = (
                f"{self.layer} ends the sum of {', '.join(joint.layers)}, and {', '.join(given) or 'none'} "
                f"ran before it"
            )
            raise RuntimeError(
                f"{text}: needed are all, in the order of the trial. Call them in every forward of the block"
            )
        return summand, biases


def joint_sum_members(sums: Mapping[str, tuple[str, ...]]) -> dict[str, JointSumMember]:
    """Returns the members of joint sums by layer; `sums` has, by layer, all layers that end in one sum with
    it.
    """
    joints = {layers: JointSum(layers) for layers in sums.values()}
    return {layer: JointSumMember(layer, joints[layers]) for layer, layers in sums.items()}


def add_summand(summand: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """Returns `summand`, which nobody else holds, with `other` added in place."""
    return summand if other is None else summand.add_(other)
