"""Seconds of what ranks send each other: by what was measured of a cluster, or by the rates of a kind of
device.

    measured      `meshwright bench network` has measured sums (all_reduce). A sum is a scatter of sums and a
                  gather, of equal bytes, so each of the two is half of it:

                      all_reduce of S = reduce_scatter of S + all_gather of S

                  An exchange, and a shift to the next rank, move what one of the two does. A message from
                  one rank to another is priced by the model of the network that was fitted to the sums
    by its kind   bytes over the rate of the slowest link on the way, and a latency per hop
                  (planner/roofline.py)

`ranks` are those that meet, by their number: neighbours share a host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshwright.comm.algorithms import BACKEND
from meshwright.comm.tuning.autoselect import predict_all_reduce_s
from meshwright.plan.hardware.network_model import Cluster, NetworkModel
from meshwright.plan.step.action import Transfer
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.roofline import all_gather_seconds, send_seconds

POINT_TO_POINT = ("send", "recv", "shift")
GATHERING_COLLECTIVES = ("all_gather", "gather")  # whose bytes are those of one rank's piece


class NetworkTime(Protocol):
    """Seconds of collectives and messages."""

    def seconds(self, transfer: Transfer, ranks: Sequence[int]) -> float:
        """What `move` takes the `ranks` that meet in it."""


@dataclass(frozen=True)
class MeasuredNetworkTime:
    """The links of a cluster, as `bench network` has measured them."""

    cluster: Cluster

    def seconds(self, transfer: Transfer, ranks: Sequence[int]) -> float:
        """What `move` takes the `ranks` that meet in it."""
        size = len(ranks)
        if size < 2 or not transfer.nbytes:
            return 0.0
        host = self.cluster.ranks_per_host
        per_host = (
            0 if not host else max(1, min(size, sum(rank // host == ranks[0] // host for rank in ranks)))
        )
        if transfer.collective == "all_reduce":
            return predict_all_reduce_s(self.cluster, transfer.algorithm, size, transfer.nbytes, per_host)
        if transfer.collective in ("send", "recv"):
            apart = bool(host) and ranks[0] // host != ranks[-1] // host
            return message_seconds(self.cluster.network, transfer.nbytes, crosses_hosts=apart)
        whole = transfer.nbytes * size if transfer.collective in GATHERING_COLLECTIVES else transfer.nbytes
        if (
            transfer.collective == "shift"
        ):  # all ranks send as much as in an exchange of so many bytes, by the same transport
            whole = transfer.nbytes * size / (size - 1)
        return predict_all_reduce_s(self.cluster, BACKEND, size, whole, per_host) / 2


@dataclass(frozen=True)
class RatedNetworkTime:
    """The links of a kind of machine, whose hosts hold neighbouring ranks."""

    machine: Machine

    def seconds(self, transfer: Transfer, ranks: Sequence[int]) -> float:
        """What `move` takes the `ranks` that meet in it."""
        size = len(ranks)
        if size < 2 or not transfer.nbytes:
            return 0.0
        stride = abs(ranks[1] - ranks[0])
        if transfer.collective in POINT_TO_POINT:
            return send_seconds(self.machine, transfer.nbytes, stride)
        whole = transfer.nbytes * size if transfer.collective in GATHERING_COLLECTIVES else transfer.nbytes
        times = 2 if transfer.collective == "all_reduce" else 1
        return times * all_gather_seconds(self.machine, whole, size, stride, self.machine.num_devices)


@dataclass(frozen=True)
class UnknownNetworkTime:
    """Links of which nobody knows anything: what goes over them is left out."""

    def seconds(self, transfer: Transfer, ranks: Sequence[int]) -> float:
        """Nothing."""
        return 0.0


def message_seconds(network: NetworkModel, nbytes: float, *, crosses_hosts: bool = False) -> float:
    """The seconds of a message of `nbytes`; `apart`: to another host."""
    if (crosses_hosts or network.intra_host is None) and network.inter_host is not None:
        return network.inter_host.seconds(nbytes)
    if network.intra_host is None or network.busiest_rank is None:
        return 0.0
    return (
        network.round_overhead_s(1)
        + network.intra_host.seconds(nbytes)
        + network.busiest_rank.seconds(nbytes)
    )
