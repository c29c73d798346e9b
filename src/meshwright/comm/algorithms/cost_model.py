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

from meshwright.comm.algorithms.schedule import Algorithm, Round
from meshwright.plan.hardware.network_model import NetworkModel

Messages = tuple[tuple[float, int], ...]  # the share of the tensor that one holds, and how many of them


@dataclass(frozen=True)
class Demand:
    """What a round asks for: sizes are shares of the tensor.

    `receiving`: the most ranks of one host that receive from within it. `host`: the messages inside the host that moves most.
    `rank`: those of the rank in it that sends and receives most. `added`: the most that one rank adds. `leaving`: the most
    that leaves, or comes into, one host.
    """

    receiving: int
    host: Messages
    rank: Messages
    added: float
    leaving: float


def seconds(
    algorithm: Algorithm, size: int, nbytes: float, network: NetworkModel, per_host: int = 0
) -> float:
    """The time of an all-reduce of `nbytes` among `size` ranks, `per_host` of them on each host (0: all on one)."""
    return sum(
        count * _round(demand, nbytes, network) for demand, count in demands(algorithm, size, per_host)
    )


def _round(demand: Demand, nbytes: float, network: NetworkModel) -> float:
    between, inside = network.inter_host, 0.0
    if demand.host:
        if network.intra_host is None or network.busiest_rank is None:
            if between is None:
                raise ValueError("the network has no price at all; measure it: meshwright bench comm")
            inside = between.seconds(sum(share * count for share, count in demand.host) * nbytes)
        else:
            inside = network.round_overhead_s(demand.receiving)
            inside += sum(count * network.intra_host.seconds(share * nbytes) for share, count in demand.host)
            inside += sum(
                count * network.busiest_rank.seconds(share * nbytes) for share, count in demand.rank
            )
    outside = 0.0
    if demand.leaving and network.intra_host is not None and between is None:
        raise ValueError(
            "messages leave their host, and the network has no price for that; measure it across hosts: bench comm"
        )
    if demand.leaving and between is not None:
        outside = between.seconds(demand.leaving * nbytes)
    added = (
        network.local_sum.seconds(demand.added * nbytes)
        if network.local_sum is not None and demand.added
        else 0.0
    )
    return max(inside, outside) + added


@lru_cache(maxsize=256)
def demands(algorithm: Algorithm, size: int, per_host: int = 0) -> tuple[tuple[Demand, int], ...]:
    """What the rounds of `algorithm` ask for among `size` ranks, `per_host` on each host (0: all on one), and how often."""
    per_host = per_host or size
    gathered: list[_Gathered] = []
    pieces = algorithm.num_pieces(size)
    for index in range(size):
        for number, each in enumerate(algorithm.rounds(size, index)):
            if number == len(gathered):
                gathered.append(_Gathered())
            gathered[number].take(each, index, per_host, pieces)
    return tuple(Counter(round_.demand() for round_ in gathered).items())


class _Gathered:
    """One round, rank after rank."""

    def __init__(self) -> None:
        self.hosts: dict[int, Counter[int]] = {}
        self.receiving: Counter[int] = Counter()
        self.ranks: dict[int, tuple[int, Counter[int]]] = {}  # of each host the busiest
        self.added = 0.0
        self.out: Counter[int] = Counter()  # pieces that leave a host, and that come into it
        self.into: Counter[int] = Counter()
        self.pieces = 1

    def take(self, each: Round, index: int, per_host: int, pieces: int) -> None:
        """Count in what the rank at `index` does."""
        self.pieces = pieces
        host = index // per_host
        sent = [parcel for parcel in each.sends if parcel.peer // per_host == host]
        come = [parcel for parcel in each.receives if parcel.peer // per_host == host]
        self.hosts.setdefault(host, Counter()).update(len(parcel.pieces) for parcel in sent)
        self.receiving[host] += bool(come)
        mine = Counter(len(parcel.pieces) for parcel in (*sent, *come))
        if host not in self.ranks or _total(mine) > _total(self.ranks[host][1]):
            self.ranks[host] = (index, mine)
        self.out[host] += sum(len(parcel.pieces) for parcel in each.sends) - sum(
            len(parcel.pieces) for parcel in sent
        )
        self.into[host] += sum(len(parcel.pieces) for parcel in each.receives) - sum(
            len(parcel.pieces) for parcel in come
        )
        if each.adds:
            self.added = max(self.added, sum(len(parcel.pieces) for parcel in each.receives))

    def demand(self) -> Demand:
        """What the round asks for."""
        host = max(self.hosts, key=lambda each: _total(self.hosts[each]))
        leaving = max(*self.out.values(), *self.into.values())
        return Demand(
            max(self.receiving.values()),
            self._shares(self.hosts[host]),
            self._shares(self.ranks[host][1]),
            self.added / self.pieces,
            leaving / self.pieces,
        )

    def _shares(self, counts: Mapping[int, int]) -> Messages:
        return tuple((length / self.pieces, count) for length, count in sorted(counts.items()) if count)


def _total(counts: Mapping[int, int]) -> int:
    return sum(length * count for length, count in counts.items())
