"""Placements of parameters and gradients, and the groups that follow."""

from dataclasses import replace

from meshwright.plan.model_spec.model_spec import ROOT, ModelSpec, ParamSpec
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import FLAT, I, Layout, P, R, S

WEIGHTS = (
    ParamSpec("embed.weight", (5, 2), ("embed", "head"), aliases=("head.weight",)),
    ParamSpec("one.weight", (2, 2), ("one",)),
    ParamSpec("one.bias", (2,), ("one",)),
    ParamSpec("two.weight", (2, 2), ("two",)),
    ParamSpec("two.frozen", (2,), ("two",), trainable=False),
    ParamSpec("scale", (1,), (ROOT,)),
)
MODEL = ModelSpec("model", ("embed", "one", "two", "head"), WEIGHTS, (1,) * 4, (1,) * 4)
SPACE = ShardingPlan.one_device(Mesh(dp_replicate=3), MODEL)


def test_on_one_device_nothing_moves():
    assert SPACE.data_axes == ()
    assert list(SPACE.unreduced_params()) == []
    assert all(param_sharding.grad_reductions() == {} for param_sharding in SPACE.param_shardings)


def test_the_gradient_of_a_replicated_parameter_is_a_partial_sum():
    param_sharding = ParamSharding(WEIGHTS[1], Layout.from_dict({"dp_replicate": R}), Layout())
    assert param_sharding.unreduced_grad_layout == Layout.from_dict({"dp_replicate": P})
    assert param_sharding.grad_reductions() == {"dp_replicate": "all_reduce"}


def test_a_gradient_wanted_in_shards_is_scattered():
    param_sharding = ParamSharding(
        WEIGHTS[1], Layout.from_dict({"dp_shard": R}), Layout.from_dict({"dp_shard": S(0)})
    )
    assert param_sharding.grad_reductions() == {"dp_shard": "reduce_scatter"}


def test_a_gradient_left_as_a_sum_is_named_but_not_that_of_a_frozen_weight():
    apart = SPACE.map_param_shardings(
        lambda param_sharding: ParamSharding(
            param_sharding.param,
            param_sharding.layout,
            param_sharding.grad_layout.with_placement("dp_replicate", P),
        )
    )
    assert [param_sharding.param.name for param_sharding in apart.unreduced_params()] == [
        param.name for param in MODEL.trainable
    ]


def test_groups_come_in_the_order_in_which_backward_completes_them():
    groups = SPACE.param_groups
    assert [(group.name, group.last_block_call) for group in groups] == [
        ("two", "two"),
        ("one", "one"),
        ("embed+head", "embed"),
        (ROOT, None),
    ]
    assert [group.numel for group in groups] == [4, 6, 10, 1]


def test_uneven_slices_have_their_own_group_so_that_offsets_are_equal_on_all_ranks():
    def shard(param_sharding: ParamSharding) -> ParamSharding:
        sliced = Layout.from_dict({"tp": S(0)} if param_sharding.param.name == "one.weight" else {})
        return replace(param_sharding, layout=sliced, grad_layout=sliced.with_placement("dp_shard", S(FLAT)))

    for tp, names in (
        (2, ["two", "one", "embed+head", ROOT]),
        (3, ["two", "one", "one in uneven slices", "embed+head", ROOT]),
    ):
        sharding = ShardingPlan.one_device(Mesh(dp_shard=2, tp=tp), MODEL).map_param_shardings(shard)
        assert sorted(group.name.replace(" over dp_shard", "") for group in sharding.param_groups) == sorted(
            names
        )


def test_parameters_that_are_summed_over_other_axes_have_their_own_group():
    def split(param_sharding: ParamSharding) -> ParamSharding:
        return (
            ParamSharding(param_sharding.param, param_sharding.layout.with_placement("tp", R), I_ON_TP)
            if param_sharding.param.name == "one.bias"
            else param_sharding
        )

    I_ON_TP = Layout.from_dict({"tp": I})
    names = [
        [param.name for param in group.params] for group in SPACE.map_param_shardings(split).param_groups
    ]
    assert ["one.bias"] in names
    assert ["one.weight"] in names


def test_data_axes_are_outermost_first_whatever_the_order_in_which_they_were_split():
    sharding = (
        SPACE.with_batch_placement("dp_shard", S(0))
        .with_batch_placement("dp_replicate", S(0))
        .with_batch_placement("cp", S(1))
    )
    assert sharding.data_axes == ("dp_replicate", "dp_shard")
    assert sharding.token_axes == ("cp",)
    assert sharding.grad_sum_axes == ("dp_replicate", "dp_shard", "cp")
    assert sharding.sum_axes("dp_shard") == ("dp_shard", "cp")
