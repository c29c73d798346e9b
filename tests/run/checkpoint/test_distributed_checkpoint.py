"""Checkpoints are loaded bitwise as saved, by any number of ranks, and damaged ones are skipped with a
reason.
"""

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.comm.collectives.group import World
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.checkpoint import manifest
from meshwright.run.checkpoint.distributed_checkpoint import (
    check_state,
    compare_checkpoints,
    load_tensors,
    newest_valid,
    save_tensors,
)
from meshwright.run.checkpoint.manifest import MANIFEST_FILE, CheckpointError, read_manifest
from meshwright.testing.ranks import ProcessPool, run_on_threads
from tests.run.checkpoint.awkward_states import (
    META,
    THREE,
    alone,
    assert_holds,
    bits,
    expected,
    names,
    saved,
    state,
)

# What is saved is loaded.


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_any_number_of_ranks_writes_one_checkpoint_that_one_process_reads(size: int, tmp_path):
    def body(world: World) -> Path:
        return save_tensors(tmp_path, 100, state(), META, world.group(("dp_shard",)), 1)

    places = run_on_threads(body, Mesh(dp_shard=size))
    assert places == [tmp_path / "step-00000100"] * size
    assert names(tmp_path) == ["step-00000100"]
    tensors, meta = load_tensors(places[0])
    assert meta == META
    assert {name: (t.shape, t.dtype, bits(t)) for name, t in tensors.items()} == {
        name: (t.shape, t.dtype, bits(t)) for name, t in state().items()
    }
    shards = [name for name in names(places[0]) if name != MANIFEST_FILE]
    assert shards == [f"rank-{rank:05d}.safetensors" for rank in range(min(size, len(state())))]


def save_and_report(world: World, folder: Path) -> tuple[Path, str]:
    group = world.group(("dp_shard",))
    place = save_tensors(folder, 1, state(), META, group, 1)
    try:
        save_tensors(folder / "none", 2, {"model/w": torch.zeros(2 + (world.rank == 2))}, META, group, 1)
    except CheckpointError as error:
        return place, str(error)
    return place, ""


def test_processes_write_one_checkpoint_too_and_fail_together(tmp_path, process_pool: ProcessPool):
    for place, report in process_pool.run(save_and_report, THREE, tmp_path):
        assert_holds(place, state())
        assert "differs on ranks [2] from rank 0" in report
    assert names(tmp_path) == ["step-00000001"]


def test_the_largest_tensors_are_assigned_first_so_that_ranks_write_equal_amounts(tmp_path):
    tensors = {f"model/{i}": torch.zeros(2**i) for i in range(4, 14)} | {
        f"model/x{i}": torch.zeros(5000) for i in range(4)
    }

    def body(world: World) -> Path:
        return save_tensors(
            tmp_path,
            world.mesh.world_size,
            dict(sorted(tensors.items(), reverse=world.rank == 1)),
            {},
            world.group(("dp_shard",)),
            9,
        )

    path = run_on_threads(body, THREE)[0]
    sizes = [shard.nbytes for shard in read_manifest(path).files.values()]
    assert max(sizes) - min(sizes) < 4 * 5000
    again = run_on_threads(
        lambda world: save_tensors(tmp_path / "again", 3, tensors, {}, world.group(("dp_shard",)), 1), THREE
    )[0]
    assert (path / MANIFEST_FILE).read_bytes() == (again / MANIFEST_FILE).read_bytes()


def test_only_the_wanted_tensors_and_their_files_are_read(tmp_path):
    path = run_on_threads(
        lambda world: save_tensors(tmp_path, 1, state(), META, world.group(("dp_shard",)), 1), THREE
    )[0]
    file = read_manifest(path).entries["model/double"].slices[0].file
    for other in path.glob("*.safetensors"):
        if other.name != file:
            other.unlink()
    tensors, _ = load_tensors(path, {"model/double": ((5,), torch.float64)})
    assert list(tensors) == ["model/double"]
    assert bits(tensors["model/double"]) == bits(state()["model/double"])


