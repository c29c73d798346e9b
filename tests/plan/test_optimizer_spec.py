"""Which rule steps which weight, the grain that follows, the bytes of moments, and what a job may not ask of a rule."""

from dataclasses import dataclass, replace
from typing import ClassVar, get_args

import pytest

from meshwright.plan.job.job import Optimizer, ParameterGroup, RuleName
from meshwright.plan.model_spec.model_spec import Weight
from meshwright.plan.optimizer_spec import GRAINS, Stepping, grain_of, moment_nbytes, stepping_of
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.param_sharding import Home
from meshwright.plan.sharding.placement import S
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.single_device import ROLE
from meshwright.plan.strategy import Phase, Strategy
from tests.paper_model import Paper
from tests.tiny_model import tiny_job

HIDDEN = Weight("layer.weight", (4, 3), ("layer",), hidden=True)
EMBED, BIAS = Weight("embed.weight", (9, 3), ("embed",)), Weight("layer.bias", (4,), ("layer",))
CONV = Weight("conv.weight", (4, 3, 2), ("conv",), hidden=True)
MUON = Optimizer("muon", lr=0.5, weight_decay=0.1, momentum=0.95)


def test_every_rule_has_a_grain_and_a_law():
    assert set(GRAINS) == set(get_args(RuleName))
    assert all(moment_nbytes(rule, (4, 3)) >= 0 for rule in GRAINS)


def test_muon_steps_hidden_matrices_and_adamw_the_rest():
    assert stepping_of(MUON, HIDDEN) == Stepping("muon", 0.95, 0.5, 0.1)
    assert [stepping_of(MUON, weight) for weight in (EMBED, BIAS, CONV)] == [
        Stepping("adamw", 0.0, 0.5, 0.1),
        Stepping("adamw", 0.0, 0.5, 0.0),
        Stepping("adamw", 0.0, 0.5, 0.1),
    ]


def test_a_group_that_names_a_rule_decides_but_no_vector_becomes_a_matrix():
    forced = replace(MUON, groups=(ParameterGroup("*", 0.5, name="muon", momentum=0.8),))
    assert stepping_of(forced, EMBED) == Stepping("muon", 0.8, 0.25, 0.1)
    assert stepping_of(forced, BIAS).rule == "adamw"
    other = replace(MUON, groups=(ParameterGroup("layer.*", name="adamw_8bit"), ParameterGroup("embed.*", 2.0, 0.0)))
    assert stepping_of(other, HIDDEN).rule == stepping_of(other, BIAS).rule == "adamw_8bit"
    assert stepping_of(other, EMBED) == Stepping("adamw", 0.0, 1.0, 0.0)


def test_grains_follow_from_rules_weight_by_weight():
    assert [grain_of(MUON, weight) for weight in (HIDDEN, EMBED, BIAS)] == ["matrix", "element", "element"]
    assert {grain_of(Optimizer("adafactor"), weight) for weight in (HIDDEN, EMBED, BIAS)} == {"matrix"}
    assert grain_of(Optimizer("adamw_8bit"), BIAS) == "block"
    assert {grain_of(Optimizer(name), HIDDEN) for name in ("sgd", "adamw", "adamw_bf16", "lion", "lion_bf16")} == {"element"}


@pytest.mark.parametrize(
    ("rule", "nbytes"),
    [
        ("sgd", 0),
        ("adamw", 8 * 4096 * 1024),
        ("adamw_bf16", 4 * 4096 * 1024),
        ("adamw_8bit", 2 * 4096 * 1024 + 8 * 4096 * 4),
        ("lion", 4 * 4096 * 1024),
        ("lion_bf16", 2 * 4096 * 1024),
        ("adafactor", 4 * (4096 + 1024)),
        ("muon", 4 * 4096 * 1024),
    ],
)
def test_the_bytes_of_moments_of_a_matrix(rule: RuleName, nbytes: int):
    assert moment_nbytes(rule, (4096, 1024)) == nbytes


def test_the_bytes_of_other_shapes_and_widths():
    assert moment_nbytes("sgd", (10,), momentum=0.9) == 40
    assert moment_nbytes("adafactor", (10,)) == 40
    assert moment_nbytes("adafactor", ()) == 4
    assert moment_nbytes("adafactor", (2, 3, 5), width=8) == 8 * (6 + 10)
    assert moment_nbytes("adamw_8bit", (257,)) == 2 * 257 + 8 * 2
    assert moment_nbytes("adamw", (10,), width=2) == 40
    assert moment_nbytes("adafactor", (10,), width=2) == 40, "factors are never narrower than float32"


