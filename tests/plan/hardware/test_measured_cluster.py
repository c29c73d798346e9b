"""A measured cluster is validated."""

from dataclasses import replace

from meshwright.plan.hardware.measured_cluster import AllReduceSeries, Cluster, FitError
from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, SizeBand

LINK = LinkCost((SizeBand(0, 1e-5, 1e9),))
RING = AllReduceSeries("ring", 2, (1024, 2048), (1e-4, 2e-4), (0.1, 0.1))
GOOD = Cluster(
    "",
    "cpu",
    "2.11",
    "gloo",
    0,
    FitError(0.1, 0.1),
    NetworkModel(intra_host=LINK, busiest_rank=LINK),
    (RING,),
)


def test_ranks_and_sizes_are_those_of_all_series():
    more = replace(GOOD, measurements=(AllReduceSeries("tree", 3, (512, 2048), (1.0, 1.0), (0.0, 0.0)), RING))
    assert (more.ranks, more.sizes) == ((2, 3), (512, 1024, 2048))
    assert more.series("ring", 2) is RING
    assert more.series("ring", 3) is None


def test_a_good_cluster_has_no_diagnostics():
    assert list(GOOD.diagnostics()) == []


def test_every_bad_number_is_reported_with_its_location():
    odd = AllReduceSeries("ring", 1, (2048, 1024), (0.0,), (-0.1, 0.1))
    bad = replace(GOOD, ranks_per_host=-1, measurements=(RING, RING, odd))
    messages = {diagnostic.location: diagnostic.problem for diagnostic in bad.diagnostics()}
    assert "-1 ranks per host" in messages["ranks_per_host"]
    assert "twice" in messages["measurements"]
    assert "1 ranks" in messages["measurements.2.ranks"]
    assert "[2048, 1024]" in messages["measurements.2.nbytes"]
    assert "2 sizes, 1 times" in messages["measurements.2"]
    assert "0.0" in messages["measurements.2.seconds"]
    assert "-0.1" in messages["measurements.2.spread"]


def test_a_cluster_without_measurements_is_refused():
    (diagnostic,) = replace(GOOD, measurements=()).diagnostics()
    assert "bench network" in diagnostic.fix
