"""Mask blocks cover every pair of query and key that attends exactly once, and few others."""

from collections.abc import Sequence

import numpy as np
import pytest

from meshwright.parallel.context.block_mask import CPU_CALL_COST, MaskRegion, find_regions, regions_cost

KINDS = ("causal", "stripes", "window", "documents", "both ways", "prefix", "padding", "noise")


def bounds(kind: str, count: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Of so many queries, as a rank of a ring has them."""
    at = np.arange(count)
    starts = np.sort(draw.integers(0, count + 1, draw.integers(0, count // 3 + 1)))
    number = np.searchsorted(starts, at, side="right")
    ends = np.array([0, *starts.tolist(), count])
    document, behind = ends[number], ends[number + 1]
    return {
        "causal": (np.zeros_like(at), at + 1),
        "stripes": (np.zeros_like(at), at),  # the keys of a rank whose tokens come behind
        "window": (np.maximum(0, at - count // 4), at + 1),
        "documents": (document, at + 1),
        "both ways": (document, behind),
        "prefix": (np.zeros_like(at), np.maximum(at + 1, count // 3)),
        "padding": (np.where(at < count // 2, 0, count // 2), np.where(at < count // 2, 0, at + 1)),
        "noise": (
            low := draw.integers(0, count + 1, count),
            np.maximum(low, draw.integers(0, count + 1, count)),
        ),
    }[kind]


def seen(low: np.ndarray, high: np.ndarray, keys: int) -> np.ndarray:
    """Returns which keys each query looks at."""
    at = np.arange(keys)
    return (at >= low[:, None]) & (at < high[:, None])


def visits_per_pair(found: Sequence[MaskRegion], low: np.ndarray, high: np.ndarray, keys: int) -> np.ndarray:
    """Returns how often kernels look at each pair: with a mask, at what that leaves."""
    count, mask = np.zeros((len(low), keys), int), seen(low, high, keys)
    for region in found:
        part = count[slice(*region.queries), slice(*region.keys)]
        if region.kind == "causal":
            assert part.shape[0] == part.shape[1]
        part += {
            "all": lambda part=part: np.ones_like(part),
            "causal": lambda part=part: np.tri(*part.shape, dtype=int),
            "some": lambda region=region: mask[slice(*region.queries), slice(*region.keys)],
        }[region.kind]()
    return count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [1, 16, CPU_CALL_COST, 1 << 20])
def test_every_attended_pair_is_computed_once_and_no_other(kind: str, call: int) -> None:
    draw = np.random.default_rng(7)
    for count in (0, 1, 2, 3, 7, 40, 41):
        low, high = bounds(kind, count, draw)
        for cut in (0, count // 2):
            found = find_regions(low, high, call, cut)
            assert np.array_equal(visits_per_pair(found, low, high, count), seen(low, high, count))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "noise"])
def test_little_is_computed_that_is_masked(kind: str) -> None:
    low, high = bounds(kind, 2048, np.random.default_rng(3))
    found = find_regions(low, high)
    computed = sum((region.num_pairs // 2 if region.kind == "some" else region.num_pairs) for region in found)
    many = kind in ("documents", "both ways")  # short ones share a call
    assert computed <= (high - low).sum() * (40 if many else 1.1)
    assert regions_cost(found, CPU_CALL_COST) < 0.8 * regions_cost(
        [MaskRegion((0, 2048), (0, 2048), "some")], CPU_CALL_COST
    )


def test_a_causal_mask_is_one_call_and_three_when_split_in_halves() -> None:
    low, high = np.zeros(256, int), np.arange(256) + 1
    assert find_regions(low, high) == [MaskRegion((0, 256), (0, 256), "causal")]
    halves = [
        ((0, 128), (0, 128), "causal"),
        ((128, 256), (0, 128), "all"),
        ((128, 256), (128, 256), "causal"),
    ]
    assert find_regions(low, high, split_row=128) == [MaskRegion(*each) for each in halves]


def test_short_documents_share_calls_and_long_ones_do_not() -> None:
    def packed(length: int) -> list[MaskRegion]:
        at = np.arange(1024)
        return find_regions(at // length * length, at + 1)

    assert packed(256) == [MaskRegion((at, at + 256), (at, at + 256), "causal") for at in range(0, 1024, 256)]
    short = packed(4)
    assert {region.kind for region in short} == {"some"}
    assert 1024 // 64 <= len(short) <= 1024 // 16
    assert all(region.queries == region.keys for region in short)


def test_a_window_is_computed_in_tiles_of_queries() -> None:
    at = np.arange(2048)
    found = find_regions(np.maximum(0, at - 255), at + 1)
    assert (
        sum(region.num_pairs for region in found if region.kind == "some") < 2.4 * 256 * 2048
    )  # masked pairs count twice
    assert len(found) < 2048 / 24


def test_padding_costs_nothing() -> None:
    nothing = np.zeros(100, int)
    assert find_regions(nothing, nothing) == []
