"""Sums the load of experts over steps, so that a run of any length has about a hundred lines of it."""

from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.plan.plan import Plan
from meshwright.plan.sharding.expert_load import ExpertLoad, busiest, expert_ranges_by_layer
from meshwright.run.telemetry.metrics_log import EXPERT_LOAD

MAX_LINES = 100
STEP_FIELDS = ("busiest_expert", "busiest_rank", "dropped_share")
ROUND_FIELDS = ("round_loss", "round_tokens")


class ExpertLoadLines:
    """The loads since the last line, by layer; a line ends with every n-th step, and with the last."""

    def __init__(self, plan: Plan) -> None:
        self._ranges = expert_ranges_by_layer(plan.sharding)
        self._steps = plan.job.train.steps
        self._every = -(-self._steps // MAX_LINES)
        self._sums: dict[str, ExpertLoad] = {}
        self._first_step = 0

    def add(self, step: int, loads: Iterable[ExpertLoad]) -> dict[str, Any] | None:
        """Adds the loads of `step`; returns a line if the step ends one."""
        if not self._sums:
            self._first_step = step
        for load in loads:
            before = self._sums.get(load.layer)
            self._sums[load.layer] = load if before is None else before + load
        if not self._sums or (step % self._every and step != self._steps):
            return None
        layers = {name: self._layer(load) for name, load in self._sums.items()}
        self._sums = {}
        return {"kind": EXPERT_LOAD, "step": step, "first_step": self._first_step, "layers": layers}

    def _layer(self, load: ExpertLoad) -> dict[str, Any]:
        ranks = load.rank_counts(self._ranges.get(load.layer, []))
        return {"experts": load.counts, "ranks": ranks, "dropped": load.num_dropped}

    def worst(self, loads: Iterable[ExpertLoad]) -> tuple[float | None, float | None, float | None]:
        """Returns the load of the busiest expert, and of the busiest rank, over the mean, in the layer where
        that is most, and the share of all choices that were dropped; None: there are no experts, or each
        rank has all.
        """
        loads = list(loads)
        by_rank = [load.rank_counts(self._ranges[load.layer]) for load in loads if load.layer in self._ranges]
        dropped = sum(load.num_dropped for load in loads)
        total = sum(sum(load.counts) for load in loads) + dropped
        return (
            max((busiest(load.counts) for load in loads), default=None),
            max(map(busiest, by_rank), default=None),
            dropped / total if total else None,
        )


def without_expert_load(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record of a step; without the fields of its experts, if there are none, and of a round, if
    none ends.
    """
    optional = (*STEP_FIELDS, *ROUND_FIELDS)
    return {name: value for name, value in record.items() if value is not None or name not in optional}
