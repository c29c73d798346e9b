"""Declares the tensors that a technique keeps from step to step: they are sized, saved and resharded.

    I         every rank holds the value                                 an average, a loss scale
    P         every rank holds a summand, the value is their sum         the residual of compressed gradients
    S(flat)   every rank holds the elements of its shard                 a momentum of sharded parameters

A tensor of a parameter has its shape, and is sliced like it along the axes of tensor parallelism. In a
checkpoint a P tensor has a leading dim with one summand per rank, so that the same plan resumes with the same
bits. Under m ranks in place of n, rank i takes the sum of summands i, i + m, i + 2 m ...: their sum stays.

A history has one row per step, the newest last; one of another length keeps its newest rows.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.job import Job, LossGuard
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.model_spec.model_spec import PARAM_DTYPE_NBYTES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.tensor_placements import FLAT, Layout, S

STATE_PREFIX = "state/"  # of their names in a checkpoint
ANSWER_PREFIX = f"{STATE_PREFIX}observer/"  # of what observers have answered


@dataclass(frozen=True)
class StateSpec:
    """One tensor, filled with `fill` before the first step; if it `is_random`, with normal numbers, and if it
    `fills_from_param`, with the values of its parameter.

    With `param` it belongs to that parameter and has its shape; else `shape` is the shape on every rank.
    `layout` says where it is P or S(flat). What Python reads every step stays `on_host`. One that
    `may_begin_anew` does so where a checkpoint has another shape, which is refused else. One that
    `ends_with_params` begins anew where parameters are given that no step has made.
    """

    name: str
    shape: tuple[int, ...] = ()
    param: str = ""
    dtype: str = "float32"
    layout: Layout = Layout()
    fill: float = 0.0
    on_host: bool = False
    is_history: bool = False
    is_random: bool = False
    may_begin_anew: bool = False
    fills_from_param: bool = False
    ends_with_params: bool = False

    @property
    def key(self) -> str:
        """The name that is unique within its technique: "averages", "residual/layers.0.weight"."""
        return f"{self.name}/{self.param}" if self.param else self.name

    def shape_of_one(self, saved: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of one summand, or of one row of a history, of a tensor whose shape in a
        checkpoint is `saved`.
        """
        is_stacked = self.is_history or bool(self.layout.axes_with("P"))
        return tuple(saved[1:] if is_stacked else saved)

    @property
    def is_shard(self) -> bool:
        """Whether a rank holds a shard of the flat parameter only."""
        return any(placement == S(FLAT) for _, placement in self.layout.placements)


def loss_scale_states(precision: PrecisionConfig) -> tuple[StateSpec, ...]:
    """Returns the loss scale, and the number of good steps since it changed."""
    return (
        StateSpec("value", dtype="float64", fill=precision.loss_scale, on_host=True),
        StateSpec("num_good_steps", dtype="int64", on_host=True),
    )


def guard_states(guard: LossGuard) -> tuple[StateSpec, ...]:
    """Returns the loss and gradient norm of the last good steps, and the number of steps skipped in a row."""
    window = StateSpec("window", (guard.window, 2), "", "float64", fill=inf, on_host=True, is_history=True)
    return window, StateSpec("num_skipped_in_a_row", dtype="int64", on_host=True)


NOISE_SCALE_STATES = (StateSpec("averages", (2,), dtype="float64", on_host=True),)  # of |G|^2 and S


def job_states(job: Job) -> Iterator[tuple[str, tuple[StateSpec, ...]]]:
    """Yields what the options of `job` keep from step to step, by owner."""
    precision = job.precision.effective
    if precision.scales_loss:
        yield "loss_scale", loss_scale_states(precision)
    if job.guard.action != "off":
        yield "guard", guard_states(job.guard)
    if job.train.noise_scale:
        yield "noise_scale", NOISE_SCALE_STATES


def owner_names(names: Iterable[str]) -> list[str]:
    """Returns a name for each strategy: its own, and a number where several have the same."""
    names, seen = list(names), Counter[str]()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if names.count(name) == 1 else f"{name}.{seen[name]}")
    return found


def state_diagnostics(owner: str, specs: Iterable[StateSpec], view: RankView) -> Iterator[Diagnostic]:
    """Yields what is wrong with the tensors that the strategy `owner` declares."""
    shardings = {each.param.name: each for each in view.param_shardings}
    for spec in specs:
        where, param_sharding = f"strategies.{owner}", shardings.get(spec.param)
        if spec.dtype not in PARAM_DTYPE_NBYTES:
            fix = f"use one of {', '.join(PARAM_DTYPE_NBYTES)}"
            yield Diagnostic(f"the state '{spec.key}' has the dtype '{spec.dtype}'", fix, where)
        if spec.param and (param_sharding is None or spec.shape):
            fix = "name a parameter of view.model_spec, and give no shape: it is the parameter's"
            yield Diagnostic(f"the state '{spec.key}' is of no parameter of this rank", fix, where)
        elif spec.is_shard and (param_sharding is None or not param_sharding.flat_shard_axes):
            fix = "use P or I, or a strategy that shards the parameter (zero)"
            yield Diagnostic(f"the state '{spec.key}' is S(flat), and its parameter is not", fix, where)


def local_state_nbytes(spec: StateSpec, view: RankView) -> int:
    """Returns the bytes of `spec` on the device of the rank of `view`."""
    if spec.on_host:
        return 0
    return _local_numel(spec, view) * PARAM_DTYPE_NBYTES[spec.dtype]


def _local_numel(spec: StateSpec, view: RankView) -> int:
    if not spec.param:
        return prod(spec.shape)
    if spec.is_shard:
        return sum(
            shard.numel
            for flat_param in view.flat_param_specs.values()
            for shard in flat_param.param_shards(view.plan.mesh.index(view.coordinate, flat_param.axes))
            if shard.name == spec.param
        )
    return sum(each.param.numel for each in view.param_shardings if each.param.name == spec.param)
