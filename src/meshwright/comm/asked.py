"""How a process waits for what it asked torch.distributed for: in slices, within the limit of the phase.

    gloo, a collective            the wait can be given up and taken up again: a quarter of a second at a time
    gloo, a send or a receive     one wait as long as the limit: when it is late, gloo closes the connections
    NCCL                          the wait orders streams and does not block; a watchdog of torch ends the process

When it fails, or lasts too long, all ranks are asked where they are (comm/stall.py).
"""

from datetime import timedelta

from meshwright.comm.collective import Call
from meshwright.comm.group import Group
from meshwright.comm.handed import Issued
from meshwright.comm.stall import SLICE_S, Lookout, Waiting, waited
from meshwright.core.errors import CollectiveError

SLICE = timedelta(seconds=SLICE_S)


class Asked:
    """What a work of torch.distributed serves: the `call` that `group` announced last. `pairwise`: by sends and receives."""

    __slots__ = ("_call", "_group", "_lookout", "_on_gloo", "_order", "_pairwise")

    def __init__(self, group: Group, call: Call, lookout: Lookout, *, on_gloo: bool, pairwise: bool) -> None:
        self._group, self._call, self._lookout = group, call, lookout
        self._on_gloo, self._pairwise = on_gloo, pairwise
        self._order = group.ledger.recent.order

    def wait(self, work: Issued) -> None:
        """Return when `work` is over. Raises CollectiveError, with who is to blame, when that cannot be or takes too long."""
        with self._lookout.waiting(self._order) as waiting:
            try:
                if not self._on_gloo:
                    work.wait()
                elif self._pairwise:
                    work.wait(timedelta(seconds=max(0.001, waiting.left_s)))
                else:
                    if not _over(work, SLICE):  # it mostly is: no limit to look up, nothing to make
                        waiting.check()
                        waited(waiting, lambda seconds: _over(work, timedelta(seconds=seconds)))
            except CollectiveError:
                raise
            except RuntimeError as error:
                raise self._failed(error, waiting) from error

    def failed(self, error: RuntimeError) -> CollectiveError:
        """What to raise when the backend said `error` as soon as it was asked."""
        with self._lookout.waiting(self._order) as waiting:
            return self._failed(error, waiting)

    def _failed(self, error: RuntimeError, waiting: Waiting) -> CollectiveError:
        ranks = self._group.ranks
        here = f"rank {ranks[self._group.index]}: {self._call} over {' x '.join(self._group.axes)}"
        return waiting.failed(f"{here} (ranks {', '.join(map(str, ranks))}) did not complete: {error}")


def _over(work: Issued, time: timedelta) -> bool:
    """Whether `work` is over within `time`; on gloo, which can be asked again."""
    try:
        work.wait(time)
    except RuntimeError as error:
        if "Operation timed out" not in str(error):
            raise
        if not work.is_completed():
            return False
        work.wait(time)  # it has ended meanwhile: well, or with an error of its own
    return True
