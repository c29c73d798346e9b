"""What SOURCE names: a plan, and the weights; what names nothing is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from meshwright.comm.backends.threads import single_rank_world
from meshwright.commands.serving.served_source import find_source, source_name
from meshwright.plan.job.errors import PlanError
from meshwright.run.checkpoint.distributed_checkpoint import save_tensors
from meshwright.run.checkpoint.manifest import read_manifest
from tests.command_line import LLAMA, lay_out


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run's folder with two checkpoints."""
    config = lay_out(tmp_path_factory.mktemp("runs"))
    folder = config.parent / "run"
    folder.mkdir()
    config.rename(folder / "plan.toml")
    group = single_rank_world(torch.device("cpu")).group(())
    for step in (1, 2):
        save_tensors(folder / "checkpoints", step, {"model/w": torch.zeros(step)}, {}, group, keep=2)
    return folder


def test_a_run_gives_its_plan_and_its_newest_checkpoint(run: Path):
    found = find_source(str(run), None, ["--train.batch", "3"])
    assert found.request.job.train.batch == 3
    assert found.checkpoint == run / "checkpoints" / "step-00000002"
    first = run / "checkpoints" / "step-00000001"
    assert find_source(str(run), first, []).checkpoint == first
    assert source_name(str(run)) == "run"


def test_data_and_evaluations_are_left_out(run: Path):
    job = find_source(str(run), None, ["--evaluate.hold_out", "5", "--data.chat", "talk"]).request.job
    assert (job.data.source, job.data.chat, job.evaluate.hold_out) == ("", "", 0)
    assert job.data.sequence == 16


def test_a_checkpoint_gives_the_plan_of_its_run(run: Path, tmp_path: Path):
    first = run / "checkpoints" / "step-00000001"
    found = find_source(str(first), None, [])
    assert (found.checkpoint, source_name(str(first))) == (first, "run")
    assert found.request.mesh == {"dp_replicate": 2}
    alone = Path(shutil.copytree(first, tmp_path / "step-00000001"))
    with pytest.raises(PlanError, match=r"in no run's folder(?s:.*)serve CONFIG\.toml --checkpoint"):
        find_source(str(alone), None, [])


def test_a_damaged_checkpoint_is_passed_over(run: Path, tmp_path: Path):
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    newest, first = (copied / "checkpoints" / f"step-0000000{step}" for step in (2, 1))
    for folder, expected in ((newest, first), (first, None)):
        file = next(iter(read_manifest(folder).files))
        (folder / file).write_bytes(b"")
        if expected is not None:
            assert find_source(str(copied), None, []).checkpoint == expected
    with pytest.raises(PlanError, match=r"no complete(?s:.*)step-00000002: (?s:.*)step-00000001: "):
        find_source(str(copied), None, [])


def test_a_model_is_served_with_its_own_weights(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    found = find_source(str(tmp_path / "model"), None, ["--mesh.tp", "2"])
    model = found.request.job.model
    assert model.source == model.weights == str(tmp_path / "model")
    assert (found.request.mesh, found.checkpoint) == ({"tp": 2}, None)


def test_a_config_serves_the_weights_of_a_run(run: Path, tmp_path: Path):
    config = lay_out(tmp_path, mesh={"dp_replicate": 3})
    assert find_source(str(config), None, []).checkpoint is None
    found = find_source(str(config), run, [])
    assert (found.request.mesh, found.checkpoint) == ({"dp_replicate": 3}, run / "checkpoints/step-00000002")
    assert source_name(str(config)) == "config"


@pytest.mark.parametrize("source", ["nowhere", "."])
def test_what_names_nothing_is_refused(source: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match=f"'{source}' is neither a run's folder, nor a checkpoint"):
        find_source(source, None, [])
