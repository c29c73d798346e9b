"""MeshwrightTrainer on gloo processes: every plan trains, evaluates, saves and resumes as one device does."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.integrations.transformers import MeshwrightTrainer
from meshwright.testing.ranks import ProcessPool
from tests.integrations.small_llama import accuracy, arguments, llama, logged, samples

MESHES = {
    "ddp": mw.Mesh(dp_replicate=2),
    "zero": mw.Mesh(dp_shard=2),
    "tp": mw.Mesh(tp=2),
    "pp": mw.Mesh(pp=2),
}
Result = tuple[list[dict[str, float]], torch.Tensor, dict[str, Any]]


def trained(mesh: mw.Mesh, folder: str, resume: str = "") -> Result:
    """What a run logs, the parameters that the user's model ends with, and what was counted."""
    num_data = mesh.dp_replicate * mesh.dp_shard
    model = llama()
    args = arguments(
        folder,
        per_device_train_batch_size=2 // num_data,
        per_device_eval_batch_size=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        include_num_input_tokens_seen="all",
    )
    trainer = MeshwrightTrainer(
        model,
        args,
        train_dataset=samples(),
        eval_dataset=samples(5),
        compute_metrics=accuracy,
        mesh=mesh,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume or None)
    predicted = trainer.predict(samples(5))
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    counted = {
        "flos": trainer.state.total_flos,
        "tokens": trainer.state.num_input_tokens_seen,
        "evaluated": trainer.evaluate()["eval_loss"],
        "predictions": predicted.predictions.tolist(),
    }
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    return logged(trainer.state), parameters, counted


def trained_on_rank(world: World, folder: str, resume: str = "") -> Result:
    """The same in a process of a job; accelerate reads the environment."""
    sizes = {"WORLD_SIZE": str(world.mesh.world_size), "RANK": str(world.rank), "LOCAL_RANK": str(world.rank)}
    os.environ |= {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        return trained(world.mesh, folder, resume)
    finally:
        for name in sizes:
            del os.environ[name]
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("alone")
    return trained(mw.Mesh(), str(folder)), folder


def assert_same(found: Result, wanted: Result) -> None:
    for mine, other in zip(found[0], wanted[0], strict=True):
        assert mine == pytest.approx(other, rel=1e-10)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-10, atol=1e-12)
    for key, value in wanted[2].items():
        if key == "predictions":
            torch.testing.assert_close(torch.tensor(found[2][key]), torch.tensor(value), rtol=1e-9, atol=1e-9)
        else:
            assert found[2][key] == pytest.approx(value, rel=1e-10)


@pytest.mark.parametrize("name", MESHES)
def test_ranks_train_evaluate_and_resume_as_one_device(
    name: str, alone: tuple[Result, Path], process_pool: ProcessPool, tmp_path: Path
):
    wanted, folder = alone
    mesh = MESHES[name]
    found = process_pool.run(trained_on_rank, mesh, str(tmp_path / "whole"), timeout_s=100)
    for each in found:
        assert_same(each, wanted)
    checkpoint = sorted(folder.glob("checkpoint-*"))[0]
    resumed = process_pool.run(
        trained_on_rank, mesh, str(tmp_path / "resumed"), str(checkpoint), timeout_s=100
    )
    for each in resumed:
        assert_same(each, wanted)
