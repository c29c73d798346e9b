"""The optimizer of each parameter, its shard alignment, the bytes of its states, and invalid requests."""

from dataclasses import dataclass, replace
from typing import ClassVar, get_args

import pytest

from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.errors import Diagnostic, diagnostics_in
from meshwright.plan.job.job import Job, OptimizerConfig, OptimizerName, ParamGroupConfig
from meshwright.plan.model_spec.model_spec import ParamSpec
from meshwright.plan.optimizer_per_param import (
    SHARD_ALIGNMENTS,
    ParamOptimizer,
    optimizer_state_nbytes,
    param_optimizer,
    shard_alignment_of,
)
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import S
from meshwright.plan.strategy_interface import Strategy, StrategyPhase
from tests.paper_model import FIRST_ROLE, SyntheticModel
from tests.tiny_model import tiny_job

HIDDEN = ParamSpec("layer.weight", (4, 3), ("layer",), is_hidden_matrix=True)
EMBED, BIAS = ParamSpec("embed.weight", (9, 3), ("embed",)), ParamSpec("layer.bias", (4,), ("layer",))
CONV = ParamSpec("conv.weight", (4, 3, 2), ("conv",))
EXPERTS = ParamSpec("experts.weight", (4, 3, 2), ("layer",), is_hidden_matrix=True)
MUON = OptimizerConfig("muon", lr=0.5, weight_decay=0.1, momentum=0.95)


def test_every_optimizer_has_an_alignment_and_a_size():
    assert set(SHARD_ALIGNMENTS) == set(get_args(OptimizerName))
    assert all(optimizer_state_nbytes(rule, (4, 3)) >= 0 for rule in SHARD_ALIGNMENTS)


def test_muon_steps_hidden_matrices_and_adamw_the_rest():
    for param in (HIDDEN, EXPERTS):
        assert param_optimizer(MUON, param) == ParamOptimizer("muon", 0.95, 0.5, 0.1)
    assert [param_optimizer(MUON, param) for param in (EMBED, BIAS, CONV)] == [
        ParamOptimizer("adamw", 0.0, 0.5, 0.1),
        ParamOptimizer("adamw", 0.0, 0.5, 0.0),
        ParamOptimizer("adamw", 0.0, 0.5, 0.1),
    ]


def test_the_optimizer_of_a_group_wins_but_vectors_never_use_a_matrix_optimizer():
    forced = replace(MUON, groups=(ParamGroupConfig("*", 0.5, name="muon", momentum=0.8),))
    assert param_optimizer(forced, EMBED) == ParamOptimizer("muon", 0.8, 0.25, 0.1)
    assert param_optimizer(forced, BIAS).optimizer == param_optimizer(forced, CONV).optimizer == "adamw"
    other = replace(
        MUON, groups=(ParamGroupConfig("layer.*", name="adamw_8bit"), ParamGroupConfig("embed.*", 2.0, 0.0))
    )
    assert param_optimizer(other, HIDDEN).optimizer == param_optimizer(other, BIAS).optimizer == "adamw_8bit"
    assert param_optimizer(other, EMBED) == ParamOptimizer("adamw", 0.0, 1.0, 0.0)


def test_alignments_follow_from_the_optimizer_of_each_parameter():
    assert [shard_alignment_of(MUON, param) for param in (HIDDEN, EMBED, BIAS)] == [
        "matrix",
        "element",
        "element",
    ]
    assert {shard_alignment_of(OptimizerConfig("adafactor"), param) for param in (HIDDEN, EMBED, BIAS)} == {
        "matrix"
    }
    assert shard_alignment_of(OptimizerConfig("adamw_8bit"), BIAS) == "block"
    assert {
        shard_alignment_of(OptimizerConfig(name), HIDDEN)
        for name in ("sgd", "adamw", "adamw_bf16", "lion", "lion_bf16")
    } == {"element"}


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
def test_the_bytes_of_optimizer_states_of_a_matrix(rule: OptimizerName, nbytes: int):
    assert optimizer_state_nbytes(rule, (4096, 1024)) == nbytes


def test_the_bytes_of_other_shapes_and_widths():
    assert optimizer_state_nbytes("sgd", (10,), momentum=0.9) == 40
    assert optimizer_state_nbytes("adafactor", (10,)) == 40
    assert optimizer_state_nbytes("adafactor", ()) == 4
    assert optimizer_state_nbytes("adafactor", (2, 3, 5), itemsize=8) == 8 * (6 + 10)
    assert optimizer_state_nbytes("adamw_8bit", (257,)) == 2 * 257 + 8 * 2
    assert optimizer_state_nbytes("adamw", (10,), itemsize=2) == 40
    assert optimizer_state_nbytes("adafactor", (10,), itemsize=2) == 40, (
        "factors are never narrower than float32"
    )


def of_optimizer(spec: OptimizerConfig) -> list[Diagnostic]:
    return diagnostics_in("optimizer", Job(optimizer=spec).diagnostics(RunConfig()))


