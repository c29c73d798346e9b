"""Mixtures: every source has its fraction of any first k samples, on any number of ranks and after any
resume.
"""

from collections import Counter
from fractions import Fraction
from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.plan.job.data_config import DataConfig, MixturePart
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import TrainConfig
from meshwright.run.data.data_loader import LocalBatches, open_dataset
from meshwright.run.data.mixture import MAX_PERIOD, MixedOrder, Mixture, integer_shares, interleave
from tests.run.data.corpora import MARKED, TALKS, jsonl, local_batches_of, samples, tokenizer

SHARES = st.lists(st.integers(1, 40), min_size=1, max_size=6)
SIZES, WEIGHTS, BATCH = (37, 11, 23), (5.0, 3.0, 2.0), 12


@settings(deadline=None)
@given(shares=SHARES)
def test_every_source_has_its_share_of_any_prefix_rounded_up_or_down(shares: list[int]):
    order = interleave(shares)
    counts = np.zeros((len(shares), len(order) + 1), np.int64)
    for s in range(len(shares)):
        counts[s, 1:] = np.cumsum(order == s)
    ideal = np.outer(shares, np.arange(len(order) + 1))
    assert (np.abs(counts * sum(shares) - ideal) < sum(shares)).all()
    assert counts[:, -1].tolist() == shares


def test_the_order_of_the_picture_is_the_one_that_is_played():
    assert "".join("abc"[s] for s in interleave([5, 3, 2])) == "abacababac"


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([1, 1, 1], [1, 1, 1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([0.5], [1]),
        ([1e-3, 0.999], [1, 999]),
        ([30, 12.0], [5, 2]),
    ],
)
def test_weights_become_the_smallest_whole_numbers(weights, shares):
    assert integer_shares(weights) == shares


@given(weights=st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=5))
def test_any_weights_become_shares_that_are_close(weights: list[float]):
    shares = integer_shares(weights)
    total = sum(Fraction(str(weight)) for weight in weights)
    assert sum(shares) <= MAX_PERIOD
    assert min(shares) >= 1
    assert gcd(*shares) == 1
    for share, weight in zip(shares, weights, strict=True):
        assert abs(Fraction(share, sum(shares)) - Fraction(str(weight)) / total) <= Fraction(
            len(weights), MAX_PERIOD
        )


def owners(ids: list[int], sizes=SIZES) -> list[int]:
    return np.searchsorted(np.cumsum(sizes), [i for i in ids if i >= 0], side="right").tolist()


def test_each_source_is_played_whole_before_any_sample_of_it_comes_again():
    order = MixedOrder(SIZES, (5, 3, 2), seed=4)
    ids = [i for step in range(40) for i in order.ids(step, BATCH)]
    first = 0
    for s, size in enumerate(SIZES):
        mine = [i - first for i, owner in zip(ids, owners(ids), strict=True) if owner == s]
        assert len(mine) == len(ids) * (5, 3, 2)[s] // 10
        for epoch in range(len(mine) // size):
            assert sorted(mine[epoch * size : (epoch + 1) * size]) == list(range(size))
        first += size


def test_sources_of_one_size_are_not_played_in_step():
    ids = MixedOrder((50, 50), (1, 1), seed=4).ids(0, 100)
    assert ids[0::2] != [i - 50 for i in ids[1::2]]
    assert sorted(ids) == list(range(100))


def test_seeds_decide_the_order():
    made = [MixedOrder(SIZES, (5, 3, 2), seed=seed).ids(3, 20) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


@settings(deadline=None)
@given(step=st.integers(0, 10**9), batch=st.integers(1, 30))
def test_any_position_is_found_at_once_and_the_batch_changes_nothing(step: int, batch: int):
    order = MixedOrder(SIZES, (5, 3, 2), seed=4)
    assert order.ids(step, batch) == [
        i for place in range(step * batch, (step + 1) * batch) for i in order.ids(place, 1)
    ]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4), epochs=st.integers(1, 3), data=st.data())
def test_it_ends_before_a_source_would_begin_once_too_often(sizes: list[int], epochs: int, data):
    shares = tuple(data.draw(st.lists(st.integers(1, 6), min_size=len(sizes), max_size=len(sizes))))
    order = MixedOrder(tuple(sizes), shares, 0, epochs)
    endless = MixedOrder(tuple(sizes), shares, 0)
    assert order.num_total is not None
    counts = Counter(owners(order.ids(0, order.num_total), sizes))
    assert all(counts[s] <= size * epochs for s, size in enumerate(sizes))
    after = Counter(owners(endless.ids(0, order.num_total + 1), sizes))
    assert any(after[s] > size * epochs for s, size in enumerate(sizes))
    assert order.ids(1, order.num_total) == [-1] * order.num_total
    assert order.ids(0, order.num_total + 2)[-2:] == [-1, -1]


