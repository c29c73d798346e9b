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

from meshwright.model.analysis.analyze import SECOND_BATCH_SIZE, AnalyzedModel
from meshwright.model.pipeline.forward_graph import ForwardGraph, ForwardRecord, build_forward_graph
from meshwright.model.pipeline.liveness import record_forward
from meshwright.model.rng.dropout_mode import record_draw_sites
from meshwright.model.rng.sites import StatelessRNG
from meshwright.model.sequence_parallel.hf_attention import patch_attention
from meshwright.model.sequence_parallel.sharded_forward import SingleRankForward
from meshwright.model.tensors.fake_cache import clear_fake_caches
from meshwright.model.trial.trial import PROBE_BATCH, depends_on_values
from meshwright.plan.job.errors import PlanError

MAX_FORWARD_GRAPHS = 256  # courses that are kept: that of 32 layers takes some 0.2 MB, and to learn it again as long as some steps
Inputs = Mapping[str, torch.Tensor]
InputSignature = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def trace_forward_graph(
    analyzed: AnalyzedModel,
    inputs: Inputs,
    dtype: torch.dtype = torch.float32,
    *,
    training: bool = True,
    compute_dtype: torch.dtype | None = None,
    sequence_sharded: bool = False,
) -> ForwardGraph:
    """The course of the forward of the model of `reading` on rows like those of `inputs`, in training or in an evaluation.

    Parameters are in `dtype`, products compute in `compute` (None: as the parameters are). What counts as used of the outputs is
    what the loss takes: the others may be Foreign where a part runs. Where tokens are `dealt` to ranks, a third run tells of
    which values a rank has its own. Raises PlanError for a forward that takes another way on another number of rows; what the
    forward itself raises passes.
    """
    rows = PROBE_BATCH, SECOND_BATCH_SIZE
    mode: FakeTensorMode | None = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        few, more = (
            _record_forward(analyzed, inputs, each, dtype, mode, training, compute_dtype) for each in rows
        )
    except Exception as error:
        if not depends_on_values(error):
            raise
        mode = None
        few, more = (
            _record_forward(analyzed, inputs, each, dtype, mode, training, compute_dtype) for each in rows
        )
    own = SingleRankForward.for_inputs(analyzed.sequence_info, inputs) if sequence_sharded else None
    third = (
        None
        if own is None
        else _record_forward(analyzed, inputs, rows[0], dtype, mode, training, compute_dtype, own)
    )
    return build_forward_graph(few, more, rows, third)


def add_stage_boundaries(
    analyzed: AnalyzedModel,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    *,
    sequence_sharded: bool = False,
) -> AnalyzedModel:
    """`reading` with the borders in its anatomy: the values between its blocks, in training on rows like those of its example.

    With `dealt`, of which of them a rank has its own tokens.
    """
    inputs = {column.name: analyzed.example[column.name] for column in analyzed.model_spec.inputs}
    borders = (
        get_forward_graphs(analyzed, dtype)
        .get(inputs, compute_dtype, sequence_sharded=sequence_sharded)
        .boundaries
    )
    return replace(analyzed, model_spec=replace(analyzed.model_spec, stage_boundaries=borders))


def get_forward_graphs(analyzed: AnalyzedModel, dtype: torch.dtype) -> "ForwardGraphCache":
    """The courses of the model of `reading` with parameters in `dtype`: the same for all who ask, so each is learnt once."""
    return analyzed.forward_graphs.setdefault(dtype, ForwardGraphCache(analyzed, dtype))


@dataclass
class ForwardGraphCache:
    """The courses of a model by the shape of its inputs, each learnt when it is first asked for; threads may share them.

    Of more than `most` the one goes that nobody has asked for longest, so a run whose rows have any length does not grow.
    """

    analyzed: AnalyzedModel
    dtype: torch.dtype = torch.float32
    max_graphs: int = MAX_FORWARD_GRAPHS
    _graphs: dict[tuple[InputSignature, bool, torch.dtype | None, bool], ForwardGraph] = field(
        default_factory=dict
    )
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def get(
        self,
        inputs: Inputs,
        compute_dtype: torch.dtype | None = None,
        *,
        training: bool = True,
        sequence_sharded: bool = False,
    ) -> ForwardGraph:
        """The course of a forward on `inputs`, of any number of rows, whose products compute in `compute`, as in `learn`."""
        kind = tuple((key, tuple(value.shape[1:]), value.dtype) for key, value in inputs.items())
        compute_dtype = None if compute_dtype == self.dtype else compute_dtype
        key = kind, training, compute_dtype, sequence_sharded
        with self._lock:
            known = self._graphs.pop(key, None)
            if known is None:
                known = trace_forward_graph(
                    self.analyzed,
                    inputs,
                    self.dtype,
                    training=training,
                    compute_dtype=compute_dtype,
                    sequence_sharded=sequence_sharded,
                )
                while len(self._graphs) >= self.max_graphs:
                    del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = known  # behind all others: it was asked for last
            return known


def _record_forward(
    reading: AnalyzedModel,
    inputs: Inputs,
    rows: int,
    dtype: torch.dtype,
    mode: FakeTensorMode | None,
    training: bool,
    compute: torch.dtype | None,
    dealt: SingleRankForward | None = None,
) -> ForwardRecord:
    """What one forward on so many rows shows; on real tensors without a `mode`.

    With `dealt` it runs as on ranks with some of the tokens: glue on real ones, as it was looked through (model/passing.py).
    """
    module, blocks, _ = reading.make_module("cpu", dtype, mode)
    some = {key: _make_samples(value, rows, dtype) for key, value in inputs.items()}
    fakes: AbstractContextManager = nullcontext()
    if mode is not None and dealt is None:
        some, fakes = {key: mode.from_tensor(value) for key, value in some.items()}, mode
    elif mode is not None:
        for block in blocks.values():
            block.forward = partial(_run_in_mode, mode, block.forward)
    if dealt is not None:
        patch_attention(module, lambda queries, keys: None)
    casting = torch.autocast("cpu", dtype=compute, enabled=compute not in (None, dtype), cache_enabled=False)
    dice = StatelessRNG(seed=0)
    used = {place for place, column in enumerate(reading.model_spec.outputs) if column.used_by_loss}
    try:
        with fakes, record_draw_sites(dice, rows), torch.set_grad_enabled(training), casting:
            call, drawn = partial(module, **some), lambda: dice.num_draws
            before = {key: value._version for key, value in some.items()}
            found = record_forward(
                module if training else module.eval(), blocks, call, dice.enter_block, drawn, used, dealt
            )
    finally:
        clear_fake_caches(module)
    for key, value in some.items():
        if value._version != before[key]:
            text = f"the forward writes into its input '{key}', and every part that a rank runs would do so again"
            raise PlanError(text, fix=f"begin the forward with {key} = {key}.clone()", location="model")
    return found


def _run_in_mode(mode: FakeTensorMode, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return forward(*args, **kwargs)


def _make_samples(value: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """`rows` rows like those of `value`, on the CPU; floating ones in `dtype`."""
    few = value.detach()[: min(rows, len(value))].to(
        "cpu", dtype if value.is_floating_point() else value.dtype
    )
    return few.repeat(-(-rows // len(few)), *[1] * (few.ndim - 1))[:rows]
