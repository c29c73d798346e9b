"""The dtypes of a plan as a table and in a line."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from meshwright.plan.job.job import OptimizerConfig, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.report.terminal.action_table import plan_details
from meshwright.report.terminal.dtype_balance_staleness_notes import precision_table, precision_text
from tests.paper_model import SyntheticModel
from tests.tiny_model import tiny_job

MIXED = PrecisionConfig("bfloat16", "bfloat16", "float32", master="float32")


def synthetic_plan(precision: PrecisionConfig, optimizer: OptimizerConfig | None = None) -> Plan:
    job = replace(tiny_job(), precision=precision, optimizer=optimizer or OptimizerConfig())
    return Plan.make(job, Mesh(), SyntheticModel().model_spec)


def shown(view: object) -> str:
    console = Console(file=StringIO(), width=160, color_system=None)
    console.print(view)
    return console.file.getvalue()


def test_the_table_has_a_row_for_each_role():
    lines = shown(precision_table(synthetic_plan(MIXED))).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        *(["parameters", "bfloat16"], ["master", "float32"], ["compute", "bfloat16"]),
        *(["gradients", "bfloat16"], ["reduce", "float32"], ["optimizer_states", "float32"]),
    ]
    assert "the parameters themselves" in shown(precision_table(synthetic_plan(PrecisionConfig())))
    assert "the parameters themselves" not in shown(precision_table(synthetic_plan(MIXED)))


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        (PrecisionConfig(), "float32 parameters, compute, gradients, reduce, optimizer_states"),
        (MIXED, "bfloat16 parameters, compute, gradients; float32 master, reduce, optimizer_states"),
        (
            PrecisionConfig(compute="float16", loss_scale=1024.0),
            "float32 parameters, gradients, reduce, optimizer_states; float16 compute; loss scale from 1024",
        ),
    ],
    ids=str,
)
def test_a_line_lists_the_roles_by_dtype(precision: PrecisionConfig, message: str):
    assert precision_text(synthetic_plan(precision)) == message
    assert message in shown(plan_details(synthetic_plan(precision)))


def test_optimizer_states_are_shown_in_the_dtype_of_the_optimizer():
    assert "bfloat16 optimizer_states" in precision_text(
        synthetic_plan(PrecisionConfig(), OptimizerConfig("adamw_bf16", betas=(0.9, 0.95)))
    )
    assert "8 bits, scales float32 optimizer_states" in precision_text(
        synthetic_plan(PrecisionConfig(), OptimizerConfig("adamw_8bit"))
    )
