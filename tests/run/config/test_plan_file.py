"""Plan files: what is written is the request with every default, behind format and version."""

import tomllib

from meshwright.plan.job.file_format import PLAN
from meshwright.run.config.config_and_plan_files import PlanRequest
from meshwright.run.config.plan_file import request_as_dict, write_request


def test_a_plan_file_is_the_request_behind_its_format(tmp_path):
    request = PlanRequest(mesh={"tp": 2}, micro_batch=3)
    write_request(request, tmp_path / "plan.toml")
    document = tomllib.loads((tmp_path / "plan.toml").read_text())
    assert list(document)[:2] == ["format", "version"]
    assert PLAN.contents(document, "plan.toml") == request_as_dict(request)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]
