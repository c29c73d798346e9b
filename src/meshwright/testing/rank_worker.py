"""The worker process of a `ProcessPool`: runs one rank of one call after another.

A worker waits for a `RankTask` on its pipe, meets the other ranks at the store of that call, runs the
function and sends back a `RankResult`. When it crashes, or is aborted because it hangs, it writes its stack;
when its parent ends it exits at once. gloo listens on one interface only: loopback, unless the worker has a
`NetworkLocation`.
"""

import copyreg
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from threading import Thread

import torch

from meshwright.comm.rendezvous import RendezvousEndpoint
from meshwright.comm.world import init_world
from meshwright.plan.sharding.mesh import Mesh

COLLECTIVE_TIME_FRACTION = (
    0.8  # of the time of a call: a stuck collective gives up first, because its message names the action
)


CLONE_NEWNET = 0x40000000  # of setns(2): the network only


@dataclass(frozen=True)
class NetworkLocation:
    """The place of a worker in the network: `interface` of a network namespace, which stands for a host."""

    namespace: Path
    interface: str

    def enter(self) -> None:
        """Moves the calling thread, and the threads that it starts later, into the namespace.

        Makes gloo listen there. Raises OSError when there is no such namespace, or this process may not enter
        it.
        """
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on
        with self.namespace.open("rb") as opened:
            if libc.setns(opened.fileno(), CLONE_NEWNET):
                why = os.strerror(ctypes.get_errno())
                raise OSError(
                    f"cannot enter the network namespace {self.namespace} ({why}). Only root may; "
                    "`ip netns` lists them"
                )
        os.putenv("GLOO_SOCKET_IFNAME", self.interface)  # gloo takes its interface from nowhere else


@dataclass(frozen=True)
class RankTask:
    """One rank's part of a call: `fn(world, *args)`.

    The ranks meet at `endpoint`, or at a file in `folder`, which is empty. With `shared_memory` they use it
    where they can.
    """

    fn: Callable[..., object]
    args: tuple[object, ...]
    mesh: Mesh
    rank: int
    folder: Path
    timeout_s: float
    endpoint: RendezvousEndpoint | None = None
    shared_memory: bool = True

    @property
    def stack_file(self) -> Path:
        """The file with the stack of this rank after a crash or an abort."""
        return self.folder / f"stack_{self.rank}.txt"


@dataclass(frozen=True)
class RankResult:
    """The result of a task, or its traceback as text and the time of the failure on the host's clock."""

    result: object = None
    error: str = ""
    failed_at_s: float = 0.0


class _CopyingPickler(ForkingPickler):
    """multiprocessing's own pickler, with tensors as bytes.

    Shared memory would tie the result to the worker's life.
    """

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self.dispatch_table = dict(copyreg.dispatch_table)  # without those that torch has added for tensors


def serialize(message: RankTask | RankResult) -> memoryview:
    """Returns `message` as bytes for `Connection.send_bytes`; the other end reads it with `recv`."""
    buffer = BytesIO()
    _CopyingPickler(buffer).dump(message)
    return buffer.getbuffer()


def serve_tasks(connection: Connection, location: NetworkLocation | None = None) -> None:
    """Runs tasks from `connection` until it closes, at `location` or on loopback.

    Sends one empty result first: ready.
    """
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # an interrupt at the terminal reaches the parent, which ends its workers
    torch.set_num_threads(1)
    if location is not None:
        location.enter()
    else:
        _listen_on_loopback()
    Thread(target=_exit_with_parent, daemon=True).start()
    connection.send_bytes(serialize(RankResult()))
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        except Exception:
            repair = (
                "Define the function of a pool at the top level of a module that a new process can import"
            )
            connection.send_bytes(
                serialize(RankResult(error=traceback.format_exc() + repair, failed_at_s=time.monotonic()))
            )
            continue
        connection.send_bytes(_run_task(task))


def _run_task(task: RankTask) -> memoryview:
    failed_at = 0.0
    with task.stack_file.open("w") as stack:
        faulthandler.enable(stack)
        try:
            path = None if task.endpoint is not None else task.folder / "store"
            limit_s = COLLECTIVE_TIME_FRACTION * task.timeout_s
            with init_world(
                task.mesh,
                task.rank,
                store_path=path,
                endpoint=task.endpoint,
                timeout_s=limit_s,
                shared_memory=task.shared_memory,
            ) as world:
                try:
                    result = task.fn(world, *task.args)
                except BaseException:
                    failed_at = time.monotonic()  # before the sockets close, which fails the peers too
                    raise
            return serialize(RankResult(result))
        except BaseException:
            return serialize(
                RankResult(error=traceback.format_exc(), failed_at_s=failed_at or time.monotonic())
            )
        finally:
            faulthandler.disable()


def _listen_on_loopback() -> None:
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.putenv("GLOO_SOCKET_IFNAME", loopback[0])


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
