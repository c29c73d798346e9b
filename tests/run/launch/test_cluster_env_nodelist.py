"""Slurm node lists and task counts."""

import pytest

from meshwright.run.launch.cluster_env import first_host, tasks_per_host


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[01-04,07]", "node01"),
        ("node[07,01-04],login", "node07"),
        ("a,b", "a"),
        ("host-1.cluster", "host-1.cluster"),
        ("rack[1-2]n[03-05,9]-ib,x", "rack1n03-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_is_found(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("counts", "each"),
    [("4(x2),3", [4, 4, 3]), ("8", [8]), ("1(x3)", [1, 1, 1]), ("", []), ("4(x2),many", [])],
)
def test_counts_are_written_out(counts, each):
    assert tasks_per_host(counts) == each
