"""A checkpoint of stages is that of the model: any other plan takes it up, moments included,
and vice versa.
"""

import json
from math import prod
from pathlib import Path

import pytest

from meshwright.api import default_strategies
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from tests.parallel.checkpoint_crossing import loads_under_other_plan
from tests.parallel.tensor.odd_llama import analyzed_llama, planned

MESHES = {
    "two stages": Mesh(pp=2),
    "three stages": Mesh(pp=3),
    "stages in shards": Mesh(pp=2, dp_shard=2),
    "ddp": Mesh(dp_replicate=2),
    "alone": Mesh(),
    "every stage twice": Mesh(pp=2),
}


def plan_on(name: str, analyzed: AnalyzedModel) -> Plan:
    """With the default strategies, and a pipeline where the mesh has one."""
    mesh = MESHES[name]
    schedule = "dualpipe" if name == "every stage twice" else "1f1b"
    pipeline = (Pipeline(schedule=schedule),) if mesh.pp > 1 else ()
    others = (
        each for each in default_strategies(mesh, analyzed.model_spec) if not isinstance(each, Pipeline)
    )
    return planned(analyzed, mesh, (*pipeline, *others), 1)[1]


@pytest.mark.parametrize(
    ("saved", "taken"),
    [
        ("two stages", "alone"),
        ("alone", "three stages"),
        ("three stages", "ddp"),
        ("stages in shards", "two stages"),
    ],
)
def test_a_checkpoint_crosses(saved: str, taken: str, tmp_path: Path):
    loads_under_other_plan(
        analyzed_llama(), plan_on(saved, analyzed_llama()), plan_on(taken, analyzed_llama()), tmp_path
    )


@pytest.mark.parametrize(
    ("saved", "taken"),
    [
        ("three stages", "alone"),
        ("stages in shards", "three stages"),
        ("every stage twice", "ddp"),
        ("ddp", "every stage twice"),
    ],
)
def test_a_tied_table_stands_in_it_once(saved: str, taken: str, tmp_path: Path):
    tied = analyzed_llama(tie_word_embeddings=True)
    loads_under_other_plan(tied, plan_on(saved, tied), plan_on(taken, tied), tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    entries = json.loads((folder / "manifest.json").read_text())["entries"]
    assert [
        name for name in entries if name.startswith("model/") and ("embed" in name or "head" in name)
    ] == ["model/model.embed_tokens.weight"]
    for entry in entries.values():
        assert sum(prod(each["shape"]) for each in entry["slices"]) == prod(entry["shape"])
