"""The numbers of a draw site that a rank draws for its slice, and ambiguous slices that are refused."""

import pytest
import torch

from meshwright.model.rng.sharded_draws import DrawSharding, find_slice
from meshwright.model.rng.stateless_rng import DrawSites, StatelessRNG
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.param_dim_split import DimSplit

CPU = torch.device("cpu")


def stateless_rng(
    sites: DrawSites, samples: list[int], divisions: tuple[DrawSharding, ...] = ()
) -> StatelessRNG:
    found = StatelessRNG(7, sites)
    found.set_shardings({"block/0": divisions})
    found.begin_forward(3, torch.tensor(samples))
    found.enter_block("block")
    return found


def trial_sites(*shape: int) -> DrawSites:
    """Returns what a trial on 5 samples finds of a site that draws that shape."""
    sites = DrawSites()
    for batch in (5, 3):
        sites.record("block/0", torch.Size(batch if size == 5 else size for size in shape), batch)
    return sites


HEADS = DimSplit(0, 3, (24,))  # three units of two heads of four features
WHOLE = {"heads": (5, 6, 4, 4), "features": (5, 4, 24), "second": (4, 5, 24), "shared": (6, 4, 4)}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", WHOLE)
def test_slices_put_together_are_the_whole(kind: str, ranks: int):
    sites, samples = trial_sites(*WHOLE[kind]), [4, 0, 9]
    shape = [3 if size == 5 else size for size in WHOLE[kind]]
    dim = {"heads": 1, "shared": 0}.get(kind, 2)
    whole = stateless_rng(sites, samples).keep_mask(shape, 0.5, CPU)
    parts = []
    for index in range(ranks):
        local = [*shape[:dim], DimSplit(0, 3, (shape[dim],)).size(index, ranks), *shape[dim + 1 :]]
        parts.append(
            stateless_rng(sites, samples, (DrawSharding(ranks, index, dim_split=HEADS),)).keep_mask(
                local, 0.5, CPU
            )
        )
    assert torch.equal(torch.cat(parts, dim), whole)


def test_two_axes_that_shard_one_dim_are_nested_outermost_first():
    sites = trial_sites(5, 4, 24)
    whole = stateless_rng(sites, [1, 2]).uniform((2, 4, 24), torch.float64, CPU)
    for outer in range(3):
        for inner in range(2):
            shardings = (DrawSharding(3, outer, -1), DrawSharding(2, inner, -1))
            local = stateless_rng(sites, [1, 2], shardings).uniform((2, 4, 4), torch.float64, CPU)
            first = (2 * outer + inner) * 4
            assert torch.equal(local, whole[..., first : first + 4])


@pytest.mark.parametrize("dim", [-1, -2])
def test_a_slice_of_the_residual_stream_is_known_by_its_dim(dim: int):
    sites = trial_sites(5, 8, 8)
    whole = stateless_rng(sites, [1, 2]).uniform((2, 8, 8), torch.float64, CPU)
    local = [2, 8, 8]
    local[dim] = 4
    part = stateless_rng(sites, [1, 2], (DrawSharding(2, 1, dim),)).uniform(local, torch.float64, CPU)
    assert torch.equal(part, whole.narrow(dim, 4, 4))


def test_what_is_whole_on_every_rank_is_drawn_whole():
    sites = trial_sites(5, 1, 1)
    mine = stateless_rng(sites, [1, 2], (DrawSharding(2, 1, dim_split=HEADS), DrawSharding(2, 1, -2)))
    assert torch.equal(
        mine.keep_mask((2, 1, 1), 0.5, CPU), stateless_rng(sites, [1, 2]).keep_mask((2, 1, 1), 0.5, CPU)
    )


def test_heads_on_more_ranks_than_units_are_split_one_by_one():
    cut = DimSplit(0, 1, (24,), num_heads=6, per_head_numel=(24,))
    assert find_slice((6, 4, 4), (3, 4, 4), [DrawSharding(2, 1, dim_split=cut)], "").global_indices(
        torch.tensor([0, 47])
    ).tolist() == [48, 95]


@pytest.mark.parametrize(("whole", "local"), [((8, 24), (4, 24)), ((6, 8, 8), (6, 4, 4))])
def test_shorter_sequences_are_drawn_where_nothing_is_sharded(whole: tuple[int, ...], local: tuple[int, ...]):
    assert find_slice(whole, local, [DrawSharding(2, 1, declared=False)], "") is None


def test_sequences_of_another_length_are_drawn_where_another_dim_decides():
    found = find_slice((6, 9, 9), (2, 5, 5), [DrawSharding(2, 1, dim_split=DimSplit(0, 3, (24,)))], "")
    assert found.full_shape == (6, 5, 5)
    assert found.global_indices(torch.tensor([0])).tolist() == [4 * 25]


@pytest.mark.parametrize(
    ("whole", "local", "division"),
    [
        (
            (6, 6, 4),
            (4, 4, 4),
            DrawSharding(2, 0, dim_split=HEADS),
        ),  # two dims may be the one that is divided
        ((9, 4), (3, 4), DrawSharding(2, 0, -2)),  # shorter rows, of which nobody knows the length
        ((6, 4), (4,), DrawSharding(2, 0, dim_split=HEADS)),
        (
            (9, 8),
            (9, 4),
            DrawSharding(2, 0, declared=False),
        ),  # features of which nobody knows that they are divided
        ((6, 9, 9), (3, 9, 9), DrawSharding(2, 0, declared=False)),  # heads, likewise
    ],
)
def test_what_is_not_clear_is_refused(whole: tuple[int, ...], local: tuple[int, ...], division: DrawSharding):
    with pytest.raises(
        PlanError,
        match=r"block/0: .* in the unsharded model: the slice is ambiguous\n.*as long as those of the",
    ):
        find_slice(whole, local, [division], "block/0")
