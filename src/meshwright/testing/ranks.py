"""Ranks for a test: threads to test the maths, processes to test real communication.

`run_on_threads` runs a function on every rank of a mesh in this process: exact, deterministic, milliseconds
to start, and an error is raised here with its own traceback. `ProcessPool` runs it on gloo processes, which
also have separate interpreters, real sockets and real buffers. Starting a process and importing torch takes
seconds, so the pool keeps its workers between calls; each call uses a fresh store, so nothing of a failed one
survives.

    run_on_threads(body, Mesh(dp_shard=3))      pool.run(body, Mesh(dp_shard=3))      with def body(world):
                                                ...

The workers communicate with this process through multiprocessing's pipes. A worker that fails, hangs or dies
is reported by rank, and replaced unless it is idle again. When this process ends, so do they.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from types import TracebackType
from typing import Self, TypeVar, cast

import torch

from meshwright.comm.backends.threads import ThreadBackend, ThreadWorld
from meshwright.comm.collectives.group import World
from meshwright.comm.rendezvous import RendezvousEndpoint
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.rank_worker import NetworkLocation, RankResult, RankTask, serialize, serve_tasks

Result = TypeVar("Result")

START_TIMEOUT_S = 120.0  # for a worker to import torch
GRACE_S = 5.0  # for the other ranks to notice that one has failed
EXIT_TIMEOUT_S = 10.0  # for a worker to exit
DIED, HUNG = (
    float("-inf"),
    float("inf"),
)  # as moments of failure: a death comes before what it causes, a hanging rank last


class RankFailure(RuntimeError):
    """A rank of a `ProcessPool` failed, hung or died. The message names the first one and shows its stack."""


def run_on_threads(
    fn: Callable[[World], Result], mesh: Mesh, timeout_s: float = 60.0, device: torch.device | str = "cpu"
) -> list[Result]:
    """Returns the results of `fn(world)` on all ranks of `mesh`, in rank order; all compute on `device`.

    Each rank is a thread with one torch thread, in which its backwards run too: the thread of a GPU, which
    all would share, may wait for no other rank. `timeout_s` bounds every wait for a peer and, once a rank has
    failed, the wait for the others to end. Raises the error of the first rank that failed, with a note that
    names the rank.
    """
    backend = ThreadBackend(mesh, timeout_s)
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    ended: SimpleQueue[int] = SimpleQueue()

    def play(rank: int) -> None:
        torch.set_num_threads(1)
        world = ThreadWorld(backend, rank, device)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(world)
        except BaseException as error:
            errors[rank] = error
            backend.abort(rank, error)
        finally:
            world.close()
            ended.put(rank)

    threads = {
        rank: Thread(target=play, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(mesh.world_size)
    }
    torch_threads = torch.get_num_threads()
    for thread in threads.values():
        thread.start()
    try:
        while threads:
            threads.pop(ended.get(timeout=timeout_s if errors else None)).join()
    except Empty:
        pass  # these ranks ignore the failure of another; they are named below
    finally:
        torch.set_num_threads(torch_threads)
    if errors:
        raise _first_error(errors, backend, still_running=list(threads))
    return [results[rank] for rank in range(mesh.world_size)]


def _first_error(
    errors: dict[int, BaseException], backend: ThreadBackend, still_running: list[int]
) -> BaseException:
    culprit = backend.failure[0] if backend.failure is not None else -1
    rank = culprit if culprit in errors else next(iter(errors))
    errors[rank].add_note(f"raised on rank {rank} of {backend.mesh.world_size} ({backend.mesh})")
    if still_running:
        errors[rank].add_note(
            f"ranks {still_running} were still running {backend.timeout_s:g} s later, outside any collective"
        )
    return errors[rank]


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection

    def stop(self) -> None:
        """Ends the process, by force if it is not idle."""
        self.connection.close()  # an idle worker reads the end of the pipe and returns
        self.process.join(EXIT_TIMEOUT_S)
        self.process.kill()
        self.process.join()
        self.process.close()

    def abort(self, stack: Path) -> str:
        """Ends the process at once; returns its stack as text."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGABRT)  # the worker's fault handler writes the stack
        self.process.join(EXIT_TIMEOUT_S)
        return f"It was here:\n{stack.read_text()}" if stack.exists() else "It had not begun"


