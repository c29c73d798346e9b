"""The law of every algorithm: rounds and bytes of every rank against the formulas and the textbook."""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log2

import pytest

from meshwright.comm.allreduce import get_algorithm
from meshwright.comm.allreduce.algorithm_as_rounds import (
    AllReduceAlgorithm,
    ChunkMessage,
    Round,
    cached_num_sent,
    chunk_numel,
    min_max_sent,
)
from meshwright.comm.allreduce.hierarchical import HierarchicalAllReduce
from meshwright.comm.allreduce.recursive_doubling import RecursiveDoublingAllReduce
from meshwright.comm.allreduce.recursive_halving import RecursiveHalvingAllReduce
from meshwright.comm.allreduce.ring import RingAllReduce
from meshwright.comm.allreduce.tree import TreeAllReduce
from tests.comm.allreduce.round_counts import CASES, SIZES, counted, numels, port_time


def textbook(algorithm: AllReduceAlgorithm, n: int) -> tuple[int, Fraction]:
    """Rounds, and S/B units of time, as the lectures have them; powers of two for doubling."""
    up = ceil(log2(n))
    least = Fraction(2 * (n - 1), n)
    folds = 0 if n == 2**up else 2
    match algorithm.name:
        case "naive":
            return n, Fraction(n * (n - 1))
        case "reduce_broadcast":
            return 2, Fraction(2 * (n - 1))
        case "one_shot":
            return 1, Fraction(n - 1)
        case "ring" | "backend":
            return 2 * (n - 1), least
        case "recursive_halving":
            return 2 * up, least
        case "recursive_doubling":
            rounds = (up if not folds else up - 1) + folds
            return rounds, Fraction(rounds)
        case "tree":
            return 2 * up, Fraction(2 * up)
        case _:
            g = int(str(algorithm).split("/")[1])
            k = n // g
            return 2 * (g - 1) + 2 * (k - 1), Fraction(2 * (g - 1), g) + Fraction(2 * (k - 1), k * g)


def sent_by_the_book(algorithm: AllReduceAlgorithm, n: int, numel: int) -> list[int]:
    """The elements that each rank sends, of a tensor that divides among n ranks, by another way of counting
    than num_sent.
    """
    up, least = ceil(log2(n)), 2 * (n - 1) * numel // n
    power = 2 ** int(log2(n))
    match algorithm.name:
        case "naive" | "one_shot":
            return [(n - 1) * numel] * n
        case "reduce_broadcast":
            return [(n - 1) * numel] + [numel] * (n - 1)
        case "recursive_doubling":
            return [numel if i >= power else (int(log2(n)) + (i + power < n)) * numel for i in range(n)]
        case "tree":
            edges = [
                (i, i - (i & -i)) for i in range(1, n)
            ]  # from a rank to its parent: what it is without its lowest bit
            assert len(edges) <= 2**up
            return [sum((i in edge) for edge in edges) * numel for i in range(n)]
        case _:
            return [least] * n


@pytest.mark.parametrize(("algorithm", "size"), CASES, ids=str)
def test_every_rank_has_as_many_rounds_as_the_formula_says(algorithm: AllReduceAlgorithm, size: int):
    assert {len(algorithm.rounds(size, index)) for index in range(size)} == {algorithm.num_rounds(size)}


@pytest.mark.parametrize(("algorithm", "size"), CASES, ids=str)
def test_every_rank_sends_what_the_formula_says_to_the_element(algorithm: AllReduceAlgorithm, size: int):
    for numel in numels(size):
        for index in range(size):
            assert counted(algorithm, size, index, numel) == algorithm.num_sent(size, index, numel), (
                numel,
                index,
            )
            assert cached_num_sent(algorithm, size, index, numel) == counted(algorithm, size, index, numel)


@pytest.mark.parametrize(("algorithm", "size"), CASES, ids=str)
def test_a_tensor_that_divides_costs_each_rank_the_textbooks_bytes(algorithm: AllReduceAlgorithm, size: int):
    numel = 5 * size
    assert [counted(algorithm, size, index, numel) for index in range(size)] == sent_by_the_book(
        algorithm, size, numel
    )


@pytest.mark.parametrize(("algorithm", "size"), CASES, ids=str)
def test_rounds_and_time_through_one_port_are_the_textbooks(algorithm: AllReduceAlgorithm, size: int):
    rounds, time = textbook(algorithm, size)
    assert port_time(algorithm, size) == (rounds, time)
    assert algorithm.seconds(size, 1000, 2.0, 10.0) == pytest.approx(2.0 * rounds + 100 * float(time))


