"""Safetensors files: validation of headers, and reading bytes by offset."""

import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshwright.model.loading import safetensors_reader
from meshwright.model.loading.safetensors_reader import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    equal_tensors,
    list_tensors,
    read_header,
    read_tensor,
    weights_digest,
)
from meshwright.plan.job.errors import PlanError


def written(folder: Path, tensors: dict[str, torch.Tensor], name: str = SINGLE_FILE) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return folder / name


def refusal(path: Path) -> str:
    with pytest.raises(PlanError) as caught:
        list_tensors(path)
    return str(caught.value)


def forged(path: Path, header: object, data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_comes_back_as_it_was_written(tmp_path: Path, dtype: torch.dtype):
    tensor = torch.arange(6).view(2, 3).to(dtype)
    file = written(tmp_path, {"a": torch.ones(3), "x": tensor})
    found = read_tensor(list_tensors(file)["x"], dtype)
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_values_are_cast_and_scalars_and_empty_tensors_are_read(tmp_path: Path):
    file = written(
        tmp_path, {"x": torch.tensor([1.5, 2.5]).bfloat16(), "n": torch.tensor(7), "e": torch.ones(0, 3)}
    )
    found = list_tensors(file)
    assert read_tensor(found["x"], torch.float64).tolist() == [1.5, 2.5]
    assert read_tensor(found["n"], torch.int64).item() == 7
    assert read_tensor(found["e"], torch.float32).shape == (0, 3)


def test_rows_are_read_by_their_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(safetensors_reader, "READ_NBYTES", 16)  # several pieces, which do not end with a row
    whole = torch.randn(7, 3, 2)
    entry = list_tensors(written(tmp_path, {"pad": torch.ones(5), "x": whole}))["x"]
    assert torch.equal(read_tensor(entry, torch.float32, rows=range(2, 5)), whole[2:5])
    assert torch.equal(read_tensor(entry, torch.float32), whole)


def test_reading_holds_one_piece_besides_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(safetensors_reader, "READ_NBYTES", 1 << 16)
    entry = list_tensors(written(tmp_path, {"x": torch.randn(1 << 19)}))["x"]
    read_tensor(entry, torch.float32)
    tracemalloc.start()
    try:
        read_tensor(entry, torch.bfloat16)
        peak = tracemalloc.get_traced_memory()[1]  # of Python's own memory: the pieces; the result is torch's
    finally:
        tracemalloc.stop()
    assert 1 << 16 <= peak < 3 << 16


def test_a_folder_is_read_by_its_index_its_numbers_or_its_only_file(tmp_path: Path):
    one, two = {"a": torch.ones(1)}, {"b": torch.zeros(2)}
    names = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    for number, tensors in zip(names, (one, two), strict=True):
        written(tmp_path, tensors, number)
    assert sorted(list_tensors(tmp_path)) == ["a", "b"]
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    assert list_tensors(tmp_path)["b"].file == tmp_path / names[1]
    assert list(list_tensors(written(tmp_path / "other", one, "weights.safetensors").parent)) == ["a"]


def test_absent_files_are_named_together(tmp_path: Path):
    written(tmp_path, {"a": torch.ones(1)}, "model-00002-of-00003.safetensors")
    assert "2 files of the weights are not in" in refusal(tmp_path)
    assert "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors" in refusal(tmp_path)
    (tmp_path / INDEX_FILE).write_text(
        json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}})
    )
    assert "x.safetensors, y.safetensors" in refusal(tmp_path)


def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path):
    written(tmp_path, {"a": torch.ones(1)})
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    assert "plain file name" in refusal(tmp_path)


def test_an_index_that_names_more_than_its_files_hold_is_refused(tmp_path: Path):
    written(tmp_path, {"a": torch.ones(1)})
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": SINGLE_FILE, "b": SINGLE_FILE}}))
    assert "names 1 tensors that its files do not have: b" in refusal(tmp_path)


def test_a_name_in_two_files_is_refused(tmp_path: Path):
    for number in (1, 2):
        written(tmp_path, {"a": torch.ones(number)}, f"model-0000{number}-of-00002.safetensors")
    assert "has 1 tensors that another file has too: a" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_is_refused_with_its_conversion(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"x")
    for path in (tmp_path, tmp_path / name):
        assert f"meshwright convert {name} model.safetensors" in refusal(path)


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path):
    file = tmp_path / SINGLE_FILE
    cases = {
        b"": "is not a safetensors file",
        b"12345": "is not a safetensors file",
        (1 << 40).to_bytes(8, "little") + b"{}": "is not a safetensors file",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n": "pointer of git-lfs",
        (4).to_bytes(8, "little") + b"nope": "cannot be read",
    }
    for content, words in cases.items():
        file.write_bytes(content)
        assert words in refusal(tmp_path)
    assert "there is no folder" in refusal(tmp_path / "nowhere")
    assert "holds no model.safetensors" in refusal(
        written(tmp_path / "empty", {"a": torch.ones(1)}, "a.st").parent
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "does not fit into the bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 800]}, "does not fit"),
        ({"dtype": "F32", "shape": [200], "data_offsets": [0, 800]}, "of 8"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "not integers"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "not integers"),
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}, "is of dtype F4"),
        ({"dtype": "F32"}, "has no dtype, shape and offsets"),
        ([], "has no dtype, shape and offsets"),
    ],
)
def test_a_header_is_not_believed(tmp_path: Path, entry: object, message: str):
    file = forged(tmp_path / SINGLE_FILE, {"x": entry}, b"12345678")
    with pytest.raises(PlanError, match="x") as caught:
        read_header(file)
    assert message in str(caught.value)


def test_a_file_that_was_cut_after_it_was_looked_at_is_noticed(tmp_path: Path):
    file = written(tmp_path, {"x": torch.ones(1000)})
    entry = list_tensors(file)["x"]
    file.write_bytes(file.read_bytes()[:-400])
    with pytest.raises(PlanError, match="ends early"):
        read_tensor(entry, torch.float32)


def test_the_digest_follows_values_names_and_shapes_but_not_the_folder(tmp_path: Path):
    x = torch.randn(100, 3)
    contents = ({"x": x}, {"y": x}, {"x": x.view(3, 100)}, {"x": x + 1}, {"x": x.half()})
    digests = [
        weights_digest(list_tensors(written(tmp_path / str(i), tensors)))
        for i, tensors in enumerate(contents)
    ]
    assert len(set(digests)) == len(contents)
    assert weights_digest(list_tensors(written(tmp_path / "again", contents[0]))) == digests[0]


def test_equal_tensors_are_the_same_to_the_last_bit(tmp_path: Path):
    x = torch.randn(50)
    found = list_tensors(
        written(tmp_path, {"x": x, "y": x.clone(), "z": x + 1e-7, "w": x.view(5, 10).clone()})
    )
    assert [equal_tensors(found["x"], found[name]) for name in "yzw"] == [True, False, False]