@pytest.mark.parametrize(
    ("spec", "where", "said"),
    [
        (Optimizer("muon"), "optimizer.momentum", "muon without momentum"),
        (
            Optimizer("lion", momentum=0.9),
            "optimizer.momentum",
            "momentum = 0.9 with lion, which has none: its first beta is 0.9",
        ),
        (Optimizer("adafactor", momentum=0.9), "optimizer.momentum", "momentum = 0.9 with adafactor, which has none"),
        (Optimizer("adamw_bf16", betas=(0.9, 0.999)), "optimizer.betas", "betas of (0.9, 0.999) with adamw_bf16: rounding"),
        (Optimizer("lion_bf16", betas=(0.9, 0.999)), "optimizer.betas", "betas of (0.9, 0.999) with lion_bf16: rounding"),
        (
            Optimizer(betas=(0.9, 0.999), groups=(ParameterGroup("*", name="adamw_bf16"),)),
            "optimizer.betas",
            "betas of (0.9, 0.999) with adamw_bf16: rounding",
        ),
        (
            Optimizer(groups=(ParameterGroup("*", name="muon"),)),
            "optimizer.groups '*'",
            "muon without momentum",
        ),
        (
            Optimizer(groups=(ParameterGroup("*", name="lion", momentum=0.9),)),
            "optimizer.groups '*'",
            'momentum = 0.9 in a group that does not name "sgd" or "muon"',
        ),
    ],
)
def test_what_a_rule_cannot_use_is_refused(spec: Optimizer, where: str, said: str):
    faults = list(spec.faults())
    assert [fault.where for fault in faults] == [where]
    assert faults[0].what.startswith(said)
    assert faults[0].fix


@pytest.mark.parametrize(
    "spec",
    [
        MUON,
        Optimizer("adamw_bf16"),
        Optimizer("adamw_8bit", betas=(0.9, 0.999)),
        Optimizer("lion", betas=(0.9, 0.999)),
        Optimizer("adafactor"),
        Optimizer(groups=(ParameterGroup("*", name="muon", momentum=0.95),)),
    ],
    ids=lambda spec: spec.name,
)
def test_what_rules_are_usually_given_is_accepted(spec: Optimizer):
    assert list(spec.faults()) == []


@dataclass(frozen=True)
class Rows(Strategy):
    """Cuts every weight along its rows, as tensor parallelism does."""

    name: ClassVar[str] = "rows"
    phase: ClassVar[Phase] = "shard"

    def place(self, space: Space) -> Space:
        cut = lambda home: replace(home, layout=home.layout.with_place("tp", S(0)), grad=home.grad.with_place("tp", S(0)))  # noqa: E731
        return space.with_homes(cut)


def test_a_weight_that_is_cut_along_a_dim_is_stepped_whole_by_one_rank():
    mesh, anatomy = Mesh(tp=2), Paper(layers=1).anatomy

    def kinds(rule: RuleName) -> set[str]:
        plan = Plan.make(tiny_job(optimizer=Optimizer(rule)), mesh, anatomy, (Rows(),))
        return {action.kind for action in plan.program.actions(ROLE)}

    assert {"BRING", "HAND"} & kinds("lion") == set()
    assert {"BRING", "HAND"} < kinds("adafactor")
    assert {"BRING", "HAND"} < kinds("adamw_8bit")


def test_what_a_weight_is_counts_in_the_hash_where_rules_depend_on_it():
    anatomy = Paper(layers=1).anatomy
    other = replace(anatomy, weights=tuple(replace(weight, hidden=True) for weight in anatomy.weights))

    def hashes(spec: Optimizer) -> set[str]:
        return {Plan.make(tiny_job(optimizer=spec), Mesh(), each).hash for each in (anatomy, other)}

    assert len(hashes(MUON)) == 2
    assert len(hashes(Optimizer("adafactor"))) == 1


def test_homes_know_their_grain_and_bundles_are_cut_by_it():
    weights = tuple(replace(weight, shape=(10, 10), hidden=True) for weight in Paper(layers=2).anatomy.weights)
    anatomy = replace(Paper(layers=2).anatomy, weights=weights)
    space = Plan.make(tiny_job(optimizer=MUON), Mesh(), anatomy).space
    assert [home.grain for home in space.homes] == ["matrix", "matrix"]
    assert [home.grain for home in Space.one_device(Mesh(), anatomy).homes] == [Home(HIDDEN).grain] * 2 == ["element"] * 2
