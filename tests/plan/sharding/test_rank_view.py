"""What one coordinate has of a sharding plan: slices, stage, counted parameters."""

from dataclasses import replace

from meshwright.plan.model_spec.model_spec import ModelSpec, ParamSpec
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import Layout, S

TIED = ParamSpec("tied", (5, 2), ("embed", "head"))
WIDE = ParamSpec("wide", (3, 2), ("head",), dim_splits=(DimSplit(0, 3, (3,)),))
MODEL = ModelSpec("model", ("embed", "head"), (TIED, WIDE), (1, 1), (1, 1))


def views(mesh: Mesh) -> list[RankView]:
    """The views of all ranks: two stages along pp, `wide` sliced along tp."""
    sliced = Layout.from_dict({"tp": S(0)})
    plan = ShardingPlan(mesh, MODEL, (ParamSharding(TIED), ParamSharding(WIDE, sliced, sliced)))
    plan = plan.with_pipeline((("embed",), ("head",)), ("head",)) if mesh.pp > 1 else plan
    return [RankView(plan, mesh.coordinate(rank)) for rank in range(mesh.world_size)]


def test_a_view_has_the_parameters_of_its_stage_in_slices():
    first, *_, last = views(Mesh(pp=2, tp=2))
    assert first.model_spec.block_calls == ("embed",)
    assert not first.computes_loss
    assert last.computes_loss
    assert [each.param.name for each in first.param_shardings] == ["tied"]
    assert {each.param.name: each.param.shape for each in last.param_shardings} == {
        "tied": (5, 2),
        "wide": (1, 2),
    }
    assert [each.param.shape for each in last.logical_param_shardings] == [(5, 2), (3, 2)]
    assert [each.param.block_calls for each in last.logical_param_shardings] == [("embed", "head"), ("head",)]
    assert [each.param.block_calls for each in last.unsliced_param_shardings] == [("head",), ("head",)]
    assert last.slice_range("wide", "tp") == (2, 3)


def test_every_element_is_counted_once_over_all_ranks():
    found = views(Mesh(pp=2, tp=2))
    for counted in (
        [each.params_counted_in_sum for each in found],
        [each.params_counted_in_norm for each in found],
    ):
        assert [sorted(names) for names in counted] == [["tied"], [], ["wide"], ["wide"]]


def test_what_follows_from_a_view_is_computed_once():
    view, *_ = views(Mesh(tp=2))
    for name in ("model_spec", "param_shardings", "param_groups", "flat_param_specs", "work_share"):
        assert getattr(view, name) is getattr(view, name)
    assert view.work_share.block_shares is view.work_share.block_shares


def test_a_dim_sliced_along_two_axes_is_split_over_all_their_ranks_the_last_innermost():
    param = ParamSpec(
        "w", (12, 7), ("a",), dim_splits=(DimSplit(0, 6, (12,), "out"), DimSplit(1, 7, (7,), "in"))
    )
    param_sharding = ParamSharding(param, Layout.from_dict({"tp": S(0), "tp_depth": S(0), "cp": S(1)}))
    sharding = replace(
        ShardingPlan.one_device(Mesh(cp=3, tp_depth=2, tp=3), MODEL),
        param_shardings=(param_sharding,),
    )
    found = [
        RankView(sharding, {**dict.fromkeys(AXES, 0), "cp": 1, "tp_depth": d, "tp": t})
        for d in range(2)
        for t in range(3)
    ]
    assert {each.param_shardings[0].param.shape for each in found} == {(2, 2)}
    sides = [each.dim_shards(param_sharding) for each in found]
    assert [side.dim_ranges.ranges for _, side in sides] == [
        ((first, first + 2),) for first in range(0, 12, 2)
    ]
    assert [(side.axes, side.num_ranks) for side in sides[0]] == [(("cp",), 3), (("tp_depth", "tp"), 6)]
