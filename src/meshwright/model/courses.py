"""The courses of a model: learnt from its forward on fake tensors, one for each shape of its inputs, rows apart.

A reading knows how to make the model without memory, so a course is learnt wherever it is asked for, by two forwards on a few
rows each: two, because that tells which dims are rows. A model whose forward looks at values is made once, whole, on the CPU.

Where products compute in another dtype than parameters have (autocast), so do they in these forwards: what a value is in when it
crosses follows from that, as autocast on a CPU has it. Where a device casts otherwise, that is told when the value is sent.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.core.errors import PlanError
from meshwright.model.course import Course, Record, course
from meshwright.model.crossing import record
from meshwright.model.dice import Dice
from meshwright.model.dropout import trial
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
) -> Course:
    """The course of the forward of the model of `reading` on rows like those of `inputs`, in training or in an evaluation.

    Parameters are in `dtype`, products compute in `compute` (None: as the parameters are). What counts as used of the outputs is
    what the loss takes: the others may be Foreign where a part runs. Raises PlanError for a forward that takes another way on
    another number of rows; what the forward itself raises passes.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        few, more = (_record(reading, inputs, rows, dtype, mode, training, compute) for rows in (PROBE_BATCH, OTHER_BATCH))
    except Exception as error:
        if not depends_on_values(error):
            raise
        few, more = (_record(reading, inputs, rows, dtype, None, training, compute) for rows in (PROBE_BATCH, OTHER_BATCH))
    return course(few, more, (PROBE_BATCH, OTHER_BATCH))


def bordered(reading: Reading, dtype: torch.dtype = torch.float32, compute: torch.dtype | None = None) -> Reading:
    """`reading` with the borders in its anatomy: the values between its blocks, in training on rows like those of its example."""
    inputs = {column.name: reading.example[column.name] for column in reading.anatomy.inputs}
    return replace(reading, anatomy=replace(reading.anatomy, borders=learn(reading, inputs, dtype, compute=compute).borders))


@dataclass
class Courses:
    """The courses of a model by the shape of its inputs, each learnt when it is first asked for."""

    reading: Reading
    dtype: torch.dtype = torch.float32
    _known: dict[tuple[Kind, bool, torch.dtype | None], Course] = field(default_factory=dict)

    def of(self, inputs: Inputs, *, training: bool = True) -> Course:
        """The course of a forward on `inputs`, of any number of rows; under autocast, where that is on."""
        kind = tuple((key, tuple(value.shape[1:]), value.dtype) for key, value in inputs.items())
        compute = _autocasting(next(iter(inputs.values())).device.type)
        if (kind, training, compute) not in self._known:
            self._known[kind, training, compute] = learn(self.reading, inputs, self.dtype, training=training, compute=compute)
        return self._known[kind, training, compute]


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
) -> Record:
    """What one forward on so many rows shows; on real tensors without a `mode`."""
    module, blocks, _ = reading.make("cpu", dtype, mode)
    some = {key: _rows(value, rows, dtype) for key, value in inputs.items()}
    if mode is not None:
        some = {key: mode.from_tensor(value) for key, value in some.items()}
    fakes: AbstractContextManager = nullcontext() if mode is None else mode
    casting = torch.autocast("cpu", dtype=compute, enabled=compute not in (None, dtype), cache_enabled=False)
    dice = Dice(seed=0)
    used = {place for place, column in enumerate(reading.anatomy.outputs) if column.used}
    with fakes, trial(dice, rows), torch.set_grad_enabled(training), casting:
        call, drawn = (lambda: module(**some)), (lambda: dice.count)
        before = {key: value._version for key, value in some.items()}
        found = record(module if training else module.eval(), blocks, call, dice.enter, drawn, used)
    for key, value in some.items():
        if value._version != before[key]:
            text = f"the forward writes into its input '{key}', and every part that a rank runs would do so again"
            raise PlanError(text, fix=f"begin the forward with {key} = {key}.clone()", where="model")
    return found


def _rows(value: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """`rows` rows like those of `value`, on the CPU; floating ones in `dtype`."""
    few = value.detach()[: min(rows, len(value))].to("cpu", dtype if value.is_floating_point() else value.dtype)
    return few.repeat(-(-rows // len(few)), *[1] * (few.ndim - 1))[:rows]
