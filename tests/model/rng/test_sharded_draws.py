"""Which numbers of a site a rank draws for a slice, and what is refused because it is not clear."""

import pytest
import torch

from meshwright.model.rng.sharded_draws import Division, slice_of
from meshwright.model.rng.sites import Dice, Sites
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.dim_split import Cut

CPU = torch.device("cpu")


def dice(sites: Sites, rows: list[int], divisions: tuple[Division, ...] = ()) -> Dice:
    found = Dice(7, sites)
    found.divide({"block/0": divisions})
    found.begin(3, torch.tensor(rows))
    found.enter("block")
    return found


def learnt(*shape: int) -> Sites:
    """What a trial on 5 samples finds of a site that draws that shape."""
    sites = Sites()
    for batch in (5, 3):
        sites.learn("block/0", torch.Size(batch if size == 5 else size for size in shape), batch)
    return sites


HEADS = Cut(0, 3, (24,))  # three units of two heads of four features
WHOLE = {"heads": (5, 6, 4, 4), "features": (5, 4, 24), "second": (4, 5, 24), "shared": (6, 4, 4)}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", WHOLE)
def test_slices_put_together_are_the_whole(kind: str, ranks: int):
    sites, rows = learnt(*WHOLE[kind]), [4, 0, 9]
    shape = [3 if size == 5 else size for size in WHOLE[kind]]
    dim = {"heads": 1, "shared": 0}.get(kind, 2)
    whole = dice(sites, rows).keep(shape, 0.5, CPU)
    parts = []
    for index in range(ranks):
        local = [*shape[:dim], Cut(0, 3, (shape[dim],)).size(index, ranks), *shape[dim + 1 :]]
        parts.append(dice(sites, rows, (Division(ranks, index, cut=HEADS),)).keep(local, 0.5, CPU))
    assert torch.equal(torch.cat(parts, dim), whole)


@pytest.mark.parametrize("dim", [-1, -2])
def test_a_slice_of_the_stream_is_told_by_its_dim(dim: int):
    sites = learnt(5, 8, 8)
    whole = dice(sites, [1, 2]).uniform((2, 8, 8), torch.float64, CPU)
    local = [2, 8, 8]
    local[dim] = 4
    part = dice(sites, [1, 2], (Division(2, 1, dim),)).uniform(local, torch.float64, CPU)
    assert torch.equal(part, whole.narrow(dim, 4, 4))


def test_what_is_whole_on_every_rank_is_drawn_whole():
    sites = learnt(5, 1, 1)
    mine = dice(sites, [1, 2], (Division(2, 1, cut=HEADS), Division(2, 1, -2)))
    assert torch.equal(mine.keep((2, 1, 1), 0.5, CPU), dice(sites, [1, 2]).keep((2, 1, 1), 0.5, CPU))


def test_heads_of_more_ranks_than_units_are_dealt_one_by_one():
    cut = Cut(0, 1, (24,), heads=6, own=(24,))
    assert slice_of((6, 4, 4), (3, 4, 4), [Division(2, 1, cut=cut)], "").places(torch.tensor([0, 47])).tolist() == [48, 95]


@pytest.mark.parametrize(("whole", "local"), [((8, 24), (4, 24)), ((6, 8, 8), (6, 4, 4))])
def test_shorter_rows_are_drawn_where_nothing_is_divided(whole: tuple[int, ...], local: tuple[int, ...]):
    assert slice_of(whole, local, [Division(2, 1, meant=False)], "") is None


def test_rows_of_another_length_are_drawn_where_another_dim_says_enough():
    found = slice_of((6, 9, 9), (2, 5, 5), [Division(2, 1, cut=Cut(0, 3, (24,)))], "")
    assert found.whole == (6, 5, 5)
    assert found.places(torch.tensor([0])).tolist() == [4 * 25]


@pytest.mark.parametrize(
    ("whole", "local", "division"),
    [
        ((6, 6, 4), (4, 4, 4), Division(2, 0, cut=HEADS)),  # two dims may be the one that is divided
        ((9, 4), (3, 4), Division(2, 0, -2)),  # shorter rows, of which nobody knows the length
        ((6, 4), (4,), Division(2, 0, cut=HEADS)),
        ((9, 8), (9, 4), Division(2, 0, meant=False)),  # features of which nobody knows that they are divided
        ((6, 9, 9), (3, 9, 9), Division(2, 0, meant=False)),  # heads, likewise
    ],
)
def test_what_is_not_clear_is_refused(whole: tuple[int, ...], local: tuple[int, ...], division: Division):
    with pytest.raises(PlanError, match=r"block/0: .* in the whole model: which is not clear\n.*as long as those of the example"):
        slice_of(whole, local, [division], "block/0")
