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

from meshwright.model.analysis.analyze import OTHER_BATCH, Reading
from meshwright.model.pipeline.forward_graph import Course, Record, course
from meshwright.model.pipeline.liveness import record
from meshwright.model.rng.dropout_mode import trial
from meshwright.model.rng.sites import Dice
from meshwright.model.sequence_parallel.hf_attention import plug
from meshwright.model.sequence_parallel.sharded_forward import OnlyRank
from meshwright.model.tensors.fake_cache import forget_fakes
from meshwright.model.trial.trial import PROBE_BATCH, depends_on_values
from meshwright.plan.job.errors import PlanError

MOST = 256  # courses that are kept: that of 32 layers takes some 0.2 MB, and to learn it again as long as some steps
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
    borders = courses_of(reading, dtype).of(inputs, compute, dealt=dealt).borders
    return replace(reading, anatomy=replace(reading.anatomy, borders=borders))


def courses_of(reading: Reading, dtype: torch.dtype) -> "Courses":
    """The courses of the model of `reading` with parameters in `dtype`: the same for all who ask, so each is learnt once."""
    return reading.courses.setdefault(dtype, Courses(reading, dtype))


@dataclass
class Courses:
    """The courses of a model by the shape of its inputs, each learnt when it is first asked for; threads may share them.

    Of more than `most` the one goes that nobody has asked for longest, so a run whose rows have any length does not grow.
    """

    reading: Reading
    dtype: torch.dtype = torch.float32
    most: int = MOST
    _known: dict[tuple[Kind, bool, torch.dtype | None, bool], Course] = field(default_factory=dict)
    _learning: Lock = field(default_factory=Lock, repr=False, compare=False)

    def of(self, inputs: Inputs, compute: torch.dtype | None = None, *, training: bool = True, dealt: bool = False) -> Course:
        """The course of a forward on `inputs`, of any number of rows, whose products compute in `compute`, as in `learn`."""
        kind = tuple((key, tuple(value.shape[1:]), value.dtype) for key, value in inputs.items())
        compute = None if compute == self.dtype else compute
        key = kind, training, compute, dealt
        with self._learning:
            known = self._known.pop(key, None)
            if known is None:
                known = learn(self.reading, inputs, self.dtype, training=training, compute=compute, dealt=dealt)
                while len(self._known) >= self.most:
                    del self._known[next(iter(self._known))]
            self._known[key] = known  # behind all others: it was asked for last
            return known


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
        plug(module, lambda queries, keys: None)
    casting = torch.autocast("cpu", dtype=compute, enabled=compute not in (None, dtype), cache_enabled=False)
    dice = Dice(seed=0)
    used = {place for place, column in enumerate(reading.anatomy.outputs) if column.used}
    try:
        with fakes, trial(dice, rows), torch.set_grad_enabled(training), casting:
            call, drawn = partial(module, **some), lambda: dice.count
            before = {key: value._version for key, value in some.items()}
            found = record(module if training else module.eval(), blocks, call, dice.enter, drawn, used, dealt)
    finally:
        forget_fakes(module)
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
