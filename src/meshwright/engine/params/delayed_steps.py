"""Optimizer steps that the host runs beside the next step of the device
(`delay` of parallel/memory/tiers/offload.py).

    STEP(group)            gives the step of the group to a thread, and returns
    FETCH_PARAM(group)     of the next step waits for it, then copies the stepped weights to the device
    OFFLOAD_GRAD(group)    likewise, before it overwrites the gradients that the thread reads

PyTorch's kernels run without Python's lock, so thread and device compute at once. A checkpoint holds the
weights that are stepped and those that the device computes with (engine/optim/sharded_state_dict.py).
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.job.errors import PlanError


class DelayedSteps:
    """The steps of the optimizers of one rank that are under way in a thread; without `delay` there are
    none.
    """

    def __init__(self, state: RankState) -> None:
        self.is_active = bool(state.plan.sharding.tiers.delay)
        self._thread = ThreadPoolExecutor(1, "optimizer") if self.is_active else None
        self._under_way: dict[str, Future[None]] = {}

    def check_scheduler(self, lr_scheduler: object) -> None:
        """Raises PlanError for a scheduler of the caller, which would change rates while the thread steps."""
        if self.is_active and lr_scheduler is not None:
            text = "a scheduler that was passed changes the rates while the host steps (offload, delay)"
            fix = "pass none: name a schedule in the job (lr_schedule.name), or remove delay"
            raise PlanError(text, fix=fix, location="lr_scheduler")

    def run(self, name: str, step: Callable[[], None]) -> None:
        """Gives `step`, that of the action `name`, to the thread, behind those that it has; without delay,
        runs it.
        """
        if self._thread is None:
            step()
        else:
            self._under_way[name] = self._thread.submit(step)

    def wait_for(self, names: Iterable[str]) -> None:
        """Waits for the steps of the actions `names`; raises what one has raised, and forgets the others."""
        try:
            for name in names:
                if name in self._under_way:
                    self._under_way.pop(name).result()
        except BaseException:
            wait(self._under_way.values())
            self._under_way.clear()
            raise

    def wait_for_all(self) -> None:
        """Waits for all steps."""
        self.wait_for(list(self._under_way))

    def close(self) -> None:
        """Ends the thread, when its steps have ended."""
        if self._thread is not None:
            self._thread.shutdown()
