"""Who steps which weight of which ranks have slices: each has one owner, loads are even, and the program says what travels."""

from meshwright.parallel.data.batch_split import Batch
from meshwright.parallel.data.zero import Zero
from meshwright.plan.job.job import Optimizer
from meshwright.plan.model_spec.model_spec import Anatomy, Weight
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.matrix_owners import coordinate_of, owned_by, parcels
from meshwright.plan.step.single_device import ROLE
from meshwright.planner.program_cost.memory import state_bytes
from tests.plan.test_optimizer_spec import Rows
from tests.tiny_model import tiny_job

VISITS = ("first", "second")
SIZES = {"a": (7, 4), "b": (9, 3), "c": (5, 5), "d": (10, 2)}
WEIGHTS = tuple(Weight(f"{visit}.{name}", shape, (visit,)) for visit in VISITS for name, shape in SIZES.items())
ANATOMY = Anatomy("paper", VISITS, WEIGHTS, (4, 4), (8, 8))
SHARDS = (Rows(), Batch(axis="dp_shard"), Zero(stage=2))


def plan_of(rule: str = "adafactor", mesh: Mesh | None = None, anatomy: Anatomy = ANATOMY) -> Plan:
    mesh = mesh or Mesh(tp=3)
    return Plan.make(tiny_job(optimizer=Optimizer(rule)), mesh, anatomy, SHARDS if mesh.dp_shard > 1 else (Rows(),))


def test_every_weight_has_one_owner_and_the_largest_load_is_small():
    for mesh in (Mesh(tp=3), Mesh(dp_shard=2, tp=3)):
        plan = plan_of(mesh=mesh)
        owned = [list(owned_by(plan.space, rank)) for rank in range(mesh.world)]
        assert sorted(weight.name for mine in owned for _, weight in mine) == sorted(weight.name for weight in WEIGHTS)
        loads = [sum(weight.numel for _, weight in mine) for mine in owned]
        assert max(loads) <= sum(loads) / mesh.world + max(weight.numel for weight in WEIGHTS)


def test_who_owns_what_is_the_same_for_every_rank():
    plan = plan_of(mesh=Mesh(dp_shard=2, tp=3))
    assert len({parcels(plan.at(rank).space) for rank in range(6)}) == 1
    for rank in range(6):
        mine = plan.at(rank).space
        for name, arena in mine.arenas().items():
            at = {weight: start // arena.shard for weight, _, start in arena.weights}
            logical = mine.whole.arenas()[name]
            assert at == {weight: start // logical.shard for weight, _, start in logical.weights}


def test_a_parcel_is_as_long_as_the_largest_ranks_slices():
    plan = plan_of()
    for parcel in parcels(plan.space):
        names = parcel.names[0]
        rows = [sum(-(-weight.shape[0] // 3) * weight.shape[1] for weight in WEIGHTS if weight.name in names)]
        assert parcel.numel == rows[0], "the first rank gets one row more"


def test_slices_come_before_the_clip_and_go_behind_the_step():
    names = [action.name for action in plan_of().program.actions(ROLE)]
    brings, hands = ([name for name in names if name.startswith(kind)] for kind in ("BRING", "HAND"))
    assert brings == ["BRING(second)", "BRING(first)"]
    assert len(hands) == 2
    assert names.index("NORM(norm)") < min(map(names.index, brings))
    assert max(map(names.index, brings)) < names.index("CLIP()") < names.index("STEP()") < min(map(names.index, hands))


def test_rules_of_single_elements_and_uncut_weights_have_no_owners():
    assert parcels(plan_of("adamw").space) == ()
    assert parcels(Space.one_device(Mesh(), ANATOMY)) == ()


def test_owned_copies_and_their_moments_are_in_the_plans_bytes():
    plan = plan_of("lion"), plan_of("adamw_8bit")
    elements, blocks = (sum(state_bytes(each, rank).master for rank in range(3)) for each in plan)
    assert elements == 0
    assert blocks == sum(weight.numel for weight in WEIGHTS) * 8


def test_coordinates_are_counted_as_groups_are():
    space = Space.one_device(Mesh(dp_shard=2, tp=3), ANATOMY)
    found = [coordinate_of(space, ("tp", "dp_shard"), index) for index in range(6)]
    assert [(each["dp_shard"], each["tp"]) for each in found] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
