"""The price of an all-reduce, read off its rounds: one reading for every algorithm.

Each round asks something of the network (a `Demand`): how many ranks of a host wait for a message, what goes through the host
that moves most, what the busiest rank sends and receives, what is added, what leaves the busiest host by its network card.
Rounds follow each other; in a round the slowest part decides:

    seconds = sum over rounds of  max(inside, between) + added
    inside  = crowd(ranks that receive) + messages through the host + messages of its busiest rank
    between = bytes through the busiest network card, as one message

What the figures are is measured (comm/links.py) and fitted (comm/fitting.py); `Network` holds them. Sizes in a demand are
shares of the tensor, so that it is found once for an algorithm and a number of ranks. Rounds that ask for the same are counted:
a ring of a thousand ranks has two thousand rounds, of two kinds.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from meshwright.comm.algorithms.schedule import AllReduceAlgorithm, Round
from meshwright.plan.hardware.network_model import NetworkModel

MessageCounts = tuple[tuple[float, int], ...]  # the share of the tensor that one holds, and how many of them


@dataclass(frozen=True)
class RoundLoad:
    """What a round asks for: sizes are shares of the tensor.

    `receiving`: the most ranks of one host that receive from within it. `host`: the messages inside the host that moves most.
    `rank`: those of the rank in it that sends and receives most. `added`: the most that one rank adds. `leaving`: the most
    that leaves, or comes into, one host.
    """

    num_receivers: int
    intra_host: MessageCounts
    busiest_rank: MessageCounts
    local_sum: float
    inter_host: float


def all_reduce_seconds(
    algorithm: AllReduceAlgorithm, size: int, nbytes: float, network: NetworkModel, ranks_per_host: int = 0
) -> float:
    """The time of an all-reduce of `nbytes` among `size` ranks, `per_host` of them on each host (0: all on one)."""
    return sum(
        count * _round_seconds(demand, nbytes, network)
        for demand, count in round_loads(algorithm, size, ranks_per_host)
    )


def _round_seconds(load: RoundLoad, nbytes: float, network: NetworkModel) -> float:
    between, inside = network.inter_host, 0.0
    if load.intra_host:
        if network.intra_host is None or network.busiest_rank is None:
            if between is None:
                raise ValueError("the network has no price at all; measure it: meshwright bench network")
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
            "messages leave their host, and the network has no price for that; measure it across hosts: bench network"
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
    """What the rounds of `algorithm` ask for among `size` ranks, `per_host` on each host (0: all on one), and how often."""
    ranks_per_host = ranks_per_host or size
    gathered: list[_RoundTotals] = []
    pieces = algorithm.num_pieces(size)
    for index in range(size):
        for number, each in enumerate(algorithm.rounds(size, index)):
            if number == len(gathered):
                gathered.append(_RoundTotals())
            gathered[number].add_rank(each, index, ranks_per_host, pieces)
    return tuple(Counter(round_.round_load() for round_ in gathered).items())


class _RoundTotals:
    """One round, rank after rank."""

    def __init__(self) -> None:
        self.messages_by_host: dict[int, Counter[int]] = {}
        self.receivers_by_host: Counter[int] = Counter()
        self.busiest_rank_by_host: dict[int, tuple[int, Counter[int]]] = {}  # of each host the busiest
        self.max_added = 0.0
        self.sent_from_host: Counter[int] = Counter()  # pieces that leave a host, and that come into it
        self.received_by_host: Counter[int] = Counter()
        self.num_pieces = 1

    def add_rank(self, round_: Round, index: int, ranks_per_host: int, num_pieces: int) -> None:
        """Count in what the rank at `index` does."""
        self.num_pieces = num_pieces
        host = index // ranks_per_host
        sent = [parcel for parcel in round_.sends if parcel.peer // ranks_per_host == host]
        come = [parcel for parcel in round_.receives if parcel.peer // ranks_per_host == host]
        self.messages_by_host.setdefault(host, Counter()).update(len(parcel.pieces) for parcel in sent)
        self.receivers_by_host[host] += bool(come)
        mine = Counter(len(parcel.pieces) for parcel in (*sent, *come))
        if host not in self.busiest_rank_by_host or _total_pieces(mine) > _total_pieces(
            self.busiest_rank_by_host[host][1]
        ):
            self.busiest_rank_by_host[host] = (index, mine)
        self.sent_from_host[host] += sum(len(parcel.pieces) for parcel in round_.sends) - sum(
            len(parcel.pieces) for parcel in sent
        )
        self.received_by_host[host] += sum(len(parcel.pieces) for parcel in round_.receives) - sum(
            len(parcel.pieces) for parcel in come
        )
        if round_.accumulate:
            self.max_added = max(self.max_added, sum(len(parcel.pieces) for parcel in round_.receives))

    def round_load(self) -> RoundLoad:
        """What the round asks for."""
        host = max(self.messages_by_host, key=lambda each: _total_pieces(self.messages_by_host[each]))
        leaving = max(*self.sent_from_host.values(), *self.received_by_host.values())
        return RoundLoad(
            max(self.receivers_by_host.values()),
            self._fractions(self.messages_by_host[host]),
            self._fractions(self.busiest_rank_by_host[host][1]),
            self.max_added / self.num_pieces,
            leaving / self.num_pieces,
        )

    def _fractions(self, counts: Mapping[int, int]) -> MessageCounts:
        return tuple((length / self.num_pieces, count) for length, count in sorted(counts.items()) if count)


def _total_pieces(counts: Mapping[int, int]) -> int:
    return sum(length * count for length, count in counts.items())
