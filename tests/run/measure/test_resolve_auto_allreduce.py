"""`algorithm = "auto"` becomes a rule once, when the plan is made."""

from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
import torch

from meshwright.comm.allreduce.size_rule import SizeRule
from meshwright.comm.tuning.choose_size_rule import choose_rule
from meshwright.device.local_device import local_platform
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.hardware.measured_cluster import AllReduceSeries, Cluster, FitError
from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, SizeBand
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.file_format import PLAN
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.measure.cluster_file import describe_machine, write_cluster
from meshwright.run.measure.resolve_auto_allreduce import choose_algorithms

TRANSPORT = local_platform().backend or "gloo"
NETWORK = NetworkModel(inter_host=LinkCost((SizeBand(0, 1e-4, 1e9),)))
RING = AllReduceSeries("ring", 3, (1024, 1 << 20, 64 << 20), (1e-3, 1e-2, 1e-1), (0.0, 0.0, 0.0))
CLUSTER = Cluster(
    "", describe_machine(), torch.__version__, TRANSPORT, 1, FitError(0.1, 0.1), NETWORK, (RING,)
)
AUTO = (BatchSplit(), DDP(algorithm="auto"))
MESH = Mesh(dp_replicate=3)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "cluster.toml"
    write_cluster(CLUSTER, path)
    return str(path)


def rule_of(strategies: tuple[object, ...]) -> str:
    (found,) = [each.algorithm for each in strategies if isinstance(each, DDP)]
    return found


def test_auto_becomes_the_rule_that_the_cluster_gives(file: str, tmp_path: Path):
    strategies, notes = choose_algorithms(AUTO, MESH, file, tmp_path / "run")
    assert rule_of(strategies) == str(choose_rule(CLUSTER, 3).rule) != "auto"
    assert strategies[0] == BatchSplit()
    (note,) = notes
    assert note.startswith(f"auto chose '{rule_of(strategies)}' for 3 ranks, because ")


def test_the_same_file_gives_the_same_strategies(file: str, tmp_path: Path):
    assert choose_algorithms(AUTO, MESH, file, tmp_path) == choose_algorithms(AUTO, MESH, file, tmp_path)


def test_a_plan_without_auto_reads_no_cluster(tmp_path: Path):
    plain = (BatchSplit(), DDP(algorithm="tree"))
    assert choose_algorithms(plain, MESH, str(tmp_path / "gone.toml"), tmp_path) == (plain, [])


def test_without_a_cluster_the_repair_is_to_measure_one(tmp_path: Path):
    with pytest.raises(PlanError) as raised:
        choose_algorithms(AUTO, MESH, "", tmp_path)
    (fault,) = raised.value.diagnostics
    assert fault.location == "strategies.ddp.algorithm"
    assert "meshwright bench network" in fault.fix


def test_one_rank_takes_the_backend(file: str, tmp_path: Path):
    strategies, _ = choose_algorithms(AUTO, Mesh(), file, tmp_path)
    assert rule_of(strategies) == "backend"


def test_a_measurement_of_another_machine_or_transport_is_told(tmp_path: Path):
    path = tmp_path / "cluster.toml"
    write_cluster(replace(CLUSTER, machine="another"), path)
    assert (
        "measured on another machine (another; here: "
        in choose_algorithms(AUTO, MESH, str(path), tmp_path)[1][0]
    )
    write_cluster(replace(CLUSTER, transport="gloo" if TRANSPORT == "nccl" else "nccl"), path)
    assert "was measured over" in choose_algorithms(AUTO, MESH, str(path), tmp_path)[1][0]


def begun(folder: Path, algorithm: str, ranks: int = 3) -> None:
    (folder / "checkpoints" / "step-00000010").mkdir(parents=True)
    tables = [{"name": "batch_split", "axis": "dp_replicate"}, DDP(algorithm=algorithm).as_dict()]
    document = {**PLAN.header, "mesh": {"dp_replicate": ranks}, "strategies": tables}
    (folder / "plan.toml").write_text(tomli_w.dumps(document))


def test_a_run_that_goes_on_keeps_its_rule_and_reads_no_cluster(tmp_path: Path):
    begun(tmp_path, "tree <= 8 KiB, else naive")
    strategies, notes = choose_algorithms(AUTO, MESH, str(tmp_path / "gone.toml"), tmp_path)
    assert rule_of(strategies) == "tree <= 8 KiB, else naive"
    assert notes == [
        f"auto keeps 'tree <= 8 KiB, else naive' for ddp, with which the run in {tmp_path} began"
    ]


def test_a_run_whose_plan_is_of_another_version_does_not_choose_anew(file: str, tmp_path: Path):
    begun(tmp_path, "naive")
    text = (tmp_path / "plan.toml").read_text()
    (tmp_path / "plan.toml").write_text(text.replace("version = 1", "version = 2"))
    with pytest.raises(PlanError, match=r"plan\.toml: its version is 2(?s:.*)make the plan again"):
        choose_algorithms(AUTO, MESH, file, tmp_path)


@pytest.mark.parametrize(("algorithm", "ranks"), [("tree", 2), ("no such rule", 3)])
def test_a_run_on_another_mesh_or_with_a_spoilt_plan_chooses_anew(
    algorithm: str, ranks: int, file: str, tmp_path: Path
):
    begun(tmp_path / "run", algorithm, ranks)
    strategies, _ = choose_algorithms(AUTO, MESH, file, tmp_path / "run")
    assert rule_of(strategies) == str(choose_rule(CLUSTER, 3).rule)


def test_a_run_that_has_saved_nothing_chooses_anew(file: str, tmp_path: Path):
    begun(tmp_path / "run", "naive")
    (tmp_path / "run" / "checkpoints" / "step-00000010").rmdir()
    assert rule_of(choose_algorithms(AUTO, MESH, file, tmp_path / "run")[0]) != "naive"


def test_ranks_of_one_host_are_priced_as_such_and_ranks_of_several_as_theirs(tmp_path: Path):
    inside = LinkCost((SizeBand(0, 1e-6, 1e11),))
    network = NetworkModel(
        intra_host=inside,
        busiest_rank=inside,
        local_sum=inside,
        inter_host=LinkCost((SizeBand(0, 1e-2, 1e8),)),
    )
    path = tmp_path / "cluster.toml"
    write_cluster(replace(CLUSTER, ranks_per_host=2, network=network), path)
    strategies, _ = choose_algorithms(AUTO, Mesh(dp_replicate=4), str(path), tmp_path)
    assert "hierarchical/2" in SizeRule.parse(rule_of(strategies)).algorithm_names
    strategies, notes = choose_algorithms(AUTO, Mesh(dp_replicate=2), str(path), tmp_path)
    assert (
        "64 MiB takes 3.03 ms" in notes[-1]
    )  # as inside a host; between hosts it would be half a second and more


def test_ranks_with_other_tokens_of_the_same_samples_count(file: str, tmp_path: Path):
    found, _ = choose_algorithms((DDP(algorithm="auto"),), Mesh(dp_replicate=2, cp=3), file, tmp_path)
    assert rule_of(found) == str(choose_rule(CLUSTER, 6, 1).rule)
    _, notes = choose_algorithms((DDP(axis="cp", algorithm="auto"),), Mesh(cp=3), file, tmp_path)
    assert notes[-1] == str(choose_rule(CLUSTER, 3, 1))
