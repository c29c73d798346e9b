"""Code that comes with a config: runs only if trusted, and from the folder of a commit."""

import json
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from meshwright.model.hf.model_from_config import config_factory
from meshwright.plan.job.errors import PlanError

CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

class ThimbleConfig(PreTrainedConfig):
    model_type = "thimble"
    def __init__(self, width=4, **rest):
        self.width = width
        super().__init__(**rest)

class Thimble(PreTrainedModel):
    config_class = ThimbleConfig
    def __init__(self, config):
        super().__init__(config)
        self.line = nn.Linear(config.width, 2)
        self.post_init()
    def forward(self, x):
        return self.line(x)
"""
AUTO_MAP = {"AutoConfig": "thimble.ThimbleConfig", "AutoModelForCausalLM": "thimble.Thimble"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "thimble.py").write_text(CODE)
    return tmp_path / "repository"


def written(folder: Path, **changes: object) -> str:
    config = {
        "model_type": "thimble",
        "architectures": ["Thimble"],
        "width": 6,
        "auto_map": AUTO_MAP,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_model_that_needs_its_own_code_is_refused_with_the_two_ways(folder: Path):
    with pytest.raises(PlanError) as caught:
        config_factory(written(folder), {})
    assert "its repository brings code for it, which is not run" in caught.value.diagnostics[0].problem
    assert (
        "model.trust_remote_code = true and model.revision to its commit" in caught.value.diagnostics[0].fix
    )


def test_trusted_code_builds_its_model(folder: Path):
    module = config_factory(written(folder), {"width": 3}, trust_remote_code=True)()
    assert type(module).__name__ == "Thimble"
    assert module.line.weight.shape == (2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Needle"]}, "the architecture is 'Needle'"),
        ({"auto_map": {**AUTO_MAP, "AutoConfig": "thimble.Missing"}}, "fails: AttributeError"),
    ],
)
def test_code_that_does_not_fit_its_config_is_refused(folder: Path, changes: dict, message: str):
    with pytest.raises(PlanError, match=message):
        config_factory(written(folder, **changes), {}, trust_remote_code=True)
