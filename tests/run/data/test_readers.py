"""Rows of files and datasets: what is read, from which location, and refusals."""

import gzip
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import datasets
import pytest
import tqdm

from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.run.data.readers import missing_column_diagnostic, open_reader, source_format
from tests.run.data.corpora import jsonl

ROWS = [{"text": f"row {n}", "n": n} for n in range(7)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Datasets keep their tables here, and show no bars, nor have a thread that watches bars."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "tables")
    datasets.disable_progress_bars()


def saved(folder: Path) -> str:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))
    return str(folder)


def values(source: DataConfig) -> list[Mapping[str, object] | Diagnostic]:
    return [row for _, row in open_reader(source).read()]


def faults(source: DataConfig) -> dict[str, str]:
    found = {where: row for where, row in open_reader(source).read() if isinstance(row, Diagnostic)}
    assert all(fault.location == where or fault.location in where for where, fault in found.items())
    return {Path(where).name: fault.problem for where, fault in found.items()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", "jsonl"),
        ("a.jsonl.gz", "jsonl"),
        ("a.txt", "text"),
        ("folder", "text"),
        ("a.parquet", "datasets"),
        ("a.csv", "datasets"),
        ("a.json", "datasets"),
    ],
)
def test_the_format_is_found_from_the_name(name: str, kind: str):
    assert source_format(DataConfig(name)) == kind
    assert source_format(DataConfig(name, format="jsonl")) == "jsonl"


def test_a_saved_data_set_is_known_by_what_lies_in_it(tmp_path):
    assert source_format(DataConfig(saved(tmp_path / "saved"))) == "datasets"


def test_jsonl_rows_come_in_order_with_their_lines_and_again(tmp_path):
    source = DataConfig(jsonl(tmp_path / "a.jsonl", [ROWS[0], "", ROWS[1]]))
    rows = open_reader(source)
    expected = [(f"{source.source}:1", ROWS[0]), (f"{source.source}:3", ROWS[1])]
    assert list(rows.read()) == expected
    assert list(rows.read()) == expected


def test_packed_files_and_folders_are_read_alike(tmp_path):
    jsonl(tmp_path / "in" / "b.jsonl", ROWS[3:])
    jsonl(tmp_path / "in" / "notes.txt", ["no JSON"])
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS[:3]).encode())
    )
    source = DataConfig(str(tmp_path / "in"), format="jsonl")
    assert values(source) == ROWS
    assert values(DataConfig(source.source, format="jsonl", include=("b*",))) == ROWS[3:]
    assert values(DataConfig(source.source, format="jsonl", exclude=("*.gz",))) == ROWS[3:]


def test_broken_lines_are_named_by_file_and_line_and_the_others_are_read(tmp_path):
    lines = [ROWS[0], '{"text": "cut', "[1, 2]", '"text"', "null", "\udcff", ROWS[1]]
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b"".join(
            (json.dumps(x) if isinstance(x, dict) else x).encode(errors="surrogateescape") + b"\n"
            for x in lines
        )
    )
    source = DataConfig(str(path))
    assert faults(source) == {
        "a.jsonl:2": "not JSON: Unterminated string starting at (column 10)",
        "a.jsonl:3": "the line holds a list; needed is an object",
        "a.jsonl:4": "the line holds a string; needed is an object",
        "a.jsonl:5": "the line holds null; needed is an object",
        "a.jsonl:6": "the byte at position 0 of the line is not UTF-8",
    }
    assert [row for row in values(source) if isinstance(row, dict)] == ROWS[:2]


def test_a_deeply_nested_line_is_a_fault_and_no_crash(tmp_path):
    source = DataConfig(jsonl(tmp_path / "a.jsonl", ["[" * 200_000]))
    assert list(faults(source)) == ["a.jsonl:1"]


def test_a_gzip_that_was_cut_short_is_named(tmp_path):
    whole = gzip.compress(json.dumps(ROWS[0]).encode() * 500)
    for name, content in {"cut.jsonl.gz": whole[:-20], "none.jsonl.gz": b"text"}.items():
        (tmp_path / name).write_bytes(content)
        said = faults(DataConfig(str(tmp_path / name)))
        assert "cannot be read to its end" in said[name]


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(
        PlanError, match=r'no such file or folder\n  repair: correct data.source; .*data.format = "datasets"'
    ):
        open_reader(DataConfig(str(tmp_path / "none.jsonl")))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").touch()
    with pytest.raises(
        PlanError, match=r"no file in .* matches include = \['\*.jsonl', '\*.jsonl.gz'\].* it holds \*.csv"
    ):
        open_reader(DataConfig(str(tmp_path / "in"), format="jsonl"))


