"""The clocks of workers: who waits, and how stale an update can be. Records: read back, or refused."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from meshwright.parallel.server.arrival_record import (
    RecordHeader,
    RecordWriter,
    Update,
    WorkerClocks,
    most_staleness,
    read_record,
)
from meshwright.plan.job.errors import PlanError

STEPS = 12


def random_order(workers: int, bound: int | None, seed: int) -> list[Update]:
    """Updates of workers of random speeds, of which each makes `STEPS` steps as far as the bound lets it."""
    clocks, random = WorkerClocks(workers, bound), Random(seed)
    speeds, may, left = [random.random() ** 3 for _ in range(workers)], set(range(workers)), [STEPS] * workers
    updates = list[Update]()
    while may:
        (worker,) = random.choices(sorted(may), [speeds[each] + 1e-3 for each in sorted(may)])
        updates.append(clocks.apply(worker))
        left[worker] -= 1
        may.remove(worker)
        may |= {each for each in clocks.release() if left[each]}
        steps = [STEPS - each for each in left]
        assert bound is None or max(steps) - min(steps) <= bound + 1
    assert left == [0] * workers  # nobody waits for ever
    return updates


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_no_update_is_more_stale_than_the_law_says(workers: int, bound: int):
    found = max(
        number - update.version
        for seed in range(60)
        for number, update in enumerate(random_order(workers, bound, seed))
    )
    assert found <= most_staleness(bound, workers)


@pytest.mark.parametrize(("workers", "bound"), [(3, 0), (3, 1), (4, 3)])
def test_the_largest_staleness_is_reached(workers: int, bound: int):
    clocks, most = WorkerClocks(workers, bound), 0
    slow, others = 0, range(1, workers)
    may = set(range(workers))

    def push(worker: int) -> None:
        nonlocal most
        version, may_not = clocks.num_applied, may.discard(worker)
        assert may_not is None
        most = max(most, version - clocks.apply(worker).version)
        may.update(clocks.release())

    for _ in range(bound):  # the slow one goes ahead, as far as it may
        push(slow)
    for _ in range(2 * bound + 1):  # then all others pass it
        for worker in others:
            push(worker)
    push(slow)
    assert most == most_staleness(bound, workers)


def test_without_a_bound_nobody_waits():
    clocks = WorkerClocks(3, None)
    for step in range(9):
        assert clocks.apply(1) == Update(1, step, step)
        assert clocks.release() == [1]
    with pytest.raises(ValueError, match=r"worker 3 pushed update 9(?s:.*)0, 1, 2"):
        clocks.apply(3)


def test_with_bound_0_all_workers_go_on_together():
    clocks = WorkerClocks(3, 0)
    released = []
    for worker in (2, 0, 1):
        clocks.apply(worker)
        released.append(clocks.release())
    assert released == [[], [], [2, 0, 1]]
    assert clocks.apply(0) == Update(0, 1, 3)
    with pytest.raises(ValueError, match="worker 0 pushed update 4"):
        clocks.apply(0)


def written(folder: Path) -> tuple[Path, list[Update]]:
    path, updates = folder / "sub" / "arrivals-3.txt", random_order(3, 1, 0)
    writer = RecordWriter(path, RecordHeader("5f0c", 3, 3, 1))
    for first in range(0, len(updates), 3):
        writer.append(updates[first : first + 3])
    return path, updates


def test_a_record_is_read_as_it_was_written(tmp_path: Path):
    path, updates = written(tmp_path)
    record = read_record(path)
    assert record.header == RecordHeader("5f0c", 3, 3, 1)
    assert list(record.updates) == updates
    assert record.num_steps == STEPS
    assert record.staleness.total() == len(updates)
    assert max(record.staleness) <= most_staleness(1, 3)


def replaced(number: int, old: str, new: str) -> Callable[[list[str]], list[str]]:
    def change(lines: list[str]) -> list[str]:
        assert old in lines[number]
        return [line.replace(old, new, 1) if at == number else line for at, line in enumerate(lines)]

    return change


EDITS = [
    (replaced(1, "0:0:0", "1:0:0"), "line 2 of .* does not have the checksum"),
    (replaced(0, '"bound": 1', '"bound": 2'), "line 2 of .* does not have the checksum"),
    (lambda lines: [*lines[:2], *lines[3:]], "line 3 of .* does not have the checksum"),
    (lambda lines: [*lines[:1], lines[2], lines[1], *lines[3:]], "line 2 of .* does not have the checksum"),
    (lambda lines: [*lines[:3], lines[3][:9]], "line 4 of .* does not have the checksum"),
    (replaced(0, "arrivals 1", "arrivals 9"), "no record of arrivals in the format 'arrivals 1'"),
    (lambda lines: ["[]", *lines[1:]], "is no record of arrivals"),
    (lambda lines: [], "is no record of arrivals"),
]


@pytest.mark.parametrize(("edit", "text"), EDITS, ids=range(len(EDITS)))
def test_an_edited_record_is_refused(edit: Callable[[list[str]], list[str]], text: str, tmp_path: Path):
    path, _ = written(tmp_path)
    path.write_text("\n".join(edit(path.read_text().splitlines())))
    with pytest.raises(PlanError, match=f"{text}(?s:.*)replay the files that the run wrote, unchanged"):
        read_record(path)


def test_an_order_that_cannot_have_been_is_refused_and_so_is_no_file(tmp_path: Path):
    path = tmp_path / "arrivals-2.txt"
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        read_record(path)
    RecordWriter(path, RecordHeader("5f0c", 2, 2, 1)).append([Update(0, 0, 0), Update(1, 0, 1)])
    with pytest.raises(PlanError, match=r"line 2 of .*version=1\) cannot have been"):
        read_record(path)
    RecordWriter(path, RecordHeader("5f0c", 2, 2, 0)).append([Update(0, 0, 0), Update(0, 1, 1)])
    with pytest.raises(PlanError, match="is no order of pushes"):
        read_record(path)
