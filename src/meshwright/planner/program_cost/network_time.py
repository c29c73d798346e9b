"""Predicts the seconds of collectives and messages, from measurements or from the rates of a kind of device.

    measured    `meshwright bench network` measured all-reduces. An all-reduce of S bytes is a reduce-scatter
                and an all-gather of S bytes, so each of these takes half as long. An all-to-all, and a shift
                to the next rank, send as much as one of them. A message from one rank to another is predicted
                by the network model that was fitted to the all-reduces (plan/hardware/network_model.py)
    rated       bytes over the rate of the slowest link on the way, and latencies (machine/roofline.py)

`ranks` are the members of a collective, as positions in the world: neighbours share a host. The seconds are
those of one message; a transfer takes as long as its messages (`Transfer.messages`) one after another.
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
from meshwright.planner.machine.roofline import all_gather_seconds, exchange_seconds, send_seconds

POINT_TO_POINT = ("send", "recv", "shift")
EXCHANGES = ("all_to_all", "all_to_all_v")  # every rank sends to every other one: no ring shares the cards


class NetworkTime(Protocol):
    """Seconds of collectives and messages."""

    def seconds(self, message: Transfer, ranks: Sequence[int]) -> float:
        """Returns the seconds of `message` among `ranks`."""


@dataclass(frozen=True)
class MeasuredNetworkTime:
    """The links of a cluster, as `bench network` measured them."""

    cluster: Cluster

    def seconds(self, message: Transfer, ranks: Sequence[int]) -> float:
        """Returns the seconds of `message` among `ranks`."""
        size = len(ranks)
        if size < 2 or not message.nbytes:
            return 0.0
        ranks_per_host = self.cluster.ranks_per_host
        per_host = (
            0
            if not ranks_per_host
            else max(
                1, min(size, sum(rank // ranks_per_host == ranks[0] // ranks_per_host for rank in ranks))
            )
        )
        if message.collective == "all_reduce":
            return predict_all_reduce_s(self.cluster, message.algorithm, size, message.nbytes, per_host)
        if message.collective in ("send", "recv"):
            crosses_hosts = bool(ranks_per_host) and ranks[0] // ranks_per_host != ranks[-1] // ranks_per_host
            return message_seconds(self.cluster.network, message.nbytes, crosses_hosts=crosses_hosts)
        nbytes = full_nbytes(message, size)
        if message.collective == "shift":
            # every rank sends as much as in an all-to-all of so many bytes
            nbytes = message.nbytes * size / (size - 1)
        return predict_all_reduce_s(self.cluster, BACKEND, size, nbytes, per_host) / 2


@dataclass(frozen=True)
class RatedNetworkTime:
    """The links of a kind of machine, with neighbouring ranks on one host."""

    machine: Machine

    def seconds(self, message: Transfer, ranks: Sequence[int]) -> float:
        """Returns the seconds of `message` among `ranks`."""
        size = len(ranks)
        if size < 2 or not message.nbytes:
            return 0.0
        stride = abs(ranks[1] - ranks[0])
        if message.collective in POINT_TO_POINT:
            return send_seconds(self.machine, message.nbytes, stride)
        nbytes = full_nbytes(message, size)
        if message.collective in EXCHANGES:
            return exchange_seconds(self.machine, nbytes, size, stride, self.machine.num_devices)
        times = 2 if message.collective == "all_reduce" else 1
        return times * all_gather_seconds(self.machine, nbytes, size, stride, self.machine.num_devices)


@dataclass(frozen=True)
class UnknownNetworkTime:
    """Links without any measurement: communication counts as free."""

    def seconds(self, message: Transfer, ranks: Sequence[int]) -> float:
        """Returns 0."""
        return 0.0


def full_nbytes(message: Transfer, num_ranks: int) -> int:
    """Returns the bytes of the full tensor of a collective: of a gather, each rank puts in its shard; of an
    uneven all-to-all, all but its own rows.
    """
    if message.collective == "all_to_all_v":
        return message.nbytes * num_ranks // (num_ranks - 1)
    return message.nbytes * (num_ranks if message.collective in ("all_gather", "gather") else 1)


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
