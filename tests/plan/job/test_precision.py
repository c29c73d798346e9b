"""Every role of a job has a dtype."""

import pytest

from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import ROLES, PrecisionConfig


@pytest.mark.parametrize(
    ("precision", "roles"),
    [
        (PrecisionConfig(), "float32 float32 float32 float32 float32 float32"),
        (PrecisionConfig(compute="bfloat16"), "float32 float32 bfloat16 float32 float32 float32"),
        (
            PrecisionConfig("bfloat16", "bfloat16", "bfloat16"),
            "bfloat16 bfloat16 bfloat16 bfloat16 bfloat16 bfloat16",
        ),
        (
            PrecisionConfig("bfloat16", "bfloat16", "float32", "float32"),
            "bfloat16 float32 bfloat16 bfloat16 float32 float32",
        ),
        (
            PrecisionConfig("bfloat16", "bfloat16", "bfloat16", "float32", "float32"),
            " ".join(["bfloat16 float32"] * 3),
        ),
        (
            PrecisionConfig("float16", "float16", "float16", "float32"),
            "float16 float32 float16 float16 float16 float32",
        ),
        (
            PrecisionConfig("float64", "float64", "float64", optimizer_states="float64"),
            "float64 float64 float64 float64 float64 float64",
        ),
    ],
    ids=str,
)
def test_every_role_has_a_dtype(precision: PrecisionConfig, roles: str):
    job = Job(ModelConfig("model.json"), DataConfig("text.txt"), precision=precision)
    assert job.diagnostics(RunConfig()) == []
    assert dict(zip(ROLES, roles.split(), strict=True)) == precision.roles
    assert precision.scales_loss == ("float16" in roles.split())


def test_bfloat16_parameters_without_a_master_are_noted():
    (note,) = PrecisionConfig("bfloat16", "bfloat16").notes()
    assert "steps below 1/512 of a weight are lost" in note
    assert 'precision.master = "float32"' in note
    for precision in (PrecisionConfig(), PrecisionConfig("bfloat16", "bfloat16", master="float32")):
        assert not list(precision.notes())
