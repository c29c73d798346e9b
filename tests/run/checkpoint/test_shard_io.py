"""Checkpoint files: plain safetensors, written in pieces, read by slices, and verified before use."""

import os

import pytest
import torch
from safetensors.torch import load_file

from meshwright.comm.collectives.group import World
from meshwright.engine.optim.sharded_state_dict import TensorShard
from meshwright.engine.params.rank_file import RankFile
from meshwright.plan.job.errors import PlanError
from meshwright.run.checkpoint.directories import list_step_folders
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors, save_tensors
from meshwright.run.checkpoint.manifest import (
    MANIFEST_FILE,
    CheckpointError,
    Manifest,
    ShardFile,
    StoredSlice,
    TensorEntry,
    read_manifest,
)
from meshwright.run.checkpoint.shard_io import read_entry, write_shard
from meshwright.testing.ranks import run_on_threads
from tests.run.checkpoint.awkward_states import META, THREE, alone, assert_holds, bits, saved, state


def test_the_files_are_safetensors_that_anybody_can_read(tmp_path):
    path = run_on_threads(
        lambda world: save_tensors(tmp_path, 1, state(), META, world.group(("dp_shard",)), 1), THREE
    )[0]
    together: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        together |= load_file(file)
    assert {name: bits(tensor) for name, tensor in together.items()} == {
        name: bits(t) for name, t in state().items()
    }


def test_a_view_is_saved_as_its_own_elements_only(tmp_path):
    flat_param = torch.zeros(1_000_000)
    path = save_tensors(tmp_path, 1, {"model/w": flat_param[5:8]}, {}, alone(), 1)
    assert sum(shard.nbytes for shard in read_manifest(path).files.values()) < 500


