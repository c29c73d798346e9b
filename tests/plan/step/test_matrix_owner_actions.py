"""Owners of sliced matrices: one per matrix, even loads, and their messages in the program."""

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import OptimizerConfig
from meshwright.plan.model_spec.model_spec import ModelSpec, ParamSpec
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.matrix_owner_actions import matrix_parcels, owned_params, owner_coordinate
from meshwright.planner.program_cost.rank_memory import state_bytes
from tests.paper_model import FIRST_ROLE
from tests.plan.test_optimizer_per_param import Rows
from tests.tiny_model import tiny_job

BLOCK_CALLS = ("first", "second")
SIZES = {"a": (7, 4), "b": (9, 3), "c": (5, 5), "d": (10, 2)}
WEIGHTS = tuple(
    ParamSpec(f"{block_call}.{name}", shape, (block_call,))
    for block_call in BLOCK_CALLS
    for name, shape in SIZES.items()
)
MODEL_SPEC = ModelSpec("paper", BLOCK_CALLS, WEIGHTS, (4, 4), (8, 8))
SHARDS = (Rows(), BatchSplit(axis="dp_shard"), ZeRO(stage=2))


def plan_of(rule: str = "adafactor", mesh: Mesh | None = None, model_spec: ModelSpec = MODEL_SPEC) -> Plan:
    mesh = mesh or Mesh(tp=3)
    return Plan.make(
        tiny_job(optimizer=OptimizerConfig(rule)),
        mesh,
        model_spec,
        SHARDS if mesh.dp_shard > 1 else (Rows(),),
    )


def test_every_weight_has_one_owner_and_the_largest_load_is_small():
    for mesh in (Mesh(tp=3), Mesh(dp_shard=2, tp=3)):
        plan = plan_of(mesh=mesh)
        owned = [list(owned_params(plan.rank_view(rank))) for rank in range(mesh.world_size)]
        assert sorted(param.name for mine in owned for _, param in mine) == sorted(
            param.name for param in WEIGHTS
        )
        loads = [sum(param.numel for _, param in mine) for mine in owned]
        assert max(loads) <= sum(loads) / mesh.world_size + max(param.numel for param in WEIGHTS)


def test_owners_are_the_same_for_every_rank():
    plan = plan_of(mesh=Mesh(dp_shard=2, tp=3))
    assert len({matrix_parcels(plan.rank_view(rank)) for rank in range(6)}) == 1
    for rank in range(6):
        mine = plan.rank_view(rank)
        for name, flat_param in mine.flat_param_specs.items():
            at = {param: start // flat_param.shard_numel for param, _, start in flat_param.params}
            logical = plan.sharding.build_flat_params(plan.sharding.param_groups)[name]
            assert at == {param: start // logical.shard_numel for param, _, start in logical.params}


def test_a_parcel_is_as_long_as_the_largest_ranks_slices():
    plan = plan_of()
    for parcel in matrix_parcels(plan.rank_view(0)):
        names = parcel.names_by_shard[0]
        rows = [sum(-(-param.shape[0] // 3) * param.shape[1] for param in WEIGHTS if param.name in names)]
        assert parcel.numel == rows[0], "the first rank gets one row more"


def test_slices_are_gathered_before_the_clip_and_scattered_after_the_step():
    names = [action.name for action in plan_of().program.actions(FIRST_ROLE)]
    brings, hands = (
        [name for name in names if name.startswith(kind)] for kind in ("GATHER_GRAD", "SCATTER_PARAM")
    )
    assert brings == ["GATHER_GRAD(second)", "GATHER_GRAD(first)"]
    assert len(hands) == 2
    assert names.index("GLOBAL_NORM(norm)") < min(map(names.index, brings))
    assert (
        max(map(names.index, brings))
        < names.index("CLIP()")
        < names.index("STEP()")
        < min(map(names.index, hands))
    )


def test_elementwise_optimizers_and_unsliced_weights_have_no_owners():
    assert matrix_parcels(plan_of("adamw").rank_view(0)) == ()
    alone = RankView(ShardingPlan.one_device(Mesh(), MODEL_SPEC), Mesh().coordinate(0))
    assert matrix_parcels(alone) == ()


def test_owned_matrices_and_their_optimizer_states_are_in_the_planned_bytes():
    plan = plan_of("lion"), plan_of("adamw_8bit")
    elements, blocks = (sum(state_bytes(each, rank).master for rank in range(3)) for each in plan)
    assert elements == 0
    assert blocks == sum(param.numel for param in WEIGHTS) * 8


def test_coordinates_are_counted_as_groups_are():
    mesh = Mesh(dp_shard=2, tp=3)
    view = RankView(ShardingPlan.one_device(mesh, MODEL_SPEC), mesh.coordinate(0))
    found = [owner_coordinate(view, ("tp", "dp_shard"), index) for index in range(6)]
    assert [(each["dp_shard"], each["tp"]) for each in found] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
