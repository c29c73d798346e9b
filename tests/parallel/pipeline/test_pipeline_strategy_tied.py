"""Weights that stages on several ranks use: one weight, counted once, the same to the bit wherever it is."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, parallelize, verify
from meshwright.comm.backends.fake import CompletedWork
from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.parallel.tensor import model_families
from tests.tiny_model import TOKENS, VOCABULARY, WIDTH, Tiny, token_samples

NUM_SAMPLES = 6
SHARD = BatchSplit(axis="dp_shard")
TABLE = VOCABULARY * WIDTH  # elements of the tied table


class Rooted(nn.Module):
    """Glue uses a parameter behind the first block, one behind the third, and one behind every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.start, self.middle = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.start
        for number, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x)) * self.scale
            x = x + self.middle if number == 1 else x
        return self.head(x)


@cache
def tied() -> AnalyzedModel:
    return analyze(lambda: Tiny(tied=True), token_samples(NUM_SAMPLES))


@cache
def rooted() -> AnalyzedModel:
    return analyze(Rooted, token_samples(NUM_SAMPLES))


def planned(analyzed: AnalyzedModel, mesh: Mesh, *strategies: Strategy, micro_batch: int = 1) -> Plan:
    train = TrainConfig(batch=NUM_SAMPLES, clip=0.05)
    job = Job(
        ModelConfig("tied"),
        DataConfig("random", sequence=TOKENS),
        train,
        OptimizerConfig("adamw", lr=0.1, weight_decay=0.1),
    )
    return make_plan(analyzed, job, mesh, strategies, micro_batch)


