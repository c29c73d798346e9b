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

from meshwright.model.sequence_parallel.token_shard import Share
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import LEAST, Convolve

FIX = "let the block convolve as often, and as far, on every batch; or set mesh.cp = 1"


@dataclass(frozen=True)
class Convolution:
    """The arguments of F.conv1d, by its names: `Convolution(*args, **kwargs)`."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    stride: int | Sequence[int] = 1
    padding: str | int | Sequence[int] = 0
    dilation: int | Sequence[int] = 1
    groups: int = 1

    @property
    def reach(self) -> int:
        """How many elements behind the first the kernel takes in."""
        return (self.weight.shape[-1] - 1) * _single(self.dilation)

    @property
    def padded(self) -> tuple[int, int]:
        """How many zeros it puts before its input, and after it."""
        if isinstance(self.padding, str):
            total = self.reach if self.padding == "same" else 0
            return total // 2, total - total // 2
        return (_single(self.padding),) * 2

    @property
    def step(self) -> int:
        """Its stride."""
        return _single(self.stride)


@dataclass(frozen=True)
class Convolved:
    """One convolution over tokens: `own`, [.., width, tokens], are those of `share` that are run here, nothing around them."""

    own: torch.Tensor
    given: Convolution
    known: Convolve
    share: Share


Beside = Callable[[Convolved], torch.Tensor]  # [.., channels, tokens that are run here]


Told = tuple[str, Sequence[Convolve], int, Callable[[int, int], Share]]


class Convolving(TorchFunctionMode):
    """While active, convolutions over tokens within blocks are `answer`, asked for `aside()`.

    `told()` is the visit that runs, its convolutions in order, the number of the one that comes now, and who says which tokens
    are here of a row that has n in the plan, and now n where nobody knows. None: no visit whose tokens are elsewhere.
    """

    def __init__(
        self, answer: Beside, told: Callable[[], Told | None], aside: Callable[[], AbstractContextManager[object]]
    ) -> None:
        super().__init__()
        self._answer, self._told, self._aside = answer, told, aside

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        told = self._told() if func is F.conv1d else None
        if told is None:
            return func(*args, **(kwargs or {}))
        visit, mine, number, shares = told
        if number >= len(mine):
            text = f"it convolves {number + 1} times, and in the trial run {len(mine)} times"
            raise PlanError(text, fix=FIX, where=visit)
        known = mine[number]
        with self._aside():  # the mode of another forward may stand behind this one, and would be asked next
            if not known.reach:
                return func(*args, **(kwargs or {}))
            return self._asked(known, Convolution(*args, **(kwargs or {})), shares(known.tokens, known.tokens))

    def _asked(self, known: Convolve, given: Convolution, share: Share) -> torch.Tensor:
        run, size = max(LEAST, share.count), tuple(given.input.shape[-2:])
        behind = known.before + known.after + sum(given.padded) - given.reach
        found = (size, given.step, given.reach, known.before + given.padded[0], behind)
        if found != ((known.width, known.before + run + known.after), 1, known.reach, known.left, known.behind):
            text = f"'{known.module}' convolves {list(size)} with a kernel that reaches over {given.reach}"
            wanted = f"{run} tokens of width {known.width} here, with {known.before} zeros before and {known.after} after them"
            raise PlanError(f"{text}; the trial run says {wanted}, and a reach of {known.reach}", fix=FIX, where=known.visit)
        made = self._answer(Convolved(given.input.narrow(-1, known.before, run), given, known, share))
        return F.pad(made, (0, known.behind), value=1.0) if known.behind else made  # of ones, no function that is cut is infinite


def _single(value: int | Sequence[int]) -> int:
    return value if isinstance(value, int) else value[0]
