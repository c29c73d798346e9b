"""Predicts the seconds of collectives and messages, from measurements or from the rates of a kind of device.

    measured    `meshwright bench network` measured all-reduces. An all-reduce of S bytes is a reduce-scatter
                and an all-gather of S bytes, so each of these takes half as long. An all-to-all, and a shift
                to the next rank, send as much as one of them. A message from one rank to another is predicted
                by the network model that was fitted to the all-reduces (plan/hardware/network_model.py)
    rated       bytes over the rate of the slowest link on the way, and latencies (machine/roofline.py)

`ranks` are the members of a collective, as positions in the world: neighbours share a host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshwright.comm.allreduce import BACKEND
from meshwright.comm.tuning.choose_size_rule import predict_all_reduce_s
from meshwright.plan.hardware.measured_cluster import Cluster
from meshwright.plan.hardware.network_model import NetworkModel
from meshwright.plan.step.program import Transfer
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.roofline import all_gather_seconds, send_seconds

POINT_TO_POINT = ("send", "recv", "shift")
GATHERING_COLLECTIVES = ("all_gather", "gather")  # their nbytes is one rank's shard


class NetworkTime(Protocol):
    """Seconds of collectives and messages."""

    def seconds(self, transfer: Transfer, ranks: Sequence[int]) -> float:
        """Returns the seconds of `transfer` among `ranks`."""


@dataclass(frozen=True)
class MeasuredNetworkTime:
    """The links of a cluster, as `bench network` measured them."""

    cluster: Cluster

    def seconds(self, transfer: Transfer, ranks: Sequence[int]) -> float:
        """Returns the seconds of `transfer` among `ranks`."""
        size = len(ranks)
        if size < 2 or not transfer.nbytes:
            return 0.0
        ranks_per_host = self.cluster.ranks_per_host
        per_host = (
            0
            if not ranks_per_host
            else max(
                1, min(size, sum(rank // ranks_per_host == ranks[0] // ranks_per_host for rank in ranks))
            )
        )
        if transfer.collective == "all_reduce":
            return predict_all_reduce_s(self.cluster, transfer.algorithm, size, transfer.nbytes, per_host)
        if transfer.collective in ("send", "recv"):
            crosses_hosts = bool(ranks_per_host) and ranks[0] // ranks_per_host != ranks[-1] // ranks_per_host
            return message_seconds(self.cluster.network, transfer.nbytes, crosses_hosts=crosses_hosts)
        nbytes = transfer.nbytes * size if transfer.collective in GATHERING_COLLECTIVES else transfer.nbytes
        if transfer.collective == "shift":
            # every rank sends as much as in an all-to-all of so many bytes
            nbytes = transfer.nbytes * size / (size - 1)
        return predict_all_reduce_s(self.cluster, BACKEND, size, nbytes, per_host) / 2


@dataclass(frozen=True)
class RatedNetworkTime:
    """The links of a kind of machine, with neighbouring ranks on one host."""

    machine: Machine

    def seconds(self, transfer: Transfer, ranks: Sequence[int]) -> float:
        """Returns the seconds of `transfer` among `ranks`."""
        size = len(ranks)
        if size < 2 or not transfer.nbytes:
            return 0.0
        stride = abs(ranks[1] - ranks[0])
        if transfer.collective in POINT_TO_POINT:
            return send_seconds(self.machine, transfer.nbytes, stride)
        nbytes = transfer.nbytes * size if transfer.collective in GATHERING_COLLECTIVES else transfer.nbytes
        times = 2 if transfer.collective == "all_reduce" else 1
        return times * all_gather_seconds(self.machine, nbytes, size, stride, self.machine.num_devices)


@dataclass(frozen=True)
class UnknownNetworkTime:
    """Links without any measurement: communication counts as free."""

    def seconds(self, transfer: Transfer, ranks: Sequence[int]) -> float:
        """Returns 0."""
        return 0.0


def message_seconds(network: NetworkModel, nbytes: float, *, crosses_hosts: bool = False) -> float:
    """Returns the seconds of a message of `nbytes`; `crosses_hosts`: to another host."""
    if (crosses_hosts or network.intra_host is None) and network.inter_host is not None:
        return network.inter_host.seconds(nbytes)
    if network.intra_host is None or network.busiest_rank is None:
        return 0.0
    return (
        network.round_overhead_s(1)
        + network.intra_host.seconds(nbytes)
        + network.busiest_rank.seconds(nbytes)
    )
