"""Convolutions over tokens where each rank has some of the tokens: whoever calls torch's is answered by a technique.

`F.conv1d` is where models come to that convolve (nn.Conv1d among them), tokens last. Within a block it is called with the tokens
of this rank alone, and its kernel reaches over those of other ranks:

    input      zeros | this rank's tokens | zeros      the zeros are what the model has padded its tokens with, on every rank
    answer     what one device gives for these tokens, whose neighbours in the sample may be elsewhere
    output     this rank's tokens | ones               the ones are what the model cuts off: y[..., :tokens]

Which calls those are, and how far their kernels reach, the trial run has told (model/around.py): in each visit they come in the
same order.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch.overrides import TorchFunctionMode

from meshwright.model.sequence_parallel.token_shard import TokenShard
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import MIN_TOKENS, ConvSpec

CONV_FIX = "let the block convolve as often, and as far, on every batch; or set mesh.cp = 1"


@dataclass(frozen=True)
class Conv1dArguments:
    """The arguments of F.conv1d, by its names: `Convolution(*args, **kwargs)`."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    stride: int | Sequence[int] = 1
    padding: str | int | Sequence[int] = 0
    dilation: int | Sequence[int] = 1
    groups: int = 1

    @property
    def kernel_reach(self) -> int:
        """How many elements behind the first the kernel takes in."""
        return (self.weight.shape[-1] - 1) * _first_value(self.dilation)

    @property
    def padding_sizes(self) -> tuple[int, int]:
        """How many zeros it puts before its input, and after it."""
        if isinstance(self.padding, str):
            total = self.kernel_reach if self.padding == "same" else 0
            return total // 2, total - total // 2
        return (_first_value(self.padding),) * 2

    @property
    def stride_size(self) -> int:
        """Its stride."""
        return _first_value(self.stride)


@dataclass(frozen=True)
class ShardedConv1dCall:
    """One convolution over tokens: `own`, [.., width, tokens], are those of `share` that are run here, nothing around them."""

    local_input: torch.Tensor
    arguments: Conv1dArguments
    conv_spec: ConvSpec
    token_shard: TokenShard


Conv1dImpl = Callable[[ShardedConv1dCall], torch.Tensor]  # [.., channels, tokens that are run here]


Conv1dContext = tuple[str, Sequence[ConvSpec], int, Callable[[int, int], TokenShard]]


class Conv1dMode(TorchFunctionMode):
    """While active, convolutions over tokens within blocks are `answer`, asked for `aside()`.

    `told()` is the visit that runs, its convolutions in order, the number of the one that comes now, and who says which tokens
    are here of a row that has n in the plan, and now n where nobody knows. None: no visit whose tokens are elsewhere.
    """

    def __init__(
        self,
        conv_impl: Conv1dImpl,
        next_call: Callable[[], Conv1dContext | None],
        suspend_modes: Callable[[], AbstractContextManager[object]],
    ) -> None:
        super().__init__()
        self._conv_impl, self._next_call, self._suspend_modes = conv_impl, next_call, suspend_modes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        told = self._next_call() if func is F.conv1d else None
        if told is None:
            return func(*args, **(kwargs or {}))
        visit, mine, number, shares = told
        if number >= len(mine):
            text = f"it convolves {number + 1} times, and in the trial run {len(mine)} times"
            raise PlanError(text, fix=CONV_FIX, location=visit)
        known = mine[number]
        with (
            self._suspend_modes()
        ):  # the mode of another forward may stand behind this one, and would be asked next
            if not known.halo:
                return func(*args, **(kwargs or {}))
            return self._call_impl(
                known, Conv1dArguments(*args, **(kwargs or {})), shares(known.num_tokens, known.num_tokens)
            )

    def _call_impl(self, known: ConvSpec, given: Conv1dArguments, share: TokenShard) -> torch.Tensor:
        run, size = max(MIN_TOKENS, share.num_tokens), tuple(given.input.shape[-2:])
        behind = known.pad_before + known.pad_after + sum(given.padding_sizes) - given.kernel_reach
        found = (
            size,
            given.stride_size,
            given.kernel_reach,
            known.pad_before + given.padding_sizes[0],
            behind,
        )
        if found != (
            (known.token_numel, known.pad_before + run + known.pad_after),
            1,
            known.halo,
            known.left_halo,
            known.num_extra_outputs,
        ):
            text = f"'{known.module}' convolves {list(size)} with a kernel that reaches over {given.kernel_reach}"
            wanted = f"{run} tokens of width {known.token_numel} here, with {known.pad_before} zeros before and {known.pad_after} after them"
            raise PlanError(
                f"{text}; the trial run says {wanted}, and a reach of {known.halo}",
                fix=CONV_FIX,
                location=known.block_call,
            )
        made = self._conv_impl(
            ShardedConv1dCall(given.input.narrow(-1, known.pad_before, run), given, known, share)
        )
        return (
            F.pad(made, (0, known.num_extra_outputs), value=1.0) if known.num_extra_outputs else made
        )  # of ones, no function that is cut is infinite


def _first_value(value: int | Sequence[int]) -> int:
    return value if isinstance(value, int) else value[0]