@pytest.mark.parametrize(
    ("spec", "where", "message"),
    [
        (OptimizerConfig("muon"), "optimizer.momentum", "muon without momentum"),
        (
            OptimizerConfig("lion", momentum=0.9),
            "optimizer.momentum",
            "momentum = 0.9 with lion, which has none: its first beta is 0.9",
        ),
        (
            OptimizerConfig("adafactor", momentum=0.9),
            "optimizer.momentum",
            "momentum = 0.9 with adafactor, which has none",
        ),
        (
            OptimizerConfig("adamw_bf16", betas=(0.9, 0.999)),
            "optimizer.betas",
            "betas of (0.9, 0.999) with adamw_bf16: rounding",
        ),
        (
            OptimizerConfig("lion_bf16", betas=(0.9, 0.999)),
            "optimizer.betas",
            "betas of (0.9, 0.999) with lion_bf16: rounding",
        ),
        (
            OptimizerConfig(betas=(0.9, 0.999), groups=(ParamGroupConfig("*", name="adamw_bf16"),)),
            "optimizer.betas",
            "betas of (0.9, 0.999) with adamw_bf16: rounding",
        ),
        (
            OptimizerConfig(groups=(ParamGroupConfig("*", name="muon"),)),
            "optimizer.groups.0.momentum",
            "muon without momentum",
        ),
        (
            OptimizerConfig(groups=(ParamGroupConfig("*", name="lion", momentum=0.9),)),
            "optimizer.groups.0.momentum",
            'momentum = 0.9 in a group that does not name "sgd" or "muon"',
        ),
    ],
)
def test_options_that_an_optimizer_does_not_have_are_refused(spec: OptimizerConfig, where: str, message: str):
    diagnostics = of_optimizer(spec)
    assert [diagnostic.location for diagnostic in diagnostics] == [where]
    assert diagnostics[0].problem.startswith(message)
    assert diagnostics[0].fix


@pytest.mark.parametrize(
    "spec",
    [
        MUON,
        OptimizerConfig("adamw_bf16"),
        OptimizerConfig("adamw_8bit", betas=(0.9, 0.999)),
        OptimizerConfig("lion", betas=(0.9, 0.999)),
        OptimizerConfig("adafactor"),
        OptimizerConfig(groups=(ParamGroupConfig("*", name="muon", momentum=0.95),)),
    ],
    ids=lambda spec: spec.name,
)
def test_usual_options_of_optimizers_are_accepted(spec: OptimizerConfig):
    assert of_optimizer(spec) == []


@dataclass(frozen=True)
class Rows(Strategy):
    """Cuts every weight along its rows, as tensor parallelism does."""

    name: ClassVar[str] = "rows"
    phase: ClassVar[StrategyPhase] = "shard"

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        def cut(param_sharding: ParamSharding) -> ParamSharding:
            return replace(
                param_sharding,
                layout=param_sharding.layout.with_placement("tp", S(0)),
                grad_layout=param_sharding.grad_layout.with_placement("tp", S(0)),
            )

        return sharding.map_param_shardings(cut)


def test_a_sliced_matrix_is_updated_in_full_by_one_rank():
    mesh, model_spec = Mesh(tp=2), SyntheticModel(layers=1).model_spec

    def kinds(rule: OptimizerName) -> set[str]:
        plan = Plan.make(tiny_job(optimizer=OptimizerConfig(rule)), mesh, model_spec, (Rows(),))
        return {action.kind for action in plan.program.actions(FIRST_ROLE)}

    assert {"GATHER_GRAD", "SCATTER_PARAM"} & kinds("lion") == set()
    assert {"GATHER_GRAD", "SCATTER_PARAM"} < kinds("adafactor")
    assert {"GATHER_GRAD", "SCATTER_PARAM"} < kinds("adamw_8bit")


def test_the_kind_of_a_weight_is_in_the_hash_where_optimizers_depend_on_it():
    model_spec = SyntheticModel(layers=1).model_spec
    other = replace(
        model_spec, params=tuple(replace(param, is_hidden_matrix=True) for param in model_spec.params)
    )

    def hashes(spec: OptimizerConfig) -> set[str]:
        return {Plan.make(tiny_job(optimizer=spec), Mesh(), each).hash for each in (model_spec, other)}

    assert len(hashes(MUON)) == 2
    assert len(hashes(OptimizerConfig("adafactor"))) == 1


def test_param_shardings_know_their_alignment_and_groups_follow_it():
    params = tuple(
        replace(param, shape=(10, 10), is_hidden_matrix=True)
        for param in SyntheticModel(layers=2).model_spec.params
    )
    model_spec = replace(SyntheticModel(layers=2).model_spec, params=params)
    sharding = Plan.make(tiny_job(optimizer=MUON), Mesh(), model_spec).sharding
    assert [param_sharding.shard_alignment for param_sharding in sharding.param_shardings] == [
        "matrix",
        "matrix",
    ]
    assert (
        [
            param_sharding.shard_alignment
            for param_sharding in ShardingPlan.one_device(Mesh(), model_spec).param_shardings
        ]
        == [ParamSharding(HIDDEN).shard_alignment] * 2
        == ["element"] * 2
    )