def test_the_digest_follows_the_content_and_not_the_name(tmp_path):
    digests = [
        open_reader(DataConfig(jsonl(tmp_path / name, rows))).digest
        for name, rows in {"a.jsonl": ROWS, "b.jsonl": ROWS, "c.jsonl": ROWS[1:]}.items()
    ]
    assert digests[0] == digests[1] != digests[2]


def test_fields_that_a_format_has_no_use_for_are_refused(tmp_path):
    text = DataConfig(str(tmp_path), column="body", chat="talk", split="test", streaming=True, tokenizer="t")
    with pytest.raises(PlanError) as caught:
        open_reader(text)
    assert [fault.location for fault in caught.value.diagnostics] == [
        "data.column",
        "data.chat",
        "data.split",
        "data.streaming",
    ]
    with pytest.raises(
        PlanError,
        match=r"data.streaming: streaming = True, which JSONL files have not\n.*format = \"datasets\"",
    ):
        open_reader(DataConfig(jsonl(tmp_path / "a.jsonl", ROWS), streaming=True))
    with pytest.raises(PlanError, match="a dataset has none"):
        open_reader(DataConfig("name", format="datasets", include=("*.json",)))


def test_a_missing_column_is_said_with_those_there_are():
    fault = missing_column_diagnostic({"body": "x", "title": "y"}, "bodi", "a.jsonl:3", "data.column")
    assert str(fault) == (
        "a.jsonl:3: there is no column 'bodi'; the columns are: body, title\n  repair: set "
        "data.column: did you mean 'body'?"
    )
    assert missing_column_diagnostic({"body": None}, "body", "", "") is None


@pytest.mark.parametrize("streaming", [False, True])
def test_a_saved_data_set_is_read(tmp_path, streaming: bool):
    source = DataConfig(saved(tmp_path / "saved"), streaming=streaming)
    rows = open_reader(source)
    assert list(rows.read()) == [(f"{source.source}[{n}]", row) for n, row in enumerate(ROWS)]
    assert len(list(rows.read())) == 7


def test_a_split_of_a_saved_data_set_is_chosen(tmp_path):
    both = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])}
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "both"))
    assert values(DataConfig(str(tmp_path / "both"), split="test")) == ROWS[:2]
    with pytest.raises(
        PlanError, match=r"there is no split 'tset'; the splits are: train, test\n.*did you mean 'test'"
    ):
        open_reader(DataConfig(str(tmp_path / "both"), split="tset"))


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_local_tables_are_read_by_the_package(tmp_path, suffix: str, streaming: bool):
    table, path = datasets.Dataset.from_list(ROWS), tmp_path / f"a.{suffix}"
    {"csv": table.to_csv, "parquet": table.to_parquet}.get(suffix, table.to_json)(str(path))
    source = DataConfig(str(path), format="datasets", streaming=streaming)
    assert values(source) == ROWS
    part = values(DataConfig(str(path), format="datasets", split="train[:3]")) if not streaming else ROWS[:3]
    assert part == ROWS[:3]


def test_a_column_that_a_data_set_has_not_is_refused_before_it_is_read(tmp_path):
    source = saved(tmp_path / "saved")
    with pytest.raises(
        PlanError,
        match=(
            r"there is no column 'txet'; the columns are: text, n\n  repair: set data.column: "
            r"did you mean 'text'"
        ),
    ):
        open_reader(DataConfig(source, column="txet"))
    with pytest.raises(PlanError, match=r"there is no column 'messages'(.|\n)*data.chat"):
        open_reader(DataConfig(source, chat="messages", tokenizer="t"))


def test_a_table_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda **more: pytest.fail("it was"))
    with pytest.raises(PlanError, match=r"none.parquet: there is no such file or folder"):
        open_reader(DataConfig(str(tmp_path / "none.parquet")))


def test_a_name_on_the_hub_is_given_to_the_package_with_its_configuration(monkeypatch):
    asked = {}

    def load_dataset(**more: object) -> datasets.Dataset:
        asked.update(more)
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert values(DataConfig("owner/name:part", format="datasets", split="test")) == ROWS
    assert asked == {"path": "owner/name", "name": "part", "split": "test", "streaming": False}


def test_what_the_package_refuses_is_said_in_its_words(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(
        PlanError,
        match=r"data.source: the dataset '.*a.parquet' cannot be loaded: .+\n  repair: check data.source",
    ):
        open_reader(DataConfig(str(tmp_path / "a.parquet")))


def test_without_the_package_its_extra_is_named(tmp_path, monkeypatch):
    source = DataConfig(saved(tmp_path / "saved"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        PlanError,
        match=r"the package 'datasets' is not installed\n  repair: pip install 'meshwright\[datasets\]'",
    ):
        open_reader(source)
