"""What of a visit falls to a rank: divided parts by its share of the weight, the rest whole or by slices of the stream."""

from dataclasses import replace

from meshwright.plan.model_spec.dim_split import Cut
from meshwright.plan.model_spec.layer_calls import Call, Logits, Passage
from meshwright.plan.model_spec.model_spec import Anatomy, Weight
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.param_sharding import Home
from meshwright.plan.sharding.placement import Layout, S
from meshwright.plan.sharding.rank_share import Share, shares, weight_flops
from meshwright.plan.sharding.sharding_plan import Space

UP = Weight("up.weight", (3, 4), ("layer",), role="columns", cuts=(Cut(0, 3, (3,)),))
HEAD = Weight("head.weight", (8, 4), ("head",), role="head", cuts=(Cut(0, 8, (8,)),))
CALLS = (
    Call("norm", "layer", "norm", 0, 4, 4, inside=6),
    Call("up", "layer", "columns", 1, 4, 3, flops=30, inside=9),
    Call("head", "head", "head", 2, 4, 8, flops=80),
)
MODEL = Anatomy("model", ("layer", "head"), (UP, HEAD), (20, 8), (50, 80), inside_numel=(25, 4), calls=CALLS)


def seen(rank: int, *, stream: bool = False, logits: bool = False, through: tuple[str, ...] = ()) -> dict[str, Share]:
    space = Space(Mesh(tp=2), MODEL, tuple(Home(weight, Layout.of({"tp": S(0)})) for weight in (UP, HEAD)))
    space = space.with_stream("tp", S(1), through) if stream else space
    if logits:
        space = replace(space, anatomy=replace(MODEL, logits=Logits("head", "head.weight", 8, 1, 2))).with_logits("tp", S(-1))
    return shares(space.at({"tp": rank, "pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0}))


def test_divided_parts_go_by_the_ranks_own_share():
    first, second = seen(0)["layer"], seen(1)["layer"]
    assert first == Share(flops=20 + 30 * 2 // 3, inside=16 + 6, hands_on=20, owed=20, weights=40)
    assert second == Share(flops=20 + 30 * 1 // 3, inside=16 + 3, hands_on=20, owed=20, weights=30)
    assert seen(0)["head"] == Share(
        flops=40, inside=4, hands_on=8, owed=8, weights=40
    )  # whoever divides no logits hands on all of them


def test_all_else_is_a_slice_where_the_stream_goes_in_slices():
    assert seen(0, stream=True)["layer"] == Share(flops=10 + 20, inside=8 + 6, hands_on=10, owed=10, weights=30)
    assert seen(0, stream=True, through=("head",))["layer"] == seen(0)["layer"]


def test_divided_logits_are_handed_on_as_they_are():
    assert seen(0, logits=True)["head"].hands_on == 4


def test_one_device_has_all():
    assert shares(Space.one_device(Mesh(), MODEL)) == {"layer": Share(50, 25, 20, 20, 50), "head": Share(80, 4, 8, 8, 80)}


def test_gradients_that_weights_need_are_those_of_what_layers_give_out():
    wide = replace(MODEL, calls=(*CALLS, Call("out", "layer", "rows", 3, 3, 40)))
    space = Space(Mesh(tp=2), wide, tuple(Home(weight, Layout.of({"tp": S(0)})) for weight in (UP, HEAD)))
    space = space.at({"tp": 0, "pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0})
    assert shares(space)["layer"].owed == 4 + 2 + 40
    assert (
        shares(replace(space, anatomy=replace(wide, calls=())))["layer"].owed == 25
    )  # nothing is known of them: as much as kept


def test_products_without_weights_cost_weights_nothing():
    passing = replace(MODEL, passages=(Passage("layer", 0, None, 2, 10),))
    assert weight_flops(passing) == (
        2 * 4 * 3 // 2,
        80,
    )  # of what is no product with a matrix nothing; of the head nothing is known
    frozen = replace(passing, weights=(replace(UP, trainable=False), HEAD))
    assert weight_flops(frozen) == (0, 80)
    assert weight_flops(MODEL) == MODEL.flops
