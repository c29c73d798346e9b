"""What blocks compute on rows of two lengths: who asks how many tokens there are would compute something else on a rank.

    rows of 7 tokens      layers.0: mul 0.35, softmax, mul 2.81, ...          log(7) / log(2)
    rows of 5 tokens      layers.0: mul 0.35, softmax, mul 2.32, ...          log(5) / log(2)

A number may have become anything by the time that it is computed with, so it is told by this alone. The same holds for a branch.
What a model runs again by itself in backward asks nobody, and would attend to this rank's tokens alone.

How many tokens the rows of a trial have: other numbers than the example's, so that dims of tokens are known by their size.

    ids [3, 13]             cut to 11: what reads them has 11 tokens, between blocks and within
    images [3, 3, 8, 8]     as they are: glue sees 17 patches, a block is given 13 of them, and what it gives out has 17 again

How many patches there are the model alone knows, so their number changes where a block takes them in, the first that attends.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from meshwright.model.sequence_analysis.token_dims import find_prime, has_tokens, prime_factors
from meshwright.model.tensors.op_tables import CONSTANT_LIKE, ELEMENTWISE
from meshwright.model.tensors.pytree import value_leaves
from meshwright.model.trial.trial import PROBE_BATCH

USER_CHECKPOINT = (
    "torch.utils.checkpoint, which runs it again in backward: leave that to the strategy 'activation_checkpointing'"
)
_FILL_VALUE_POSITIONS = {
    "full": 1,
    "full_like": 1,
    "new_full": 2,
    "fill": 1,
}  # where the value stands; sizes are told by shapes
_NUMBER_FACTORIES = frozenset(
    ("tensor", "as_tensor", "asarray", "new_tensor", "scalar_tensor", "scaled_dot_product_attention")
)
_WITH_NUMBERS = (
    (ELEMENTWISE - CONSTANT_LIKE) | _NUMBER_FACTORIES | {"softmax", "log_softmax", "layer_norm", "rms_norm"}
)


@dataclass(frozen=True)
class ComputedOp:
    """One operation of a block: within which module, its name, the numbers that it was given."""

    module: str
    name: str
    numbers: tuple[str, ...]

    @classmethod
    def from_call(
        cls, module: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> "ComputedOp":
        """The operation `name` on these."""
        if name in _FILL_VALUE_POSITIONS:
            given: list[Any] = [
                *args[_FILL_VALUE_POSITIONS[name] :][:1],
                *(kwargs[key] for key in ("fill_value", "value") if key in kwargs),
            ]
        else:
            given = value_leaves((args, dict(kwargs))) if name in _WITH_NUMBERS else []
        return cls(module, name, tuple(repr(each) for each in given if type(each) in (int, float, complex)))


def recompute_reason() -> str:
    """Why what runs now cannot have some of the tokens, in a trial: it runs once more in backward, unseen; "": it does not."""
    if not torch.is_grad_enabled():
        return f"runs without gradients: torch.no_grad, or {USER_CHECKPOINT}"
    return (
        f"runs in {USER_CHECKPOINT}"
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        else ""
    )


def length_dependence(ops: Sequence[ComputedOp], other_ops: Sequence[ComputedOp], length: str) -> str:
    """Why a visit that computes `mine`, and `other` on rows of so many tokens, must know how many there are; "": it need not."""
    for one, two in zip(ops, other_ops, strict=False):
        if one.name != two.name:
            return f"{one.module} computes '{two.name}' on rows of {length} tokens where it else computes '{one.name}'"
        if one.numbers != two.numbers:
            return f"{one.module} computes with the number of tokens ({one.name})"
    return (
        ""
        if len(ops) == len(other_ops)
        else f"{ops[-1].module} computes more or less on rows of {length} tokens than else"
    )


NextPrime = Callable[[int, Collection[int]], int]  # a prime near a number, which is none of those in use


class TrialLengths:
    """The primes of a trial on `batch` rows.

    `rows` are those of inputs, each with the length that it stands for; `spare` gives more.
    """

    def __init__(
        self, planned_lengths: Mapping[int, int], next_prime: NextPrime, num_samples: int = PROBE_BATCH
    ) -> None:
        self.planned_lengths, self.num_samples = dict(planned_lengths), num_samples
        self.inner_primes = dict[int, int]()  # by how many glue sees
        self._next_prime = next_prime

    @property
    def prime_product(self) -> int:
        """All primes in use."""
        return prod(self.planned_lengths)

    @property
    def description(self) -> str:
        """How long the rows are, in words."""
        return " and ".join(map(str, self.planned_lengths))

    @property
    def input_lengths(self) -> list[int]:
        """How long the rows of inputs are in the plan."""
        return [
            planned
            for prime, planned in self.planned_lengths.items()
            if prime not in self.inner_primes.values()
        ]

    def start_tokens(self, count: int) -> None:
        """From here on, `count` in glue are tokens too."""
        if count not in self.inner_primes:
            if has_tokens(count, prod(self.planned_lengths)):
                raise RuntimeError(
                    f"{count} tokens that begin within, and those of rows, are not told from each other"
                )
            prime = self._next_prime(count, {*self.planned_lengths, *self.inner_primes, count})
            self.inner_primes[count], self.planned_lengths[prime] = prime, count

    def glue_length(self, prime: int) -> int:
        """How many tokens glue sees of rows that have `prime` in blocks."""
        return next((count for count, inside in self.inner_primes.items() if inside == prime), prime)

    def planned_length(self, size: int) -> int:
        """How many tokens they have in the plan whose dim in a block has this size; 0: several, or none."""
        return self.planned_lengths.get(find_prime(size, self.prime_product), 0)

    def planned_numel(self, shape: Sequence[int]) -> int:
        """The elements of a tensor in a block, in the plan."""
        return prod(map(self._planned_size, shape))

    def resize_for_block(self, tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        """A tensor of glue with as many tokens along `dims` as blocks are given."""
        return _resize(tensor, {dim: self.inner_primes[tensor.shape[dim]] for dim in dims})

    def resize_for_glue(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that a block gives out with as many tokens as glue sees."""
        sizes = {
            dim: self.glue_length(size)
            for dim, size in enumerate(tensor.shape)
            if size in self.inner_primes.values()
        }
        return _resize(tensor, sizes)

    def _planned_size(self, size: int) -> int:
        for prime in prime_factors(self.prime_product):
            size = size // prime * self.planned_lengths[prime] if size % prime == 0 else size
        return size


def _resize(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        for dim, size in sizes.items():
            tensor = tensor.index_select(dim, torch.arange(size) % tensor.shape[dim])
    return tensor
