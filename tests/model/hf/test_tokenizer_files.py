"""The tokenizer of a model: which one it comes with, where one of the hub is found, its largest id."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from meshwright.model.hf import hub, tokenizer_files
from meshwright.model.hf.tokenizer_files import (
    HUB_TIMEOUT_S,
    check_tokenizer,
    fetch_tokenizer,
    largest_token_id,
    own_tokenizer,
    pin_tokenizer,
)
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.model_config import ModelConfig

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """In place of the hub: `snapshot` is what it and its cache hold; remembers what it was asked for."""

    def __init__(self, snapshot: Path, *, cached: bool, online: bool) -> None:
        self.snapshot, self.cached, self.online = snapshot, cached, online
        self.requests: list[tuple[str, str | None, float]] = []

    def model_info(self, name: str, *, revision: str | None, timeout: float) -> SimpleNamespace:
        self.requests.append((name, revision, timeout))
        if not self.online:
            raise ConnectionError("Name or service not known")
        return SimpleNamespace(sha=COMMIT)

    def download(self, name: str, *, local_files_only: bool = False, **asked: object) -> str:
        if local_files_only and not self.cached:
            raise LocalEntryNotFoundError("not in the cache")
        return str(self.snapshot)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    folder = tmp_path / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def hub_with(monkeypatch: pytest.MonkeyPatch, snapshot: Path, *, cached: bool, online: bool) -> Hub:
    found = Hub(snapshot, cached=cached, online=online)
    monkeypatch.setattr(tokenizer_files, "snapshot_download", found.download)
    monkeypatch.setattr(tokenizer_files, "HfApi", lambda: found)
    return found


def test_a_model_comes_with_the_tokenizer_of_its_weights_or_else_of_its_config(tmp_path: Path):
    for name in ("weights", "bare", "config"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "weights" / "spiece.model").write_text("")
    (tmp_path / "config" / "vocab.txt").write_text("")
    weights, bare, config = (str(tmp_path / name) for name in ("weights", "bare", "config"))
    assert own_tokenizer(ModelConfig(config, weights=weights)) == weights
    assert own_tokenizer(ModelConfig(config, weights=bare)) == config
    assert own_tokenizer(ModelConfig(f"{config}/config.json")) == config
    assert own_tokenizer(ModelConfig(f"{tmp_path}/model.py:build", weights=weights)) == weights
    assert own_tokenizer(ModelConfig(bare)) == ""
    inside = tmp_path / "lib.python" / "weights"
    shutil.copytree(weights, inside)
    assert own_tokenizer(ModelConfig(str(inside))) == str(inside)
    assert own_tokenizer(ModelConfig(f"{tmp_path}/model.py:build")) == ""


def test_the_tokenizer_of_a_hub_id_is_that_of_its_commit(snapshot: Path, monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", lambda *args, **asked: str(snapshot))
    assert own_tokenizer(ModelConfig("org/name", revision=COMMIT)) == f"org/name@{COMMIT}"


def test_a_tokenizer_in_the_cache_needs_no_network(snapshot: Path, monkeypatch):
    found = hub_with(monkeypatch, snapshot, cached=True, online=False)
    assert pin_tokenizer("org/name", "here") == f"org/name@{COMMIT}"
    assert fetch_tokenizer(f"org/name@{COMMIT}", "here") == snapshot
    assert pin_tokenizer(str(snapshot), "here") == str(snapshot)
    assert not found.requests


def test_the_hub_is_asked_once_and_for_a_bounded_time(snapshot: Path, monkeypatch):
    found = hub_with(monkeypatch, snapshot, cached=False, online=True)
    assert fetch_tokenizer("gpt2@main", "here") == snapshot
    assert found.requests == [("gpt2", "main", HUB_TIMEOUT_S)]
    found.online = False
    with pytest.raises(PlanError) as caught:
        fetch_tokenizer("gpt3", "data.tokenizer")
    assert len(found.requests) == 2
    (refusal,) = caught.value.diagnostics
    assert refusal.problem.startswith(
        "no tokenizer: there is no folder 'gpt3', the cache of the hub does not"
    )
    assert refusal.problem.endswith("the hub cannot be asked: Name or service not known")
    assert "`hf download gpt3`" in refusal.fix
    assert 'data.tokenizer = "bytes"' in refusal.fix


def test_a_cached_config_without_a_tokenizer_is_no_tokenizer(snapshot: Path, monkeypatch):
    (snapshot / "tokenizer.json").rename(snapshot / "config.json")
    found = hub_with(monkeypatch, snapshot, cached=True, online=True)
    fetch_tokenizer("org/name", "here")
    assert len(found.requests) == 1


def test_a_name_that_the_hub_cannot_have_is_not_asked_for(snapshot: Path, monkeypatch):
    found = hub_with(monkeypatch, snapshot, cached=True, online=True)
    with pytest.raises(PlanError, match="'to ken' is neither a folder nor a hub id"):
        fetch_tokenizer("to ken", "here")
    assert not found.requests


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
