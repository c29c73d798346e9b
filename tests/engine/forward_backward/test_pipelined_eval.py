"""Evaluation through pipeline stages equals one device under every layout, and leaves the state of training
unchanged.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.forward_backward.evaluation import Evaluation
from meshwright.engine.forward_backward.pipelined_eval import PipelinedEvaluation
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit as Split
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import EvalConfig, PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import bits, sample_range
from tests.parallel.tensor.declared_pairs import pairs
from tests.tiny_model import VOCABULARY, tiny_job, token_samples

SHARD = Split(axis="dp_shard")
DATA = token_samples(31)
ANALYZED = pairs(0.3, layers=4)
LAYOUTS: dict[str, tuple[Mesh, tuple[Strategy, ...], int]] = {
    "two stages": (Mesh(pp=2), (Pipeline(),), 1),
    "three stages": (Mesh(pp=3), (Pipeline(),), 4),
    "two virtual stages on each of three ranks": (
        Mesh(pp=3),
        (Pipeline(schedule="interleaved", virtual_stages=2),),
        2,
    ),
    "a V": (Mesh(pp=2), (Pipeline(schedule="zb_v"),), 2),
    "replicas": (Mesh(pp=2, dp_replicate=3), (Pipeline(), Split(), DDP()), 1),
    "stage 1": (Mesh(pp=2, dp_shard=3), (Pipeline(), SHARD, ZeRO(stage=1)), 2),
    "stage 3": (
        Mesh(pp=2, dp_shard=3),
        (Pipeline(schedule="interleaved", virtual_stages=2), SHARD, ZeRO()),
        1,
    ),
    "slices": (Mesh(pp=2, tp=3), (Pipeline(), TensorParallel()), 3),
}


def evaluations_of(
    analyzed: AnalyzedModel,
    mesh: Mesh,
    strategies: Sequence[Strategy],
    micro_batch: int,
    *,
    evaluated: bool = True,
) -> list[tuple[list[Evaluation], list[float], dict[str, bytes]]]:
    """Returns what each rank finds in two evaluations, each before a step; the losses of the steps; and what
    it then holds.
    """
    plan = make_plan(analyzed, tiny_job(), mesh, strategies, micro_batch)

    def rank(world: World) -> tuple[list[Evaluation], list[float], dict[str, bytes]]:
        found, losses = list[Evaluation](), list[float]()
        with parallelize(analyzed, plan, world=world) as engine:
            for _ in range(2):
                shares = [engine.local_batch(sample_range(DATA, at, min(at + 12, 31))) for at in (0, 12, 24)]
                mine = [each if len(each["labels"]) else None for each in shares]
                mine += (
                    [sample_range(DATA, 0, 1)] if plan.data_index(world.rank) == 0 else []
                )  # the others have one batch less
                modes = [each.training for each in engine.module.modules()]
                found += [engine.executor.evaluate(mine)] if evaluated else []
                assert modes == [each.training for each in engine.module.modules()]
                losses.append(engine.step(engine.local_batch(sample_range(DATA, 0, 12))).loss)
            held = dict(engine.module.named_buffers()) | engine.executor.gather_parameters()
            return found, losses, bits(held)

    return run_on_threads(rank, mesh)


@pytest.fixture(scope="module")
def expected() -> list[Evaluation]:
    """Returns what one device finds."""
    return evaluations_of(ANALYZED, Mesh(), (), 0)[0][0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_finds_the_loss_that_one_device_finds(layout: str, expected: list[Evaluation]):
    for found, _, _ in evaluations_of(ANALYZED, *LAYOUTS[layout]):
        assert [each.loss for each in found] == pytest.approx([each.loss for each in expected], rel=1e-12)
        assert [each.tokens for each in found] == [each.tokens for each in expected]


def test_steps_go_on_as_without_it_to_the_last_bit():
    layout = LAYOUTS["two virtual stages on each of three ranks"]
    with_it, without = evaluations_of(ANALYZED, *layout), evaluations_of(ANALYZED, *layout, evaluated=False)
    assert [each[1:] for each in with_it] == [each[1:] for each in without]


@pytest.mark.parametrize("layout", ["two virtual stages on each of three ranks", "a V"])
def test_where_messages_go_in_the_order_of_issue_each_direction_has_a_group(
    layout: str, expected: list[Evaluation]
):
    mesh, strategies, micro_batch = LAYOUTS[layout]
    plan = make_plan(ANALYZED, tiny_job(), mesh, strategies, micro_batch)

    def rank(world: World) -> tuple[float, set[tuple[int, ...]]]:
        world.serializes_p2p = world.ledger.is_recording = True  # as on NCCL
        with parallelize(ANALYZED, plan, world=world) as engine:
            found = engine.executor.evaluate(
                [engine.local_batch(sample_range(DATA, at, min(at + 12, 31))) for at in (0, 12, 24)]
                + [sample_range(DATA, 0, 1)]
            )
            return found.loss, {
                entry.group_size for entry in world.ledger.entries if entry.collective in ("send", "recv")
            }

    assert run_on_threads(rank, mesh) == [(pytest.approx(expected[0].loss, rel=1e-12), {2})] * mesh.world_size


class Skips(nn.Module):
    """The outputs of two layers go far past their neighbours; batch norms, which learn nothing in an
    evaluation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(5), nn.Tanh()) for _ in range(5)
        )
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        first = self.embed(input_ids)
        x = second = self.layers[0](first)
        for layer in list(self.layers)[1:4]:
            x = layer(x)
        return self.head(self.layers[4](x + first) + second)