class ProcessPool:
    """Up to `max_ranks` worker processes, started on first use and kept until `close` (or the end of `with`).

    `locations`, one per rank, place them elsewhere than on this host's loopback. With `shared_memory` ranks
    use memory (comm/shared_memory), which is faster; else gloo alone.
    """

    def __init__(
        self, max_ranks: int = 4, locations: Sequence[NetworkLocation] = (), *, shared_memory: bool = True
    ) -> None:
        self.max_ranks, self.shared_memory = max_ranks, shared_memory
        self._locations = dict(enumerate(locations))
        self._workers: dict[int, _Worker] = {}  # by rank

    def run(
        self,
        fn: Callable[..., Result],
        mesh: Mesh,
        *args: object,
        timeout_s: float = 60.0,
        endpoint: RendezvousEndpoint | None = None,
    ) -> list[Result]:
        """Returns the results of `fn(world, *args)` on all ranks of `mesh`, in rank order.

        Each rank a gloo process. `fn` is at the top level of a module; it, the arguments and the results are
        copied between processes. The ranks meet at a file, or at `endpoint` if they have locations. Raises
        RankFailure when a rank fails, dies, or has not ended after `timeout_s`; PlanError when the mesh is
        larger than the pool; ValueError when `fn` or an argument cannot be copied.
        """
        if mesh.world_size > self.max_ranks:
            text = f"{mesh} has {mesh.world_size} ranks, and this pool at most {self.max_ranks} processes"
            raise PlanError(
                text, fix="use run_on_threads, a smaller mesh, or ProcessPool(max_ranks=...)", location="mesh"
            )
        with TemporaryDirectory(prefix="meshwright-") as folder:
            tasks = [
                RankTask(fn, args, mesh, rank, Path(folder), timeout_s, endpoint, self.shared_memory)
                for rank in range(mesh.world_size)
            ]
            try:
                messages = [serialize(task) for task in tasks]
            except Exception as error:
                text = f"{fn} and its arguments cannot be copied to another process ({error})"
                raise ValueError(
                    f"{text}. Define the function at the top level of a module, pass plain values"
                ) from error
            self._start(mesh.world_size)
            for rank, message in enumerate(messages):
                self._workers[rank].connection.send_bytes(message)
            answers = self._collect(tasks)
        failed = {rank: answer for rank, answer in answers.items() if answer.error}
        if failed:
            raise RankFailure(_failure_text(failed, mesh, timeout_s))
        return cast(list[Result], [answers[rank].result for rank in range(mesh.world_size)])

    def close(self) -> None:
        """Ends all workers. A later `run` starts new ones."""
        for worker in self._workers.values():
            worker.connection.close()  # all at once, so that they exit side by side
        while self._workers:
            self._workers.popitem()[1].stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, count: int) -> None:
        for rank in [rank for rank, worker in self._workers.items() if not worker.process.is_alive()]:
            self._discard(rank)
        context = multiprocessing.get_context("spawn")
        fresh = [rank for rank in range(count) if rank not in self._workers]
        for rank in fresh:
            here, there = context.Pipe()
            process = context.Process(
                target=serve_tasks, args=(there, self._locations.get(rank)), daemon=True
            )
            process.start()
            there.close()  # now the death of the worker ends the pipe
            self._workers[rank] = _Worker(process, here)
        for rank in fresh:
            connection = self._workers[rank].connection
            try:
                ready = connection.poll(START_TIMEOUT_S) and connection.recv()
            except EOFError:
                ready = None
            if not ready:
                self.close()
                text = f"a worker died as it started, or was not ready after {START_TIMEOUT_S:g} s"
                raise RankFailure(
                    f"{text}. Read what it printed; "
                    "a script that uses a pool needs `if __name__ == '__main__':`"
                )

    def _collect(self, tasks: list[RankTask]) -> dict[int, RankResult]:
        answers: dict[int, RankResult] = {}
        busy = {self._workers[task.rank].connection: (task.rank, self._workers[task.rank]) for task in tasks}
        deadline = time.monotonic() + tasks[0].timeout_s + GRACE_S
        try:
            while busy and (ready := wait(list(busy), max(0.0, deadline - time.monotonic()))):
                for connection in [connection for connection in busy if connection in ready]:
                    rank, worker = busy.pop(connection)
                    try:
                        answers[rank] = connection.recv()
                    except (EOFError, OSError):
                        where = worker.abort(tasks[rank].stack_file)
                        answers[rank] = RankResult(
                            error=f"the process died with exit code {worker.process.exitcode}. {where}",
                            failed_at_s=DIED,
                        )
                    if answers[rank].error:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
            for rank, worker in busy.values():
                answers[rank] = RankResult(
                    error=f"had not ended. {worker.abort(tasks[rank].stack_file)}", failed_at_s=HUNG
                )
        finally:
            for rank, _ in busy.values():
                self._discard(rank)
        return answers

    def _discard(self, rank: int) -> None:
        worker = self._workers.pop(rank)
        worker.process.kill()
        worker.stop()


def _failure_text(failed: dict[int, RankResult], mesh: Mesh, timeout_s: float) -> str:
    first, *others = sorted(failed, key=lambda rank: (failed[rank].failed_at_s, rank))
    lines = [
        f"rank {first} of {mesh.world_size} ({mesh}) failed first (a call may last {timeout_s:g} s):",
        failed[first].error.rstrip(),
    ]
    for rank in others:
        text = failed[rank].error.rstrip()
        lines.append(
            f"then rank {rank}: {text if failed[rank].failed_at_s == HUNG else text.splitlines()[-1]}"
        )
    return "\n".join(lines)