@pytest.mark.parametrize(("algorithm", "size"), CASES, ids=str)
def test_what_one_rank_sends_the_other_expects_in_the_same_round(algorithm: AllReduceAlgorithm, size: int):
    everyone = [algorithm.rounds(size, index) for index in range(size)]
    for same_time in zip(*everyone, strict=True):
        sent = {
            (index, parcel.peer, parcel.chunks)
            for index, each in enumerate(same_time)
            for parcel in each.sends
        }
        expected = {
            (parcel.peer, index, parcel.chunks)
            for index, each in enumerate(same_time)
            for parcel in each.receives
        }
        assert sent == expected
        assert all(source != target for source, target, _ in sent)


@pytest.mark.parametrize(
    "algorithm",
    [
        RingAllReduce(),
        RecursiveHalvingAllReduce(),
        RecursiveDoublingAllReduce(),
        TreeAllReduce(),
        *map(get_algorithm, ("naive", "reduce_broadcast", "one_shot")),
    ],
    ids=str,
)
def test_a_rank_alone_sends_nothing_in_no_rounds(algorithm: AllReduceAlgorithm):
    assert algorithm.refusal(1) is None
    assert (algorithm.rounds(1, 0), algorithm.num_rounds(1), algorithm.num_sent(1, 0, 7)) == ((), 0, 0)
    assert algorithm.seconds(1, 1000, 1.0, 1.0) == 0


def test_one_rank_on_several_hosts_is_no_error():
    hosts = HierarchicalAllReduce(4)
    assert hosts.refusal(1) is None
    assert (
        hosts.rounds(1, 0),
        hosts.num_rounds(1),
        hosts.num_sent(1, 0, 7),
        hosts.seconds(1, 8, 1.0, 1.0),
    ) == ((), 0, 0, 0.0)


@pytest.mark.parametrize("size", SIZES)
def test_chunks_fill_the_tensor_and_differ_by_one_element_at_most(size: int):
    for numel in numels(size):
        lengths = [chunk_numel(numel, size, chunk) for chunk in range(size)]
        assert sum(lengths) == numel
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("algorithm", "size"), CASES, ids=str)
def test_the_busiest_rank_is_found_and_is_the_first_but_for_odd_elements(
    algorithm: AllReduceAlgorithm, size: int
):
    for numel in numels(size):
        everyone = [counted(algorithm, size, index, numel) for index in range(size)]
        assert min_max_sent(algorithm, size, numel) == (min(everyone), max(everyone))
        assert max(everyone) - everyone[0] <= algorithm.num_rounds(size)


def test_the_busiest_of_a_hundred_thousand_ranks_is_known_without_their_rounds():
    least, most = min_max_sent(RecursiveHalvingAllReduce(), 100_000, 10**9 + 1)
    assert 0 < most - least < 50
    assert most == pytest.approx(2e9, rel=1e-4)


@dataclass(frozen=True)
class Wrong(AllReduceAlgorithm):
    """A ring with something changed in every round."""

    change: str

    def num_chunks(self, size: int) -> int:
        return size

    def rounds(self, size: int, index: int) -> tuple[Round, ...]:
        rounds = RingAllReduce().rounds(size, index)
        if self.change == "one round less":
            return rounds[:-1]
        if self.change == "sends to the left":
            turned = [ChunkMessage((index - 1) % size, each.sends[0].chunks) for each in rounds]
            return tuple(
                Round((to,), each.receives, each.accumulate) for to, each in zip(turned, rounds, strict=True)
            )
        both = [ChunkMessage(each.sends[0].peer, (*each.sends[0].chunks, index)) for each in rounds]
        return tuple(
            Round((more,), each.receives, each.accumulate) for more, each in zip(both, rounds, strict=True)
        )

    def num_rounds(self, size: int) -> int:
        return RingAllReduce().num_rounds(size)

    def num_sent(self, size: int, index: int, numel: int) -> int:
        return RingAllReduce().num_sent(size, index, numel)

    def seconds(self, size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
        return RingAllReduce().seconds(size, nbytes, latency_s, bytes_per_s)


LAWS = (
    test_every_rank_has_as_many_rounds_as_the_formula_says,
    test_every_rank_sends_what_the_formula_says_to_the_element,
    test_what_one_rank_sends_the_other_expects_in_the_same_round,
)


@pytest.mark.parametrize(
    ("change", "law"), [*zip(("one round less", "a chunk more", "sends to the left"), LAWS, strict=True)]
)
def test_a_planted_mistake_breaks_its_law_at_three_ranks(change: str, law):
    with pytest.raises(AssertionError):
        law(Wrong(change), 3)
