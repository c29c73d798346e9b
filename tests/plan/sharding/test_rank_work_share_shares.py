"""The fraction of a block call that one rank computes: sharded layers by their weights, the rest in full or
by slices.
"""

from collections.abc import Mapping
from dataclasses import replace

from meshwright.plan.model_spec.model_spec import ModelSpec, ParamSpec
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall, LogitsSpec, ResidualFlow
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.rank_work_share import BlockShare, weight_grad_flops
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import Layout, S

UP = ParamSpec("up.weight", (3, 4), ("layer",), role="colwise", dim_splits=(DimSplit(0, 3, (3,)),))
HEAD = ParamSpec("head.weight", (8, 4), ("head",), role="lm_head", dim_splits=(DimSplit(0, 8, (8,)),))
CALLS = (
    LayerCall("norm", "layer", "norm", 0, 4, 4, saved_numel=6),
    LayerCall("up", "layer", "colwise", 1, 4, 3, flops=30, saved_numel=9),
    LayerCall("head", "head", "lm_head", 2, 4, 8, flops=80),
)
MODEL = ModelSpec(
    "model", ("layer", "head"), (UP, HEAD), (20, 8), (50, 80), saved_numel=(25, 4), layer_calls=CALLS
)


def fraction_of(
    rank: int, *, stream: bool = False, logits: bool = False, through: tuple[str, ...] = ()
) -> Mapping[str, BlockShare]:
    sharding = ShardingPlan(
        Mesh(tp=2),
        MODEL,
        tuple(ParamSharding(param, Layout.from_dict({"tp": S(0)})) for param in (UP, HEAD)),
    )
    sharding = sharding.with_residual_placement("tp", S(1), through) if stream else sharding
    if logits:
        sharding = replace(
            sharding, model_spec=replace(MODEL, logits=LogitsSpec("head", "head.weight", 8, 1, 2))
        ).with_logits_placement("tp", S(-1))
    return RankView(sharding, sharding.mesh.coordinate(rank)).work_share.block_shares


def test_sharded_amounts_follow_the_local_share():
    first, second = fraction_of(0)["layer"], fraction_of(1)["layer"]
    assert first == BlockShare(
        flops=20 + 30 * 2 // 3,
        saved_numel=16 + 6,
        output_numel=20,
        deferred_grad_numel=20,
        weight_grad_flops=40,
    )
    assert second == BlockShare(
        flops=20 + 30 * 1 // 3,
        saved_numel=16 + 3,
        output_numel=20,
        deferred_grad_numel=20,
        weight_grad_flops=30,
    )
    assert fraction_of(0)["head"] == BlockShare(
        flops=40, saved_numel=4, output_numel=8, deferred_grad_numel=8, weight_grad_flops=40
    )  # whoever divides no logits hands on all of them


def test_all_else_is_a_slice_where_the_stream_goes_in_slices():
    assert fraction_of(0, stream=True)["layer"] == BlockShare(
        flops=10 + 20, saved_numel=8 + 6, output_numel=10, deferred_grad_numel=10, weight_grad_flops=30
    )
    assert fraction_of(0, stream=True, through=("head",))["layer"] == fraction_of(0)["layer"]


def test_sharded_logits_are_passed_on_sharded():
    assert fraction_of(0, logits=True)["head"].output_numel == 4


def test_one_device_has_all():
    view = RankView(ShardingPlan.one_device(Mesh(), MODEL), Mesh().coordinate(0))
    assert view.work_share.block_shares == {
        "layer": BlockShare(50, 25, 20, 20, 50),
        "head": BlockShare(80, 4, 8, 8, 80),
    }


def test_gradients_that_weights_need_are_those_of_what_layers_give_out():
    wide = replace(MODEL, layer_calls=(*CALLS, LayerCall("out", "layer", "rowwise", 3, 3, 40)))
    sharding = ShardingPlan(
        Mesh(tp=2),
        wide,
        tuple(ParamSharding(param, Layout.from_dict({"tp": S(0)})) for param in (UP, HEAD)),
    )
    for calls, numel in ((wide.layer_calls, 4 + 2 + 40), ((), 25)):  # nothing is known: as much as is saved
        known = replace(sharding, model_spec=replace(wide, layer_calls=calls))
        shares = RankView(known, known.mesh.coordinate(0)).work_share.block_shares
        assert shares["layer"].deferred_grad_numel == numel


def test_products_without_weights_cost_weights_nothing():
    passing = replace(MODEL, residual_flows=(ResidualFlow("layer", 0, None, 2, 10),))
    assert weight_grad_flops(passing) == (
        2 * 4 * 3 // 2,
        80,
    )  # of what is no product with a matrix nothing; of the head nothing is known
    frozen = replace(passing, params=(replace(UP, trainable=False), HEAD))
    assert weight_grad_flops(frozen) == (0, 80)
    assert weight_grad_flops(MODEL) == MODEL.flops
