"""run_info.json: enough to draw the program elsewhere, and no host or user name."""

import getpass
import json
import platform
from dataclasses import replace

import torch

from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.step.program_json import program_from_dict
from meshwright.run.telemetry.run_info import write_run_info
from tests.paper_model import FIRST_ROLE
from tests.tiny_model import analyzed_model, plan_of


def test_about_holds_the_plan_its_program_versions_and_machine(tmp_path):
    plan = replace(plan_of(analyzed_model(), 3), run=RunConfig(str(tmp_path / "run")))
    path = write_run_info(plan, {"model": "a model"}, {FIRST_ROLE: {"parameters": 8}}, torch.device("cpu"))
    said = json.loads(path.read_text())
    assert path == tmp_path / "run" / "run_info.json"
    assert (said["hash"], said["world"], said["axis_sizes"]) == (plan.hash, 3, {"dp_replicate": 3})
    assert (said["summary"], said["resident_memory"]) == (
        {"model": "a model"},
        {FIRST_ROLE: {"parameters": 8}},
    )
    assert said["stages"] == [list(plan.model_spec.block_calls)]
    assert [action.name for action in program_from_dict(said["program"]).actions(FIRST_ROLE)] == [
        action.name for action in plan.program.actions(FIRST_ROLE)
    ]
    installed = torch.__version__.partition("+")[0]  # a build of the package index has no +cu130 there
    assert said["versions"]["torch"] in (torch.__version__, installed)
    assert said["machine"]["device"] == "cpu"
    assert said["machine"]["memory"] > 0


def test_about_names_no_host_and_no_user(tmp_path):
    plan = replace(plan_of(analyzed_model(), 1), run=RunConfig(str(tmp_path / "run")))
    said = json.loads(write_run_info(plan, {}, {}, torch.device("cpu"), {"step_s": 2.0}).read_text())
    machine = said["machine"]
    assert said["prediction"] == {"step_s": 2.0}
    assert set(machine) == {"system", "processor", "cores", "memory", "device"}
    assert platform.node() not in machine.values()
    assert getpass.getuser() not in machine.values()
