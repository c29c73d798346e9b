"""Plan files: what is written is the request with every default, behind format and version."""

import tomllib
from pathlib import Path

import pytest

from meshwright.parallel import STRATEGIES
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.plan.job.file_format import PLAN
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.config.config_and_plan_files import PlanRequest, read_request
from meshwright.run.config.plan_file import request_as_dict, write_request


def test_a_plan_file_is_the_request_behind_its_format(tmp_path):
    request = PlanRequest(mesh={"tp": 2}, micro_batch=3)
    write_request(request, tmp_path / "plan.toml")
    document = tomllib.loads((tmp_path / "plan.toml").read_text())
    assert list(document)[:2] == ["format", "version"]
    assert PLAN.contents(document, "plan.toml") == request_as_dict(request)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]


@pytest.mark.parametrize("strategy", [Offload(), Offload(host_gb=1.5), ActivationOffload(), DiskOffload("a")])
def test_strategies_with_and_without_a_bound_are_read_as_they_were_written(
    strategy: Strategy, tmp_path: Path
):
    write_request(PlanRequest(strategies=(strategy,)), tmp_path / "plan.toml")
    assert read_request(tmp_path / "plan.toml", (), STRATEGIES).strategies == (strategy,)
