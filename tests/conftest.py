"""Fixtures of all tests, and the two tiers of the suite.

`make test` runs the default tier: every test, and of the expensive parametrised ones the cases that
tests/tiers.toml keeps (benchmarks/suite_tiers.py writes it). `make test-full` adds `--full` and runs every
case.
"""

import os
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from benchmarks.suite_tiers import case_of, is_kept, read_tiers
from meshwright.device.local_device import platform_of
from meshwright.testing.ranks import ProcessPool
from tests.command_forks import Forks

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--full` and `--gpu`."""
    parser.addoption("--full", action="store_true", help="run every case, not only the default tier")
    parser.addoption("--gpu", action="store_true", help="let tests see the GPUs of this host")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs of this host, unless they are asked for: all tests but a few are about ranks on the CPU,
    as many as they like.
    """
    if not config.getoption("--gpu"):
        built_for = torch.accelerator.current_accelerator()
        variables = platform_of(built_for).visible_variables if built_for is not None else ()
        os.environ.update(dict.fromkeys(variables[:1], ""))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that tests/tiers.toml leaves to the full tier, unless they were asked for by their
    id.
    """
    if config.getoption("--full") or any("::" in argument for argument in config.args):
        return
    tiers = read_tiers()
    kept, left_out = [], []
    for item in items:
        (kept if is_kept(case_of(item), tiers) else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


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