# The same step, saved again.


def test_a_checkpoint_of_the_same_step_and_bits_is_left_as_it_is(tmp_path, caplog):
    (path,) = saved(tmp_path, 5)
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    with caplog.at_level(logging.INFO):
        assert save_tensors(tmp_path, 5, state(5), META, alone(), 1) == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
    assert "step 5 is saved already" in caplog.text
    assert names(tmp_path) == ["step-00000005"]


@pytest.mark.parametrize(("seed", "meta"), [(6, META), (5, {"seed": 4})])
def test_a_checkpoint_of_the_same_step_with_other_values_is_replaced(tmp_path, seed, meta):
    (path,) = saved(tmp_path, 5)
    assert save_tensors(tmp_path, 5, state(seed), meta, alone(), 1) == path
    assert names(tmp_path) == ["step-00000005"]
    assert load_tensors(path)[1] == meta
    assert_holds(path, state(seed))


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path):
    (path,) = saved(tmp_path, 5)
    (path / MANIFEST_FILE).write_text("{}")
    saved(tmp_path, 5)
    assert names(tmp_path) == ["step-00000005"]
    assert_holds(path, state(5))


def test_a_checkpoint_of_another_model_is_not_overwritten(tmp_path):
    saved(tmp_path, 5)
    with pytest.raises(
        CheckpointError,
        match=r"making the folder failed(.|\n)*model/a.weight: \[4, 3\] float32 in the checkpoint, nothing",
    ):
        save_tensors(tmp_path, 5, {"model/z": torch.zeros(2)}, {}, alone(), 1)
    assert_holds(tmp_path / "step-00000005", state(5))


def test_no_folder_holds_no_checkpoint(tmp_path):
    assert newest_valid(tmp_path / "nowhere") == (None, None, [])


# Another model is refused.


def test_resuming_with_another_model_lists_the_first_differences(tmp_path):
    (path,) = saved(tmp_path, 1)
    other = expected(state())
    other["model/a.weight"] = ((4, 4), torch.float32)
    other["model/double"] = ((5,), torch.float32)
    other["model/new"] = ((1,), torch.float32)
    del other["model/odd"]
    with pytest.raises(CheckpointError) as caught:
        check_state(read_manifest(path), other, path)
    what = caught.value.diagnostics[0].problem
    assert "model/a.weight: [4, 3] float32 in the checkpoint, [4, 4] float32 in this run" in what
    assert "model/double: [5] float64 in the checkpoint, [5] float32 in this run" in what
    assert "model/new: nothing in the checkpoint, [1] float32 in this run" in what
    assert "model/odd: [3] uint8 in the checkpoint, nothing in this run" in what
    assert "resume with the model and optimizer that wrote it" in caught.value.diagnostics[0].fix
    with pytest.raises(CheckpointError) as caught:
        load_tensors(path, other)
    assert "model/odd" not in str(caught.value), (
        "load takes what is wanted; what is left over does not matter"
    )
    found, _, rejected = newest_valid(tmp_path, lambda manifest, place: check_state(manifest, other, place))
    assert found is None
    assert "another model or optimizer" in rejected[0][1]
    assert (
        newest_valid(tmp_path, lambda manifest, place: check_state(manifest, expected(state()), place))[0]
        == path
    )


def test_a_long_list_of_differences_is_cut(tmp_path):
    path = save_tensors(tmp_path, 1, {f"model/{i}": torch.zeros(1) for i in range(20)}, {}, alone(), 1)
    with pytest.raises(CheckpointError, match=r"model/12: .* and 15 more"):
        check_state(read_manifest(path), {}, path)


