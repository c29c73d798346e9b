"""Seconds of what ranks send each other: by what was measured of a cluster, or by the rates of a kind of device.

    measured      `meshwright bench network` has measured sums (all_reduce). A sum is a scatter of sums and a gather, of equal bytes:

                      all_reduce of S = reduce_scatter of S + all_gather of S          so each of the two is half of it

                  an exchange, and a shift to the next rank, move what one of the two does; a message from one rank to another is
                  priced by the model of the network that was fitted to the sums (core/link.py)
    by its kind   bytes over the rate of the slowest link on the way, and a latency per hop (planner/roofline.py)

`ranks` are those that meet, by their number: neighbours share a host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshwright.comm.algorithms import BACKEND
from meshwright.comm.tuning.autoselect import predicted
from meshwright.plan.hardware.network_model import Cluster, NetworkModel
from meshwright.plan.step.action import Transfer
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.roofline import gathered, sent

PAIRWISE = ("send", "recv", "shift")
GATHERING = ("all_gather", "gather")  # whose bytes are those of one rank's piece


class Wire(Protocol):
    """Seconds of collectives and messages."""

    def seconds(self, move: Transfer, ranks: Sequence[int]) -> float:
        """What `move` takes the `ranks` that meet in it."""


@dataclass(frozen=True)
class Measured:
    """The links of a cluster, as `bench network` has measured them."""

    cluster: Cluster

    def seconds(self, move: Transfer, ranks: Sequence[int]) -> float:
        """What `move` takes the `ranks` that meet in it."""
        size = len(ranks)
        if size < 2 or not move.nbytes:
            return 0.0
        host = self.cluster.ranks_per_host
        per_host = (
            0 if not host else max(1, min(size, sum(rank // host == ranks[0] // host for rank in ranks)))
        )
        if move.collective == "all_reduce":
            return predicted(self.cluster, move.algorithm, size, move.nbytes, per_host)
        if move.collective in ("send", "recv"):
            apart = bool(host) and ranks[0] // host != ranks[-1] // host
            return message(self.cluster.network, move.nbytes, apart=apart)
        whole = move.nbytes * size if move.collective in GATHERING else move.nbytes
        if (
            move.collective == "shift"
        ):  # all ranks send as much as in an exchange of so many bytes, by the same transport
            whole = move.nbytes * size / (size - 1)
        return predicted(self.cluster, BACKEND, size, whole, per_host) / 2


@dataclass(frozen=True)
class ByRates:
    """The links of a kind of machine, whose hosts hold neighbouring ranks."""

    machine: Machine

    def seconds(self, move: Transfer, ranks: Sequence[int]) -> float:
        """What `move` takes the `ranks` that meet in it."""
        size = len(ranks)
        if size < 2 or not move.nbytes:
            return 0.0
        stride = abs(ranks[1] - ranks[0])
        if move.collective in PAIRWISE:
            return sent(self.machine, move.nbytes, stride)
        whole = move.nbytes * size if move.collective in GATHERING else move.nbytes
        times = 2 if move.collective == "all_reduce" else 1
        return times * gathered(self.machine, whole, size, stride, self.machine.count)


@dataclass(frozen=True)
class Unknown:
    """Links of which nobody knows anything: what goes over them is left out."""

    def seconds(self, move: Transfer, ranks: Sequence[int]) -> float:
        """Nothing."""
        return 0.0


def message(network: NetworkModel, nbytes: float, *, apart: bool = False) -> float:
    """The seconds of a message of `nbytes`; `apart`: to another host."""
    if (apart or network.intra_host is None) and network.inter_host is not None:
        return network.inter_host.seconds(nbytes)
    if network.intra_host is None or network.busiest_rank is None:
        return 0.0
    return (
        network.round_overhead_s(1)
        + network.intra_host.seconds(nbytes)
        + network.busiest_rank.seconds(nbytes)
    )
