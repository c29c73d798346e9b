"""The uneven all-to-all: rows in numbers that differ from pair to pair, also none; on threads, shared memory,
gloo and the fake world.
"""

from functools import partial

import pytest
import torch

from meshwright.comm.backends.fake import FakeWorld
from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import CollectiveError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool, RankFailure, run_on_threads
from tests.comm.collectives.test_group_shift import on_all_bodies

NUM_ROWS = (((0, 2, 1), (0, 0, 3), (4, 0, 0)), ((0, 0, 0), (0, 0, 5), (0, 0, 0)), ((0, 0, 0),) * 3)
WIDTHS = ((), (3,), (2, 5))


def rows(source: int, target: int, number: int, width: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What rank `source` sends to rank `target`."""
    generator = torch.Generator().manual_seed(10 * source + target)
    return torch.randint(0, 100, (number, *width), generator=generator).to(dtype)


def all_arrive(world: World, dtype: torch.dtype) -> bool:
    """Whether the rows of every table arrive, all under way at once."""
    group = world.group(["ep"])
    mine, started = group.index, []
    for table, width in [(table, width) for table in NUM_ROWS for width in WIDTHS]:
        sent = torch.cat([rows(mine, to, table[mine][to], width, dtype) for to in range(3)])
        due = torch.cat([rows(of, mine, table[of][mine], width, dtype) for of in range(3)])
        output, coming = torch.empty_like(due), [table[of][mine] for of in range(3)]
        work = group.all_to_all_v(
            output, sent, output_splits=coming, input_splits=table[mine], action="DISPATCH"
        )
        started.append((work, output, due))
    for work, _, _ in started[:: -1 if world.rank % 2 else 1]:
        work.wait()
    return all(torch.equal(output, due) for _, output, due in started)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16], ids=str)
def test_every_row_arrives_also_on_a_rank_that_has_none(
    process_pool: ProcessPool, dtype: torch.dtype
) -> None:
    for right in on_all_bodies(process_pool, partial(all_arrive, dtype=dtype), Mesh(ep=3)):
        assert right == [True] * 3


def test_the_ledger_has_the_bytes_of_the_rows_that_leave() -> None:
    def record(world: World) -> list[tuple[str, int, float, int]]:
        world.ledger.is_recording = True
        group, table = world.group(["ep"]), NUM_ROWS[0]
        sent = torch.zeros(sum(table[group.index]), 5)
        coming = [table[of][group.index] for of in range(3)]
        output = torch.empty(sum(coming), 5)
        group.all_to_all_v(output, sent, output_splits=coming, input_splits=table[group.index]).wait()
        return [
            (each.collective, each.nbytes, each.sent_nbytes, each.group_size) for each in world.ledger.entries
        ]

    found = run_on_threads(record, Mesh(ep=3))
    assert found == [[("all_to_all_v", 20 * number, 20 * number, 3)] for number in (3, 3, 4)]


def test_rows_of_other_shapes_do_not_pair() -> None:
    def differ(world: World) -> None:
        group, width = world.group(["ep"]), 4 + world.rank
        tensor = torch.zeros(1, width)
        splits = [1 - world.rank, world.rank][::-1]
        group.all_to_all_v(
            torch.empty(1, width), tensor, output_splits=splits, input_splits=splits, action="DISPATCH"
        ).wait()

    with pytest.raises((CollectiveError, RankFailure), match=r"all_to_all_v of float32 rows of \[5\] for"):
        run_on_threads(differ, Mesh(ep=2))


def test_the_fake_world_fills_the_rows_of_its_peers() -> None:
    group = FakeWorld(Mesh(ep=3), 1).group(["ep"])
    tensor = torch.arange(6.0).view(3, 2)
    output = torch.full((5, 2), -1.0)
    group.all_to_all_v(output, tensor, output_splits=[4, 0, 1], input_splits=[2, 0, 1]).wait()
    assert output.tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [0, 1]]


def test_splits_that_do_not_fit_are_refused_with_the_repair() -> None:
    group, three, two = FakeWorld(Mesh(ep=2), 0).group(["ep"]), torch.zeros(3, 4), torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"the input has 3 rows, and its splits are \[0, 2\]\. Give"):
        group.all_to_all_v(two, three, output_splits=[0, 2], input_splits=[0, 2])
    with pytest.raises(ValueError, match=r"the output has 2 rows, .* \[2\]\. .* of the 2 ranks"):
        group.all_to_all_v(two, three, output_splits=[2], input_splits=[0, 3])
    with pytest.raises(ValueError, match=r"the input has 1 rows for this rank itself\. Leave them out"):
        group.all_to_all_v(two, three, output_splits=[0, 2], input_splits=[1, 2])
    with pytest.raises(ValueError, match=r"the output has torch.float32 rows of \[5\]; needed are .*\[4\]"):
        group.all_to_all_v(torch.zeros(2, 5), three, output_splits=[0, 2], input_splits=[0, 3])
    with pytest.raises(ValueError, match="the output shares memory"):
        group.all_to_all_v(three, three, output_splits=[0, 3], input_splits=[0, 3])
    assert group.ledger.sent_nbytes == {}