def source(folder, **changes) -> DataConfig:
    words = "".join(f"{n} and " for n in range(60))
    parts = (
        MixturePart(jsonl(folder / "a.jsonl", [{"text": words}]), weight=5.0),
        MixturePart(jsonl(folder / "b.jsonl", [{"body": words[::-1]}]), weight=3.0, column="body"),
        MixturePart(
            jsonl(folder / "c.jsonl", [{"messages": talk} for talk in TALKS]), weight=2.0, chat="messages"
        ),
    )
    return DataConfig(mixture=parts, tokenizer=tokenizer(folder / "t", MARKED), sequence=24, **changes)


def batches_by_rank(data, ranks: int, epochs: int = 0) -> list[LocalBatches]:
    return local_batches_of(
        data, ranks, DataConfig("example", epochs=epochs), TrainConfig(batch=BATCH, seed=5)
    )


def played(each: list[LocalBatches], steps: range) -> Counter:
    found: Counter = Counter()
    for step in steps:
        for local_batches in each:
            batch = local_batches.batch(step)
            if batch is not None:
                rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
                found.update((tuple(x), tuple(y)) for x, y in rows if set(y) != {-100})
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("epochs", [0, 2])
def test_the_samples_are_the_same_on_any_number_of_ranks_and_after_going_on_with_another(
    tmp_path, ranks: int, epochs: int
):
    data = open_dataset(source(tmp_path, epochs=epochs), None, tmp_path / "cache")
    alone = batches_by_rank(data, 1, epochs)
    steps = alone[0].num_steps or 15
    whole = played(alone, range(steps))
    many = batches_by_rank(data, ranks, epochs)
    assert {local_batches.num_steps for local_batches in many} == {alone[0].num_steps}
    assert played(many, range(steps)) == whole
    assert (
        played(alone, range(4))
        + played(many, range(4, 7))
        + played(batches_by_rank(data, 3, epochs), range(7, steps))
        == whole
    )
    assert all(local_batches.batch(steps) is None for local_batches in many) == bool(epochs)


def test_samples_come_from_the_sources_that_their_ids_name(tmp_path):
    data = open_dataset(source(tmp_path), None, tmp_path / "cache")
    assert isinstance(data, Mixture)
    assert data.shares == (5, 3, 2)
    first, second, third = data.datasets
    ids = [len(first) + 1, -1, 0, len(first) + len(second), len(data) - 1]
    expected = [
        samples(second, [1]),
        samples(third, [-1]),
        samples(first, [0]),
        samples(third, [0]),
        samples(third, [8]),
    ]
    got = samples(data, ids)
    assert [[row] for r, row in enumerate(got) if r != 1] == [row for r, row in enumerate(expected) if r != 1]
    assert set(got[1][1]) == {-100}
    with pytest.raises(IndexError):
        data.batch([len(data)])


def test_the_digest_covers_the_sources_and_their_weights(tmp_path):
    one = source(tmp_path)
    smaller = tuple(MixturePart(part.source, 1.0, column=part.column, chat=part.chat) for part in one.mixture)
    other = DataConfig(mixture=smaller, tokenizer=one.tokenizer, sequence=24)
    digests = [open_dataset(each, None, tmp_path / "cache").digest for each in (one, one, other)]
    assert digests[0] == digests[1] != digests[2]


def test_bytes_of_files_and_of_rows_are_mixed_too(tmp_path):
    (tmp_path / "a.txt").write_text("plain text of some length")
    rows = jsonl(tmp_path / "b.jsonl", [{"text": "text in rows"}])
    mixed = DataConfig(mixture=(MixturePart(str(tmp_path / "a.txt")), MixturePart(rows)), sequence=6)
    data = open_dataset(mixed, None, tmp_path / "cache")
    assert len(data) == 4 + 2
    assert bytes(samples(data, [4])[0][0]) == b"text i"


def test_errors_of_all_sources_are_reported_at_once(tmp_path):
    mixed = DataConfig(
        mixture=(MixturePart(str(tmp_path / "no.jsonl")), MixturePart(jsonl(tmp_path / "b.jsonl", ["{"])))
    )
    with pytest.raises(PlanError) as caught:
        open_dataset(mixed, None, tmp_path / "cache")
    assert [fault.location.rpartition("/")[2] for fault in caught.value.diagnostics] == [
        "no.jsonl",
        "b.jsonl:1",
    ]
