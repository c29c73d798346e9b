"""Chooses the sequence lengths of a trial, and compares operations on two lengths to find length-dependent
code.

Lengths differ from the example's, so that token dims are known by their size:

    ids [3, 13]             cut to 11: everything made from them has 11 tokens, in glue and in blocks
    images [3, 3, 8, 8]     unchanged: glue sees 17 patches, a block gets 13, and its outputs have 17 again

Only the model knows the number of patches, so it changes where the first block that attends takes them.

A block that uses the length would compute something else on a shard:

    sequences of 7 tokens      layers.0: mul 0.35, softmax, mul 2.81, ...          log(7) / log(2)
    sequences of 5 tokens      layers.0: mul 0.35, softmax, mul 2.32, ...          log(5) / log(2)

A number may have any form by the time it is used, so the comparison is the only way to tell; the same holds
for branches. Code that the model itself recomputes in backward cannot be intercepted, and would attend to
the tokens of this rank only.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from meshwright.model.recording.op_table import find_op
from meshwright.model.sequence_analysis.token_dims import find_prime, has_tokens, prime_factors
from meshwright.model.tensors.pytree import value_leaves
from meshwright.model.trial.fake_tensor_forward import PROBE_BATCH
from meshwright.plan.model_spec.sequence_info import BlockSequenceInfo

USER_CHECKPOINT = (
    "torch.utils.checkpoint, which runs it again in backward: leave that to the strategy "
    "'activation_checkpointing'"
)


@dataclass(frozen=True)
class ComputedOp:
    """One operation of a block: its module, its name, and the numbers among its arguments."""

    module: str
    name: str
    numbers: tuple[str, ...]

    @classmethod
    def from_call(
        cls, module: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> "ComputedOp":
        """Returns the operation `name` with these arguments."""
        op, values = find_op(name), list[Any]()
        if op.kind == "constant" and op.position is not None:  # shapes show the sizes
            values = [
                *args[op.position :][:1],
                *(kwargs[key] for key in ("fill_value", "value") if key in kwargs),
            ]
        elif takes_number(name):
            values = value_leaves((args, dict(kwargs)))
        return cls(module, name, tuple(repr(each) for each in values if type(each) in (int, float, complex)))


def recompute_reason() -> str:
    """Returns why the running code cannot be sharded: it runs again in backward, not intercepted; "" if it
    does not.
    """
    if not torch.is_grad_enabled():
        return f"runs without gradients: torch.no_grad, or {USER_CHECKPOINT}"
    return (
        f"runs in {USER_CHECKPOINT}"
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        else ""
    )


def length_dependence(ops: Sequence[ComputedOp], other_ops: Sequence[ComputedOp], length: str) -> str:
    """Returns why a block call with operations `ops`, and `other_ops` on another length, depends on the
    length; "" if not.
    """
    for op, other_op in zip(ops, other_ops, strict=False):
        if op.name != other_op.name:
            return (
                f"{op.module} computes '{other_op.name}' on sequences of {length} tokens and else computes "
                f"'{op.name}'"
            )
        if op.numbers != other_op.numbers:
            return f"{op.module} computes with the number of tokens ({op.name})"
    return (
        ""
        if len(ops) == len(other_ops)
        else f"{ops[-1].module} runs more or fewer operations on sequences of {length} tokens than otherwise"
    )


@dataclass(frozen=True)
class BlockOnTwoLengths:
    """The shapes of what a block call takes and returns in two forwards, by path, between which it computes
    the same; `lengths` maps those of sequences in the first to those in the second.

    The forwards run on `num_samples` samples. The inputs `in_parameter_dtype` have the dtype of the
    parameters, whatever that is, or are not floating-point.
    """

    inputs: Mapping[str, tuple[torch.Size, torch.Size]]
    outputs: Mapping[str, tuple[torch.Size, torch.Size]]
    lengths: Mapping[int, int]
    num_samples: tuple[int, int] = (0, 0)
    in_parameter_dtype: Collection[str] = ()

    def is_per_sample(self, path: str, numel: int) -> bool:
        """Returns whether it is known of an input that it holds `numel` elements, as many of each sample, and
        in which dtype.
        """
        one, other = self.inputs.get(path, ((), ()))
        if path not in self.in_parameter_dtype or len(one) != len(other) or prod(one) != numel:
            return False
        rest = zip(one[1:], other[1:], strict=True)
        return (*one[:1], *other[:1]) == self.num_samples and all(
            size == new or (size, new) in self.lengths.items() for size, new in rest
        )

    def has_tokens_as(self, info: BlockSequenceInfo) -> bool:
        """Returns whether the token dims of `info`, which were found by their size, have the lengths here."""
        if len(self.outputs) != len(info.output_token_dims):
            return False
        complete = info.with_lengths(next(iter(self.lengths), 0))
        inputs, outputs = map(self.inputs.get, info.arg_paths), self.outputs.values()
        given = zip(inputs, info.input_token_dims, complete.input_num_tokens, strict=True)
        returned = zip(outputs, info.output_token_dims, complete.output_num_tokens, strict=True)
        return all(self._has_tokens(*each) for each in (*given, *returned))

    def _has_tokens(
        self, shapes: tuple[torch.Size, torch.Size] | None, dims: Sequence[int], length: int
    ) -> bool:
        if shapes is None or len(shapes[0]) != len(shapes[1]):
            return not dims
        sizes = list(zip(*shapes, strict=True))
        found = [sizes[dim] for dim in dims if dim < len(sizes)]
        # a bias may have the lengths of two sequences, of which the first is told
        has_first = not dims or found[:1] == [(length, self.lengths.get(length))]
        return has_first and len(found) == len(dims) and all(each in self.lengths.items() for each in found)


def takes_number(name: str) -> bool:
    """Returns whether the operation `name` computes with numbers among its arguments."""
    op = find_op(name)
    return (
        op.kind in ("pointwise", "random")
        or op.dims in ("data", "along", "trailing")
        or name == "scaled_dot_product_attention"
    )


NextPrime = Callable[[int, Collection[int]], int]  # a prime near a number that is not yet in use


class TrialLengths:
    """The prime lengths of a trial on `num_samples` samples.

    `planned_lengths` maps each prime to the length it stands for; `next_prime` gives further primes.
    """

    def __init__(
        self, planned_lengths: Mapping[int, int], next_prime: NextPrime, num_samples: int = PROBE_BATCH
    ) -> None:
        self.planned_lengths, self.num_samples = dict(planned_lengths), num_samples
        self.inner_primes = dict[int, int]()  # prime in blocks, by the length that glue sees
        self._next_prime = next_prime

    @property
    def prime_product(self) -> int:
        """The product of all primes in use."""
        return prod(self.planned_lengths)

    @property
    def description(self) -> str:
        """The lengths in words."""
        return " and ".join(map(str, self.planned_lengths))

    @property
    def input_lengths(self) -> list[int]:
        """The planned lengths of the inputs."""
        return [
            planned
            for prime, planned in self.planned_lengths.items()
            if prime not in self.inner_primes.values()
        ]

    def start_tokens(self, count: int) -> None:
        """Counts `count` in glue as tokens from here on."""
        if count not in self.inner_primes:
            if has_tokens(count, prod(self.planned_lengths)):
                raise RuntimeError(
                    f"{count} tokens that start inside the model cannot be distinguished from those of inputs"
                )
            prime = self._next_prime(count, {*self.planned_lengths, *self.inner_primes, count})
            self.inner_primes[count], self.planned_lengths[prime] = prime, count

    def glue_length(self, prime: int) -> int:
        """Returns the length that glue sees of sequences with length `prime` in blocks."""
        return next((count for count, inside in self.inner_primes.items() if inside == prime), prime)

    def planned_length(self, size: int) -> int:
        """Returns the planned length of a dim of this size in a block; 0 if it has none or several."""
        return self.planned_lengths.get(find_prime(size, self.prime_product), 0)

    def prime(self, length: int) -> int:
        """Returns the prime that stands for the planned `length`."""
        return next(prime for prime, planned in self.planned_lengths.items() if planned == length)

    def planned_numel(self, shape: Sequence[int]) -> int:
        """Returns the number of elements that a tensor of a block has in the plan."""
        return prod(map(self._planned_size, shape))

    def resize_for_block(self, tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        """Returns a tensor of glue with the block's lengths along `dims`."""
        return _resize(tensor, {dim: self.inner_primes[tensor.shape[dim]] for dim in dims})

    def resize_for_glue(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an output of a block with the lengths that glue sees."""
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
