"""A swallowed Ctrl-C is still noticed when ranks are about to start; a signal is a stop request."""

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from meshwright.run.launch.local_launcher import launch_ranks
from meshwright.run.launch.run_folder import Attempt
from meshwright.run.launch.signals import InterruptHandler, raise_if_interrupted, stop_flag


@pytest.fixture
def handler() -> Iterator[InterruptHandler]:
    before = signal.getsignal(signal.SIGINT)
    mine = InterruptHandler()
    signal.signal(signal.SIGINT, mine)
    yield mine
    signal.signal(signal.SIGINT, before)


def test_it_raises_at_once(handler):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert handler.was_interrupted


def test_nothing_is_raised_where_none_came(handler):
    raise_if_interrupted()


def test_a_swallowed_one_keeps_ranks_from_starting(handler, tmp_path):
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        launch_ranks(["-c", "print('started')"], 1, Attempt(tmp_path, 1), {})
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("number", "counts_as"),
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT), (signal.SIGUSR1, signal.SIGTERM)],
)
def test_a_signal_is_a_stop_request_while_a_handler_is_installed(number, counts_as):
    received: list[int] = []
    before = signal.getsignal(number)
    with stop_flag(received) as stopping:
        assert not stopping()
        signal.raise_signal(number)
        assert stopping()
    assert received == [counts_as]
    assert signal.getsignal(number) is before
