"""Records what a rank used: seconds by phase, memory by category, bytes by action. It is cheap enough to be
always on.

Every rank writes `ranks/rank-N.json` after its first step and at the end, and a trace if it was requested.
The phases are data (waiting for samples), step (executing the actions) and save. Memory is the bytes of
tensors between two steps, the peak of the activations in the first step (activation_memory.py), and the
high-water mark of the process: resident on a CPU, allocated on a GPU. Bytes sent are those of the ledger,
that is, what the collectives of this rank really sent, by action; `report` compares them with the program.
Where blocks are compiled, the graphs since this start, and the calls without one, are counted too.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from meshwright.comm.collectives.group import World
from meshwright.device.device_memory import peak_memory
from meshwright.device.local_device import device_name
from meshwright.engine.runtime.step_profiler import StepProfiler
from meshwright.engine.step.executor import StepExecutor
from meshwright.plan.hardware.device_specs import peak_flops
from meshwright.plan.job.file_format import RANK_USAGE
from meshwright.plan.plan import Plan
from meshwright.run.telemetry.activation_memory import ActivationRecorder
from meshwright.run.telemetry.atomic_write import replace_file
from meshwright.run.telemetry.chrome_trace import LoopPhase, StepTracer

RANKS_FOLDER = "ranks"

logger = logging.getLogger(__name__)


def rank_usage_path(folder: Path, rank: int) -> Path:
    """Returns the file of `rank` inside the run's `folder`."""
    return folder / RANKS_FOLDER / f"rank-{rank}.json"


class RankUsage:
    """Records what one rank uses from its current step to step `last`."""

    def __init__(self, executor: StepExecutor, plan: Plan, world: World, last: int) -> None:
        self._executor, self._plan, self._world = executor, plan, world
        folder, first = Path(plan.run.folder), executor.steps_done
        self._path = rank_usage_path(folder, world.rank)
        self._tracer = StepTracer(folder, world.rank, world.device, plan.run.trace_steps, first, last)
        self._activation_recorder = ActivationRecorder()
        self._step, self._steps = first, 0
        self._seconds: dict[str, float] = defaultdict(float)
        self._last: dict[str, float] = {}
        self._before = dict(world.ledger.sent_nbytes)
        self._flops = plan.model_spec.train_flops
        self._peak = _peak_flops(plan, world.device)

    def begin_step(self, step: int) -> StepProfiler | None:
        """Marks the begin of `step`; returns the profiler of the step, or None if the step is not traced."""
        self._step = step
        return self._tracer.start_step(step)

    def measure_activations(self) -> AbstractContextManager[None]:
        """Context manager around a step: measures its activations, if it is the first."""
        if self._steps:
            return nullcontext()
        return self._activation_recorder.recording(self._executor)

    @contextmanager
    def timed_phase(self, name: str) -> Iterator[None]:
        """Measures the body as phase `name` of the current step."""
        begin = perf_counter()
        yield
        end = perf_counter()
        self._last[name] = end - begin
        self._seconds[name] += end - begin
        self._tracer.add_phase(self._step, LoopPhase(name, begin, end))

    def pop_phase_seconds(self, name: str) -> float:
        """Returns the seconds of the last phase `name` and forgets them; 0 if there was none."""
        return self._last.pop(name, 0.0)

    def throughput(self, samples: int, seconds: float) -> tuple[float | None, float | None]:
        """Returns the FLOP/s of all ranks for a step of `samples`, and the fraction of the peak (MFU); None
        if unknown. Where sites train apart, both are of the ranks of one site, which had the samples.
        """
        if not self._flops:
            return None, None
        flops = self._flops * samples / seconds
        num_ranks = self._plan.mesh.world_size // self._plan.num_sites
        return flops, None if self._peak is None else flops / (self._peak * num_ranks)

    def end_step(self) -> None:
        """Marks the end of the step, checkpoint included."""
        self._steps += 1
        self._tracer.end_step(self._step)
        if self._steps == 1:
            self.write()

    def close(self) -> None:
        """Writes the usage file and the trace."""
        self._tracer.write()
        if self._steps:
            self.write()

    def write(self) -> None:
        """Writes the usage file. If it cannot be written, logs a warning."""
        try:
            replace_file(self._path, json.dumps(self._as_dict(), indent=1) + "\n")
        except OSError as error:
            logger.warning("the usage file of this rank cannot be written to '%s': %s", self._path, error)

    def _as_dict(self) -> dict[str, Any]:
        device = self._world.device
        sent = {
            name: total - self._before.get(name, 0.0)
            for name, total in self._world.ledger.sent_nbytes.items()
        }
        memory = self._executor.memory_by_category()
        if self._activation_recorder.peak_nbytes is not None:
            memory["activations"] = self._activation_recorder.peak_nbytes
        graphs = self._executor.state.compiled_graphs
        return {
            **RANK_USAGE.header,
            "rank": self._world.rank,
            "device": device_name(device),
            "steps": self._steps,
            "last_step": self._step,
            "seconds": dict(self._seconds),
            "memory": {**memory, "peak": peak_memory(device)},
            "sent": {name: nbytes for name, nbytes in sent.items() if nbytes},
            **({} if graphs is None else {"compiled_blocks": graphs.as_dict()}),
        }


def _peak_flops(plan: Plan, device: torch.device) -> float | None:
    dtype = plan.job.precision.compute
    if dtype == "float32" and plan.job.precision.tf32:
        return None  # TF32 is faster than the peak of float32, and the table does not have it
    return peak_flops(device_name(device), dtype)