@pytest.mark.parametrize(("ranks", "chunks"), [(3, 1), (2, 3)])
def test_values_that_skip_stages_arrive_in_the_order_in_which_they_are_sent(ranks: int, chunks: int):
    analyzed = analyze(Skips, sample_range(DATA, 0, 2))
    pipeline = Pipeline(
        schedule="interleaved" if chunks > 1 else "1f1b", virtual_stages=chunks if chunks > 1 else 0
    )
    plan = make_plan(analyzed, tiny_job(batch=4), Mesh(pp=ranks), (pipeline,), 4)
    alone = make_plan(analyzed, tiny_job(batch=4), Mesh(), (), 4)
    batches = [sample_range(DATA, at, at + 4) for at in range(0, 28, 4)]

    def rank(world: World) -> tuple[float, bool]:
        with parallelize(analyzed, alone if world.mesh.world_size == 1 else plan, world=world) as engine:
            before = bits(dict(engine.module.named_buffers()))
            found = engine.executor.evaluate(batches).loss
            return found, before == bits(dict(engine.module.named_buffers()))

    ((truth, _),) = run_on_threads(rank, Mesh())
    assert run_on_threads(rank, plan.mesh) == [(pytest.approx(truth, rel=1e-12), True)] * ranks


def test_batches_may_differ_in_length():
    short = {key: value[:, :3].contiguous() for key, value in sample_range(DATA, 12, 19).items()}
    plan = make_plan(ANALYZED, tiny_job(), Mesh(pp=2), (Pipeline(),), 2)
    alone = make_plan(ANALYZED, tiny_job(), Mesh(), (), 0)

    def rank(world: World) -> Evaluation:
        with parallelize(ANALYZED, alone if world.mesh.world_size == 1 else plan, world=world) as engine:
            return engine.executor.evaluate([sample_range(DATA, 0, 12), short, sample_range(DATA, 19, 31)])

    (truth,) = run_on_threads(rank, Mesh())
    for found in run_on_threads(rank, plan.mesh):
        assert (found.loss, found.tokens) == (pytest.approx(truth.loss, rel=1e-12), truth.tokens)


def test_the_ledger_has_what_was_sent_between_which_stages():
    plan = make_plan(
        ANALYZED, tiny_job(evaluate=EvalConfig(source="held-out", every=1)), Mesh(pp=3), (Pipeline(),), 4
    )

    def rank(world: World) -> dict[str, float]:
        with parallelize(ANALYZED, plan, world=world) as engine:
            engine.executor.evaluate([sample_range(DATA, 0, 12)])
            return {
                name: sent for name, sent in world.ledger.sent_nbytes.items() if "EVALUATE" in name and sent
            }

    for index, sent in enumerate(run_on_threads(rank, plan.mesh)):
        between = {name: nbytes for name, nbytes in sent.items() if name != "EVALUATE"}
        assert [name.endswith(f" to {index + 1})") for name in between] == [True] * (index < 2)
        assert list(between.values()) == [12 * 5 * 21 * 8] * (index < 2)


class Calling(nn.Module):
    """In an evaluation it calls its first layer once more, at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x if self.training else self.layers[0](x))


def test_a_block_called_in_another_stage_than_in_training_is_refused_by_name():
    analyzed = analyze(Calling, sample_range(DATA, 0, 2))
    plan = make_plan(analyzed, tiny_job(), Mesh(pp=2), (Pipeline(),), 1)

    def rank(world: World) -> None:
        with (
            parallelize(analyzed, plan, world=world) as engine,
            pytest.raises(PlanError, match=r"the forward calls 'layers\.0' in the"),
        ):
            engine.executor.evaluate([sample_range(DATA, 0, 12)])

    run_on_threads(rank, plan.mesh)


@pytest.mark.parametrize("forgotten", ["loss", "value"])
def test_a_missing_sum_or_message_is_noticed(forgotten: str, expected: list[Evaluation], monkeypatch):
    if forgotten == "loss":
        outputs = PipelinedEvaluation.outputs
        monkeypatch.setattr(PipelinedEvaluation, "outputs", lambda self: list(outputs(self))[1:])
    else:
        send = PipelinedEvaluation._send
        monkeypatch.setattr(
            PipelinedEvaluation,
            "_send",
            lambda self, forward, *rest: (_zeroed(forward.values), send(self, forward, *rest)),
        )
    found = evaluations_of(ANALYZED, *LAYOUTS["two stages"])[0][0]
    assert found[0].loss != pytest.approx(expected[0].loss, rel=1e-6)


def _zeroed(came: dict[str, torch.Tensor]) -> None:
    for tensor in came.values():
        tensor.zero_()


def test_it_runs_in_the_compute_dtype():
    job = tiny_job(precision=PrecisionConfig("float32", "bfloat16", "float32"))
    plan = make_plan(ANALYZED, job, Mesh(pp=2), (Pipeline(),), 2)
    alone = make_plan(ANALYZED, job, Mesh(), (), 2)

    def rank(world: World) -> float:
        with parallelize(ANALYZED, alone if world.mesh.world_size == 1 else plan, world=world) as engine:
            return engine.executor.evaluate([sample_range(DATA, 0, 12)]).loss

    (truth,) = run_on_threads(rank, Mesh())
    assert run_on_threads(rank, plan.mesh) == [pytest.approx(truth, rel=1e-6)] * 2
