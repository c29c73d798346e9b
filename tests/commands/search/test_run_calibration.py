"""The plan of a run in the terms of a search."""

from pathlib import Path

from meshwright.commands.search.run_calibration import parallel_config_of
from meshwright.parallel import STRATEGIES
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.config.config_and_plan_files import read_request
from tests.run.measure.run_folders import PLAN


def test_a_plan_is_laid_out_as_a_search_would(tmp_path: Path):
    text = PLAN.format(micro=2, store="ddp", more="")
    text = text.replace(
        '{ name = "ddp", axis = "dp_replicate" }',
        '{ name = "zero", axis = "dp_shard", stage = 2 }, {name = "activation_checkpointing"}',
    )
    path = tmp_path / "plan.toml"
    path.write_text(
        text.replace("dp_replicate = 2", "dp_shard = 2\npp = 2\ntp = 3\ncp = 2").replace(
            '"batch_split", axis = "dp_replicate"', '"batch_split", axis = "dp_shard"'
        )
    )
    request = read_request(path, (), STRATEGIES)
    found = parallel_config_of(request, Mesh.infer(request.mesh))
    assert (found.dp, found.tp, found.pp, found.cp, found.zero_stage) == (2, 3, 2, 2, 2)
    assert (found.micro_batch, found.num_microbatches, found.recompute, found.zero_group_size) == (
        2,
        2,
        "layers",
        0,
    )
