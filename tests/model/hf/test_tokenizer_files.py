"""The largest id of a tokenizer, from its files."""

import json
from pathlib import Path

import pytest
from meshwright.model.hf.tokenizer_files import check_tokenizer, largest_token_id

from meshwright.plan.job.errors import PlanError


@pytest.mark.parametrize(
    ("name", "content", "largest"),
    [
        ("tokenizer.json", {"model": {"vocab": {"a": 3, "b": 11}}, "added_tokens": [{"id": 7}]}, 11),
        ("tokenizer.json", {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 5}]}, 5),
        ("tokenizer.json", {"model": {}}, None),
        ("vocab.json", {"a": 0, "b": 4}, 4),
        ("other.json", {"a": 9}, None),
    ],
)
def test_the_largest_id_is_found(tmp_path: Path, name: str, content: object, largest: int | None):
    (tmp_path / name).write_text(json.dumps(content))
    assert largest_token_id(tmp_path) == largest


def test_a_vocabulary_that_is_padded_fits(tmp_path: Path):
    (tmp_path / "vocab.json").write_text('{"a": 9}')
    check_tokenizer(tmp_path, 10)
    check_tokenizer(tmp_path, None)
    with pytest.raises(PlanError, match="ids up to 9, and the model has 9 tokens"):
        check_tokenizer(tmp_path, 9)


def test_a_tokenizer_that_is_damaged_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(PlanError, match=r"tokenizer.json cannot be read"):
        largest_token_id(tmp_path)
