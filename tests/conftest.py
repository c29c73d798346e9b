"""What every test stands on: one torch thread, one pool of processes, and nothing left behind."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from meshwright.testing.ranks import ProcessPool
from tests.command_forks import Forks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def process_pool() -> Iterator[ProcessPool]:
    """Gloo processes, at most 4, started when first used and shared by the whole session."""
    with ProcessPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """The command as forks of a process that is started when first used and shared by the whole session."""
    with Forks() as command:
        yield command


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves a running thread or a process group; take back what it left in the environment.

    The command tells gloo and OpenMP through the environment; a later test's processes would inherit it.
    """
    before, environment = set(threading.enumerate()), dict(os.environ)
    yield
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(10.0)
    assert not [thread.name for thread in left if thread.is_alive()]
    joined = dist.is_initialized()
    if joined:
        dist.destroy_process_group()
    assert not joined, "the test left a process group; destroy it, or use rendezvous"
