"""What torch.distributed has under way, as the works of a group: a collective, a send or a receive, rounds on a stream."""

from collections.abc import Callable

import torch

from meshwright.comm.asked import Asked
from meshwright.comm.group import Work
from meshwright.comm.handed import Issued


class TorchWork(Work):
    """A work of the backend under way, what is left to do on this rank when it ends, and what to say when it fails.

    `keep` are the tensors that the backend reads or fills: they live until the wait.
    """

    def __init__(self, work: Issued, asked: Asked, keep: tuple[torch.Tensor, ...], finish: Callable[[], None] | None) -> None:
        self._work: Issued | None = work
        self._asked = asked
        self._keep = keep
        self._finish = finish

    def wait(self) -> None:
        """Return when the result is in place. Raises CollectiveError when a peer is gone or did not come in time."""
        if self._work is None:
            return
        self._asked.wait(self._work)
        if self._finish is not None:
            self._finish()
        self._work, self._keep, self._finish = None, (), None

    def then(self, call: Callable[[], None]) -> None:
        """Have `call` called when the backend has done its part."""
        if self._work is None:
            call()
        else:
            self._work.get_future().add_done_callback(lambda future: call())


class PairWork(Work):
    """A send or a receive under way, of which gloo tells only those who wait."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._calls: list[Callable[[], None]] = []
        self._over = False

    def wait(self) -> None:
        """Return when the tensor has been handed over, or has come. Raises CollectiveError when the peer is gone."""
        self._work.wait()
        self._over = True
        while self._calls:
            self._calls.pop(0)()

    def then(self, call: Callable[[], None]) -> None:
        """Have `call` called by whoever waits."""
        if self._over:
            call()
        else:
            self._calls.append(call)


class StreamWork(Work):
    """Rounds that were given to a stream of their own; `keep` lives until the wait."""

    def __init__(self, event: torch.cuda.Event, stream: torch.cuda.Stream, keep: torch.Tensor) -> None:
        self._event, self._stream = event, stream
        self._keep: torch.Tensor | None = keep

    def wait(self) -> None:
        """Have later kernels of this stream see the result."""
        torch.cuda.current_stream().wait_event(self._event)
        self._keep = None

    def then(self, call: Callable[[], None]) -> None:
        """Call `call` on the stream of the rounds."""
        with torch.cuda.stream(self._stream):
            call()
