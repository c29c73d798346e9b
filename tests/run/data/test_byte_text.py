"""Text becomes samples: which files are read, in which order, and refusals."""

import logging
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.model.loss.loss_definition import IGNORE_INDEX
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.run.data.byte_text import SEPARATOR, TextDataset
from meshwright.run.data.token_dataset import TokenCount


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return folder


def content(data: TextDataset) -> bytes:
    return data.tokens.tobytes()


def by_the_book(tokens: bytes, i: int, T: int) -> tuple[list[int], list[int]]:
    inputs = [tokens[t] if t < len(tokens) else SEPARATOR for t in range(i * T, i * T + T)]
    labels = [tokens[t + 1] if t + 1 < len(tokens) else IGNORE_INDEX for t in range(i * T, i * T + T)]
    return inputs, labels


@settings(deadline=None)
@given(
    text=st.binary(min_size=2, max_size=60).map(lambda raw: bytes(32 + byte % 90 for byte in raw)),
    sequence=st.integers(1, 9),
)
def test_every_sample_is_a_window_and_every_token_but_the_first_is_one_label(
    text: bytes, sequence: int, tmp_path_factory
):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text)
    data = TextDataset(DataConfig(str(path), sequence=sequence))
    batch = data.batch(range(len(data)))
    for i in range(len(data)):
        inputs, labels = by_the_book(text, i, sequence)
        assert batch["input_ids"][i].tolist() == inputs
        assert batch["labels"][i].tolist() == labels
    labels = batch["labels"].flatten()
    assert labels[labels != IGNORE_INDEX].tolist() == list(text[1:])


def test_a_batch_is_int64_in_the_order_of_the_ids(tmp_path):
    data = TextDataset(DataConfig(str(written(tmp_path, {"a.txt": b"hello world"})), sequence=4))
    batch = data.batch([2, 0])
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert bytes(batch["input_ids"][1].tolist()) == b"hell"
    assert bytes(batch["labels"][1].tolist()) == b"ello"
    assert batch["labels"][0].tolist() == [ord("l"), ord("d"), IGNORE_INDEX, IGNORE_INDEX]
    assert data.batch([])["input_ids"].shape == (0, 4)


@pytest.mark.parametrize(
    ("size", "count"), [(9, (8, 8, 8)), (10, (12, 10, 9)), (12, (12, 12, 11)), (2, (4, 2, 1))]
)
def test_tokens_padding_and_labels_are_counted(size: int, count: tuple[int, int, int], tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * size)
    assert TextDataset(DataConfig(str(tmp_path), sequence=4)).count_tokens() == TokenCount(*count)


def test_an_absent_sample_has_no_label(tmp_path):
    data = TextDataset(DataConfig(str(written(tmp_path, {"a.txt": b"hello world"})), sequence=4))
    batch = data.batch([-1, 1])
    assert batch["labels"][0].tolist() == [IGNORE_INDEX] * 4
    assert batch["input_ids"][0].tolist() == [SEPARATOR] * 4
    assert bytes(batch["input_ids"][1].tolist()) == b"o wo"


@pytest.mark.parametrize("wrong", [-2, 3])
def test_a_sample_that_does_not_exist_is_refused(wrong: int, tmp_path):
    data = TextDataset(DataConfig(str(written(tmp_path, {"a.txt": b"hello world"})), sequence=4))
    with pytest.raises(
        IndexError, match=f"no sample {wrong}: ids run from 0 to 2.*take ids from a SampleOrder"
    ):
        data.batch([0, wrong])


def test_files_are_joined_in_sorted_order_with_one_zero_byte_between_them(tmp_path):
    files = {"b.txt": b"bb", "a/z.md": b"zz", "a/empty.txt": b"", "B.txt": b"BB", "c.bin": b"no"}
    data = TextDataset(DataConfig(str(written(tmp_path, files))))
    assert content(data) == b"BB\0zz\0bb"
    assert [path.name for path in data.files] == ["B.txt", "empty.txt", "z.md", "b.txt"]


def test_a_single_file_is_read_whatever_its_name(tmp_path):
    folder = written(tmp_path, {"log": b"some text"})
    assert content(TextDataset(DataConfig(str(folder / "log")))) == b"some text"


