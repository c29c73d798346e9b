"""The courses of a model: learnt from its forward on fake tensors, one for each shape of its inputs, rows apart.

A reading knows how to make the model without memory, so a course is learnt wherever it is asked for, by two forwards on a few
rows each: two, because that tells which dims are rows. A model whose forward looks at values is made once, whole, on the CPU.

Where products compute in another dtype than parameters have (autocast), so do they in these forwards: what a value is in when it
crosses follows from that, as autocast on a CPU has it. Where a device casts otherwise, that is told when the value is sent.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.core.errors import PlanError
from meshwright.model.course import Course, Record, course
from meshwright.model.crossing import record
from meshwright.model.dice import Dice
from meshwright.model.dropout import trial
from meshwright.model.only import OnlyRank
from meshwright.model.plugs import plug
from meshwright.model.reading import OTHER_BATCH, Reading
from meshwright.model.trial import PROBE_BATCH, depends_on_values

Inputs = Mapping[str, torch.Tensor]
Kind = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def learn(
    reading: Reading,
    inputs: Inputs,
    dtype: torch.dtype = torch.float32,
    *,
    training: bool = True,
    compute: torch.dtype | None = None,
    dealt: bool = False,
) -> Course:
    """The course of the forward of the model of `reading` on rows like those of `inputs`, in training or in an evaluation.

    Parameters are in `dtype`, products compute in `compute` (None: as the parameters are). What counts as used of the outputs is
    what the loss takes: the others may be Foreign where a part runs. Where tokens are `dealt` to ranks, a third run tells of
    which values a rank has its own. Raises PlanError for a forward that takes another way on another number of rows; what the
    forward itself raises passes.
    """
    rows = PROBE_BATCH, OTHER_BATCH
    mode: FakeTensorMode | None = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        few, more = (_record(reading, inputs, each, dtype, mode, training, compute) for each in rows)
    except Exception as error:
        if not depends_on_values(error):
            raise
        mode = None
        few, more = (_record(reading, inputs, each, dtype, mode, training, compute) for each in rows)
    own = OnlyRank.of(reading.tokens, inputs) if dealt else None
    third = None if own is None else _record(reading, inputs, rows[0], dtype, mode, training, compute, own)
    return course(few, more, rows, third)


def bordered(
    reading: Reading, dtype: torch.dtype = torch.float32, compute: torch.dtype | None = None, *, dealt: bool = False
) -> Reading:
    """`reading` with the borders in its anatomy: the values between its blocks, in training on rows like those of its example.

    With `dealt`, of which of them a rank has its own tokens.
    """
    inputs = {column.name: reading.example[column.name] for column in reading.anatomy.inputs}
    borders = learn(reading, inputs, dtype, compute=compute, dealt=dealt).borders
    return replace(reading, anatomy=replace(reading.anatomy, borders=borders))


@dataclass
class Courses:
    """The courses of a model by the shape of its inputs, each learnt when it is first asked for; threads may share them."""

    reading: Reading
    dtype: torch.dtype = torch.float32
    _known: dict[tuple[Kind, bool, torch.dtype | None, bool], Course] = field(default_factory=dict)
    _learning: Lock = field(default_factory=Lock, repr=False, compare=False)

    def of(self, inputs: Inputs, *, training: bool = True, dealt: bool = False) -> Course:
        """The course of a forward on `inputs`, of any number of rows; under autocast, where that is on."""
        kind = tuple((key, tuple(value.shape[1:]), value.dtype) for key, value in inputs.items())
        compute = _autocasting(next(iter(inputs.values())).device.type)
        with self._learning:
            if (kind, training, compute, dealt) not in self._known:
                how = {"training": training, "compute": compute, "dealt": dealt}
                self._known[kind, training, compute, dealt] = learn(self.reading, inputs, self.dtype, **how)
            return self._known[kind, training, compute, dealt]


def _autocasting(device: str) -> torch.dtype | None:
    """What products compute in on such a device; None: as what goes in is."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _record(
    reading: Reading,
    inputs: Inputs,
    rows: int,
    dtype: torch.dtype,
    mode: FakeTensorMode | None,
    training: bool,
    compute: torch.dtype | None,
    dealt: OnlyRank | None = None,
) -> Record:
    """What one forward on so many rows shows; on real tensors without a `mode`.

    With `dealt` it runs as on ranks with some of the tokens: glue on real ones, as it was looked through (model/passing.py).
    """
    module, blocks, _ = reading.make("cpu", dtype, mode)
    some = {key: _rows(value, rows, dtype) for key, value in inputs.items()}
    fakes: AbstractContextManager = nullcontext()
    if mode is not None and dealt is None:
        some, fakes = {key: mode.from_tensor(value) for key, value in some.items()}, mode
    elif mode is not None:
        for block in blocks.values():
            block.forward = partial(_within, mode, block.forward)
    if dealt is not None:
        plug(module, lambda: None)
    casting = torch.autocast("cpu", dtype=compute, enabled=compute not in (None, dtype), cache_enabled=False)
    dice = Dice(seed=0)
    used = {place for place, column in enumerate(reading.anatomy.outputs) if column.used}
    with fakes, trial(dice, rows), torch.set_grad_enabled(training), casting:
        call, drawn = partial(module, **some), lambda: dice.count
        before = {key: value._version for key, value in some.items()}
        found = record(module if training else module.eval(), blocks, call, dice.enter, drawn, used, dealt)
    for key, value in some.items():
        if value._version != before[key]:
            text = f"the forward writes into its input '{key}', and every part that a rank runs would do so again"
            raise PlanError(text, fix=f"begin the forward with {key} = {key}.clone()", where="model")
    return found


def _within(mode: FakeTensorMode, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return forward(*args, **kwargs)


def _rows(value: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """`rows` rows like those of `value`, on the CPU; floating ones in `dtype`."""
    few = value.detach()[: min(rows, len(value))].to("cpu", dtype if value.is_floating_point() else value.dtype)
    return few.repeat(-(-rows // len(few)), *[1] * (few.ndim - 1))[:rows]
