"""Distributed integrity check of a checkpoint: every file is read once, and all ranks learn the result."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import current_thread

import pytest

from meshwright.comm.collectives.group import World
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.checkpoint.all_ranks_or_none import ERROR_PREFIX, OK_PREFIX, ConsensusError, RankConsensus
from meshwright.run.checkpoint.directories import step_folder
from meshwright.run.checkpoint.distributed_checkpoint import save_tensors
from meshwright.run.checkpoint.distributed_verification import (
    consensus_for_load,
    newest_valid_on_all_ranks,
    verify_checkpoint,
)
from meshwright.run.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from meshwright.testing.ranks import ProcessPool, run_on_threads
from tests.run.checkpoint.awkward_states import META, THREE, state

FILES = [f"rank-{rank:05d}.safetensors" for rank in range(3)]

Places = Callable[[int], Path]  # by rank


def by_ranks(folder: Path, step: int, ranks: int = 3) -> Path:
    """The checkpoint of `step` that so many ranks have saved in `folder`."""
    mesh = Mesh(dp_shard=ranks)
    return run_on_threads(
        lambda world: save_tensors(folder, step, state(step), META, world.group(("dp_shard",)), 9), mesh
    )[0]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def verdict(world: World, place: Path) -> str:
    """Returns what a rank finds wrong with the checkpoint at `place`; "" when it would go on."""
    try:
        verify_checkpoint(place, consensus_for_load(world, "the test does not go on"))
    except CheckpointError as error:
        return str(error)
    return ""


def verdicts(place: Places) -> list[str]:
    return run_on_threads(lambda world: verdict(world, place(world.rank)), THREE)


def assert_refused_by_all(path: Path, file: str) -> str:
    """Every rank says the same, which names the damaged file; returns it."""
    said = verdicts(lambda rank: path)
    assert said == [said[0]] * 3
    assert f"{path / file}: bit-flipped" in said[0]
    return said[0]


def read_since(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """The files that are opened for their sums from here on, each with the rank that does so."""
    found: list[tuple[str, Path]] = []
    usual = Path.open

    def noting(path: Path, mode: str = "r", *args: object, **kwargs: object) -> object:
        if path.suffix == ".safetensors" and mode == "rb":
            found.append((current_thread().name, path))
        return usual(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", noting)
    return found


# Who reads what.


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_each_file_is_read_for_its_sum_by_exactly_one_rank_and_ranks_read_alike(
    ranks: int, tmp_path: Path, monkeypatch
):
    path = by_ranks(tmp_path, 1, ranks=4)
    read = read_since(monkeypatch)
    assert run_on_threads(lambda world: verdict(world, path), Mesh(dp_shard=ranks)) == [""] * ranks
    files = read_manifest(path).files
    assert Counter(file.name for _, file in read) == dict.fromkeys(files, 1)
    nbytes = Counter({f"rank {rank}": 0 for rank in range(ranks)})
    for rank, file in read:
        nbytes[rank] += files[file.name].nbytes
    assert max(nbytes.values()) - min(nbytes.values()) <= max(shard.nbytes for shard in files.values())


def test_a_rank_that_sees_a_copy_reads_all_of_its_copy(tmp_path: Path, monkeypatch):
    path = by_ranks(tmp_path / "shared", 1)
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    read = read_since(monkeypatch)
    assert verdicts(lambda rank: copy if rank == 2 else path) == [""] * 3
    assert Counter(file for _, file in read) == {place / file: 1 for place in (path, copy) for file in FILES}
    assert {rank for rank, file in read if file.parent == copy} == {"rank 2"}
    flip(copy / FILES[0])
    said = verdicts(lambda rank: copy if rank == 2 else path)
    assert said == [said[0]] * 3
    assert (
        f"{copy / FILES[0]}: bit-flipped: its checksum differs from the manifest's (found by rank 2)"
        in said[0]
    )


# What one rank finds is an error on all.


@pytest.mark.parametrize("file", FILES)
def test_damage_in_a_file_that_one_rank_reads_is_the_same_error_on_every_rank(file: str, tmp_path: Path):
    path = by_ranks(tmp_path, 1)
    flip(path / file)
    said = assert_refused_by_all(path, file)
    assert "(found by rank " in said
    assert "resume from another checkpoint of the run" in said


def test_damage_that_all_ranks_see_is_told_once(tmp_path: Path):
    path = by_ranks(tmp_path, 1)
    (path / FILES[1]).write_bytes((path / FILES[1]).read_bytes()[:-1])
    said = verdicts(lambda rank: path)
    assert said == [said[0]] * 3
    assert said[0].count("truncated") == 1
    assert "found by" not in said[0]


def test_damage_in_several_files_is_told_of_each(tmp_path: Path):
    path = by_ranks(tmp_path, 1)
    for file in FILES:
        flip(path / file)
    said = verdicts(lambda rank: path)
    assert said == [said[0]] * 3
    assert all(f"{file}: bit-flipped" in said[0] for file in FILES)


def test_a_rank_that_ignored_what_the_others_found_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usual = RankConsensus.gather

    def deaf(vote: RankConsensus, act: str, work: Callable[[], bytes]) -> list[bytes]:
        told = usual(vote, act, work)
        kept = range(3) if vote.group.index != 1 else (1,)
        return [
            line if index in kept or line[:1] != ERROR_PREFIX else OK_PREFIX
            for index, line in enumerate(told)
        ]

    noticed = []
    for step, file in enumerate(FILES):
        path = by_ranks(tmp_path, step)
        flip(path / file)
        with monkeypatch.context() as planted:
            planted.setattr(RankConsensus, "gather", deaf)
            said = verdicts(lambda rank, path=path: path)
        noticed.append(said != [said[0]] * 3)
        assert_refused_by_all(path, file)
    assert sum(noticed) == 2, "all but the file that this rank reads itself"


def test_a_check_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path):
    path = by_ranks(tmp_path, 1)

    def body(world: World) -> str:
        def fits(manifest: Manifest, place: Path) -> None:
            if world.rank == 1:
                raise CheckpointError("it does not fit", fix="take another", location=str(place))

        with pytest.raises(CheckpointError) as caught:
            verify_checkpoint(path, consensus_for_load(world, "the test does not go on"), fits)
        return str(caught.value)

    assert (
        run_on_threads(body, THREE)
        == [(f"{path}: it does not fit (found by rank 1)\n  repair: take another")] * 3
    )


def test_ranks_that_find_different_checkpoints_are_named(tmp_path: Path):
    path, other = by_ranks(tmp_path / "a", 1), by_ranks(tmp_path / "b", 2)
    for said in verdicts(lambda rank: other if rank == 2 else path):
        assert "ranks [2] read another manifest than rank 0" in said
        assert "give every rank the same folder, or a copy of it" in said


def test_processes_refuse_together_too(tmp_path: Path, process_pool: ProcessPool):
    path = by_ranks(tmp_path, 1)
    assert process_pool.run(verdict, THREE, path) == [""] * 3
    flip(path / FILES[2])
    said = process_pool.run(verdict, THREE, path)
    assert said == [said[0]] * 3
    assert f"{path / FILES[2]}: bit-flipped" in said[0]
    assert "(found by rank " in said[0]


# All ranks take the same checkpoint.


def test_a_half_written_checkpoint_is_passed_over_by_all(tmp_path: Path):
    by_ranks(tmp_path, 1)
    by_ranks(tmp_path, 2).rename(tmp_path / "step-00000002.partial-0123abcd")
    for path, manifest, rejected in run_on_threads(
        lambda world: newest_valid_on_all_ranks(tmp_path, consensus_for_load(world, "")), THREE
    ):
        assert path == step_folder(tmp_path, 1)
        assert manifest == read_manifest(path)
        assert [(bad.name, why.rpartition(": ")[2]) for bad, why in rejected] == [
            ("step-00000002.partial-0123abcd", "the save was stopped")
        ]
    assert (
        run_on_threads(
            lambda world: newest_valid_on_all_ranks(tmp_path / "none", consensus_for_load(world, "")), THREE
        )
        == [(None, None, [])] * 3
    )


def test_a_failure_that_is_none_of_the_checkpoint_is_an_error_on_all_and_no_reason_for_an_older_one(
    tmp_path: Path,
):
    for step in (1, 2):
        by_ranks(tmp_path, step)

    def body(world: World) -> str:
        def broken(manifest: Manifest, place: Path) -> None:
            if world.rank == 2:
                raise RuntimeError("the device is gone")

        with pytest.raises(ConsensusError) as caught:
            newest_valid_on_all_ranks(tmp_path, consensus_for_load(world, "the test does not go on"), broken)
        return str(caught.value)

    first, second, third = run_on_threads(body, THREE)
    assert first == second
    assert (
        "the test does not go on: reading the manifest of a checkpoint failed on rank 2 "
        "(its own message says why)\n" in first
    )
    assert "repair the cause and start again, where every rank can read the checkpoint folder" in first
    assert "the device is gone" in third


def test_every_vote_of_a_reading_is_an_entry_of_the_ledger(tmp_path: Path):
    path = by_ranks(tmp_path, 1)

    def body(world: World) -> set[str]:
        world.ledger.is_recording = True
        verify_checkpoint(path, consensus_for_load(world, ""))
        return {f"{entry.action} {entry.collective}" for entry in world.ledger.entries}

    assert run_on_threads(body, THREE) == [{"RESUME all_gather"}] * 3
