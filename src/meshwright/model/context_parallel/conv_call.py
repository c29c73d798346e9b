"""Intercepts torch's convolution on a sequence shard: calls of `F.conv1d` along the sequence go to a
context-parallel strategy.

Models convolve along the last dim (nn.Conv1d among them). A block calls F.conv1d with the tokens of this
rank only, while its kernel reaches over those of other ranks:

    input      zeros | tokens of this rank | zeros     zeros: the padding of the model, on every rank
    result     the output of one device for these tokens, with neighbours from other ranks
    output     tokens of this rank | ones              ones: outputs that the model cuts off, y[..., :tokens]

The trial has found which calls these are and how far their kernels reach
(sequence_analysis/conv_rules.py); in each block call they come in the same order.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch.overrides import TorchFunctionMode

from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.model.tensors.function_modes import CallFunction, call_unchanged
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import ConvSpec
from meshwright.plan.sharding.sequence_sharding import MIN_TOKENS

CONV_FIX = "let the block run the same convolutions on every batch; or set mesh.cp = 1"


@dataclass(frozen=True)
class Conv1dArguments:
    """The arguments of F.conv1d by name: `Conv1dArguments(*args, **kwargs)`."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    stride: int | Sequence[int] = 1
    padding: str | int | Sequence[int] = 0
    dilation: int | Sequence[int] = 1
    groups: int = 1

    @property
    def kernel_reach(self) -> int:
        """The distance between the first and the last element under the kernel."""
        return (self.weight.shape[-1] - 1) * _first_value(self.dilation)

    @property
    def padding_sizes(self) -> tuple[int, int]:
        """The number of zeros before and after the input."""
        if isinstance(self.padding, str):
            total = self.kernel_reach if self.padding == "same" else 0
            return total // 2, total - total // 2
        return (_first_value(self.padding),) * 2

    @property
    def stride_size(self) -> int:
        """The stride as a number."""
        return _first_value(self.stride)


@dataclass(frozen=True)
class ShardedConv1dCall:
    """One convolution on a sequence shard: `local_input`, [.., channels, tokens], are the tokens of
    `token_shard`, unpadded.
    """

    local_input: torch.Tensor
    arguments: Conv1dArguments
    conv_spec: ConvSpec
    token_shard: TokenShard


Conv1dImpl = Callable[[ShardedConv1dCall], torch.Tensor]  # -> [.., channels, local tokens]


Conv1dContext = tuple[str, Sequence[ConvSpec], int, Callable[[int, int], TokenShard]]


class Conv1dMode(TorchFunctionMode):
    """While active, convolutions along the sequence inside blocks run `conv_impl`, under `suspend_modes()`.

    `next_call()` gives the current block call, its convolutions in order, the index of the next one, and a
    function from planned and actual length to the shard of this rank; None outside of blocks that run on a
    shard. `call` runs all of it: a compiler's, between two graphs.
    """

    def __init__(
        self,
        conv_impl: Conv1dImpl,
        next_call: Callable[[], Conv1dContext | None],
        suspend_modes: Callable[[], AbstractContextManager[object]],
        call: CallFunction = call_unchanged,
    ) -> None:
        super().__init__()
        self._conv_impl, self._next_call, self._suspend_modes = conv_impl, next_call, suspend_modes
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.conv1d:
            return func(*args, **(kwargs or {}))
        return self._call(self._convolution, args, kwargs or {})

    def _convolution(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        context = self._next_call()
        if context is None:
            return F.conv1d(*args, **kwargs)
        block_call, block_convs, number, get_shard = context
        if number >= len(block_convs):
            text = f"it convolves {number + 1} times, and in the trial {len(block_convs)} times"
            raise PlanError(text, fix=CONV_FIX, location=block_call)
        conv_spec = block_convs[number]
        # the mode of another forward may be below this one and would intercept next
        with self._suspend_modes():
            if not conv_spec.halo:
                return F.conv1d(*args, **kwargs)
            return self._call_impl(
                conv_spec,
                Conv1dArguments(*args, **kwargs),
                get_shard(conv_spec.num_tokens, conv_spec.num_tokens),
            )

    def _call_impl(
        self, conv_spec: ConvSpec, arguments: Conv1dArguments, token_shard: TokenShard
    ) -> torch.Tensor:
        num_local, size = max(MIN_TOKENS, token_shard.num_tokens), tuple(arguments.input.shape[-2:])
        num_extra = (
            conv_spec.pad_before + conv_spec.pad_after + sum(arguments.padding_sizes) - arguments.kernel_reach
        )
        actual = (
            size,
            arguments.stride_size,
            arguments.kernel_reach,
            conv_spec.pad_before + arguments.padding_sizes[0],
            num_extra,
        )
        if actual != (
            (conv_spec.token_numel, conv_spec.pad_before + num_local + conv_spec.pad_after),
            1,
            conv_spec.halo,
            conv_spec.left_halo,
            conv_spec.num_extra_outputs,
        ):
            text = (
                f"'{conv_spec.module}' convolves {list(size)} with a kernel that reaches over "
                f"{arguments.kernel_reach}"
            )
            expected = (
                f"{num_local} tokens of width {conv_spec.token_numel} here, with {conv_spec.pad_before} "
                f"zeros before and {conv_spec.pad_after} after them"
            )
            raise PlanError(
                f"{text}; the trial says {expected}, and a reach of {conv_spec.halo}",
                fix=CONV_FIX,
                location=conv_spec.block_call,
            )
        output = self._conv_impl(
            ShardedConv1dCall(
                arguments.input.narrow(-1, conv_spec.pad_before, num_local), arguments, conv_spec, token_shard
            )
        )
        # ones, since zeros could give inf in functions that follow
        return (
            F.pad(output, (0, conv_spec.num_extra_outputs), value=1.0)
            if conv_spec.num_extra_outputs
            else output
        )


def _first_value(value: int | Sequence[int]) -> int:
    return value if isinstance(value, int) else value[0]