def ties(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Returns who takes part in what is summed along pp."""
    found = {
        action.name: action.transfer
        for role in plan.program.roles
        for action in role.actions
        if action.kind == "REDUCE_TIED"
    }
    return {
        name: move.member_indices or tuple(range(plan.mesh.pp))
        for name, move in found.items()
        if move is not None
    }


def equal(analyzed: AnalyzedModel, mesh: Mesh, *strategies: Strategy, micro_batch: int = 1) -> Plan:
    """Its plan, which computes what one device computes."""
    plan = planned(analyzed, mesh, *strategies, micro_batch=micro_batch)
    assert not static_checks(plan)
    verdict = verify(analyzed, plan, [token_samples(NUM_SAMPLES), token_samples(NUM_SAMPLES)])
    assert verdict.passed, verdict
    return plan


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(pp=2), (Pipeline(),)),
        (Mesh(pp=3), (Pipeline(),)),
        (Mesh(pp=2), (Pipeline(schedule="interleaved", virtual_stages=2),)),
        (Mesh(pp=2), (Pipeline(schedule="zb_h1"),)),
        (Mesh(pp=3), (Pipeline(), ActivationCheckpointing())),
        (Mesh(pp=3, dp_replicate=2), (Pipeline(), BatchSplit(), DDP())),
        (Mesh(pp=2, dp_replicate=3), (Pipeline(), BatchSplit(), NaiveDDP())),
        (Mesh(pp=3, dp_shard=2), (Pipeline(), SHARD, ZeRO(stage=1))),
        (Mesh(pp=2, dp_shard=3), (Pipeline(), SHARD, ZeRO(stage=2))),
        (Mesh(pp=3, dp_shard=2), (Pipeline(), SHARD, ZeRO())),
    ],
)
def test_a_tied_table_is_that_of_one_device(mesh: Mesh, strategies: tuple[Strategy, ...]):
    plan = equal(tied(), mesh, *strategies)
    assert ties(plan) == {f"REDUCE_TIED(embed+head over pp 0+{mesh.pp - 1})": (0, mesh.pp - 1)}


@pytest.mark.parametrize(("mesh", "store"), [(Mesh(pp=3), ()), (Mesh(pp=3, dp_shard=2), (SHARD, ZeRO()))])
def test_what_glue_uses_is_summed_over_the_parts_that_need_it(mesh: Mesh, store: tuple[Strategy, ...]):
    plan = equal(rooted(), mesh, Pipeline(split_points=("layers.1", "layers.3")), *store)
    assert ties(plan) == {"REDUCE_TIED((root) over pp 0+1+2)": (0, 1, 2)}
    held = [
        {param_sharding.param.name for param_sharding in list(plan.role_plans())[index].view.param_shardings}
        & {"start", "middle", "scale"}
        for index in range(3)
    ]
    assert held == [{"start", "scale"}, {"middle", "scale"}, {"scale"}]


@pytest.mark.parametrize(
    ("family", "mesh", "strategies", "among"),
    [
        ("gpt2", Mesh(pp=3), (Pipeline(),), (0, 2)),
        ("gpt2", Mesh(pp=2, tp=3), (Pipeline(), TensorParallel(), VocabParallel()), (0, 1)),
        ("t5", Mesh(pp=3), (Pipeline(),), (0, 1, 2)),
        (
            "t5",
            Mesh(pp=3),
            (Pipeline(split_points=("decoder.block.0", "decoder.block.1")),),
            (0, 2),
        ),  # twice on rank 0
        ("vit", Mesh(pp=3), (Pipeline(),), ()),
    ],
)
def test_unmodified_models_are_those_of_one_device(
    family: str, mesh: Mesh, strategies: tuple[Strategy, ...], among: tuple[int, ...]
):
    analyzed = model_families.analyze_family(family)
    plan = model_families.planned(analyzed, mesh, strategies, 1)
    assert not static_checks(plan)
    assert list(ties(plan).values()) == ([among] if among else [])
    verdict = verify(analyzed, plan, model_families.batches(family, 2), loss=model_families.loss_of(family))
    assert verdict.passed, verdict


Copies = dict[str, torch.Tensor]


def stepped(world: World, plan: Plan) -> Copies:
    """Returns what this rank steps of the tied weights after three steps, and the moments."""
    with parallelize(tied(), plan, world=world) as engine:
        for _ in range(3):
            engine.step(engine.local_batch(token_samples(NUM_SAMPLES)))
        shared = {
            name
            for action in engine.executor.state.plan.actions
            if action.kind == "REDUCE_TIED"
            for name in action.tensors
        }
        found: Copies = {}
        for name, parameter in engine.executor.state.flat_params.optimizer_params().items():
            if name in shared:
                state = engine.executor.state.optimizers[0].state[parameter]
                found |= {
                    name: parameter.detach().clone(),
                    **{f"{key} of {name}": each.clone() for key, each in state.items()},
                }
        return found


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(pp=3), (Pipeline(),)),
        (Mesh(pp=3, dp_replicate=2), (Pipeline(), BatchSplit(), DDP())),
        (Mesh(pp=2, dp_shard=3), (Pipeline(), SHARD, ZeRO(stage=2))),
        (Mesh(pp=2), (Pipeline(schedule="dualpipe"),)),
    ],
)
def test_all_copies_and_their_moments_are_equal_to_the_bit(mesh: Mesh, strategies: tuple[Strategy, ...]):
    plan = planned(tied(), mesh, *strategies)
    found = run_on_threads(lambda world: stepped(world, plan), mesh)
    compared = 0
    for rank, mine in enumerate(found):
        first = mesh.peers(rank, ("pp",))[0]
        assert not mine or mine.keys() == found[first].keys()
        for name, value in mine.items():
            assert torch.equal(value, found[first][name]), name
            compared += rank != first
    assert compared >= 4


def sent(world: World, plan: Plan) -> float:
    """The bytes that this rank has sent for its ties in a step."""
    with parallelize(tied(), plan, world=world) as engine:
        engine.step(engine.local_batch(token_samples(NUM_SAMPLES)))
        return sum(
            nbytes for name, nbytes in world.ledger.sent_nbytes.items() if name.startswith("REDUCE_TIED")
        )


@pytest.mark.parametrize(
    ("mesh", "store", "nbytes"),
    [
        (Mesh(pp=2), (), TABLE * 4),
        (Mesh(pp=3), (), TABLE * 4),
        (Mesh(pp=3, dp_replicate=2), (BatchSplit(), DDP()), TABLE * 4),
        (Mesh(pp=3, dp_shard=4), (SHARD, ZeRO(stage=2)), -(-TABLE // 4) * 4),
    ],
)
def test_owners_send_2_times_k_minus_1_over_k_of_the_tied_group_and_others_nothing(
    mesh: Mesh, store: tuple[Strategy, ...], nbytes: int
):
    micro_batch = NUM_SAMPLES // mesh.dp_replicate if mesh.dp_shard == 1 else 1
    train = TrainConfig(batch=12 if mesh.dp_shard > 1 else NUM_SAMPLES)
    job = Job(ModelConfig("tied"), DataConfig("random", sequence=TOKENS), train, OptimizerConfig("sgd"))
    plan = make_plan(tied(), job, mesh, (Pipeline(), *store), micro_batch)
    found = run_on_threads(lambda world: sent(world, plan), mesh)
    owners = (0, mesh.pp - 1)
    assert found == [
        2 * nbytes / 2 if mesh.coordinate(rank)["pp"] in owners else 0 for rank in range(mesh.world_size)
    ]


def broken(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, instead: Callable[..., object]) -> bool:
    """Whether a plan is found wrong when `instead` stands for a method."""
    plan = planned(tied(), Mesh(pp=3), Pipeline())
    monkeypatch.setattr(owner, name, instead)
    return not verify(tied(), plan, [token_samples(NUM_SAMPLES), token_samples(NUM_SAMPLES)]).passed


def test_a_sum_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch):
    start = RankState.start_collective

    def forget(state: RankState, action: Action, *given: torch.Tensor) -> None:
        if action.kind == "REDUCE_TIED":
            state.issue(action, CompletedWork())
        else:
            start(state, action, *given)

    assert broken(monkeypatch, RankState, "start_collective", forget)


def test_a_norm_that_counts_a_weight_twice_is_noticed(monkeypatch: pytest.MonkeyPatch):
    assert broken(monkeypatch, RankView, "_first_used_params", lambda view: iter(view.param_shardings))


@pytest.mark.parametrize(
    ("mesh", "strategies", "micro_batch"),
    [
        (Mesh(pp=2), (), 1),
        (Mesh(pp=2), (), 2),
        (Mesh(pp=4), (), 1),
        (Mesh(pp=2), (ActivationCheckpointing(),), 3),
        (Mesh(pp=2, dp_replicate=3), (BatchSplit(), DDP()), 1),
        (Mesh(pp=2, dp_shard=2), (SHARD, ZeRO(stage=1)), 1),
        (Mesh(pp=2, dp_shard=3), (SHARD, ZeRO(stage=2)), 1),
        (Mesh(pp=2, dp_shard=3), (SHARD, ZeRO()), 1),
    ],
)
def test_two_copies_of_every_part_are_one_model(
    mesh: Mesh, strategies: tuple[Strategy, ...], micro_batch: int
):
    plan = equal(tied(), mesh, Pipeline(schedule="dualpipe"), *strategies, micro_batch=micro_batch)
    assert set(ties(plan).values()) == {(index, mesh.pp - 1 - index) for index in range(mesh.pp // 2)}
    assert {role.name for role in plan.program.roles for action in role.actions if action.kind == "LOSS"} == {
        "pp0",
        f"pp{mesh.pp - 1}",
    }


def test_two_copies_need_two_micro_batches():
    with pytest.raises(
        PlanError, match="dualpipe has no microbatch for stage 0 on rank 1 of the pipeline, but 1 in all"
    ) as told:
        planned(tied(), Mesh(pp=2), Pipeline(schedule="dualpipe"), micro_batch=NUM_SAMPLES)
    assert "a smaller micro_batch" in str(told.value)


def test_two_copies_of_parts_that_share_weights_with_others_are_one_model():
    equal(rooted(), Mesh(pp=2), Pipeline(schedule="dualpipe"))
    equal(rooted(), Mesh(pp=4), Pipeline(schedule="dualpipe"))