def test_compare_names_what_differs_in_any_bit(tmp_path):
    first = {
        "model/a": torch.tensor([0.0, float("nan")]),
        "model/b": torch.zeros(2),
        "model/c": torch.zeros(2),
        "model/d": torch.ones(1),
    }
    second = first | {
        "model/b": torch.tensor([0.0, -0.0]),
        "model/c": torch.zeros(2, 1),
        "model/e": torch.ones(1),
    }
    del second["model/d"]
    a = save_tensors(tmp_path / "a", 1, first, {}, alone(), 1)
    b = run_on_threads(
        lambda world: save_tensors(tmp_path / "b", 1, second, {}, world.group(("dp_shard",)), 1), THREE
    )[0]
    assert compare_checkpoints(a, a) == []
    assert compare_checkpoints(a, b) == ["model/b", "model/c", "model/d", "model/e"]


# Damage is noticed.


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_truncated_or_flipped_file_is_passed_over_for_the_one_before(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    saved(folder, 1)
    newer = run_on_threads(
        lambda world: save_tensors(folder, 2, state(2), META, world.group(("dp_shard",)), 2), THREE
    )[0]
    file = newer / data.draw(st.sampled_from(names(newer)))
    content = bytearray(file.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if truncate := data.draw(st.booleans()):
        del content[position:]
    else:
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    path, manifest, rejected = newest_valid(folder)
    assert path == folder / "step-00000001"
    assert manifest == read_manifest(path)
    assert [place for place, _ in rejected] == [newer]
    if file.name != MANIFEST_FILE:
        assert ("truncated" if truncate else "bit-flipped") in rejected[0][1]
        assert file.name in rejected[0][1]
    with pytest.raises(CheckpointError):
        load_tensors(newer)


def test_each_kind_of_damage_has_its_words(tmp_path):
    for step in range(1, 7):
        saved(tmp_path, step)
    shard = "rank-00000.safetensors"
    places = {step: tmp_path / f"step-{step:08d}" for step in range(1, 7)}
    (places[2] / MANIFEST_FILE).unlink()
    (places[3] / shard).unlink()
    with (places[4] / shard).open("ab") as file:
        file.write(b"more")
    places[5].rename(tmp_path / "step-00000005.partial-0123abcd")
    places[6].rename(tmp_path / "step-00000066")
    path, _, rejected = newest_valid(tmp_path)
    assert path == places[1]
    reasons = [reason for _, reason in rejected]
    assert "its manifest is of step 6" in reasons[0]
    assert "half-written: the save was stopped" in reasons[1]
    assert "too long" in reasons[2]
    assert "rank-00000.safetensors: missing" in reasons[3]
    assert "manifest.json: missing" in reasons[4]


# What cannot be saved is refused before anything is written.


@pytest.mark.parametrize(
    ("step", "tensors", "meta", "keep", "words"),
    [
        (-1, {}, {}, 1, "step -1, keep = 1"),
        (1, {}, {}, 0, "step 1, keep = 0(.|\n)*keep at least 1 checkpoint"),
        (
            1,
            {"model/w": torch.zeros(1, dtype=torch.complex64)},
            {},
            1,
            "model/w is complex64: no such dtype(.|\n)*convert to one of float64",
        ),
        (1, {}, {"a": {1, 2}}, 1, "meta is not plain JSON"),
    ],
)
def test_an_impossible_checkpoint_is_refused_before_anything_is_written(
    step, tensors, meta, keep, words, tmp_path
):
    with pytest.raises(CheckpointError, match=words):
        save_tensors(tmp_path / "run", step, tensors, meta, alone(), keep)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_whose_manifest_could_not_be_read_back_is_refused_before_anything_is_written(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(manifest, "MAX_MANIFEST_NBYTES", 1024)
    with pytest.raises(CheckpointError, match=r"a manifest of [^;]* tensors; 1 KiB can be read back"):
        save_tensors(tmp_path / "run", 1, state(), META, alone(), 1)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made_is_an_error_with_its_cause(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="making the folder failed on rank 0") as caught:
        save_tensors(tmp_path / "file" / "run", 1, state(), {}, alone(), 1)
    assert isinstance(caught.value.__cause__, OSError)
