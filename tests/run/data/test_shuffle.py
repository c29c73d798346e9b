"""The order of samples: a permutation per epoch, the same whoever asks, whenever they ask."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.plan.job.errors import PlanError
from meshwright.run.data.shuffle import ShuffledOrder, rank_sample_ids

SIZES = st.integers(1, 200)
SEEDS = st.integers(-(2**40), 2**40)


def played(order: ShuffledOrder, batch: int, steps: int) -> list[int]:
    return [i for step in range(steps) for i in order.ids(step, batch)]


@settings(deadline=None)
@given(num=SIZES, seed=SEEDS, epochs=st.integers(1, 3), batch=st.integers(1, 50))
def test_every_sample_is_played_once_per_epoch_and_then_none(num: int, seed: int, epochs: int, batch: int):
    steps = -(-num * epochs // batch) + 1
    ids = played(ShuffledOrder(num, seed, epochs), batch, steps)
    for epoch in range(epochs):
        assert sorted(ids[epoch * num : (epoch + 1) * num]) == list(range(num))
    assert set(ids[epochs * num :]) == {-1}


@settings(deadline=None)
@given(num=SIZES, seed=SEEDS, epochs=st.integers(0, 2), batch=st.integers(1, 40), start=st.integers(0, 20))
def test_a_restored_order_goes_on_where_it_stopped(num: int, seed: int, epochs: int, batch: int, start: int):
    whole = played(ShuffledOrder(num, seed, epochs), batch, start + 3)
    again = ShuffledOrder(num, seed, epochs)
    assert [i for step in range(start, start + 3) for i in again.ids(step, batch)] == whole[start * batch :]


@settings(deadline=None)
@given(num=SIZES, seed=SEEDS, sizes=st.lists(st.integers(1, 30), min_size=2, max_size=2))
def test_the_order_of_samples_does_not_depend_on_the_batch(num: int, seed: int, sizes: list[int]):
    one, other = (played(ShuffledOrder(num, seed), batch, 60 // batch + 1)[:60] for batch in sizes)
    assert one == other


@settings(deadline=None)
@given(length=st.integers(0, 60), num_micro=st.integers(1, 5), count=st.integers(1, 5))
def test_shares_make_up_the_step_whatever_the_number_of_ranks(length: int, num_micro: int, count: int):
    ids = list(range(length))
    shares = [rank_sample_ids(ids, m, num_micro, r, count) for m in range(num_micro) for r in range(count)]
    together = [i for part in shares for i in part]
    assert together[:length] == ids
    assert set(together[length:]) <= {-1}
    assert len({len(part) for part in shares}) == 1
    assert len(together) - length < num_micro * count


def test_micro_batch_m_of_rank_r_takes_a_contiguous_slice():
    ids = list(range(100, 112))
    assert rank_sample_ids(ids, microbatch=1, num_microbatches=2, data_rank=2, num_data_ranks=3) == [110, 111]
    assert rank_sample_ids(ids, microbatch=0, num_microbatches=2, data_rank=1, num_data_ranks=3) == [102, 103]


@pytest.mark.parametrize(("micro", "index"), [(2, 0), (-1, 0), (0, 3), (0, -1)])
def test_a_share_of_nobody_is_refused(micro: int, index: int):
    with pytest.raises(ValueError, match="does not exist"):
        rank_sample_ids([1, 2, 3], micro, 2, index, 3)


def test_endless_epochs_never_run_out():
    ids = played(ShuffledOrder(7, seed=1), batch=5, steps=70)
    assert Counter(ids) == dict.fromkeys(range(7), 50)


def test_epochs_and_seeds_differ_and_are_no_shifts_of_each_other():
    num = 64
    orders = [tuple(ShuffledOrder(num, seed).ids(epoch, num)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25
    shifts = [{(b - a) % num for a, b in zip(orders[0], other, strict=True)} for other in orders[1:]]
    assert all(len(shift) > num // 3 for shift in shifts)


def test_all_orders_of_three_samples_are_equally_likely():
    seen = Counter(tuple(ShuffledOrder(3, seed).ids(0, 3)) for seed in range(1200))
    assert len(seen) == 6
    assert (
        sum((num - 200) ** 2 / 200 for num in seen.values()) < 20.5
    )  # chi-square, 5 degrees of freedom: p = 0.001


def test_the_first_place_falls_on_all_parts_of_the_data():
    num, bins = 1000, 10
    seen = Counter(ShuffledOrder(num, seed).ids(0, 1)[0] * bins // num for seed in range(1000))
    assert sum((seen[b] - 100) ** 2 / 100 for b in range(bins)) < 27.9  # 9 degrees of freedom: p = 0.001


def test_an_order_is_the_same_in_every_version():
    assert ShuffledOrder(10, seed=0, epochs=1).ids(0, 12) == [1, 9, 7, 4, 0, 6, 8, 2, 3, 5, -1, -1]
    assert ShuffledOrder(10**12, seed=0).ids(10**13, 3) == [421676643374, 761552114058, 241080532426]


def test_a_cursor_far_away_is_as_near_as_the_first():
    order = ShuffledOrder(10**15, seed=4)
    assert len(set(order.ids(10**20, 100))) == 100


@pytest.mark.parametrize(
    ("num", "epochs", "message"),
    [(0, 0, "0 samples"), (2**60 + 1, 0, "samples; needed are 1 to"), (3, -1, "-1 epochs")],
)
def test_an_impossible_order_is_refused(num: int, epochs: int, message: str):
    with pytest.raises(PlanError, match=message):
        ShuffledOrder(num, 0, epochs)


@pytest.mark.parametrize(("step", "batch"), [(-1, 4), (0, 0)])
def test_a_step_that_does_not_exist_is_refused(step: int, batch: int):
    with pytest.raises(ValueError, match="needed are a step from 0 and at least 1 sample"):
        ShuffledOrder(3, 0).ids(step, batch)
