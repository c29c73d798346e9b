"""cluster.toml: round trip, and all errors of a file at once."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.plan.hardware.measured_cluster import AllReduceSeries, Cluster, FitError
from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, RoundOverhead, SizeBand
from meshwright.plan.job.errors import PlanError
from meshwright.run.measure.cluster_file import describe_machine, read_cluster, write_cluster

LINK = LinkCost((SizeBand(1024, 1e-5, 1e9), SizeBand(0, 0.0, 1e15)))
NETWORK = NetworkModel(
    (RoundOverhead(1, 1.5e-4), RoundOverhead(2, 2.5e-4)), intra_host=LINK, busiest_rank=LINK, local_sum=LINK
)
MEASURED = (
    AllReduceSeries("ring", 2, (1024, 2048), (1e-4, 2e-4), (0.1, 0.05)),
    AllReduceSeries("hierarchical/2", 4, (1024,), (1.0,), (0.0,)),
)
CLUSTER = Cluster("2026-01-01", 'a "machine"', "2.13", "gloo", 0, FitError(0.1, 0.05), NETWORK, MEASURED)


@pytest.mark.parametrize(
    "cluster", [CLUSTER, replace(CLUSTER, ranks_per_host=2, network=NetworkModel(inter_host=LINK))]
)
def test_what_is_read_is_what_was_written(cluster: Cluster, tmp_path: Path):
    path = tmp_path / "new" / "cluster.toml"
    assert write_cluster(cluster, path) == cluster
    assert read_cluster(path) == cluster


def test_measurements_are_written_with_four_digits_and_read_back_the_same(tmp_path: Path):
    exact = replace(CLUSTER, measurements=(AllReduceSeries("ring", 2, (1024,), (1.23456e-4,), (0.1,)),))
    written = write_cluster(exact, tmp_path / "cluster.toml")
    assert written.measurements[0].seconds == (1.235e-4,)
    assert written == read_cluster(tmp_path / "cluster.toml")


def test_every_error_of_a_file_is_reported_at_once(tmp_path: Path):
    path = tmp_path / "cluster.toml"
    write_cluster(CLUSTER, path)
    text = path.read_text()
    path.write_text(
        text.replace("ranks_per_host = 0", "ranks_per_hosts = 0\nranks = 3").replace(
            'transport = "gloo"', "transport = 7"
        )
    )
    with pytest.raises(PlanError) as raised:
        read_cluster(path)
    told = str(raised.value)
    assert all(
        part in told
        for part in (
            "'ranks_per_hosts'",
            "did you mean 'ranks_per_host'?",
            "'ranks'",
            "ranks_per_host: this key is missing",
            "transport",
        )
    )
    path.write_text(
        text.replace("1e+09", "-5.0")
        .replace('"ring"', '"rings"')
        .replace("num_receivers = 2", "num_receivers = 1")
    )
    with pytest.raises(PlanError) as raised:
        read_cluster(path)
    told = str(raised.value)
    assert all(
        part in told for part in ("rate of -5.0", "did you mean 'ring'?", "round overheads of [1, 1] ranks")
    )
    assert all(fault.location.startswith((str(path), "measured")) for fault in raised.value.diagnostics)


def test_a_file_of_another_version_is_refused_with_the_repair(tmp_path: Path):
    path = tmp_path / "cluster.toml"
    write_cluster(CLUSTER, path)
    path.write_text(path.read_text().replace("meshwright cluster", "some cluster"))
    with pytest.raises(PlanError, match=r"its format is 'some cluster'; needed is 'meshwright cluster'"):
        read_cluster(path)


@pytest.mark.parametrize("text", [None, "", "version = ", "version = 1", b"\xff\xfe"])
def test_a_file_that_is_none_is_refused_with_a_repair(text: str | bytes | None, tmp_path: Path):
    path = tmp_path / "cluster.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PlanError) as raised:
        read_cluster(path)
    assert all(fault.fix for fault in raised.value.diagnostics)


def test_a_device_file_is_distinguished_from_a_cluster_file(tmp_path: Path):
    (tmp_path / "device.toml").write_text('device = "Abacus 7"\n')
    with pytest.raises(PlanError, match="describes a device, not links"):
        read_cluster(tmp_path / "device.toml")


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written"):
        write_cluster(CLUSTER, tmp_path / "file" / "cluster.toml")


def test_a_machine_is_described_without_its_name():
    assert "cores" in describe_machine() or " x " in describe_machine()
