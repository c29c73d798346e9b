"""The mesh as algebra: ranks and coordinates are one to one, groups partition the ranks."""

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.comm.backends.fake import FakeWorld
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import (
    AXES,
    MESH_AXES,
    ROUND_AXES,
    SITE_AXES,
    Mesh,
    axes_with,
    in_mesh_order,
)

MESHES = st.builds(Mesh, *[st.integers(1, 3)] * len(AXES))
SOME_AXES = st.lists(st.sampled_from(AXES), unique=True)
MILLION = Mesh(pp=10, dp_replicate=25, dp_shard=50, cp=10, tp=8)


@settings(deadline=None)
@given(MESHES)
def test_ranks_and_coordinates_are_one_to_one(mesh: Mesh):
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.world_size)]
    assert [mesh.rank(coordinate) for coordinate in coordinates] == list(range(mesh.world_size))
    assert len({tuple(coordinate.items()) for coordinate in coordinates}) == mesh.world_size
    assert all(
        0 <= index < mesh.size(axis) for coordinate in coordinates for axis, index in coordinate.items()
    )


@settings(deadline=None)
@given(MESHES, SOME_AXES)
def test_groups_partition_the_ranks(mesh: Mesh, axes: list[str]):
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert {len(group) for group in groups} == {mesh.group_size(axes)}


