"""The config that `search --out` writes: commented, complete, and accepted by the next command as it is."""

import json
import tomllib
from math import prod
from pathlib import Path

import pytest

from meshwright.commands.plan import resolve_config
from meshwright.commands.search.commented_config import sizes_to_model_config
from meshwright.commands.search.search import SearchOptions, next_command, run_search, write_config
from meshwright.model.loading.loader import load_model
from meshwright.parallel import STRATEGIES
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.model_config import ModelConfig
from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.report.search.assumptions_and_cost import TrainingBudget
from meshwright.run.config.config_and_plan_files import read_request
from tests.commands.search.test_best_plan_to_config import LLAMA

GATED = "tiny: layers 2 hidden 64 heads 4 kv_heads 2 ffn 96 vocab 256 sequence 32 gated"
PLAIN = "tiny: layers 2 hidden 64 heads 4 vocab 256 sequence 32 tied"


def written(folder: Path, model: str, **options: object) -> Path:
    path = folder / "job.toml"
    asked = SearchOptions(model, 2, "h100", 8, num_kept=1, **options)
    write_config(run_search(asked), path)
    return path


@pytest.mark.parametrize("model", [GATED, PLAIN])
def test_plan_accepts_it_for_a_model_that_is_given_by_sizes(tmp_path: Path, model: str):
    path = written(tmp_path, model)
    plan = resolve_config(path, [], None, needs_data=False)[1].plan
    assert plan.mesh.world_size == 2
    assert plan.job.data.sequence == 32


def test_plan_accepts_it_for_a_config(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    path = written(tmp_path, str(tmp_path), sequence=24)
    request, ready = resolve_config(path, [], None, needs_data=False)
    assert (ready.plan.mesh.world_size, ready.plan.job.data.sequence) == (2, 24)
    assert request.run.hardware == "h100"


def test_train_and_verify_ask_for_data(tmp_path: Path):
    with pytest.raises(PlanError, match=r"data\.source: no data is named"):
        resolve_config(written(tmp_path, GATED), [], None)


def test_every_line_has_its_place_and_no_line_is_wide(tmp_path: Path):
    text = written(tmp_path, GATED).read_text()
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 80
    head = text.splitlines()[0]
    assert head.startswith("# Chosen by `meshwright search")
    assert "Next: meshwright plan" in text
    tables = tomllib.loads(text)
    assert list(tables) == [
        *("micro_batch", "model", "data", "train", "optimizer", "lr_schedule", "precision", "mesh", "run"),
        "strategies",
    ]
    commented = [line for line in text.splitlines() if "# " in line]
    assert len(commented) > len(tables["train"]) + len(tables["precision"])


def test_steps_are_those_of_the_tokens_that_were_asked_for(tmp_path: Path):
    path = written(tmp_path, GATED, budget=TrainingBudget(8 * 32 * 77))
    request = read_request(path, [], STRATEGIES)
    assert request.job.train.steps == 77
    assert request.job.lr_schedule.warmup == 7


def test_one_device_has_no_strategies_and_says_so(tmp_path: Path):
    path, choices = tmp_path / "one.toml", ("activation_checkpointing=none",)
    found = run_search(SearchOptions(GATED, 1, "h100", 8, num_kept=1, constraints=choices))
    write_config(found, path)
    assert "strategies = []" in path.read_text()
    assert resolve_config(path, [], None, needs_data=False)[1].plan.strategies == ()


SMALL = "layers 3 hidden 64 heads 4 vocab 100 gated experts 6 top_k 2 expert_ffn 32"


@pytest.mark.parametrize(
    "text",
    [
        GATED,
        PLAIN,
        "wide: layers 2 hidden 64 heads 4 head 32 vocab 100 gated",
        f"experts: {SMALL} ffn 96 dense_layers 1 kv_heads 2 head 32",
        f"latent: {SMALL} ffn 96 shared_ffn 64 dense_layers 1 "
        "q_rank 24 kv_rank 16 head 16 rope_head 8 value_head 12",
    ],
)
def test_a_model_of_sizes_has_these_sizes(tmp_path: Path, text: str):
    shape = parse_shape(text)
    (tmp_path / "config.json").write_text(json.dumps(sizes_to_model_config(shape)))
    params = load_model(ModelConfig(str(tmp_path)), seed=0).deferred_init.logical_params.values()
    matrices = sum(prod(entry.shape) for entry in params if len(entry.shape) > 1)
    assert matrices == shape.numel


def test_the_next_command_can_be_pasted():
    assert next_command(Path("my job.toml")) == "meshwright plan 'my job.toml'"
    assert "--out" in next_command(None)
