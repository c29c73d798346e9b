"""Blocks are derived from a mask whose queries attend to ranges of keys; layers that get the same mask share
the result.
"""

import numpy as np
import pytest
import torch

from meshwright.parallel.context.block_mask import DenseMask, IntervalMask, KeyIntervals, MaskCache
from meshwright.parallel.context.ring_geometry import AttentionRing
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from tests.parallel.context.dense_attention import mask_of

CPU = torch.device("cpu")
LENGTH = 24


def ring_on(sharding: SequenceSharding | None = None, index: int = 1, causal: bool = False) -> AttentionRing:
    sharding = sharding or SequenceSharding(3)
    spans = tuple(sharding.token_ranges(LENGTH, each) for each in range(sharding.num_ranks))
    return AttentionRing(index, spans[index], spans, 1.0, causal, lambda output, tensor: None)


def read(mask: torch.Tensor) -> KeyIntervals | None:
    return KeyIntervals.from_mask(mask, LENGTH)


@pytest.mark.parametrize("name", ["window", "documents", "padding"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
def test_bounds_are_what_the_mask_says(name: str, dtype: torch.dtype) -> None:
    mask = mask_of(name, LENGTH)
    deep = -torch.inf if name == "padding" else torch.finfo(torch.float32).min  # padding hides whole rows
    given = mask if dtype == torch.bool else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, deep)
    bounds = read(given)
    assert bounds is not None
    at = np.arange(LENGTH)
    said = (at >= bounds.first[:, :, None]) & (at < bounds.end[:, :, None])
    assert np.array_equal(said, mask[:, 0].numpy())


def test_a_mask_that_all_queries_share_is_spread() -> None:
    bounds = read((torch.arange(LENGTH) < 9).expand(2, 1, 1, LENGTH))
    assert bounds is not None
    assert bounds.first.shape == (2, LENGTH)
    assert set(bounds.end.ravel().tolist()) == {9}
    assert bounds.sample_groups() == [None]


def test_equal_rows_of_a_mask_are_grouped() -> None:
    mask = torch.ones(5, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[2, :, :, :4] = False
    bounds = read(mask)
    assert bounds is not None
    assert bounds.sample_groups() == [(0, 2), (2, 3), (3, 5)]


def holes() -> torch.Tensor:
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[..., 20, 7] = False
    return mask


def mean() -> torch.Tensor:
    """A row that is hidden whole by a large number: one device makes a mean of it."""
    mask = torch.zeros(1, 1, LENGTH, LENGTH)
    mask[..., 5, :] = torch.finfo(torch.float32).min
    return mask


@pytest.mark.parametrize(
    "mask",
    [
        holes(),
        mean(),
        torch.eye(LENGTH)[None, None] * 1e-3,
        torch.zeros(1, 1, LENGTH, LENGTH).tril(-1) - 100.0 * torch.ones(LENGTH, LENGTH).triu(1),
        torch.ones(1, 4, LENGTH, LENGTH, dtype=torch.bool),
        torch.zeros(1, 1, LENGTH, LENGTH, requires_grad=True),
    ],
    ids=["holes", "a mean", "a bias", "hidden by little", "by head", "with a gradient"],
)
def test_a_mask_without_ranges_is_used_as_it_is(mask: torch.Tensor) -> None:
    assert read(mask) is None
    assert isinstance(
        MaskCache().block_mask(ring_on(), mask[:, :, [0, 1, 5, 6, 7, 11, 20, 21]], CPU), DenseMask
    )


def test_layers_that_get_the_same_mask_analyze_it_once() -> None:
    recent, here, mask = MaskCache(), ring_on(), mask_of("documents", LENGTH)[:, :, :8].clone()
    view = recent.block_mask(here, mask, CPU)
    assert isinstance(view, IntervalMask)
    assert recent.block_mask(here, mask, CPU) is view
    assert recent.block_mask(here, mask.reshape(mask.shape), CPU, mask) is view
    assert recent.block_mask(here, mask.clone(), CPU) is not view
    assert recent.block_mask(ring_on(), mask, CPU) is not view  # of other lengths


@pytest.mark.parametrize("mask", [holes(), torch.eye(LENGTH)[None, None] - 2048.0], ids=["holes", "a bias"])
def test_a_mask_without_ranges_is_read_twice_and_by_the_first_layer_alone(
    mask: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read_list = list[str](), torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: reads.append("bounds") or tensor)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append("parts") or read_list(tensor))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: pytest.fail("one more read"))
    recent, here, mine = MaskCache(), ring_on(), mask[:, :, [0, 1, 5, 6, 7, 11, 20, 21]]
    view = recent.block_mask(here, mine, CPU)
    assert isinstance(view, DenseMask)
    assert recent.block_mask(here, mine, CPU) is view
    assert reads == ["bounds", "parts"]


def test_a_mask_that_was_written_to_is_analyzed_again() -> None:
    recent, here, mask = MaskCache(), ring_on(), torch.ones(1, 1, 8, LENGTH, dtype=torch.bool)
    before = recent.block_mask(here, mask, CPU)
    mask[..., 12:] = False
    after = recent.block_mask(here, mask, CPU)
    assert after is not before
    assert after.blocks(0) != before.blocks(0)


def test_a_freed_mask_is_not_mistaken_for_another_at_its_address() -> None:
    recent, here = MaskCache(), ring_on()
    for last in range(1, LENGTH):
        mask = (torch.arange(LENGTH) < last).expand(1, 1, 8, LENGTH).contiguous()
        view = recent.block_mask(here, mask, CPU)
        assert isinstance(view, IntervalMask)
        assert int(view._bounds.end[0, 0]) == last
        del mask


def test_rings_are_cached_for_a_few_lengths() -> None:
    recent, made = MaskCache(), list[int]()

    def of(length: int) -> AttentionRing:
        return recent.ring(length, lambda: made.append(length) or ring_on(causal=True))

    first = of(0)
    recent.block_mask(first, None, CPU)
    assert of(0) is first
    for length in range(1, 9):
        of(length)
    assert of(8) is of(8)
    assert of(0) is not first
    assert made == [*range(9), 0]
    assert len(recent._rules) == 0


def test_samples_with_different_masks_are_computed_separately_where_that_is_less_work() -> None:
    length = 2048
    spans = ((0, length),)
    whole = AttentionRing(0, spans, (spans,), 1.0, False, lambda output, tensor: None)
    at = np.arange(length)
    first, other = at // 512 * 512, np.where(at < 100, 0, 100)
    unlike = IntervalMask(
        whole, KeyIntervals(np.stack((first, other)), np.stack((at + 1, at + 1))), 1024
    ).blocks(0)
    assert {pair.samples for pair in unlike} == {(0, 1), (1, 2)}
    assert {pair.kind for pair in unlike} == {"causal"}
    near = IntervalMask(
        whole, KeyIntervals(np.stack((first, first + (at > 2000))), np.stack((at + 1, at + 1))), 1 << 20
    ).blocks(0)
    assert {pair.samples for pair in near} == {None}