@settings(deadline=None)
@given(MESHES, SOME_AXES)
def test_peers_are_the_group_of_each_of_its_ranks(mesh: Mesh, axes: list[str]):
    for group in mesh.groups(axes):
        assert list(group) == sorted(group)
        assert all(mesh.peers(rank, axes) == group for rank in (group[0], group[len(group) // 2], group[-1]))


@settings(deadline=None)
@given(MESHES, SOME_AXES)
def test_peers_differ_along_the_axes_of_the_group_only(mesh: Mesh, axes: list[str]):
    mine = mesh.coordinate(mesh.world_size - 1)
    for peer in mesh.peers(mesh.world_size - 1, axes):
        assert {axis for axis, index in mesh.coordinate(peer).items() if index != mine[axis]} <= set(axes)


def test_the_last_axis_varies_fastest():
    assert Mesh(dp_replicate=2, tp=3).groups(["tp"]) == ((0, 1, 2), (3, 4, 5))
    assert Mesh(dp_replicate=2, tp=3).groups(["dp_replicate"]) == ((0, 3), (1, 4), (2, 5))


@pytest.mark.timeout(5)
def test_a_mesh_of_a_million_ranks_is_arithmetic():
    assert MILLION.world_size == 1_000_000
    for rank in range(0, MILLION.world_size, 97):
        assert MILLION.rank(MILLION.coordinate(rank)) == rank
    assert len(MILLION.peers(777_777, ["dp_shard", "tp"])) == 400
    assert sum(map(len, Mesh(dp_replicate=12_500, tp=8).groups(["tp"]))) == 100_000
    assert [len(group) for group in Mesh(dp_replicate=50_000, tp=2).groups(["dp_replicate"])] == [
        50_000,
        50_000,
    ]


@pytest.mark.parametrize("rank", [-1, 6, 7])
def test_a_rank_outside_the_mesh_is_refused(rank: int):
    with pytest.raises(
        ValueError, match=rf"no rank {rank} in dp_replicate 2 x tp 3: it has 6. Count ranks from 0 to 5"
    ):
        Mesh(dp_replicate=2, tp=3).coordinate(rank)


@settings(deadline=None)
@given(MESHES, st.sampled_from(AXES))
def test_an_axis_of_minus_one_becomes_what_fits_the_world(mesh: Mesh, axis: str):
    sizes = {name: mesh.size(name) for name in AXES}
    assert Mesh.infer({**sizes, axis: -1}, mesh.world_size) == mesh
    assert Mesh.infer(sizes, mesh.world_size) == mesh
    assert Mesh.infer(sizes) == mesh


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        (
            {"dp_replica": 2},
            None,
            "mesh.dp_replica: there is no axis 'dp_replica'\n  repair: did you mean 'dp_replicate'?",
        ),
        (
            {"dp_replicate": -1, "tp": -1},
            8,
            "mesh: dp_replicate and tp are both -1; only one axis can be inferred",
        ),
        ({"tp": 0}, None, "mesh.tp: the size is 0; needed is a number of at least 1, or -1 to infer it"),
        ({"tp": -2}, None, "mesh.tp: the size is -2"),
        (
            {"tp": -1},
            None,
            "mesh: tp is -1 and the number of ranks is not known\n  repair: say how many: --world N",
        ),
        (
            {"dp_shard": -1, "tp": 3},
            8,
            "mesh.dp_shard: 8 ranks do not divide by 3, the product of the other axes",
        ),
        (
            {"dp_replicate": 2},
            3,
            "mesh: the mesh dp_replicate 2 has 2 ranks and 3 were started\n  repair: start 2 ranks",
        ),
        (
            {},
            3,
            "mesh: without a mesh the plan is for one device, and 3 ranks were started\n"
            "  repair: set mesh.dp_shard = -1",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, int], world: int | None, message: str):
    with pytest.raises(PlanError) as caught:
        Mesh.infer(sizes, world)
    assert message in str(caught.value)


def test_all_errors_of_the_sizes_are_reported_at_once():
    with pytest.raises(PlanError) as caught:
        Mesh.infer({"dp": 2, "tp": -1, "pp": -1, "cp": 0}, 8)
    assert [diagnostic.location for diagnostic in caught.value.diagnostics] == ["mesh.dp", "mesh", "mesh.cp"]


@pytest.mark.parametrize("size", [0, -1, 2.0])
def test_a_mesh_made_by_hand_is_checked_too(size: float):
    with pytest.raises(PlanError, match=rf"mesh.cp: cp = {size}; needed is a whole number of at least 1"):
        Mesh(cp=size)


def test_a_mesh_names_the_axes_that_it_uses():
    assert str(Mesh(dp_replicate=2, tp=3)) == "dp_replicate 2 x tp 3"
    assert str(Mesh()) == "one device"


def test_the_table_has_a_row_for_every_size_of_a_mesh_in_its_order():
    assert [item.name for item in fields(Mesh)] == [axis.name for axis in MESH_AXES] == list(AXES)


def test_the_table_says_what_ranks_along_an_axis_have_other_parts_of():
    assert axes_with("layers") == ("pp",)
    assert axes_with("samples") == ("dp_replicate", "dp_shard", "ep")
    assert axes_with("experts") == ("ep",)
    assert axes_with("tokens") == ("cp",)
    assert axes_with("features") == ("tp_depth", "tp")
    apart = {axis.name: (axis.batch_part, axis.param_part) for axis in MESH_AXES if axis.meets_in_rounds}
    assert apart == {"outer": ("samples", None), "site": ("samples", None)}
    assert set(AXES) - set(SITE_AXES) == set(apart) == set(ROUND_AXES)


def test_axes_that_not_every_plan_has_show_nowhere_where_they_have_one_rank():
    plain, mesh = Mesh(dp_shard=2, tp=2), Mesh(dp_shard=2, tp=2, ep=1, outer=1)
    assert mesh == plain
    assert str(mesh) == "dp_shard 2 x tp 2"
    assert mesh.as_dict() == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    assert FakeWorld(mesh, 0).group(AXES).axes == SITE_AXES
    assert Mesh(outer=2, ep=3).as_dict() == {
        **{"outer": 2, "pp": 1, "dp_replicate": 1, "dp_shard": 1, "ep": 3, "cp": 1, "tp": 1}
    }


def test_axes_are_sorted_outermost_first():
    assert in_mesh_order({"tp", "ep", "pp", "outer"}) == ("outer", "pp", "ep", "tp")


def test_an_index_counts_along_the_axes_it_is_given_the_last_one_innermost():
    mesh = Mesh(dp_shard=2, tp_depth=3, tp=4)
    here = {"dp_shard": 1, "tp_depth": 2, "tp": 3}
    assert mesh.index(here, ("tp_depth", "tp")) == 2 * 4 + 3
    assert mesh.index(here, ("tp", "dp_shard")) == 3 * 2 + 1
    assert mesh.index(here, ()) == mesh.index({}, ("tp",)) == 0


@settings(deadline=None)
@given(MESHES, SOME_AXES)
def test_an_index_is_the_position_among_the_peers(mesh: Mesh, axes: list[str]):
    axes = [axis for axis in AXES if axis in axes]
    rank = mesh.world_size - 1
    assert mesh.index(mesh.coordinate(rank), axes) == mesh.peers(rank, axes).index(rank)
