"""The courses of a model: learnt from its forward on fake tensors, one for each shape of its inputs, rows apart.

A reading knows how to make the model without memory, so a course is learnt wherever it is asked for, by two forwards on a few
rows each: two, because that tells which dims are rows. A model whose forward looks at values is made once, whole, on the CPU.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.course import Course, Record, course
from meshwright.model.crossing import record
from meshwright.model.dice import Dice
from meshwright.model.dropout import trial
from meshwright.model.reading import OTHER_BATCH, Reading
from meshwright.model.trial import PROBE_BATCH, depends_on_values

Inputs = Mapping[str, torch.Tensor]
Kind = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def learn(reading: Reading, inputs: Inputs, dtype: torch.dtype = torch.float32, *, training: bool = True) -> Course:
    """The course of the forward of the model of `reading` on rows like those of `inputs`, in training or in an evaluation.

    What counts as used of the outputs is what the loss takes: the others may be Foreign where a part runs. Raises PlanError
    for a forward that takes another way on another number of rows; what the forward itself raises passes.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        few, more = (_record(reading, inputs, rows, dtype, mode, training=training) for rows in (PROBE_BATCH, OTHER_BATCH))
    except Exception as error:
        if not depends_on_values(error):
            raise
        few, more = (_record(reading, inputs, rows, dtype, None, training=training) for rows in (PROBE_BATCH, OTHER_BATCH))
    return course(few, more, (PROBE_BATCH, OTHER_BATCH))


def bordered(reading: Reading, dtype: torch.dtype = torch.float32) -> Reading:
    """`reading` with the borders in its anatomy: the values between its blocks, in training on rows like those of its example."""
    inputs = {column.name: reading.example[column.name] for column in reading.anatomy.inputs}
    return replace(reading, anatomy=replace(reading.anatomy, borders=learn(reading, inputs, dtype).borders))


@dataclass
class Courses:
    """The courses of a model by the shape of its inputs, each learnt when it is first asked for."""

    reading: Reading
    dtype: torch.dtype = torch.float32
    _known: dict[tuple[Kind, bool], Course] = field(default_factory=dict)

    def of(self, inputs: Inputs, *, training: bool = True) -> Course:
        """The course of a forward on `inputs`, of any number of rows."""
        kind = tuple((key, tuple(value.shape[1:]), value.dtype) for key, value in inputs.items())
        if (kind, training) not in self._known:
            self._known[kind, training] = learn(self.reading, inputs, self.dtype, training=training)
        return self._known[kind, training]


def _record(
    reading: Reading, inputs: Inputs, rows: int, dtype: torch.dtype, mode: FakeTensorMode | None, *, training: bool
) -> Record:
    """What one forward on so many rows shows; on real tensors without a `mode`."""
    module, blocks, _ = reading.make("cpu", dtype, mode)
    some = {key: _rows(value, rows, dtype) for key, value in inputs.items()}
    if mode is not None:
        some = {key: mode.from_tensor(value) for key, value in some.items()}
    fakes: AbstractContextManager = nullcontext() if mode is None else mode
    dice = Dice(seed=0)
    used = {place for place, column in enumerate(reading.anatomy.outputs) if column.used}
    with fakes, trial(dice, rows), torch.set_grad_enabled(training):
        call, drawn = (lambda: module(**some)), (lambda: dice.count)
        return record(module if training else module.eval(), blocks, call, dice.enter, drawn, used)


def _rows(value: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """`rows` rows like those of `value`, on the CPU; floating ones in `dtype`."""
    few = value.detach()[: min(rows, len(value))].to("cpu", dtype if value.is_floating_point() else value.dtype)
    return few.repeat(-(-rows // len(few)), *[1] * (few.ndim - 1))[:rows]