def test_a_tensor_of_many_chunks_survives_short_writes(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: max(1, len(data) // 2)]))
    tensors = {"model/w": torch.arange(3_000_001, dtype=torch.float32)}
    assert_holds(save_tensors(tmp_path, 1, tensors, {}, alone(), 1), tensors)


def test_states_on_a_disk_that_fails_end_the_save_with_an_error_on_every_rank(tmp_path):
    earlier = save_tensors(tmp_path, 1, {"model/w": torch.ones(3)}, {}, alone(), 2)

    def save(world: World) -> str:
        file = RankFile(str(tmp_path), 1 << 20)
        if world.rank == 1:
            os.ftruncate(file._descriptor, 0)  # reading its memory now raises SIGBUS
        share = TensorShard(file.tensor, world.rank << 20, (3 << 20,))
        with pytest.raises(CheckpointError) as refused:
            save_tensors(tmp_path, 2, {"optimizer/m/w": share}, {}, world.group(("dp_shard",)), 2)
        file.close()
        return str(refused.value)

    found = run_on_threads(save, THREE)
    assert all("step 2 was not saved: writing failed on rank 1" in text for text in found)
    assert "that rest on disk cannot be read: Input/output error (EIO)" in found[1]
    assert "look at the disk (dmesg)" in found[1]
    assert [path for _, path in list_step_folders(tmp_path)] == [earlier]


def test_a_strided_view_of_a_disk_that_fails_is_an_error(tmp_path):
    file = RankFile(str(tmp_path), 1 << 20)
    os.ftruncate(file._descriptor, 0)
    with pytest.raises(PlanError, match="cannot be read"):
        write_shard(tmp_path / "a", {"w": file.tensor.view(1024, 1024).t()})
    file.close()


def test_rows_are_read_from_the_files_that_hold_them(tmp_path):
    whole = torch.arange(7 * 3 * 2).view(7, 3, 2)
    places = {"a": (0, 0, 7, 1), "b": (0, 1, 2, 2), "c": (2, 1, 5, 2)}  # a column, and the rest in two parts
    boxes = []
    for file, (row, column, rows, columns) in places.items():
        write_shard(tmp_path / file, {"w": whole[row : row + rows, column : column + columns].contiguous()})
        boxes.append(StoredSlice(file, "w", (row, column, 0), (rows, columns, 2)))
    entry = TensorEntry((7, 3, 2), "int64", tuple(boxes))
    for rows in (range(7), range(1, 3), range(2, 7), range(3, 3)):
        assert torch.equal(read_entry(tmp_path, entry, (rows,)), whole[rows.start : rows.stop])
    assert torch.equal(read_entry(tmp_path, entry, (range(1, 4), range(1, 2))), whole[1:4, 1:2])
    (tmp_path / "c").unlink()
    assert torch.equal(read_entry(tmp_path, entry, (range(2),)), whole[:2]), (
        "what is not needed is not opened"
    )
    with pytest.raises(CheckpointError, match="no tensor 'w' in it"):
        read_entry(tmp_path, entry, (range(3),))


def test_what_was_read_stays_when_the_file_goes_and_what_was_not_is_an_error(tmp_path):
    (path,) = saved(tmp_path, 1)
    tensors, _ = load_tensors(path)
    mine = tensors["model/a.weight"]
    for file in path.iterdir():
        file.write_bytes(b"")
    assert bits(mine) == bits(state(1)["model/a.weight"])
    with pytest.raises(CheckpointError, match="no tensor 'model/double' in it"):
        tensors["model/double"]


def test_slices_of_several_files_become_one_tensor(tmp_path):
    whole = torch.arange(24.0).view(4, 6)
    spans = {"left": (0, 0, 4, 2), "top": (0, 2, 1, 4), "rest": (1, 2, 3, 4)}
    files, boxes = {}, []
    for name, (row, column, height, width) in spans.items():
        part = whole[row : row + height, column : column + width]
        files[f"{name}.safetensors"] = write_shard(tmp_path / f"{name}.safetensors", {"part": part})
        boxes.append(StoredSlice(f"{name}.safetensors", "part", (row, column), (height, width)))
    manifest = Manifest(1, {"model/w": TensorEntry((4, 6), "float32", tuple(boxes))}, files, {})
    (tmp_path / MANIFEST_FILE).write_text(manifest.dump())
    assert torch.equal(load_tensors(tmp_path)[0]["model/w"], whole)


@pytest.mark.skipif(os.name == "nt", reason="links and pipes need a privilege there")
@pytest.mark.parametrize("name", [MANIFEST_FILE, "rank-00000.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_opened(name: str, kind: str, tmp_path):
    (path,) = saved(tmp_path / "run", 1)
    (path / name).rename(tmp_path / name)
    if kind == "link":
        (path / name).symlink_to(tmp_path / name)
    elif kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).mkdir()
    with pytest.raises(CheckpointError, match="a link or no regular file; neither is followed"):
        load_tensors(path)


def test_a_manifest_that_lies_about_its_files_is_noticed(tmp_path):
    shard = write_shard(tmp_path / "a.safetensors", {"w": torch.zeros(4)})

    def read(entry: TensorEntry, files: dict[str, ShardFile]) -> None:
        (tmp_path / MANIFEST_FILE).write_text(Manifest(1, {"model/w": entry}, files, {}).dump())
        dict(load_tensors(tmp_path)[0])

    files = {"a.safetensors": shard}
    read(TensorEntry((4,), "float32", (StoredSlice("a.safetensors", "w", (0,), (4,)),)), files)
    with pytest.raises(CheckpointError, match=r"'w' is \(4,\) float32; the manifest says \(2, 2\) float32"):
        read(TensorEntry((2, 2), "float32", (StoredSlice("a.safetensors", "w", (0, 0), (2, 2)),)), files)
    with pytest.raises(CheckpointError, match=r"'w' is \(4,\) float32; the manifest says \(4,\) int32"):
        read(TensorEntry((4,), "int32", (StoredSlice("a.safetensors", "w", (0,), (4,)),)), files)
    with pytest.raises(CheckpointError, match="no tensor 'v' in it"):
        read(TensorEntry((4,), "float32", (StoredSlice("a.safetensors", "v", (0,), (4,)),)), files)
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * shard.nbytes)
    digest = "5f" * 32
    with pytest.raises(CheckpointError, match="bit-flipped"):
        read(
            TensorEntry((4,), "float32", (StoredSlice("a.safetensors", "w", (0,), (4,)),)),
            {"a.safetensors": ShardFile(shard.nbytes, digest)},
        )


def test_a_manifest_too_large_to_be_one_is_not_read(tmp_path):
    (path,) = saved(tmp_path, 1)
    os.truncate(path / MANIFEST_FILE, 2**28 + 1)
    with pytest.raises(CheckpointError, match="are too many for a manifest"):
        load_tensors(path)