def test_patterns_match_the_relative_path_and_any_of_its_parts(tmp_path):
    folder = written(tmp_path, {"src/a.py": b"a", "src/gen/b.py": b"b", "docs/c.rst": b"c", "d.py": b"d"})

    def read(include: tuple[str, ...], exclude: tuple[str, ...] = ()) -> bytes:
        return content(TextDataset(DataConfig(str(folder), include=include, exclude=exclude)))

    assert read(("*.py",)) == b"d\0a\0b"
    assert read(("*.py",), ("gen",)) == b"d\0a"
    assert read(("*.py", "*.rst"), ("src/*",)) == b"d\0c"
    assert read(("docs", "src/gen/*")) == b"c\0b"


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_links_out_of_the_folder_are_not_followed_and_this_is_said(tmp_path, caplog):
    outside = written(tmp_path / "outside", {"secret.txt": b"secret", "more/x.txt": b"more"})
    folder = written(tmp_path / "folder", {"a.txt": b"inside"})
    (folder / "link.txt").symlink_to(outside / "secret.txt")
    (folder / "tree.txt").symlink_to(outside / "more")
    (folder / "round.txt").symlink_to(folder)
    (folder / "twin.txt").symlink_to(folder / "a.txt")
    with caplog.at_level(logging.WARNING):
        data = TextDataset(DataConfig(str(folder)))
    assert content(data) == b"inside\0inside"
    assert sorted(Path(record.args[0]).name for record in caplog.records) == ["link.txt", "tree.txt"]
    assert "link out of the folder; name its target as data.source" in caplog.text


def test_all_files_that_are_no_text_are_named_at_once(tmp_path):
    files = {
        "good.txt": "Gr\u00fc\u00dfe, \u4e16\u754c".encode(),
        "latin.txt": "viele Gr\u00fc\u00dfe aus der Stadt".encode("latin-1"),
        "zeros.txt": b"ab\0\0cd",
        "wide.txt": "text".encode("utf-16-le"),
        "packed.txt": bytes(range(128, 256)) * 3,
    }
    with pytest.raises(PlanError) as caught:
        TextDataset(DataConfig(str(written(tmp_path, files))))
    faults = {Path(fault.location).name: fault for fault in caught.value.diagnostics}
    assert sorted(faults) == ["packed.txt", "wide.txt", "zeros.txt"]
    assert "2 of its 6 bytes are zero" in faults["zeros.txt"].problem
    assert "of its 384 bytes are not UTF-8" in faults["packed.txt"].problem
    assert all("exclude it with data.exclude" in fault.fix for fault in faults.values())


def test_a_large_text_is_judged_in_pieces_without_breaking_characters(tmp_path):
    text = ("x" + "\u4e16" * 1_000_000).encode()
    assert len(TextDataset(DataConfig(str(written(tmp_path, {"a.txt": text})), sequence=1000))) == 3000


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({}, "nowhere", "there is no such file or folder"),
        ({"a.csv": b"1,2"}, "", r"no file in .* matches include = \['\*.txt'"),
        ({"a.txt": b""}, "", "holds 0 bytes in all; needed are at least 2"),
        ({"a.txt": b"x"}, "a.txt", "holds 1 bytes in all"),
    ],
)
def test_data_that_is_not_there_is_refused(files: dict[str, bytes], source: str, message: str, tmp_path):
    with pytest.raises(PlanError, match=message):
        TextDataset(DataConfig(str(written(tmp_path, files) / source)))


@pytest.mark.skipif(os.name == "nt", reason="no named pipes in folders")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(PlanError, match="not a regular file"):
        TextDataset(DataConfig(str(tmp_path)))


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    written(tmp_path, {"a.txt": b"a", "b.txt": b"b"})
    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(PlanError, match=r"a\.txt: it cannot be read: Permission denied") as caught:
        TextDataset(DataConfig(str(tmp_path)))
    assert len(caught.value.diagnostics) == 2


def test_a_folder_that_may_not_be_entered_is_named(tmp_path, monkeypatch):
    written(tmp_path, {"a.txt": b"a", "shut/b.txt": b"b"})
    scandir = os.scandir

    def denied(path):
        if Path(path).name == "shut":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(PlanError, match="shut: the folder cannot be read: Permission denied"):
        TextDataset(DataConfig(str(tmp_path)))


def test_the_digest_changes_with_the_content_and_the_sequence_and_nothing_else(tmp_path):
    def digest(name: str, text: bytes, sequence: int) -> str:
        return TextDataset(
            DataConfig(str(written(tmp_path / name, {f"{name}.txt": text})), sequence=sequence)
        ).digest

    first = digest("a", b"hello", 4)
    assert first == digest("b", b"hello", 4)
    assert len({first, digest("c", b"hellp", 4), digest("d", b"hello", 5), digest("e", b"hello ", 4)}) == 4
    assert len(first) == 64


def test_the_tokens_cannot_be_changed(tmp_path):
    data = TextDataset(DataConfig(str(written(tmp_path, {"a.txt": b"hello"}))))
    with pytest.raises(ValueError, match="read-only"):
        data.tokens[0] = 1
