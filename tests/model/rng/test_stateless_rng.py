"""Dropout masks belong to samples: a sample draws the same numbers at a site however the batch is split."""

import math

import pytest
import torch

from meshwright.model.rng.stateless_rng import DrawSites, SampleLayout, StatelessRNG
from meshwright.model.tensors.counter_rng import CHUNK_NUMEL
from meshwright.plan.job.errors import PlanError

CPU = torch.device("cpu")
SHAPES: dict[SampleLayout, tuple[int, ...]] = {
    "dim0": (1, 5, 7),
    "dim1": (5, 1, 7),
    "flattened": (3, 7),
    "shared": (5, 7),
}


def shape_for(kind: SampleLayout, batch: int) -> tuple[int, ...]:
    shape = list(SHAPES[kind])
    if kind != "shared":
        shape[1 if kind == "dim1" else 0] *= batch
    return tuple(shape)


def rng_for(kind: SampleLayout, seed: int = 0) -> StatelessRNG:
    return StatelessRNG(seed, DrawSites({"/0": (kind,), "a/0": (kind,), "b/0": (kind,), "a/1": (kind,)}))


def keep(
    stateless_rng: StatelessRNG, kind: SampleLayout, ids: list[int], step: int = 0, p: float = 0.4
) -> torch.Tensor:
    stateless_rng.begin_forward(step, torch.tensor(ids))
    return stateless_rng.keep_mask(shape_for(kind, len(ids)), p, CPU)


@pytest.mark.parametrize("parts", [(3, 3), (2, 2, 2), (1,) * 6, (5, 1)])
@pytest.mark.parametrize("kind", ["dim0", "dim1", "flattened"])
def test_a_sample_has_the_same_mask_however_the_batch_is_divided(kind: SampleLayout, parts: tuple[int, ...]):
    ids = [3, 4, 50, 51, 52, 9]
    whole = keep(rng_for(kind), kind, ids)
    pieces = [keep(rng_for(kind), kind, ids[sum(parts[:i]) : sum(parts[: i + 1])]) for i in range(len(parts))]
    assert torch.equal(torch.cat(pieces, dim=1 if kind == "dim1" else 0), whole)


def test_the_layouts_of_one_sample_hold_the_same_numbers():
    first, second = keep(rng_for("dim0"), "dim0", [3, 8]), keep(rng_for("dim1"), "dim1", [3, 8])
    assert torch.equal(first, second.transpose(0, 1))


def test_a_shared_site_draws_once_for_all_samples():
    assert torch.equal(keep(rng_for("shared"), "shared", [1]), keep(rng_for("shared"), "shared", [2, 3]))


def test_seed_step_sample_and_site_each_change_the_mask():
    base = keep(rng_for("dim0"), "dim0", [3])
    others = [keep(rng_for("dim0", seed=1), "dim0", [3]), keep(rng_for("dim0"), "dim0", [4])]
    others.append(keep(rng_for("dim0"), "dim0", [3], step=1))
    stateless_rng = rng_for("dim0")
    stateless_rng.begin_forward(0, torch.tensor([3]))
    stateless_rng.enter_block("a")
    others += [stateless_rng.keep_mask((1, 5, 7), 0.4, CPU), stateless_rng.keep_mask((1, 5, 7), 0.4, CPU)]
    assert all(not torch.equal(base, other) for other in others)
    assert not torch.equal(others[-1], others[-2])


def test_a_recomputed_block_draws_the_same():
    stateless_rng = rng_for("dim0")
    stateless_rng.begin_forward(0, torch.tensor([3]))
    masks = []
    for block_call in ("a", "b", "a"):
        stateless_rng.enter_block(block_call)
        masks.append(stateless_rng.keep_mask((1, 5, 7), 0.4, CPU))
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p(p: float):
    stateless_rng = StatelessRNG(0, DrawSites({"/0": ("dim0",)}))
    stateless_rng.begin_forward(0, torch.arange(10))
    mask = stateless_rng.keep_mask((10, 20_000), p, CPU)
    assert abs(1 - mask.double().mean().item() - p) < 4 * math.sqrt(p * (1 - p) / mask.numel())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_uniform_numbers_lie_in_the_half_open_unit_interval(dtype: torch.dtype):
    stateless_rng = StatelessRNG(0, DrawSites({"/0": ("dim0",)}))
    stateless_rng.begin_forward(0, torch.arange(10))
    u = stateless_rng.uniform((10, 20_000), dtype, CPU)
    assert u.dtype == dtype
    assert u.min() >= 0
    assert u.max() < 1
    assert u.double().mean().item() == pytest.approx(0.5, abs=0.01)


def test_a_sample_wider_than_a_chunk_is_drawn_as_a_narrow_one_is():
    stateless_rng = StatelessRNG(0, DrawSites({"/0": ("dim0",)}))
    stateless_rng.begin_forward(0, torch.arange(3))
    wide = stateless_rng.keep_mask((3, CHUNK_NUMEL + 5), 0.5, CPU)
    stateless_rng.begin_forward(0, torch.arange(3))
    assert torch.equal(stateless_rng.keep_mask((3, 100), 0.5, CPU), wide[:, :100])
    assert wide[:, CHUNK_NUMEL:].any()


def test_one_trial_finds_the_sample_dim():
    sites = DrawSites()
    for site, shape in {"f": (7, 3), "s": (3, 7), "r": (21, 4), "n": (12, 5), "scalar": ()}.items():
        sites.record(site, torch.Size(shape), 7)
    assert {site: sites.layout(site) for site in sites.layouts} == {
        "f": "dim0",
        "s": "dim1",
        "r": "flattened",
        "n": "shared",
        "scalar": "shared",
    }


def test_a_second_trial_settles_what_the_first_left_open():
    sites = DrawSites()
    for batch in (3, 5):
        sites.record("time first", torch.Size((3, batch, 8)), batch)
        sites.record("heads", torch.Size((12, 4)), batch)
    assert sites.layout("time first") == "dim1"
    assert sites.layout("heads") == "shared"


def test_a_site_that_no_trial_met_is_refused():
    stateless_rng = StatelessRNG(0)
    stateless_rng.begin_forward(0, torch.arange(2))
    stateless_rng.enter_block("layers.3")
    with pytest.raises(PlanError, match=r"layers\.3/0: the forward draws random numbers at a site"):
        stateless_rng.keep_mask((2, 3), 0.5, CPU)


@pytest.mark.parametrize(("kind", "size"), [("dim0", (4, 2)), ("dim1", (2, 4)), ("flattened", (4, 2))])
def test_a_tensor_that_does_not_fit_the_announced_samples_is_refused(
    kind: SampleLayout, size: tuple[int, int]
):
    stateless_rng = rng_for(kind)
    stateless_rng.begin_forward(0, torch.arange(3))
    with pytest.raises(
        PlanError, match=rf"is drawn for 3 samples, and in the trial its sample layout was '{kind}'"
    ):
        stateless_rng.keep_mask(size, 0.5, CPU)


def test_a_rank_without_samples_draws_nothing():
    stateless_rng = rng_for("dim0")
    stateless_rng.begin_forward(0, torch.arange(0))
    assert stateless_rng.keep_mask((0, 5, 7), 0.5, CPU).shape == (0, 5, 7)
