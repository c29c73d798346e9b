"""Predicts the time of an all-reduce from its rounds, with one model for every algorithm.

Each round puts a load on the network (`RoundLoad`): how many ranks of a host wait for a message, the bytes
inside the busiest host, the bytes of its busiest rank, the bytes summed, the bytes through the busiest
network card. Rounds follow each other; in a round the slower of host and network decides:

    seconds = sum over rounds of  max(inside, between) + local sum
    inside  = overhead(number of receivers) + messages through the host + messages of its busiest rank
    between = bytes through the busiest network card, as one message

The constants are measured (comm/tuning/allreduce_bench.py) and fitted (comm/tuning/network_fit.py);
`NetworkModel` holds them. Sizes in a load are fractions of the tensor, so a load is computed once for an
algorithm and a number of ranks. Equal rounds are counted: a ring of a thousand ranks has two thousand rounds,
of two kinds.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from meshwright.comm.allreduce.algorithm_as_rounds import AllReduceAlgorithm, Round
from meshwright.plan.hardware.network_model import NetworkModel

MessageCounts = tuple[tuple[float, int], ...]  # the share of the tensor that one holds, and how many of them


@dataclass(frozen=True)
class RoundLoad:
    """The load of one round; sizes are fractions of the tensor.

    `num_receivers`: the most ranks of one host that receive from the same host. `intra_host`: the messages
    inside the host that moves most. `busiest_rank`: those of the rank in it that sends and receives most.
    `local_sum`: the most that one rank adds. `inter_host`: the most that leaves, or enters, one host.
    """

    num_receivers: int
    intra_host: MessageCounts
    busiest_rank: MessageCounts
    local_sum: float
    inter_host: float


def all_reduce_seconds(
    algorithm: AllReduceAlgorithm, size: int, nbytes: float, network: NetworkModel, ranks_per_host: int = 0
) -> float:
    """Returns the seconds of an all-reduce of `nbytes` among `size` ranks.

    `ranks_per_host` on each host (0: all on one).
    """
    return sum(
        count * _round_seconds(demand, nbytes, network)
        for demand, count in round_loads(algorithm, size, ranks_per_host)
    )


def _round_seconds(load: RoundLoad, nbytes: float, network: NetworkModel) -> float:
    between, inside = network.inter_host, 0.0
    if load.intra_host:
        if network.intra_host is None or network.busiest_rank is None:
            if between is None:
                raise ValueError(
                    "the network model is empty: no message has a cost; measure it: meshwright bench network"
                )
            inside = between.seconds(sum(share * count for share, count in load.intra_host) * nbytes)
        else:
            inside = network.round_overhead_s(load.num_receivers)
            inside += sum(
                count * network.intra_host.seconds(share * nbytes) for share, count in load.intra_host
            )
            inside += sum(
                count * network.busiest_rank.seconds(share * nbytes) for share, count in load.busiest_rank
            )
    outside = 0.0
    if load.inter_host and network.intra_host is not None and between is None:
        raise ValueError(
            "messages leave their host, and the network model has no cost for that; measure it across hosts: "
            "bench network"
        )
    if load.inter_host and between is not None:
        outside = between.seconds(load.inter_host * nbytes)
    added = (
        network.local_sum.seconds(load.local_sum * nbytes)
        if network.local_sum is not None and load.local_sum
        else 0.0
    )
    return max(inside, outside) + added


@lru_cache(maxsize=256)
def round_loads(
    algorithm: AllReduceAlgorithm, size: int, ranks_per_host: int = 0
) -> tuple[tuple[RoundLoad, int], ...]:
    """Returns the loads of the rounds of `algorithm` among `size` ranks.

    Each with the number of rounds that have it. `ranks_per_host` of the ranks are on each host (0: all on
    one).
    """
    ranks_per_host = ranks_per_host or size
    gathered: list[_RoundTotals] = []
    chunks = algorithm.num_chunks(size)
    for index in range(size):
        for number, each in enumerate(algorithm.rounds(size, index)):
            if number == len(gathered):
                gathered.append(_RoundTotals())
            gathered[number].add_rank(each, index, ranks_per_host, chunks)
    return tuple(Counter(round_.round_load() for round_ in gathered).items())


class _RoundTotals:
    def __init__(self) -> None:
        self.messages_by_host: dict[int, Counter[int]] = {}
        self.receivers_by_host: Counter[int] = Counter()
        self.busiest_rank_by_host: dict[int, tuple[int, Counter[int]]] = {}  # of each host the busiest
        self.max_added = 0.0
        self.sent_from_host: Counter[int] = Counter()  # chunks that leave a host, and that come into it
        self.received_by_host: Counter[int] = Counter()
        self.num_chunks = 1

    def add_rank(self, round_: Round, index: int, ranks_per_host: int, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        host = index // ranks_per_host
        sent = [message for message in round_.sends if message.peer // ranks_per_host == host]
        come = [message for message in round_.receives if message.peer // ranks_per_host == host]
        self.messages_by_host.setdefault(host, Counter()).update(len(message.chunks) for message in sent)
        self.receivers_by_host[host] += bool(come)
        mine = Counter(len(message.chunks) for message in (*sent, *come))
        if host not in self.busiest_rank_by_host or _total_chunks(mine) > _total_chunks(
            self.busiest_rank_by_host[host][1]
        ):
            self.busiest_rank_by_host[host] = (index, mine)
        self.sent_from_host[host] += sum(len(message.chunks) for message in round_.sends) - sum(
            len(message.chunks) for message in sent
        )
        self.received_by_host[host] += sum(len(message.chunks) for message in round_.receives) - sum(
            len(message.chunks) for message in come
        )
        if round_.accumulate:
            self.max_added = max(self.max_added, sum(len(message.chunks) for message in round_.receives))

    def round_load(self) -> RoundLoad:
        host = max(self.messages_by_host, key=lambda each: _total_chunks(self.messages_by_host[each]))
        leaving = max(*self.sent_from_host.values(), *self.received_by_host.values())
        return RoundLoad(
            max(self.receivers_by_host.values()),
            self._fractions(self.messages_by_host[host]),
            self._fractions(self.busiest_rank_by_host[host][1]),
            self.max_added / self.num_chunks,
            leaving / self.num_chunks,
        )

    def _fractions(self, counts: Mapping[int, int]) -> MessageCounts:
        return tuple((length / self.num_chunks, count) for length, count in sorted(counts.items()) if count)


def _total_chunks(counts: Mapping[int, int]) -> int:
    return sum(length * count for length, count in counts.items())
