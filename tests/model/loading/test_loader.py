"""Model sources become deferred initializations: files with factories, configs, and refusals."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.model.loading.init_recorder import is_meta
from meshwright.model.loading.loader import (
    LoadedModel,
    Model,
    load_factory,
    load_model,
    load_module,
    read_source_config,
)
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.model_config import ModelConfig

NET = """
from dataclasses import dataclass
import torch
from torch import nn
from meshwright.model.loading.loader import Model

@dataclass
class Sizes:
    width: "int" = 4

def net():
    return nn.Linear(Sizes().width, 2)

def full():
    return Model(net(), example={"x": torch.ones(3, 4)}, blocks=[""], loss="a loss")

def late():
    import neighbour
    return nn.Linear(neighbour.WIDTH, 1)

def broken():
    raise ZeroDivisionError("no width")

def number():
    return 3

def bad_example():
    return Model(net(), example=torch.ones(3))

def bad_blocks():
    return Model(net(), blocks="layers")

constant = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "neighbour.py").write_text("WIDTH = 7")
    return str(tmp_path / "net.py")


def load(source: str, **overrides: int) -> LoadedModel:
    return load_model(ModelConfig(source, overrides), seed=0)


def test_a_factory_may_return_a_module(file: str):
    loaded = load(f"{file}:net")
    assert loaded.name == "net"
    assert loaded.deferred_init.logical_params["weight"].shape == (2, 4)
    assert (loaded.example, loaded.blocks, loaded.loss) == (None, None, None)


def test_a_factory_may_return_what_goes_along_with_the_module(file: str):
    loaded = load(f"{file}:full")
    assert torch.equal(loaded.example["x"], torch.ones(3, 4))
    assert loaded.blocks == ("",)
    assert loaded.loss == "a loss"


def test_a_factory_runs_with_deferred_initialization(file: str):
    assert is_meta(load(f"{file}:net").deferred_init.instantiate().weight)


def test_a_factory_may_import_its_neighbours_when_it_is_called(file: str):
    before = list(sys.path)
    assert load(f"{file}:late").deferred_init.logical_params["weight"].shape == (1, 7)
    assert sys.path == before


def test_a_function_of_this_program_is_a_factory_too():
    loaded = load_factory(lambda: nn.Linear(2, 3), seed=1, name="mine")
    assert loaded.name == "mine"
    assert not torch.equal(
        loaded.deferred_init.initial_value("weight"),
        load_factory(lambda: nn.Linear(2, 3), 2, "mine").deferred_init.initial_value("weight"),
    )


def test_a_config_is_looked_at_and_a_factory_is_not(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 3}))
    assert read_source_config(ModelConfig(str(tmp_path))).num_hidden_layers == 3
    assert read_source_config(ModelConfig("none.py:build")) is None


def test_a_config_is_named_after_its_folder(tmp_path: Path):
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 10,
    }
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 8}))
    for source in (folder, folder / "config.json"):
        assert load(str(source)).name == "tiny"
    assert (
        "model.layers.1.mlp.up_proj.weight"
        not in load(str(folder), num_hidden_layers=1).deferred_init.logical_params
    )


@pytest.mark.parametrize(
    ("function", "what", "fix"),
    [
        ("nett", "has no function 'nett'", "did you mean 'net'?"),
        ("constant", "has no function 'constant'", "choose one of: bad_blocks"),
        ("broken", "constructing 'broken' raised ZeroDivisionError: no width", "correct the construction"),
        (
            "number",
            "the factory 'number' returned a value of type int",
            "return an nn.Module, or meshwright.Model",
        ),
        ("bad_example", "the example of 'bad_example' is not a dict", "example={'x': tensor}"),
        ("bad_blocks", "the blocks of 'bad_blocks' are 'layers'", "blocks=['layers.0', 'layers.1']"),
    ],
)
def test_a_factory_that_cannot_work_is_refused(file: str, function: str, what: str, fix: str):
    with pytest.raises(PlanError) as caught:
        load(f"{file}:{function}")
    assert what in caught.value.diagnostics[0].problem
    assert fix in caught.value.diagnostics[0].fix


def test_a_factory_that_raises_keeps_its_own_traceback(file: str):
    with pytest.raises(PlanError) as caught:
        load(f"{file}:broken")
    cause = caught.value.__cause__
    assert isinstance(cause, ZeroDivisionError)
    last = cause.__traceback__
    while last.tb_next:
        last = last.tb_next
    assert last.tb_frame.f_code.co_filename == file


def test_a_refusal_of_the_recorder_passes_through():
    with pytest.raises(PlanError) as caught:
        load_factory(
            lambda: nn.Linear(2, 2).register_parameter("late", nn.UninitializedParameter()), 0, "lazy"
        )
    assert caught.value.diagnostics[0].location == "Linear.late"


@pytest.mark.parametrize(
    ("content", "source", "what"),
    [
        (None, "missing.py:net", "there is no file"),
        ("x = 1", "file.py", "names a file and no factory"),
        ("def (", "file.py:net", "raised SyntaxError"),
        ("import nowhere_to_be_found", "file.py:net", "raised ModuleNotFoundError"),
        ("", "file.py:net", "has no function 'net'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None, source: str, what: str):
    if content is not None:
        (tmp_path / "file.py").write_text(content)
    with pytest.raises(PlanError) as caught:
        load(str(tmp_path / source))
    assert what in caught.value.diagnostics[0].problem


def test_overrides_of_a_factory_are_refused(file: str):
    with pytest.raises(PlanError, match=r"overrides \(width\) with a factory"):
        load(f"{file}:net", width=3)


def test_a_model_is_its_module_alone_by_default():
    model = Model(nn.Linear(1, 1))
    assert (model.example, model.blocks, model.loss) == (None, None, None)


def test_a_module_without_values_is_refused_with_the_factory():
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    with pytest.raises(
        PlanError, match=r"Linear: the parameters of Linear are on the device 'meta'.*\n.*lambda: "
    ):
        load_module(module, 0)
