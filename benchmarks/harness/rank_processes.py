"""Runs measured steps in this process, or in a group of processes that block until it is their turn.

    parent            rank 0                 rank 1
    "step" ------->   step(), clocks         step(), clocks
           <-------   (cpu_s, wall_s, note)  (cpu_s, wall_s, note)

A rank is built once by `build(rank, size, **arguments)`, which returns the callable that runs one step.
Between turns it blocks on its pipe. It must not spin: spinning is outside load for the other configurations,
and discards the round. Ranks are forked from one server process that has imported the large packages and has
never started a thread, so a dozen of them start quickly and share the pages of their imports.
"""

import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Literal, Self

from benchmarks.harness.interleaved_timing import Cost

# One thread per rank unless `build` sets another number, and threads that sleep while they wait. Both are
# read when the OpenMP runtime is loaded, so they must be set before the server of ranks starts.
QUIET = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
Step = Callable[[], object]
Start = Literal["forkserver", "spawn"]


# A function of a module (it is sent by name): build(rank, size, **arguments) prepares one rank and returns
# its step. The return value of the step becomes its note.
Build = Callable[..., Step]


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer. The message contains its traceback or its exit status."""


@dataclass(frozen=True)
class InProcess:
    """A step of this process."""

    name: str
    run: Step

    def step(self) -> Cost:
        """Runs one step; its CPU seconds are those of the whole process meanwhile."""
        return _timed(self.run)


def _timed(run: Step) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    note = run()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall, (note,))


class Ranks:
    """A configuration of `size` processes that step together; a context manager that ends them on exit.

    `arguments` go to `build` in every rank and must be plain values. A step may take `timeout_s`.
    """

    def __init__(
        self,
        name: str,
        build: Build,
        size: int = 1,
        *,
        preload: Sequence[str] = ("torch",),
        start: Start = "forkserver",
        timeout_s: float = 600.0,
        **arguments: Any,
    ) -> None:
        self.name, self.timeout_s = name, timeout_s
        os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
        context = get_context("forkserver") if start == "forkserver" else get_context("spawn")
        if start == "forkserver":
            context.set_forkserver_preload([__name__, *preload])
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(size):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(child_end, build, rank, size, arguments),
                name=f"{name}-{rank}",
                daemon=True,
            )
            process.start()
            child_end.close()  # only the rank has this end now, so its death is an end of file here
            self.pipes.append(parent_end)
            self.processes.append(process)
        try:
            self._replies()
        except RankFailed:
            self.close()
            raise

    def step(self) -> Cost:
        """Runs one step on every rank; returns the sum of their CPU seconds and the maximum of their wall
        seconds.

        Raises RankFailed when a rank raises, dies, or does not answer within `timeout_s`.
        """
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send("step")
            except OSError as gone:
                raise self._failed(rank, self._death(rank)) from gone
        costs = self._replies()
        notes = tuple(note for cost in costs for note in cost.notes)
        return Cost(sum(cost.cpu_s for cost in costs), max(cost.wall_s for cost in costs), notes)

    def close(self) -> None:
        """Ends all processes of this configuration; a rank that does not end within 5 seconds is killed."""
        for pipe in self.pipes:
            pipe.close()  # a waiting rank reads the end of file and returns
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _replies(self) -> list[Cost]:
        replies: dict[int, Cost] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(replies) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in replies}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failed(
                    min(waiting.values()),
                    (
                        f"no answer within {self.timeout_s:g} s; use a longer timeout_s, or look where "
                        f"it waits"
                    ),
                )
            replies.update(
                {waiting[pipe]: self._reply(waiting[pipe]) for pipe in self.pipes if pipe in ready}
            )
        return [replies[rank] for rank in range(len(self.pipes))]

    def _reply(self, rank: int) -> Cost:
        try:
            reply = self.pipes[rank].recv()
        except (EOFError, OSError) as gone:
            raise self._failed(rank, self._death(rank)) from gone
        if isinstance(reply, Cost):
            return reply
        raise self._failed(rank, str(reply))

    def _death(self, rank: int) -> str:
        self.processes[rank].join(5)
        return f"its process ended with exit status {self.processes[rank].exitcode}; its own output says why"

    def _failed(self, rank: int, why: str) -> RankFailed:
        return RankFailed(
            f"rank {rank} of {len(self.processes)} of configuration '{self.name}' failed: {why}"
        )


def _serve(pipe: Connection, build: Build, rank: int, size: int, arguments: dict[str, Any]) -> None:
    try:
        run = build(rank, size, **arguments)
        pipe.send(Cost(0.0, 0.0))
        while pipe.recv() == "step":
            pipe.send(_timed(run))
    except EOFError:
        return  # the parent closed its end: the measurement is over
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


def close_all(configurations: Iterable[object]) -> None:
    """Ends the processes of every configuration that has any."""
    for configuration in configurations:
        if isinstance(configuration, Ranks):
            configuration.close()
