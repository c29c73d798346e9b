"""Hub ids: recognition, what is fetched, the pinned commit, and refusals. No test uses the network."""

from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from meshwright.model.hf import hub
from meshwright.model.hf.hub import is_hub_id, pin_revision, resolve_path
from meshwright.model.loading.loader import load_model
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.errors import Diagnostic, PlanError, diagnostics_in
from meshwright.plan.job.job import Job
from meshwright.plan.job.model_config import ModelConfig
from tests.model.published_models import logits, made, published

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Cache:
    """In place of the hub: gives one snapshot folder, and remembers what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, []

    def __call__(self, repo_id: str, **asked: object) -> str:
        self.asked.append({"repo_id": repo_id, **asked})
        if not self.folder.is_dir():
            raise LocalEntryNotFoundError("Cannot find it.\nSet HF_HUB_OFFLINE=0.")
        return str(self.folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    cache = Cache(tmp_path / "snapshots" / COMMIT)
    monkeypatch.setattr(hub, "snapshot_download", cache)
    return cache


def test_a_hub_id_is_two_names_that_are_no_path_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("org/name-7B_v0.1")
    (tmp_path / "configs").mkdir()
    (tmp_path / "org2" / "name").mkdir(parents=True)
    paths = (
        "configs/missing",
        "org2/name",
        "llama",
        "a/b/c",
        "/a/b",
        "./a",
        "org/model.json",
        "org/x.safetensors",
        "f.py:build",
    )
    assert [path for path in paths if is_hub_id(path)] == []


def test_a_branch_becomes_the_commit_that_it_names(cache: Cache):
    published(cache.folder)
    source = pin_revision(ModelConfig("org/name", weights="org/name"))
    assert source.revision == COMMIT
    assert cache.asked[0]["revision"] is None
    assert pin_revision(source) == source
    assert len(cache.asked) == 1


def test_a_model_comes_from_its_snapshot(cache: Cache):
    theirs = published(cache.folder)
    loaded = load_model(ModelConfig("org/name", weights="org/name", revision=COMMIT), seed=0)
    assert (logits(made(loaded)) == logits(theirs)).all()
    assert loaded.name == "name"
    assert {asked["revision"] for asked in cache.asked} == {COMMIT}


def test_pickles_and_code_are_not_fetched_nor_weights_for_a_config(cache: Cache):
    published(cache.folder)
    resolve_path("org/name", ModelConfig("org/name"), "model.source")
    resolve_path("org/name", ModelConfig("org/name", weights="org/name"), "model.weights")
    resolve_path("org/name", ModelConfig("org/name", revision=COMMIT, trust_remote_code=True), "model.source")
    small, whole, trusted = (asked["allow_patterns"] for asked in cache.asked)
    assert set(whole) - set(small) == {"*.safetensors"}
    assert set(trusted) - set(small) == {"*.py"}
    assert not {"*.bin", "*.pt", "*"} & {*small, *whole, *trusted}


def test_what_the_hub_does_not_give_is_refused(cache: Cache):
    with pytest.raises(PlanError) as caught:
        pin_revision(ModelConfig("org/lost", revision="main"))
    assert "there is no path 'org/lost' here, and as a hub id at 'main' it cannot be fetched" in str(
        caught.value
    )
    assert "HF_HOME" in caught.value.diagnostics[0].fix


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ModelConfig("here.json", revision="main"), "the revision 'main', and neither"),
        (ModelConfig("org/one", weights="org/two"), "two repositories, org/one and org/two"),
        (ModelConfig("here.json", revision=COMMIT, trust_remote_code=True), "which is not a hub id"),
    ],
)
def test_settings_without_effect_are_refused(source: ModelConfig, message: str):
    with pytest.raises(PlanError, match=message):
        pin_revision(source)


def of_model(source: ModelConfig) -> list[Diagnostic]:
    return diagnostics_in("model", Job(source).diagnostics(RunConfig()))


@pytest.mark.parametrize("revision", ["", "main", COMMIT[:8]])
def test_code_of_others_needs_a_commit(revision: str):
    diagnostics = of_model(ModelConfig("org/name", revision=revision, trust_remote_code=True))
    assert [diagnostic.location for diagnostic in diagnostics] == ["model.trust_remote_code"]
    assert "40 hexadecimal digits" in diagnostics[0].fix
    assert not of_model(ModelConfig("org/name", revision=COMMIT, trust_remote_code=True))


def test_skip_without_weights_is_refused():
    assert [diagnostic.location for diagnostic in of_model(ModelConfig("x.json", skip=("a",)))] == [
        "model.skip"
    ]
